"""Salience: what the weights store about a subject, in its context or without it, independently of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnbalance.arguments import expects
from attnbalance.data.batches import in_order
from attnbalance.errors import DataError, ModelError
from attnbalance.models.bridge import BridgedModel
from attnbalance.models.evaluating import without_autocast
from attnbalance.models.single_layers import check_single_layers
from attnbalance.readings.answer_checks import check_answers_alike
from attnbalance.readings.answer_tokens import AnswerTokens
from attnbalance.readings.reading import Reading
from attnbalance.seeds import check_seed

SUBJECTS = ("embedding", "extended")
"""A subject without its context: its last token's embedding, or that embedding extended by the first MLP.

The embedding is the first layer's input (`BridgedModel.embedding`): scaled and normed as in the family, without
positions in GPT-2 and OPT."""


@dataclass(frozen=True)
class Neuron:
    """An MLP neuron at one subject (Geva et al. 2021).

    Attributes:
        layer: Layer number.
        neuron: Index of the neuron in its layer.
        activation: Its activation at the subject.
        readout: What its output weights add to the answer's logit difference for an activation of 1.
        salience: Activation times readout: logits at a final scale of 1.
    """

    layer: int
    neuron: int
    activation: float
    readout: float
    salience: float


@dataclass(frozen=True)
class ReadoutRanks:
    """Readout rank: the answer's rank among its relation's answers in what the heads could read out at the subject.

    Attributes:
        rank: 1 is the best of `candidates`.
        control: The rank of the same answer at a random other subject of the relation that has another answer.
        candidates: Number of answers that are ranked.
    """

    rank: Int[Tensor, " prompt"]
    control: Int[Tensor, " prompt"]
    candidates: Int[Tensor, " prompt"]

    def chance(self, top: int) -> Float[Tensor, " prompt"]:
        """The probability that an answer ranks among the first `top` in a random order; `top` must be >= 0."""
        if top < 0:
            raise DataError(f"top must be >= 0, got {top}")
        return (top / self.candidates).clamp(max=1.0)


@without_autocast()
@torch.no_grad()
@expects(model=BridgedModel, answer_tokens=AnswerTokens)
def read_value_salience(model: BridgedModel, answer_tokens: AnswerTokens, *, at: str = "extended") -> Reading:
    """Value salience from the weights alone: what each head would add to the logit difference at full attention.

    S(s, r, a) = phi(a)^T W_V phi(s) (Ghosal et al. 2024, Definition 4.1). In deep models it is
    (W_U difference) . gain . W_O W_V norm(x). x represents the subject's last token, the same at every layer:
    "embedding" is its embedding, "extended" the embedding plus the output of the first MLP. For the subject's actual
    residual stream, see `DirectAttribution.value_salience`. Value biases are left out, since they do not depend on the
    subject. Norms before W_V are applied. A norm after attention (Gemma 2) has the scale that it would have if all
    heads attended fully to the subject. Of the final norm only the gain is used, so values are logits per unit of its
    input. Holds one number for each fact, layer and head. Raises `DataError` for another `at`, and `ModelError` for a
    family in which a layer run alone would read other values than in a prompt.
    """
    x, subject = _subjects(model, answer_tokens, at)
    direction = _direction(model, answer_tokens)
    weights, saliences = model.weights, []
    for i in model.layers:
        values = torch.einsum("sd,hdk->shk", model.value_input(i, x), weights.W_V[i])
        written = torch.einsum("shk,hkd->sd", values, weights.W_O[i])
        before = model.before_norm(i, "ln1_post", direction, written[subject])
        per_head = torch.einsum("pd,hkd->phk", before, weights.W_O[i])
        saliences.append((values[subject] * per_head).sum(-1))
    return _reading(f"value salience ({at})", torch.stack(saliences, dim=1), model, answer_tokens)


@without_autocast()
@torch.no_grad()
@expects(model=BridgedModel, answer_tokens=AnswerTokens)
def read_mlp_salience(
    model: BridgedModel, answer_tokens: AnswerTokens, *, at: str = "extended", batch_size: int = 32
) -> Reading:
    """MLP salience: what each layer's MLP writes towards the answer at the subject's last token; one "head" per layer.

    `at`: "embedding" and "extended" run each MLP on that vector (see `read_value_salience`, also for units and errors);
    "context" takes the MLP's output in the prompt. Salience is the sum over neurons of activation times readout (see
    `top_neurons`), plus the output bias. A norm after the MLP (Gemma 2) has its actual scale.
    """
    direction = _direction(model, answer_tokens)
    if at == "context":
        names = {i: f"blocks.{i}.hook_mlp_out" for i in model.layers}
        written = _at_subject(model, answer_tokens, names, batch_size)
    else:
        x, subject = _subjects(model, answer_tokens, at)
        written = {i: model.mlp_output(i, x)[subject] for i in model.layers}
    values = torch.stack([(written[i] * direction).sum(-1) for i in model.layers], dim=1)
    return _reading(f"MLP salience ({at})", values[..., None], model, answer_tokens)


@without_autocast()
@torch.no_grad()
@expects(model=BridgedModel, answer_tokens=AnswerTokens, n=int)
def top_neurons(
    model: BridgedModel, answer_tokens: AnswerTokens, n: int = 5, *, batch_size: int = 32
) -> list[list[Neuron]]:
    """For each prompt, the `n` neurons that write most towards its answer at the subject's last token, in its context.

    Holds the activations of all neurons for these prompts, so pass few. A norm after the MLP (Gemma 2) has the scale of
    this forward pass, without the MLP's output bias. Raises `DataError` for `n` below 1, and `ModelError` for mixtures
    of experts.
    """
    if n < 1:
        raise DataError(f"n must be >= 1, got {n}")
    W_out = model.weights.W_out
    if W_out is None:
        raise ModelError(f"{model.name} has layers without an ordinary MLP (a mixture of experts?)")
    direction = _direction(model, answer_tokens)
    names = {i: f"blocks.{i}.mlp.hook_post" for i in model.layers}
    activations = _at_subject(model, answer_tokens, names, batch_size)
    activation = torch.stack([activations[i] for i in model.layers], dim=1)  # [prompt layer neuron]
    written = {i: activations[i] @ W_out[i] for i in model.layers}
    before = {i: model.before_norm(i, "ln2_post", direction, written[i]) for i in model.layers}
    readout = torch.stack([before[i] @ W_out[i].T for i in model.layers], dim=1)
    salience = activation * readout

    def neuron(prompt: int, layer: int, index: int) -> Neuron:
        numbers = (float(values[prompt, layer, index]) for values in (activation, readout, salience))
        return Neuron(model.layers[layer], index, *numbers)

    width = salience.shape[-1]
    best = [salience[p].flatten().topk(min(n, salience[p].numel())).indices.tolist() for p in range(len(salience))]
    return [[neuron(p, j // width, j % width) for j in indices] for p, indices in enumerate(best)]


@without_autocast()
@torch.no_grad()
@expects(model=BridgedModel, answer_tokens=AnswerTokens)
def read_readout_ranks(
    model: BridgedModel, answer_tokens: AnswerTokens, *, batch_size: int = 32, seed: int = 0
) -> ReadoutRanks:
    """The readout rank of each answer: its rank among its relation's answers in what the heads could read out.

    The value outputs of all layers and heads at the subject's last token, in its context, are summed as if each head
    attended to that token alone (through the norm after attention, in families that have one), then multiplied by the
    final norm's gain and the unembedding. Each candidate's mean score over the relation's subjects is subtracted, since
    a preference shared by all subjects says nothing about one. So pass all prompts of a relation together; raises
    `DataError` for a prompt without another subject of its relation that has another answer. `seed` draws the subjects
    of the controls.
    """
    check_seed(seed)
    state = _read_out(model, answer_tokens, batch_size)
    rank, control, sizes = (torch.zeros(len(answer_tokens), dtype=torch.long) for _ in range(3))
    generator = torch.Generator().manual_seed(seed)
    for relation, candidates in answer_tokens.candidates.items():
        indices = [i for i, prompt in enumerate(answer_tokens.prompts) if prompt.fact.relation == relation]
        if not indices:
            continue
        scores = (state[indices] @ model.weights.W_U[:, list(candidates)]).cpu()
        scores = scores - scores.mean(dim=0)
        facts = [answer_tokens.prompts[i].fact for i in indices]
        accepted, subjects = [set(fact.folded_answers) for fact in facts], [fact.composed_subject for fact in facts]
        for row, i in enumerate(indices):
            others = (k for k, subject in enumerate(subjects) if subject != subjects[row])
            apart = [k for k in others if accepted[k].isdisjoint(accepted[row])]
            rivals = [k for k in apart if answer_tokens.answer[indices[k]] in answer_tokens.others[i]]
            strangers = rivals or apart  # the rival may be a bare space, with which several answers begin
            if not strangers:
                raise DataError(
                    f"no other subject of relation {relation!r} has another answer than "
                    f"{answer_tokens.prompts[i].text!r}; pass all prompts of a relation "
                    "together, and leave out relations with one subject"
                )
            drawn = strangers[int(torch.randint(len(strangers), (), generator=generator))]
            rank[i], control[i] = (_rank(scores[k], answer_tokens, i) for k in (row, drawn))
            sizes[i] = 1 + len(answer_tokens.others[i])
    return ReadoutRanks(rank, control, sizes)


def _read_out(model: BridgedModel, answer_tokens: AnswerTokens, batch_size: int) -> Float[Tensor, "prompt d_model"]:
    """The sum of what all heads add at the subject's last token, times the final norm's gain."""
    names = {i: f"blocks.{i}.attn.hook_v" for i in model.layers}
    values = _at_subject(model, answer_tokens, names, batch_size)
    W_U = model.weights.W_U
    state = torch.zeros(len(answer_tokens), len(W_U), device=W_U.device, dtype=torch.float32)
    for i in model.layers:
        state += model.head_outputs(i, values[i])
    return model.norm("ln_final").at_scale_one(state)


def _rank(scores: Tensor, answer_tokens: AnswerTokens, i: int) -> int:
    """1 + the number of other answers with a higher score than the fact's own."""
    return 1 + int((scores[list(answer_tokens.others[i])] > scores[answer_tokens.answer[i]]).sum())


def _direction(model: BridgedModel, answer_tokens: AnswerTokens) -> Float[Tensor, "prompt d_model"]:
    """The logit difference's direction before the final norm, at scale 1."""
    unembed = answer_tokens.direction(model.weights.W_U)
    return model.norm("ln_final").backward(unembed, unembed.new_ones(len(unembed)))[0]


def _subjects(
    model: BridgedModel, answer_tokens: AnswerTokens, at: str
) -> tuple[Float[Tensor, "subject d_model"], Tensor]:
    """The vectors of the subjects' distinct last tokens, and for each prompt the index of its own vector."""
    if at not in SUBJECTS:
        raise DataError(f"at must be {' or '.join(SUBJECTS)}, got {at!r}")
    check_answers_alike(answer_tokens, model.hooked.tokenizer)
    check_single_layers(model)
    last = torch.tensor([encoding.ids[encoding.last_of("subject")] for encoding in answer_tokens.encodings])
    distinct, index = last.unique(return_inverse=True)
    x = model.embedding(distinct)
    return (x if at == "embedding" else x + model.mlp_output(model.layers[0], x)), index.to(x.device)


def _at_subject(
    model: BridgedModel, answer_tokens: AnswerTokens, names: dict[int, str], batch_size: int
) -> dict[int, Float[Tensor, "prompt width"]]:
    """Each layer's hooked activation at the last token of every prompt's subject, in the order of the prompts."""
    check_answers_alike(answer_tokens, model.hooked.tokenizer)
    parts: dict[int, list[Tensor]] = {i: [] for i in names}
    order: list[list[int]] = []
    for indices, batch in model.hooked.batches(answer_tokens.encodings, batch_size):
        last = batch.last_of("subject")

        def pick(x: Tensor, last: Tensor = last) -> Tensor:
            return x.flatten(2)[torch.arange(len(x), device=x.device), last.to(x.device)]

        keep: dict[str, Callable] = dict.fromkeys(names.values(), pick)
        _, kept = model.run(batch.input_ids, batch.attention_mask, keep)
        for i, name in names.items():
            parts[i].append(kept[name])
        order.append(indices)
    return {i: in_order(pieces, order) for i, pieces in parts.items()}


def _reading(
    name: str, values: Float[Tensor, "prompt layer head"], model: BridgedModel, answer_tokens: AnswerTokens
) -> Reading:
    unit = "logits per unit of final scale"
    return Reading.of(answer_tokens.prompts, name, unit, values.float().cpu(), model.layers)
