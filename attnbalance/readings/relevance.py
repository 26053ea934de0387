"""Relevance: whether learning a fact would raise or lower attention to its subject, known before any training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attnbalance.models.edits import edited
from attnbalance.models.forward import base_of, evaluating, forward_rows
from attnbalance.models.hooked import HookedModel
from attnbalance.prompts import Prompt
from attnbalance.readings.reading import Reading, concatenate
from attnbalance.tokens import batches, check_lengths, encode, encode_answers, pad


@dataclass(frozen=True)
class Relevance:
    """Relevance of the subject's and of all other tokens to each answer, by layer and head.

    `subject` and `others` are the counterparts of s_rel and p_rel (Ghosal et al. 2024, Definitions 4.3 and 4.4):
    averages, weighted by attention, of the gradient of log p(answer) with respect to the attention probability of each
    token. `push` is the gradient with respect to a number added to the scores of all subject tokens,
    m ((1 - m) subject - m' others), with m and m' the attention on the subject and on the others: without attention
    sinks m (1 - m) (subject - others). Above 0, a step of training on the fact raises attention to the subject
    (Theorem 4.5). Its sum over heads says so of the whole model.
    """

    subject: Reading
    others: Reading
    push: Reading


def read_relevance(
    model: HookedModel, prompts: Sequence[Prompt], *, batch_size: int = 32, progress: bool = False
) -> Relevance:
    """The relevance of each prompt's first answer's first token, in the order of the prompts.

    In a one-layer model the gradient with respect to the probability of token j is (e_a - p)^T W_V x_j, so that
    `subject` and `others` are the paper's s_rel and p_rel exactly; in deep models it holds every later layer's response
    to the value, rows included. (Definition 4.4 prints f(r, p_r), which its derivation shows to be f(s, p_r).) One
    forward and one backward pass a batch. Raises `ModelError` for models whose rows cannot be edited.
    """
    from tqdm import tqdm

    encodings = encode(prompts, model.tokenizer)
    check_lengths(encodings, model.max_positions)
    answers = encode_answers(encodings, model.tokenizer)
    parts: list[tuple[Reading, Reading, Reading]] = []
    with tqdm(total=len(encodings), desc="relevance", unit="prompt", disable=not progress, leave=False) as bar:
        for places in batches(encodings, batch_size):
            batch = pad([encodings[i] for i in places], model.pad_id)
            rows, slopes = _slopes(model, batch, torch.tensor([answers[i][0] for i in places]))
            parts.append(_readings(model, [prompts[i] for i in places], rows, slopes, batch.spans["subject"]))
            bar.update(len(places))
    names = [prompt.prompt_id for prompt in prompts]
    return Relevance(*(concatenate(list(found)).at(names) for found in zip(*parts, strict=True)))


def _slopes(
    model: HookedModel, batch: object, answer: Tensor
) -> tuple[Float[Tensor, "prompt layer head position"], Float[Tensor, "prompt layer head position"]]:
    """Rows, and the gradient of log p(answer) with respect to each of their probabilities."""
    added: dict[int, Tensor] = {}

    def free(layer: int, row: Tensor) -> Tensor:
        added[layer] = torch.zeros_like(row, requires_grad=True)
        return row + added[layer]

    parameters = [p for p in model.model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        with evaluating(model.model), torch.enable_grad(), edited(model, free):
            rows, logits = forward_rows(model.model, batch, model.kernel)  # pyright: ignore[reportArgumentType]
            chosen = logits[:, -1].float().log_softmax(-1)[torch.arange(len(answer)), answer.to(logits.device)]
            slopes = torch.autograd.grad(chosen.sum(), [added[layer] for layer in model.layers])
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
    home = base_of(model.model).device
    return rows.detach().cpu(), torch.stack([one.to(home) for one in slopes], dim=1).cpu()


def _readings(
    model: HookedModel, prompts: Sequence[Prompt], rows: Tensor, slopes: Tensor, span: Tensor
) -> tuple[Reading, Reading, Reading]:
    inside = span[:, None, None, :]
    mass = [rows.masked_fill(~here, 0.0).sum(-1) for here in (inside, ~inside)]
    subject, others = (
        (rows * slopes).masked_fill(~here, 0.0).sum(-1) / part.clamp(min=torch.finfo(part.dtype).tiny)
        for here, part in zip((inside, ~inside), mass, strict=True)
    )
    push = mass[0] * ((1 - mass[0]) * subject - mass[1] * others)
    ids, subjects = tuple(p.prompt_id for p in prompts), tuple(p.fact.subject for p in prompts)
    return tuple(
        Reading(name, unit, values, model.layers, ids, subjects)
        for name, unit, values in (
            ("subject relevance", "nats per unit of attention", subject),
            ("relevance of other tokens", "nats per unit of attention", others),
            ("push towards the subject", "nats per unit of score", push),
        )
    )  # pyright: ignore[reportReturnType]
