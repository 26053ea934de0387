"""The change of an answer's margin between two checkpoints, split into what each part of the weights causes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor

from attnbalance.arguments import expects
from attnbalance.data.batches import PromptBatch
from attnbalance.errors import ModelError
from attnbalance.models.config_changes import changed_settings
from attnbalance.models.evaluating import without_autocast
from attnbalance.models.forward import base_of, forward_uncapped
from attnbalance.models.hooked import HookedModel
from attnbalance.models.hybrids import Hybrids, hybrids_of
from attnbalance.models.interventions import edited, rows_of
from attnbalance.models.weights import PARTS
from attnbalance.progress import progress_bar
from attnbalance.readings.answer_checks import check_answers_alike
from attnbalance.readings.answer_tokens import AnswerTokens, weigh_by_probability
from attnbalance.readings.direct_attribution import DirectAttribution, read_direct_attribution
from attnbalance.readings.reading import Reading

TOLERANCE = 1e-3
"""Largest allowed difference between the margins of a model's direct attribution and of its own logits, in float32,
relative to 1 + the largest margin. Attention implementations that sum in another order differ by 1e-5 of the logits; a
different mask, window or frequency shows as 0.1 to 4 nats."""

IN_16_BITS = 300
"""Factor on `TOLERANCE` for models that compute in 16 bits: their logits of 10 to 30 are off by 0.1."""


@dataclass(frozen=True)
class Change:
    """The change of each prompt's margin (see `answer_tokens`) from one checkpoint to another, by cause and component.

    In families that cap their final logits (Gemma 2), all of this is about the logits before the cap. OV and MLP
    weights also change what later layers attend to, so `qk` is only part of the change that attention carries; `rows`
    is the whole. The answer tokens used here have probability weights, so fields called `logit_difference` in other
    classes hold the margin.

    Attributes:
        before: The margin in the first checkpoint, nats.
        after: The margin in the second checkpoint.
        parts: For each of `models.weights.PARTS`, the change that these weights cause: its Shapley value, with the
            margin of each hybrid of the two checkpoints as the value of a coalition. They sum to `after - before` for
            every prompt, are 0 for unchanged weights, and change sign when the checkpoints are swapped.
        components: Each of `parts`, split by the component of direct logit attribution in which it shows: "subject"
            (edges from the subject's tokens, by head), "elsewhere" (all other edges by head, then the attention bias),
            "mlp", and "rest" (embeddings and constants, with a layer axis of size 1).
        rows: The change that the last token's attention rows carry, whichever weights changed them, in the
            models' own dtype (everything else uses copies in float32); None if rows cannot be edited.
        by_attention: The change that each head carries from subject to last token because attention changed; see
            `split_edges`.
        by_readout: The change that each head carries from subject to last token because the readout changed.
        settings: Settings that differ between the two configurations, with both values. Their effect counts as "rest",
            except that of a final cap, which is applied after these logits and is left out.
    """

    before: Float[Tensor, " prompt"]
    after: Float[Tensor, " prompt"]
    parts: Mapping[str, Float[Tensor, " prompt"]]
    components: Mapping[str, Mapping[str, Float[Tensor, "prompt layer column"]]]
    rows: Float[Tensor, " prompt"] | None
    by_attention: Reading
    by_readout: Reading
    settings: Mapping[str, tuple[object, object]]

    @property
    def qk(self) -> Float[Tensor, " prompt"]:
        """The change that W_Q and W_K cause, on all paths."""
        return self.parts["qk"]

    @property
    def ov_mlp(self) -> Float[Tensor, " prompt"]:
        """The change that W_V, W_O and the MLPs cause, on all paths, including what later layers then attend to."""
        return self.parts["ov"] + self.parts["mlp"]


def split_edges(before: DirectAttribution, after: DirectAttribution) -> tuple[Reading, Reading]:
    """The change that each head carries from the subject's tokens, split into changes of attention and of readout.

    For every edge with attention a -> a' and readout r -> r', the change is
    a' r' - a r = (a' - a) (r + r') / 2 + (a + a') / 2 (r' - r). This is the Shapley value of the two factors: the cross
    term (a' - a)(r' - r) is shared equally. Both are summed over the subject's tokens. The readout depends on all
    earlier layers, so its change also contains earlier changes of attention; `Change.parts` separates causes.
    """
    span = before.spans["subject"][:, None, None, :]
    by_attention = (after.rows - before.rows) * (before.readout + after.readout) / 2
    by_readout = (before.rows + after.rows) / 2 * (after.readout - before.readout)
    return (
        before.reading("subject: change of attention", by_attention.masked_fill(~span, 0.0).sum(-1)),
        before.reading("subject: change of readout", by_readout.masked_fill(~span, 0.0).sum(-1)),
    )


@without_autocast()
@expects(before=HookedModel, after=HookedModel, answer_tokens=AnswerTokens)
def read_change(
    before: HookedModel,
    after: HookedModel,
    answer_tokens: AnswerTokens,
    *,
    batch_size: int = 32,
    progress: bool = False,
) -> Change:
    """Split the change of each prompt's margin between two checkpoints of one model.

    Reads the direct logit attribution of every hybrid of the two: 2 to the power of the number of parts that differ, at
    most 16. Adds two forward passes of each model. Holds both models twice more, in float32. Raises `DataError` if the
    two tokenizers split these texts differently; `ModelError` for models of different shapes, for models that cannot be
    decomposed, and if the margins of the decomposed models differ from those of the models' own logits.

    before, after: the two checkpoints.
    answer_tokens: the prompts and the answers that are compared.
    batch_size: prompts in a forward pass.
    progress: show a progress bar.
    """
    for model in (before, after):
        check_answers_alike(answer_tokens, model.tokenizer)
    hybrids = hybrids_of(before, after)
    answer_tokens, own, rows = _own_passes(before, after, answer_tokens, batch_size)
    margins, components, first, last = _read_hybrids(hybrids, answer_tokens, batch_size, progress)
    for model, attribution, margin in ((before, first, own[0]), (after, last, own[1])):
        _check_margins(model, attribution, margin)
    unchanged = {name: torch.zeros_like(values) for name, values in _components(first).items()}
    return Change(
        first.logit_difference,
        last.logit_difference,
        {part: _shapley_value(part, hybrids.differing, margins) for part in PARTS},
        {part: components[part] or unchanged for part in PARTS},
        rows,
        *split_edges(first, last),
        changed_settings(base_of(before.model), base_of(after.model)),
    )


def _read_hybrids(
    hybrids: Hybrids, answer_tokens: AnswerTokens, batch_size: int, progress: bool
) -> tuple[dict[tuple[str, ...], Tensor], dict[str, dict[str, Tensor]], DirectAttribution, DirectAttribution]:
    """The margins of each hybrid, each part's Shapley value in each component, and the attributions of the two ends."""
    differing = hybrids.differing
    margins: dict[tuple[str, ...], Tensor] = {}
    components: dict[str, dict[str, Tensor]] = {part: {} for part in PARTS}
    ends: dict[int, DirectAttribution] = {}
    coalitions = [parts for size in range(len(differing) + 1) for parts in combinations(differing, size)]
    for coalition in progress_bar("hybrids", items=coalitions, shown=progress):
        with hybrids.taking(coalition) as hybrid:
            attribution = read_direct_attribution(hybrid, answer_tokens, batch_size=batch_size)
        if len(coalition) in (0, len(differing)):
            ends[len(coalition)] = attribution
        margins[coalition] = attribution.logit_difference
        for part in differing:
            weight, sums = shapley_weight(part in coalition, len(coalition), len(differing)), components[part]
            for name, values in _components(attribution).items():
                sums[name] = sums.get(name, torch.zeros_like(values)) + weight * values
    return margins, components, ends[0], ends[len(differing)]


def _shapley_value(
    part: str, differing: tuple[str, ...], margins: Mapping[tuple[str, ...], Tensor]
) -> Float[Tensor, " prompt"]:
    """What a part of the weights causes, from the margins of all hybrids; zeros for a part that does not differ."""
    total = torch.zeros_like(margins[()], dtype=torch.float64)
    for coalition, margin in margins.items() if part in differing else ():
        total = total + shapley_weight(part in coalition, len(coalition), len(differing)) * margin.double()
    return total.float()


@torch.no_grad()
def _own_passes(
    before: HookedModel, after: HookedModel, answer_tokens: AnswerTokens, batch_size: int
) -> tuple[AnswerTokens, Float[Tensor, "2 prompt"], Float[Tensor, " prompt"] | None]:
    """From the models' own forward passes: answer tokens with the margin's weights, both margins, what rows carry.

    The last is None if rows cannot be edited. Otherwise it is the change that the last token's attention rows carry,
    for any cause of their change: the Shapley value of rows against everything else. It averages the effect of putting
    the first model's rows into the second with that of the reverse, in all layers at once. Swapping the models turns
    its sign.
    """
    models, editable = (before, after), before.editable and after.editable
    weights: dict[int, tuple[float, ...]] = {}
    own = torch.zeros(2, len(answer_tokens), dtype=torch.float32)
    carried = torch.zeros(len(answer_tokens), dtype=torch.float32)
    for indices, batch in before.with_limits_of(after).batches(answer_tokens.encodings, batch_size):
        (rows, logits) = zip(*(_forward(model, batch) for model in models), strict=True)
        weighted = weigh_by_probability(answer_tokens.at(indices), *logits)
        weights |= dict(zip(indices, weighted.weights or (), strict=True))
        own[:, indices] = torch.stack([weighted.difference(each) for each in logits])
        for i in range(2) if editable else ():
            with edited(models[i], rows_of(models[1 - i], rows[1 - i])):
                margin = weighted.difference(_forward(models[i], batch)[1])
            carried[indices] += (own[i, indices] - margin) / (2 if i else -2)
    weighted = replace(answer_tokens, weights=tuple(weights[i] for i in range(len(answer_tokens))))
    return weighted, own, carried if editable else None


def _forward(model: HookedModel, batch: PromptBatch) -> tuple[Tensor, Float[Tensor, "prompt vocab"]]:
    """The rows of a batch, and the last token's logits before any cap, as in direct logit attribution."""
    with model.evaluating():
        return forward_uncapped(model.model, batch, model.kernel)


def _check_margins(model: HookedModel, attribution: DirectAttribution, own: Float[Tensor, " prompt"]) -> None:
    """Raise `ModelError` if the margins of the decomposed model are not those of the model itself."""
    coarse = 1.0 if base_of(model.model).dtype in (torch.float32, torch.float64) else IN_16_BITS
    off = (attribution.logit_difference - own).abs()
    if not bool((off <= TOLERANCE * coarse * (1 + own.abs().max())).all()):
        i = int(off.argmax())
        raise ModelError(
            f"{model.name}: direct logit attribution gives a margin of {float(attribution.logit_difference[i]):.3f}, "
            f"but the model's own logits give {float(own[i]):.3f} "
            f"(prompt {attribution.encodings[i].prompt.text[:60]!r}): this family computes something for such prompts "
            "that cannot be decomposed"
        )


def shapley_weight(inside: bool, size: int, n: int) -> float:
    """The weight of a coalition's value in the Shapley value of one of `n` players (Shapley 1953).

    For a player inside the coalition of `size` players it is (size - 1)! (n - size)! / n!; for a player outside,
    -size! (n - size - 1)! / n!.

    >>> shapley_weight(True, 1, 2), shapley_weight(False, 0, 2)
    (0.5, -0.5)
    """
    if inside:
        return math.factorial(size - 1) * math.factorial(n - size) / math.factorial(n)
    return -math.factorial(size) * math.factorial(n - size - 1) / math.factorial(n)


def _components(attribution: DirectAttribution) -> dict[str, Float[Tensor, "prompt layer column"]]:
    """The entries of a direct logit attribution, summed by component (see `Change.components`)."""
    used = attribution.rows * attribution.readout
    subject = used.masked_fill(~attribution.spans["subject"][:, None, None, :], 0.0).sum(-1)
    elsewhere = torch.cat([used.sum(-1) - subject, attribution.bias[..., None]], dim=-1)
    rest = (attribution.embedding + attribution.constant)[:, None, None]
    return {"subject": subject, "elsewhere": elsewhere, "mlp": attribution.mlp[..., None], "rest": rest}
