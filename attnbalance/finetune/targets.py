"""What objectives hold a model to: numbers of the base model, computed once, before training, for every example."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from jaxtyping import Float, Shaped
from scipy.stats import rankdata
from torch import Tensor, nn

from attnbalance.errors import BadRowsError, DataError
from attnbalance.finetune.examples import IGNORED, INPUTS, POSITIONS, TOKENS, Example, answer_logits, examples_of
from attnbalance.finetune.objectives import DOWNWEIGHT, TOP, Objective, Term
from attnbalance.finetune.ranking import score_prompts
from attnbalance.models.forward import evaluating, states_of_output
from attnbalance.models.hooked import HookedModel
from attnbalance.prompts import Prompt
from attnbalance.readings.attention import read_attention
from attnbalance.tokens import batches, check_lengths, encode, pad
from attnbalance.worlds.statements import statement_prompts

Targets = Mapping[str, Shaped[Tensor, "..."]]

SHOTS = 4
"""Answered questions before the one asked, in the form few-shot."""


def add_targets(
    examples: Sequence[Example], objective: Objective, base: HookedModel, *, batch_size: int = 64, seed: int = 0
) -> list[Example]:
    """The examples with all numbers of the base model that the objective's terms need; as they are where none does.

    Adapters of `base` are switched off meanwhile, so that the model to be trained may be passed itself. Examples must
    know their prompts. The few-shot form puts `SHOTS` other examples of the relation, drawn once for each relation,
    before the question. Raises `DataError` for examples without prompts and for relations with too few others,
    `BadRowsError` where a tokenizer splits an answer otherwise behind the other form.
    """
    terms = [term for term in objective.terms if "base" in term.needs]
    if not terms:
        return list(examples)
    result = list(examples)
    with _without_adapters(base.model):
        for term in terms:
            found = _MAKERS[term.name](term, examples, base, batch_size, seed)
            for i, targets in enumerate(found):
                result[i] = replace(result[i], targets={**result[i].targets, **targets})
    return result


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """The model with its adapters switched off, peft's or transformers' own; then as it was, frozen parts included."""
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    own = bool(getattr(model, "_hf_peft_config_loaded", False))
    if own:
        model.disable_adapters()  # pyright: ignore[reportCallIssue]
    try:
        with getattr(model, "disable_adapter", nullcontext)():  # pyright: ignore[reportOptionalCall]
            yield
    finally:
        if own:
            model.enable_adapters()  # pyright: ignore[reportCallIssue]
        for parameter, flag in trained:
            parameter.requires_grad_(flag)


def prompts_of(examples: Sequence[Example]) -> list[Prompt]:
    """The examples' prompts; raises `DataError` where one has none."""
    prompts = [example.prompt for example in examples if example.prompt is not None]
    if len(prompts) != len(examples):
        raise DataError(
            f"the objective looks at prompts, but {len(examples) - len(prompts)} of {len(examples)} examples know "
            "none; make them with make_examples or as_examples"
        )
    return prompts


def in_form(form: str, prompts: Sequence[Prompt], seed: int = 0) -> list[Prompt]:
    """The prompts' facts asked in another of `FORMS`, up to the answer."""
    if form == "question":
        return list(prompts)
    if form == "statement":
        return list(statement_prompts([prompt.fact for prompt in prompts]))
    if any(prompt.has_special_tokens for prompt in prompts):
        raise DataError("few-shot puts answered questions before the prompt, which a rendered chat does not allow")
    rng, shots = random.Random(seed), dict[str, list[Prompt]]()  # noqa: S311
    for relation in dict.fromkeys(prompt.fact.relation for prompt in prompts):
        others = [prompt for prompt in prompts if prompt.fact.relation == relation]
        if len(others) <= SHOTS:
            raise DataError(f"few-shot needs more than {SHOTS} facts of each relation; {relation!r} has {len(others)}")
        shots[relation] = rng.sample(others, SHOTS + 1)
    return [_behind(prompt, shots[prompt.fact.relation]) for prompt in prompts]


def _behind(prompt: Prompt, shots: Sequence[Prompt]) -> Prompt:
    """A prompt behind answered ones, itself left out of these."""
    used = [shot for shot in shots if shot.fact != prompt.fact][:SHOTS]
    lead = "".join(f"{shot.text} {shot.fact.answer}\n\n" for shot in used)
    spans = {role: (start + len(lead), end + len(lead)) for role, (start, end) in prompt.spans.items()}
    return replace(prompt, text=lead + prompt.text, spans=spans)


def _weights(term: Term, examples: Sequence[Example], base: HookedModel, batch_size: int, seed: int) -> list[Targets]:
    prompts = prompts_of(examples)
    scores = score_prompts(prompts, str(term.argument), base, batch_size)
    if term.argument == "relevance":
        weights = [1.0 if score > 0 else DOWNWEIGHT for score in scores]
    else:
        weights = ((rankdata(scores) - 0.5) / len(scores)).tolist()
    return [{term.key: torch.tensor(weight)} for weight in weights]


def _rows(term: Term, examples: Sequence[Example], base: HookedModel, batch_size: int, seed: int) -> list[Targets]:
    rows = read_attention(base, in_form(str(term.argument), prompts_of(examples), seed), batch_size=batch_size)
    if term.argument != "question":
        return [{term.key: share} for share in rows.to("subject", "sum").values]
    lengths = [len(tokens) for tokens in rows.tokens]
    return [
        {f"{term.key}{POSITIONS}": row[..., :length].clone()} for row, length in zip(rows.values, lengths, strict=True)
    ]


@torch.no_grad()
def _states(term: Term, examples: Sequence[Example], base: HookedModel, batch_size: int, seed: int) -> list[Targets]:
    encodings = encode(in_form(str(term.argument), prompts_of(examples), seed), base.tokenizer)
    check_lengths(encodings, base.max_positions)
    found: dict[int, Targets] = {}
    with evaluating(base.model):
        for places in batches(encodings, batch_size):
            batch = pad([encodings[i] for i in places], base.pad_id, "right")
            inputs = {name: getattr(batch, name).to(base.device) for name in INPUTS}
            inputs["attention_mask"] = inputs["attention_mask"].long()
            output = base.model(**inputs, use_cache=False, output_hidden_states=True)
            states = states_of_output(output, batch.query_index.to(base.device)).cpu()
            found |= {i: {term.key: state} for i, state in zip(places, states, strict=True)}
    return [found[i] for i in range(len(examples))]


def _predictions(
    term: Term, examples: Sequence[Example], base: HookedModel, batch_size: int, seed: int
) -> list[Targets]:
    prompts = in_form(str(term.argument), prompts_of(examples), seed)
    asked = examples_of(prompts, base.tokenizer, end=False)
    wanted = [[label for label in example.labels if label != IGNORED] for example in examples]
    answers = [[label for label in one.labels if label != IGNORED] for one in asked]
    tell = "{!r} is {} behind {!r} and {} behind the question"
    bad = [
        (i, tell.format(base.tokenizer.decode(want), answer, prompts[i].text[-40:], want))
        for i, (want, answer) in enumerate(zip(wanted, answers, strict=True))
        if want[: len(answer)] != answer
    ]
    if bad:
        raise BadRowsError(
            f"answers have other tokens in the form {term.argument}",
            bad,
            len(examples),
            "use another form (question, for chats, whose answers have no space before them) or template",
        )
    found = [one.cpu() for batch in answer_logits(base, asked, batch_size) for one in batch]
    return [_most_probable(term, logits, want) for logits, want in zip(found, wanted, strict=True)]


def _most_probable(term: Term, logits: Float[Tensor, "token vocab"], wanted: Sequence[int]) -> Targets:
    """The base's most probable tokens; for tokens behind the answer (its end) the labels themselves, for certain."""
    top = logits.log_softmax(-1).topk(min(TOP, logits.shape[-1]))
    end = torch.tensor(wanted[len(logits) :], dtype=top.indices.dtype)
    certain = torch.full((len(end), top.values.shape[-1]), -torch.inf)
    certain[:, :1] = 0.0
    ids = torch.cat([top.indices, end[:, None].expand(certain.shape)])
    return {
        f"{term.key} ids{TOKENS}": ids.int(),
        f"{term.key}{TOKENS}": torch.cat([top.values, certain]),
    }


_MAKERS: dict[str, Callable[[Term, Sequence[Example], HookedModel, int, int], list[Targets]]] = {
    "kl": _predictions,
    "row-anchor": _rows,
    "state-anchor": _states,
    "weighted-ce": _weights,
}
