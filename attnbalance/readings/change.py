"""What became of an answer between two checkpoints: how much of its change is attention, and how much is storage."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor

from attnbalance.models.bridge import bridge_of
from attnbalance.models.edits import edited, rows_of_model
from attnbalance.models.forward import evaluating, forward_rows
from attnbalance.models.hooked import HookedModel
from attnbalance.models.parts import PARTS, changed_parts, transplants, weight_parts
from attnbalance.readings.contrast import Contrasts
from attnbalance.readings.ledger import Ledger, read_ledger
from attnbalance.readings.reading import Reading
from attnbalance.tokens import batches, pad


@dataclass(frozen=True)
class Change:
    """The change of each prompt's contrast from one checkpoint to another, split by cause and by place.

    The contrast is the one of `against_rivals` (not the one with equal weights, which `read_ledger` gives for the same
    prompts): to second order its change is that of the answer's log-odds against its relation's other answers, in nats.
    `parts` holds, for each of `models.parts.PARTS`, the part of the change that these weights cause: Shapley values
    over the parts, with the contrast of each hybrid of the two checkpoints as the value of a coalition. They add up to
    `after - before` for every prompt, are 0 for weights that did not change, and turn round when the two are swapped.
    `places` splits each of them further by where it shows in the ledger: "subject" (edges from the subject's tokens, by
    head), "elsewhere" (all other edges and the attention bias, by head and bias last), "mlp" and "rest" (embeddings and
    constants, with the layer axis of size 1). `rows` is what the last token's attention rows carry of it, whatever made
    them change: see `read_row_change`. Weights of values and MLPs, too, change what later layers look at. `looked` and
    `readout` split the change that is carried from subject to last token head by head, whatever caused it: see
    `split_edges`.
    """

    before: Float[Tensor, " prompt"]
    after: Float[Tensor, " prompt"]
    parts: Mapping[str, Float[Tensor, " prompt"]]
    places: Mapping[str, Mapping[str, Float[Tensor, "prompt layer column"]]]
    rows: Float[Tensor, " prompt"] | None
    looked: Reading
    readout: Reading

    @property
    def attention(self) -> Float[Tensor, " prompt"]:
        """What the changed W_Q and W_K cause, on all paths."""
        return self.parts["attention"]

    @property
    def storage(self) -> Float[Tensor, " prompt"]:
        """What the changed W_V, W_O and MLPs cause, on all paths: also through what later layers then look at."""
        return self.parts["values"] + self.parts["mlp"]


def split_edges(before: Ledger, after: Ledger, role: str = "subject") -> tuple[Reading, Reading]:
    """The change that each head carries from a role's tokens, as change of attention and change of what is read there.

    For every edge, a s -> a' s': the change a' s' - a s = (a' - a) (s + s') / 2 + (a + a') / 2 (s' - s). This is the
    Shapley value of the two factors: the cross term (a' - a)(s' - s) is shared in equal parts. Summed over the role's
    tokens. What is read there depends on all earlier layers, so that the second part holds earlier changes
    of attention too; `Change.parts` tells causes apart.
    """
    span = before.spans[role][:, None, None, :]
    moved, changed = after.rows - before.rows, after.stored - before.stored
    looked = moved * (before.stored + after.stored) / 2
    read = (before.rows + after.rows) / 2 * changed
    return (
        before.reading(f"{role}: change of attention", looked.masked_fill(~span, 0.0).sum(-1)),
        before.reading(f"{role}: change of readout", read.masked_fill(~span, 0.0).sum(-1)),
    )


@torch.no_grad()
def against_rivals(before: HookedModel, after: HookedModel, contrasts: Contrasts, *, batch_size: int = 32) -> Contrasts:
    """The contrasts with every other answer weighed by how probable it is among the others, as a mean of both models.

    The log-odds of an answer, its logit minus log sum exp of the others', changes by the change of its logit minus a
    mean of the others' changes, weighed by probabilities between those before and after: by their mean, to second order
    (trapezoidal rule). With equal weights rivals that matter would drown among answers that neither model thinks of.
    """
    shares = torch.zeros(len(contrasts), max(map(len, contrasts.others)))
    for model in (before, after):
        for places in batches(contrasts.encodings, batch_size):
            batch = pad([contrasts.encodings[i] for i in places], model.pad_id)
            with evaluating(model.model):
                logits = forward_rows(model.model, batch, model.kernel)[1][:, -1].float().cpu()
            for row, i in zip(logits, places, strict=True):
                tokens = contrasts.candidates[contrasts.prompts[i].fact.relation]
                others = row[[tokens[k] for k in contrasts.others[i]]]
                shares[i, : len(others)] += others.softmax(-1) / 2
    weights = tuple(tuple(shares[i, : len(others)].tolist()) for i, others in enumerate(contrasts.others))
    return replace(contrasts, weights=weights)


def read_change(
    before: HookedModel, after: HookedModel, contrasts: Contrasts, *, batch_size: int = 32, progress: bool = False
) -> Change:
    """Split the change of each prompt's contrast between two checkpoints of one model.

    Others are weighed as rivals first (see `against_rivals`). Runs the ledger of every hybrid of the two: 2 to the
    number of parts that differ, at most 16; parts that are the same cost nothing. Holds a few copies of the model.
    Raises `ModelError` for models of different shapes or that cannot be taken apart.
    """
    from tqdm import tqdm

    contrasts = against_rivals(before, after, contrasts, batch_size=batch_size)
    masks = weight_parts(before)
    differing = changed_parts(before, after, masks)
    totals: dict[tuple[str, ...], Tensor] = {}
    places: dict[str, dict[str, Tensor]] = {part: {} for part in PARTS}
    ends: dict[int, Ledger] = {}
    coalitions = [some for size in range(len(differing) + 1) for some in combinations(differing, size)]
    hybrids = transplants(before, after, masks, coalitions)
    bar = tqdm(coalitions, desc="hybrids", disable=not progress, leave=False)
    for some, hybrid in zip(bar, hybrids, strict=True):
        ledger = read_ledger(bridge_of(hybrid), contrasts, batch_size=batch_size)
        gc.collect()  # a bridge holds itself in a circle
        if len(some) in (0, len(differing)):
            ends[len(some)] = ledger
        totals[some], here = ledger.contrast, _places(ledger)
        for part in differing:
            weight = shapley_weight(part in some, len(some), len(differing))
            for name, values in here.items():
                places[part][name] = places[part].get(name, torch.zeros_like(values)) + weight * values
    first, last = ends[0], ends[len(differing)]
    nothing = {name: torch.zeros_like(values) for name, values in _places(first).items()}
    parts = {
        part: sum(
            (
                shapley_weight(part in some, len(some), len(differing)) * total.double()
                for some, total in totals.items()
            ),
            torch.zeros(len(contrasts), dtype=torch.float64),
        ).float()
        if part in differing
        else torch.zeros(len(contrasts))
        for part in PARTS
    }
    places = {part: found or nothing for part, found in places.items()}
    rows = read_row_change(before, after, contrasts, batch_size=batch_size)
    return Change(first.contrast, last.contrast, parts, places, rows, *split_edges(first, last))


@torch.no_grad()
def read_row_change(
    before: HookedModel, after: HookedModel, contrasts: Contrasts, *, batch_size: int = 32
) -> Float[Tensor, " prompt"] | None:
    """What the attention rows of the last token carry of the change, whatever made them change; None if not editable.

    The Shapley value of rows against all else: the mean of what the first model's rows undo in the second, and the
    second's do in the first, in all layers at once. Swapping the models turns its sign.
    """
    if "eager" in (before.kernel, after.kernel):
        return None
    result = torch.zeros(len(contrasts))
    for places in batches(contrasts.encodings, batch_size):
        batch, some = pad([contrasts.encodings[i] for i in places], before.pad_id), contrasts.at(places)
        for model, other, sign in ((after, before, 1.0), (before, after, -1.0)):
            with evaluating(model.model):
                own = some.of_logits(forward_rows(model.model, batch, model.kernel)[1][:, -1].float())
                with edited(model, rows_of_model(other)(batch)):
                    changed = some.of_logits(forward_rows(model.model, batch, model.kernel)[1][:, -1].float())
            result[places] += sign * (own - changed) / 2
    return result


def shapley_weight(inside: bool, size: int, n: int) -> float:
    """The weight of a coalition's value in the Shapley value of one of n players, who is inside it or not.

    (size - 1)! (n - size)! / n! inside, -size! (n - size - 1)! / n! outside (Shapley 1953).
    """
    if inside:
        return math.factorial(size - 1) * math.factorial(n - size) / math.factorial(n)
    return -math.factorial(size) * math.factorial(n - size - 1) / math.factorial(n)


def _places(ledger: Ledger) -> dict[str, Float[Tensor, "prompt layer column"]]:
    """The ledger's entries summed into places."""
    used = ledger.rows * ledger.stored
    subject = used.masked_fill(~ledger.spans["subject"][:, None, None, :], 0.0).sum(-1)
    elsewhere = torch.cat([used.sum(-1) - subject, ledger.bias[..., None]], dim=-1)
    rest = (ledger.embedding + ledger.constant)[:, None, None]
    return {"subject": subject, "elsewhere": elsewhere, "mlp": ledger.mlp[..., None], "rest": rest}
