"""Relevance: whether an answer would gain or lose if the model attended more to the subject."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attnbalance.arguments import expects
from attnbalance.data.batches import PromptBatch
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt
from attnbalance.data.tokens import Encoding
from attnbalance.errors import DataError, ModelError
from attnbalance.models.evaluating import without_autocast
from attnbalance.models.forward import check_vocabulary, forward_rows
from attnbalance.models.hooked import HookedModel
from attnbalance.models.interventions import edited
from attnbalance.readings.distinguishing_tokens import distinguishing_tokens
from attnbalance.readings.reading import Reading, concatenate


@dataclass(frozen=True)
class Relevance:
    """Relevance of the subject's and of all other tokens to each answer, by layer and head.

    In the paper's one-layer model, the sign of `push` says whether a training step on the fact moves attention towards
    the subject (Theorem 4.5). In a deep model it does not: a step changes weights, which change the scores of every
    token, prompt and layer. On a trained model, the sign of one small gradient-descent step agreed with the push for
    67% of facts, while 65% had the more frequent sign.

    Attributes:
        subject: Counterpart of s_rel (Ghosal et al. 2024, Definition 4.3): the gradient of log p(answer) with respect
            to each subject token's attention probability, averaged over the subject with attention as weights; 0 where
            it gets no attention, such as outside a sliding window.
        others: Counterpart of p_rel (Definition 4.4): the same average over all other tokens.
        push: The gradient of log p(answer) with respect to a number added to the scores of all subject tokens:
            m ((1 - m) subject - m' others), with m and m' the attention on the subject and on the others; without
            attention sinks m (1 - m) (subject - others). Above 0, the answer gains if this head attends more to the
            subject. Summed over heads, it gives the sign for the whole model.
    """

    subject: Reading
    others: Reading
    push: Reading


@without_autocast()
@expects(model=HookedModel, prompts=[Prompt], among=[Prompt])
def read_relevance(
    model: HookedModel,
    prompts: Sequence[Prompt],
    *,
    among: Sequence[Prompt] = (),
    batch_size: int = 32,
    progress: bool = False,
) -> Relevance:
    """The relevance of each prompt's answer, at the first token that tells it from the answers it is compared with.

    If all these answers begin with the same tokens, or an answer begins with a token that shows no character (a bare
    "▁"), these are appended to the prompt, whose last token is then the query: see `distinguishing_tokens`. Only the
    next token is read. Warns if a wrong answer has the same token there: where numbers are split into digits, 1815 and
    1999 share their 1.

    In a one-layer model, the gradient with respect to the probability of token j is (e_a - p)^T W_V x_j, so `subject`
    and `others` are exactly the paper's s_rel and p_rel. In deep models, the gradient includes the response of all
    later layers, attention rows included. (Definition 4.4 prints f(r, p_r); its derivation shows that f(s, p_r) is
    meant.) Takes one forward and one backward pass for each batch, in the model's dtype. Gradients of 16-bit models are
    off by some percent of the largest one; load the model with dtype="float32" for more precise ones. Raises
    `ModelError` for models whose rows cannot be edited, and under `torch.inference_mode`.

    model: the model.
    prompts: the prompts that are read.
    among: the prompts whose answers each answer is compared with, those of its relation; by default, and for a relation
        that none of them has, `prompts`.
    batch_size: prompts in a pass.
    progress: show a progress bar.
    """
    if not prompts:
        raise DataError("expected at least one prompt, got none")
    if torch.is_inference_mode_enabled():
        raise ModelError("relevance needs gradients: call `read_relevance` outside torch.inference_mode()")
    prompts = PromptSet.of(prompts, model.tokenizer)
    compared = PromptSet.of([*prompts, *among], model.tokenizer) if among else prompts
    encodings, answers = distinguishing_tokens(compared, len(prompts))
    _warn_of_alike(compared, encodings, answers)
    largest = [max(encoding.ids) for encoding in encodings]
    check_vocabulary(model.model, torch.tensor([*largest, *answers]), model.name)
    parts: list[tuple[Reading, Reading, Reading]] = []
    for indices, batch in model.batches(encodings, batch_size, bar="relevance" if progress else None):
        slopes = _slopes(model, batch, torch.tensor([answers[i] for i in indices]))
        parts.append(_readings(model, batch, *slopes))
    return Relevance(*(concatenate(list(pieces)).at(prompts.prompt_ids) for pieces in zip(*parts, strict=True)))


def _warn_of_alike(compared: PromptSet, encodings: Sequence[Encoding], tokens: Sequence[int]) -> None:
    """Warn how many prompts are read at a token that a wrong answer, after the same tokens, has too."""
    count, end, facts = len(encodings), compared.tokenizer.eos_token_id, [prompt.fact for prompt in compared]
    begun = [
        (*encoding.ids[len(asked.ids) :], token)
        for encoding, asked, token in zip(encodings, compared.encodings, tokens, strict=False)
    ]
    lengths: dict[str, set[int]] = {}
    for fact, beginning in zip(facts, begun, strict=False):
        lengths.setdefault(fact.relation, set()).add(len(beginning))
    accepted: dict[tuple[str, tuple[object, ...]], set[tuple[str, ...]]] = {}
    elsewhere = {fact.relation for fact in facts[count:]}
    for i, (fact, ids) in enumerate(zip(facts, compared.answers.ids, strict=True)):
        for length in lengths.get(fact.relation, ()) if i >= count or fact.relation not in elsewhere else ():
            accepted.setdefault((fact.relation, (*ids, end)[:length]), set()).add(fact.folded_answers)
    alike = sum(
        any(set(fact.folded_answers).isdisjoint(others) for others in accepted.get((fact.relation, beginning), ()))
        for fact, beginning in zip(facts, begun, strict=False)
    )
    if alike:
        warnings.warn(
            f"relevance is read at one token of each answer: {alike} of {len(encodings)} prompts have a right answer "
            "that begins with the same token as a wrong one, and have its relevance",
            stacklevel=5,
        )


def _slopes(
    model: HookedModel, batch: PromptBatch, answer: Tensor
) -> tuple[Float[Tensor, "prompt layer head position"], Float[Tensor, "prompt layer head position"]]:
    """The rows, and the gradient of log p(answer) with respect to each probability in them."""
    added: dict[int, Tensor] = {}

    def free(layer: int, row: Tensor) -> Tensor:
        if layer not in added:  # a layer may call its attention twice for one row
            added[layer] = torch.zeros_like(row, requires_grad=True)
        return row + added[layer]

    parameters = [p for p in model.model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        with model.evaluating(), torch.enable_grad(), edited(model, free):
            rows, logits = forward_rows(model.model, batch, model.kernel)
            model.check_finite(batch.prompts, rows, logits)
            chosen = logits[:, -1].float().log_softmax(-1)[torch.arange(len(answer)), answer.to(logits.device)]
            slopes = torch.autograd.grad(chosen.sum(), [added[layer] for layer in model.layers])
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
    home = model.device
    return rows.detach().cpu(), torch.stack([slope.to(home) for slope in slopes], dim=1).cpu()


def _readings(model: HookedModel, batch: PromptBatch, rows: Tensor, slopes: Tensor) -> tuple[Reading, Reading, Reading]:
    """The three readings of a batch."""
    inside = batch.spans["subject"][:, None, None, :]
    mass = [rows.masked_fill(~tokens, 0.0).sum(-1) for tokens in (inside, ~inside)]
    subject, others = (
        (rows * slopes).masked_fill(~tokens, 0.0).sum(-1) / attention.clamp(min=torch.finfo(attention.dtype).tiny)
        for tokens, attention in zip((inside, ~inside), mass, strict=True)
    )
    push = mass[0] * ((1 - mass[0]) * subject - mass[1] * others)
    return tuple(
        Reading.of(batch.prompts, name, unit, values, model.layers)
        for name, unit, values in (
            ("subject relevance", "nats per unit of attention", subject),
            ("relevance of other tokens", "nats per unit of attention", others),
            ("push towards the subject", "nats per unit of score", push),
        )
    )  # pyright: ignore[reportReturnType]
