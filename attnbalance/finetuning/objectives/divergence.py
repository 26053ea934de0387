"""The term that holds the model to the base model's predictions: self-distillation."""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt
from attnbalance.data.taught_answers import taught_answer
from attnbalance.errors import BadRowsError
from attnbalance.finetuning.examples import IGNORED, TOKENS, Example, special_ids
from attnbalance.finetuning.labelled_logits import answer_logits
from attnbalance.finetuning.objectives.alignment import Match, match_tokens, space_tables, text_end
from attnbalance.finetuning.objectives.base_model import BaseModel
from attnbalance.finetuning.objectives.forward_pass import ForwardPass
from attnbalance.finetuning.objectives.objective import CHOICES, Targets, Term, TermKind

TOP = 1024
"""The number of most probable tokens whose probability in the base is kept one by one."""


def divergence(forward: ForwardPass, term: Term) -> Float[Tensor, " token"]:
    """`kl(FORM)`: KL divergence of the answer's tokens from the base model's prediction of them after FORM, nats.

    Self-distillation in the sense of learning without forgetting (Li & Hoiem 2016), from the form in which the base
    answers from its knowledge. The divergence is taken over the base's `TOP` most probable tokens, with all other
    tokens merged into one; this gives at most the full divergence. Text of the label after the answer is held to the
    base as well; only the special tokens at the end, which a statement does not have, are learned by cross-entropy.
    After a statement or few shots a label must begin with an accepted answer; the form question takes any label. Where
    the tokenizer splits the answer differently after FORM, tokens that spell the same characters are held to the base's
    prediction (a chat's first token lacks the space that it has after a statement), and the others are learned. The
    term holds the model to what the base says, mistakes included: facts that the base does not know are not learned.
    Where facts are replayed, it holds these alone, and `ce` does not learn them.
    """
    ids, base = forward.target(f"{term.key} ids{TOKENS}"), forward.target(f"{term.key}{TOKENS}")
    return divergence_of(forward.logits, ids, base)


def divergence_of(
    logits: Float[Tensor, "token vocab"], ids: Shaped[Tensor, "token top"], base: Float[Tensor, "token top"]
) -> Float[Tensor, " token"]:
    """The divergence of predictions from the base's: its `TOP` most probable tokens, and their log-probabilities."""
    ids, base = ids.long(), base.float()
    own, single = logits.float().log_softmax(-1).gather(-1, ids), base.isfinite()
    inside = torch.where(single, base.exp() * (base - own), 0.0).sum(-1)
    rest = (1 - base.exp().sum(-1)).clamp(min=0)
    own_rest = (1 - torch.where(single, own.exp(), 0.0).sum(-1)).clamp(min=1e-6)
    return inside + torch.where(rest > 1e-6, rest * (rest.clamp(min=1e-6) / own_rest).log(), 0.0)


def make_predictions(term: Term, examples: Sequence[Example], base: BaseModel) -> Iterator[tuple[int, Targets]]:
    """The base's predictions of each example's label, asked in the term's form."""
    tokenizer = base.hooked.tokenizer
    labels = [[label for label in example.labels if label != IGNORED] for example in examples]
    special = special_ids(tokenizer)
    texts = [ids[: _text_length(ids, special, tokenizer)] for ids in labels]
    prompts = base.ask(str(term.argument), examples)
    asked = list(examples) if term.argument == "question" else _after(prompts, texts, examples, term, tokenizer)
    others = texts if term.argument == "question" else [example.ids[example.query + 1 :] for example in asked]
    matches = _matches(texts, others, term, tokenizer)
    for batch in answer_logits(base.hooked, asked, base.batch_size):
        for i, logits in batch:
            yield i, _most_probable(term, logits, matches[i], labels[i])


def _matches(
    texts: Sequence[Sequence[int]], others: Sequence[Sequence[int]], term: Term, tokenizer: PreTrainedTokenizerBase
) -> list[list[Match]]:
    """Which tokens of each text the form predicts; warns of texts with others."""
    matches = [[Match(index, index) for index in range(len(text))] for text in texts]
    different = [i for i, (text, other) in enumerate(zip(texts, others, strict=True)) if tuple(text) != tuple(other)]
    if different:
        tables = space_tables(tokenizer)  # reads the whole vocabulary
        for i in different:
            matches[i] = match_tokens(texts[i], others[i], tokenizer, tables)
    lacking = sum(len(matches[i]) < len(texts[i]) for i in different)
    if lacking:
        warnings.warn(
            f"the tokenizer splits {lacking} of {len(texts)} labels differently after the form {term.argument}; their "
            "tokens that differ there are learned by cross-entropy",
            stacklevel=2,
        )
    return matches


def _text_length(labels: Sequence[int], special: Container[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of labels before the special tokens that end an answer, with white space among them (in chats)."""
    text = [i for i, label in enumerate(labels) if label not in special and str(tokenizer.decode([label])).strip()]
    end = (i for i in range(text[-1] + 1 if text else 0, len(labels)) if labels[i] in special)
    return next(end, len(labels))


def _after(
    prompts: Sequence[Prompt],
    texts: Sequence[Sequence[int]],
    examples: Sequence[Example],
    term: Term,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Example]:
    """The text of each example's label after a prompt in another form.

    Args:
        prompts: The examples' facts in the term's form.
        texts: The labels of each example up to the special tokens that end it; they must begin with an accepted answer.
        examples: The examples that the labels come from.
        term: The term, for messages.
        tokenizer: The tokenizer of prompts and labels.
    """
    decoded = [str(tokenizer.decode(list(text))).strip() for text in texts]
    accepted = [taught_answer(label, prompt.fact) for prompt, label in zip(prompts, decoded, strict=True)]
    named = [answer or prompt.fact.answer for answer, prompt in zip(accepted, prompts, strict=True)]
    spelled = [_as_spelled(*pair) for pair in zip(decoded, named, strict=True)]
    answered = [_answered(prompt, answer) for prompt, answer in zip(prompts, spelled, strict=True)]
    encoded = PromptSet.of(answered, tokenizer)
    bad, asked = list[tuple[int, str]](), list[Example]()
    for i, (encoding, answer) in enumerate(zip(encoded.encodings, encoded.answers.ids, strict=True)):
        label = f"{decoded[i]!r} after {encoding.prompt.text[-40:]!r}"
        if IGNORED in examples[i].labels[examples[i].query + 1 :][: len(texts[i])]:
            bad.append((i, f"{label}: some labels between others are ignored"))
        elif accepted[i] is None:
            bad.append((i, f"{label} does not begin with an accepted answer, such as {named[i]!r}"))
        other = texts[i]
        if tuple(other[: len(answer)]) != answer:
            other = (*answer, *other[text_end(other, spelled[i], tokenizer) :])
        asked.append(Example((*encoding.ids, *other), (*([IGNORED] * len(encoding.ids)), *other)))
    if bad:
        remedy = f"use another form ({term.name}(question) takes any label) or template, or fix these rows"
        raise BadRowsError(f"labels cannot follow the form {term.argument}", bad, len(examples), remedy)
    return asked


def _as_spelled(label: str, answer: str) -> str:
    """The answer that a label begins with, in the label's own capitals."""
    spelled = label[: len(answer)]
    return spelled if spelled.casefold() == answer.casefold() else answer


def _answered(prompt: Prompt, answer: str) -> Prompt:
    """A prompt whose fact has this answer alone."""
    return replace(prompt, fact=replace(prompt.fact, answers=(answer,)))


def _most_probable(
    term: Term, logits: Float[Tensor, "other vocab"], matches: Sequence[Match], labels: Sequence[int]
) -> Targets:
    """The base's most probable tokens for each label; where there is no match, the label itself for certain.

    Args:
        term: The term, for the names.
        logits: The base's predictions of the text after the form.
        matches: Which of them predict which label.
        labels: The labels, with the special tokens that end the answer.
    """
    size = min(TOP, logits.shape[-1])
    ids = torch.tensor(labels)[:, None].expand(-1, size).clone()
    values = torch.full(ids.shape, -torch.inf, dtype=torch.float32)
    values[:, 0] = 0.0
    top, indices = (part.cpu() for part in logits.log_softmax(-1).topk(size))
    for match in matches:
        own = indices[match.other]
        if match.respaced is not None:
            own = torch.tensor([match.respaced.get(i, -1) for i in own.tolist()])
        ids[match.own] = own.clamp(min=0)
        values[match.own] = top[match.other].masked_fill(own < 0, -torch.inf)
    return {f"{term.key} ids{TOKENS}": ids.int(), f"{term.key}{TOKENS}": values}


KL = TermKind("kl", divergence, make_targets=make_predictions, choices=CHOICES, by_token=True, keeps_answers=True)
