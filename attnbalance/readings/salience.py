"""Salience: what the weights store about a subject, with or without its context, whether or not it is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnbalance.errors import DataError, ModelError
from attnbalance.models.bridge import BridgedModel, heads_of
from attnbalance.readings.contrast import Contrasts
from attnbalance.readings.reading import Reading
from attnbalance.tokens import PromptBatch, batches, check_lengths, pad

SUBJECTS = ("embedding", "extended")
"""What stands for the subject without its context: the embedding of its last token, or that after the first MLP."""


@dataclass(frozen=True)
class Neuron:
    """An MLP neuron at one subject: its activation there, and its value's readout for the answer (Geva et al. 2021).

    `salience` is their product: what the neuron writes towards the answer, in logits at a final scale of 1.
    """

    layer: int
    neuron: int
    activation: float
    readout: float
    salience: float


@dataclass(frozen=True)
class StoredAnswers:
    """Where each fact's answer ranks among its relation's candidates in what all heads could read from the subject.

    `rank` 1 is the best of `candidates`. `control` is the rank of the same answer at the subject of another fact of the
    relation with another answer, drawn at random: what chance would give.
    """

    rank: Int[Tensor, " prompt"]
    control: Int[Tensor, " prompt"]
    candidates: Int[Tensor, " prompt"]


@torch.no_grad()
def read_value_salience(model: BridgedModel, contrasts: Contrasts, *, at: str = "extended") -> Reading:
    """Value salience from the weights alone: what each head would add to the answer's contrast at full attention.

    S(s, r, a) = phi(a)^T W_V phi(s) (Ghosal et al. 2024, Definition 4.1), for deep models
    (W_U contrast) . gain . W_O W_V norm(x), with x the subject's last token: its "embedding", or "extended", the
    embedding with what the first MLP adds to it, at every layer the same; the subject's true residual stream is
    `Ledger.readout`. Biases of values are left out, as they do not depend on the subject; norms before the values are
    applied, those behind them (and the final one) take part with their gain at scale 1, so that values are logits per
    unit of the final norm's input. Holds one number a fact, layer and head. Raises `DataError` for another `at`.
    """
    x, places = _subjects(model, contrasts, at)
    direction = _direction(model, contrasts)
    weights, found = model.weights, []
    for i in model.layers:
        layer, here = model.value_input(i, x), _behind(model, i, "ln1_post", direction)
        values = torch.einsum("sd,hdk->shk", layer, weights.W_V[i])[places]
        found.append((values * torch.einsum("pd,hkd->phk", here, weights.W_O[i])).sum(-1))
    return _reading(f"value salience ({at})", torch.stack(found, dim=1), model, contrasts)


@torch.no_grad()
def read_mlp_salience(
    model: BridgedModel, contrasts: Contrasts, *, at: str = "extended", batch_size: int = 32
) -> Reading:
    """MLP salience: what each layer's MLP writes towards the answer at the subject's last token, one "head" a layer.

    `at` "embedding" and "extended" run each MLP on that vector; "context" takes what it writes in the prompt. Units as
    in `read_value_salience`. It is the sum over neurons of activation times readout (see `top_neurons`) and the
    output's bias; in families with a norm behind the MLP (Gemma 2), at that norm's true scale, where neurons by
    themselves are read at 1. Raises `DataError` for another `at`.
    """
    direction = _direction(model, contrasts)
    if at == "context":
        names = {i: f"blocks.{i}.hook_mlp_out" for i in model.layers}
        written = _at_subject(model, contrasts, names, batch_size)
    else:
        x, places = _subjects(model, contrasts, at)
        written = {i: model.mlp_output(i, x)[places] for i in model.layers}
    values = torch.stack([(written[i] * direction).sum(-1) for i in model.layers], dim=1)
    return _reading(f"MLP salience ({at})", values[..., None], model, contrasts)


@torch.no_grad()
def top_neurons(model: BridgedModel, contrasts: Contrasts, n: int = 5, *, batch_size: int = 32) -> list[list[Neuron]]:
    """For each prompt the `n` neurons that write most towards its answer at the subject's last token, in its context.

    Holds the activations of all neurons for these prompts: meant for examples. Raises `ModelError` for MLPs without
    neurons of their own (mixtures of experts).
    """
    W_out = model.weights.W_out
    if W_out is None:
        raise ModelError(f"{model.name} has layers without an MLP of its own neurons (a mixture of experts?)")
    direction = _direction(model, contrasts)
    active = _at_subject(model, contrasts, {i: f"blocks.{i}.mlp.hook_post" for i in model.layers}, batch_size)
    readout = torch.stack(
        [_behind(model, i, "ln2_post", direction) @ W_out[i].T for i in model.layers], dim=1
    )  # [prompt layer neuron]
    activation = torch.stack([active[i] for i in model.layers], dim=1)
    salience = activation * readout
    width, found = salience.shape[-1], []
    for p in range(len(contrasts)):
        best = salience[p].flatten().topk(min(n, salience[p].numel())).indices.tolist()
        found.append(
            [
                Neuron(
                    model.layers[j // width],
                    j % width,
                    *(float(t[p].flatten()[j]) for t in (activation, readout, salience)),
                )
                for j in best
            ]
        )
    return found


@torch.no_grad()
def read_stored_answers(
    model: BridgedModel, contrasts: Contrasts, *, batch_size: int = 32, seed: int = 0
) -> StoredAnswers:
    """The rank of each answer among its relation's candidates in what all heads together could read from the subject.

    The value outputs of every layer and head at the subject's last token, in its context, are summed as if each head
    attended to it fully, and put through the final norm's gain and the unembedding. From each candidate's score its
    mean over the relation's subjects is taken: answers that every subject favours alike say nothing of this one.
    """
    names = {i: f"blocks.{i}.attn.hook_v" for i in model.layers}
    values = _at_subject(model, contrasts, names, batch_size)
    weights, final = model.weights, model.norm("ln_final")
    state = torch.zeros(len(contrasts), weights.W_U.shape[0], device=weights.W_U.device)
    for i in model.layers:
        heads = heads_of(values[i].flatten(1)[:, None], weights.W_V.shape[1], weights.W_V.shape[-1])[:, 0]
        state += torch.einsum("phk,hkd->pd", heads, weights.W_O[i]) * _gain(model, i)
    state = (state - state.mean(-1, keepdim=True) if final.centred else state) * final.gain
    rank, control = (torch.zeros(len(contrasts), dtype=torch.long) for _ in range(2))
    sizes = torch.zeros(len(contrasts), dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    for relation, candidates in contrasts.candidates.items():
        rows = [i for i, prompt in enumerate(contrasts.prompts) if prompt.fact.relation == relation]
        if not rows:
            continue
        scores = (state[rows] @ weights.W_U[:, list(candidates)]).cpu()
        scores = scores - scores.mean(dim=0)
        for row, i in enumerate(rows):
            strangers = [other for other, j in enumerate(rows) if contrasts.answer[j] in contrasts.others[i]]
            drawn = strangers[int(torch.randint(len(strangers), (), generator=generator))] if strangers else row
            rank[i], control[i] = (_rank(scores[k], contrasts, i) for k in (row, drawn))
            sizes[i] = 1 + len(contrasts.others[i])
    return StoredAnswers(rank, control, sizes)


def _rank(scores: Tensor, contrasts: Contrasts, i: int) -> int:
    """1 + the number of other answers that score higher than the fact's own."""
    return 1 + int((scores[list(contrasts.others[i])] > scores[contrasts.answer[i]]).sum())


def _gain(model: BridgedModel, layer: int) -> Float[Tensor, " d_model"]:
    return model.norm(layer, "ln1_post").gain.to(model.weights.W_U.device)


def _direction(model: BridgedModel, contrasts: Contrasts) -> Float[Tensor, "prompt d_model"]:
    """The contrast's direction before the final norm, at scale 1."""
    unembed = contrasts.of(model.weights.W_U)
    return model.norm("ln_final").backward(unembed, unembed.new_ones(len(unembed)))[0]


def _behind(model: BridgedModel, layer: int, norm: str, direction: Tensor) -> Float[Tensor, "prompt d_model"]:
    """A direction of the residual stream before a norm that stands behind attention or MLP (Gemma 2), at scale 1."""
    return model.norm(layer, norm).backward(direction, direction.new_ones(len(direction)))[0]


def _subjects(model: BridgedModel, contrasts: Contrasts, at: str) -> tuple[Float[Tensor, "subject d_model"], Tensor]:
    """The vectors of the distinct last tokens of subjects, and for each prompt the place of its own among them."""
    if at not in SUBJECTS:
        raise DataError(f"a subject without its context is read at {' or '.join(SUBJECTS)}, got {at!r}")
    last = torch.tensor([one.ids[max(one.spans["subject"])] for one in contrasts.encodings])
    distinct, places = last.unique(return_inverse=True)
    x = model.bridge.embed(distinct[None].to(model.weights.W_E.device))[0]
    return (x if at == "embedding" else x + model.mlp_output(model.layers[0], x)), places.to(x.device)


def _at_subject(
    model: BridgedModel, contrasts: Contrasts, names: dict[int, str], batch_size: int
) -> dict[int, Float[Tensor, "prompt width"]]:
    """What each layer's hook gives at the last token of every prompt's subject, in the order of the prompts."""
    parts: dict[int, list[Tensor]] = {i: [] for i in names}
    order: list[int] = []
    for places, last, batch in _batches(model, contrasts, batch_size):

        def pick(x: Tensor, last: Tensor = last) -> Tensor:
            return x.flatten(2)[torch.arange(len(x), device=x.device), last.to(x.device)]

        keep: dict[str, Callable] = dict.fromkeys(names.values(), pick)
        _, kept = model.run(batch.input_ids, batch.attention_mask, keep)
        for i, name in names.items():
            parts[i].append(kept[name])
        order += places
    back = torch.tensor(order).argsort()
    return {i: torch.cat(found)[back.to(found[0].device)] for i, found in parts.items()}


def _batches(
    model: BridgedModel, contrasts: Contrasts, batch_size: int
) -> Iterator[tuple[list[int], Tensor, PromptBatch]]:
    check_lengths(contrasts.encodings, model.hooked.max_positions)
    for places in batches(contrasts.encodings, batch_size):
        batch = pad([contrasts.encodings[i] for i in places], model.hooked.pad_id)
        width = batch.input_ids.shape[1]
        last = (torch.arange(width) * batch.spans["subject"]).amax(dim=1)
        yield places, last, batch


def _reading(
    name: str, values: Float[Tensor, "prompt layer head"], model: BridgedModel, contrasts: Contrasts
) -> Reading:
    prompts = contrasts.prompts
    return Reading(
        name,
        "logits per unit of final scale",
        values.float().cpu(),
        model.layers,
        tuple(p.prompt_id for p in prompts),
        tuple(p.fact.subject for p in prompts),
    )
