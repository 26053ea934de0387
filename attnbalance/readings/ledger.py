"""The ledger: what every part of a model adds to the contrast of an answer, head by head and source by source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnbalance.errors import DataError, ModelError
from attnbalance.models.bridge import BridgedModel, heads_of
from attnbalance.readings.contrast import Contrasts
from attnbalance.readings.reading import Reading
from attnbalance.tokens import Encoding, PromptBatch, batches, check_lengths, pad

TOLERANCE = 1e-4
"""Largest difference allowed between the sum of a ledger and the contrast of the logits, over 1 + the contrast."""


@dataclass(frozen=True)
class Ledger:
    """The contrast of each prompt's answer, in logits (nats), as a sum of what the model's parts add at its last token.

    contrast = embedding + sum over layers, heads and positions of rows * stored + sum over layers of (bias + mlp)
    + constant, the scales of norms frozen at what they were. `rows` are attention probabilities; `stored` is the value
    readout of each source position: what the head would add if it attended to that position alone. `bias` is the
    attention output's bias, `constant` the biases of the final norm and the unembedding. `contrast` is taken from the
    model's own logits, before any softcap. Token j of a prompt stands at position j; `spans` marks the tokens of roles.
    """

    contrast: Float[Tensor, " prompt"]
    embedding: Float[Tensor, " prompt"]
    rows: Float[Tensor, "prompt layer head position"]
    stored: Float[Tensor, "prompt layer head position"]
    bias: Float[Tensor, "prompt layer"]
    mlp: Float[Tensor, "prompt layer"]
    constant: Float[Tensor, " prompt"]
    spans: Mapping[str, Bool[Tensor, "prompt position"]]
    layers: tuple[int, ...]
    encodings: tuple[Encoding, ...]

    def total(self) -> Float[Tensor, " prompt"]:
        """The sum of all entries: the contrast, within rounding."""
        heads = (self.rows.double() * self.stored.double()).sum((1, 2, 3))
        rest = self.bias.double().sum(1) + self.mlp.double().sum(1) + self.constant.double()
        return (self.embedding.double() + heads + rest).float()

    def used(self, role: str = "subject") -> Reading:
        """What each head carries from the tokens of a role to the contrast: attention x stored, summed over them."""
        inside = (self.rows * self.stored).masked_fill(~self._span(role)[:, None, None, :], 0.0).sum(-1)
        return self.reading(f"{role} used", inside)

    def readout(self, role: str = "subject") -> Reading:
        """In-context value salience: what each head would add if it attended fully to the last token of a role."""
        span = self._span(role)
        last = (torch.arange(span.shape[1]) * span).amax(dim=1)
        chosen = self.stored.gather(3, last[:, None, None, None].expand(*self.stored.shape[:3], 1))[..., 0]
        return self.reading(f"value salience ({role}, in context)", chosen)

    def reading(self, name: str, values: Float[Tensor, "prompt layer head"]) -> Reading:
        """Values of these prompts, layers and heads as a reading in logits."""
        prompts = [one.prompt for one in self.encodings]
        ids, subjects = tuple(p.prompt_id for p in prompts), tuple(p.fact.subject for p in prompts)
        return Reading(name, "logits", values, self.layers, ids, subjects)

    def _span(self, role: str) -> Bool[Tensor, "prompt position"]:
        if role not in self.spans or not bool(self.spans[role].any(dim=1).all()):
            raise DataError(f"not every prompt has a span {role!r}; there are {', '.join(self.spans) or 'none'}")
        return self.spans[role]


def read_ledger(model: BridgedModel, contrasts: Contrasts, *, batch_size: int = 32, progress: bool = False) -> Ledger:
    """The ledger of every prompt, in the order of the contrasts.

    Holds two numbers for each prompt, layer, head and position. Raises `ModelError` where entries do not add up to the
    model's own contrast within `TOLERANCE` (its layers add something that the ledger has no entry for),
    `BadRowsError` for prompts longer than the model's positions.
    """
    from tqdm import tqdm

    check_lengths(contrasts.encodings, model.hooked.max_positions)
    parts, order = [], []
    with tqdm(total=len(contrasts), desc="ledger", unit="prompt", disable=not progress, leave=False) as bar:
        for places in batches(contrasts.encodings, batch_size):
            parts.append(_of_batch(model, contrasts.at(places)))
            order += places
            bar.update(len(places))
    ledger = _joined(parts, torch.tensor(order).argsort(), contrasts)
    off = (ledger.total() - ledger.contrast).abs() / (1 + ledger.contrast.abs())
    if not bool((off <= TOLERANCE).all()):
        i = int(off.argmax())
        raise ModelError(
            f"{model.name}: the parts of its ledger add up to {float(ledger.total()[i]):.4f} where its logits say "
            f"{float(ledger.contrast[i]):.4f} (prompt {contrasts.prompts[i].text[:60]!r}): this family adds to the "
            "residual stream or scales its logits in a way that the ledger has no entry for"
        )
    return ledger


@torch.no_grad()
def _of_batch(model: BridgedModel, contrasts: Contrasts) -> Ledger:
    batch = pad(contrasts.encodings, model.hooked.pad_id)
    layers, last = model.layers, lambda x: x[:, -1]
    keep = {"blocks.0.hook_resid_pre": last, "unembed.hook_in": last}
    keep |= {f"blocks.{layers[-1]}.hook_resid_post": last, "unembed.hook_out": last}
    for i in layers:
        keep |= {f"blocks.{i}.attn.hook_pattern": lambda x: x[:, :, -1], f"blocks.{i}.attn.hook_v": lambda x: x}
        named = ("hook_attn_out", "hook_mlp_out", "ln1_post.hook_in", "ln1_post.hook_out")
        keep |= {f"blocks.{i}.{n}": last for n in named if f"blocks.{i}.{n}" in model.bridge.hook_dict}
    logits, kept = model.run(batch.input_ids, batch.attention_mask, keep)
    weights, final = model.weights, model.norm("ln_final")
    unembed = contrasts.of(weights.W_U)
    stream, normed = kept[f"blocks.{layers[-1]}.hook_resid_post"], kept["unembed.hook_in"]
    direction, constant = final.backward(unembed, final.scale(stream, normed))
    rows, stored, bias, mlp = [], [], [], []
    for i in layers:
        here, fixed = direction, direction.new_zeros(len(direction))
        if f"blocks.{i}.ln1_post.hook_in" in kept:
            norm = model.norm(i, "ln1_post")
            scale = norm.scale(kept[f"blocks.{i}.ln1_post.hook_in"], kept[f"blocks.{i}.ln1_post.hook_out"])
            here, fixed = norm.backward(direction, scale)
        values = heads_of(kept[f"blocks.{i}.attn.hook_v"], weights.W_V.shape[1], weights.W_V.shape[-1])
        rows.append(kept[f"blocks.{i}.attn.hook_pattern"])
        stored.append(torch.einsum("pjhk,phk->phj", values, torch.einsum("pd,hkd->phk", here, weights.W_O[i])))
        bias.append(here @ weights.b_O[i] + fixed)
        written = kept.get(f"blocks.{i}.hook_mlp_out")
        mlp.append(direction.new_zeros(len(direction)) if written is None else (written * direction).sum(-1))
    moved = _Moved(batch)
    return Ledger(
        contrast=contrasts.of_logits(_uncapped(logits[:, -1], kept["unembed.hook_out"], model)),
        embedding=(kept["blocks.0.hook_resid_pre"] * direction).sum(-1).cpu(),
        rows=moved(torch.stack(rows, dim=1)),
        stored=moved(torch.stack(stored, dim=1)),
        bias=torch.stack(bias, dim=1).cpu(),
        mlp=torch.stack(mlp, dim=1).cpu(),
        constant=(constant + contrasts.of_logits(weights.b_U.expand(len(contrasts), -1)).to(constant)).cpu(),
        spans={role: span.gather(1, moved.order) for role, span in batch.spans.items()},
        layers=layers,
        encodings=contrasts.encodings,
    )


class _Moved:
    """Moves left-padded positions so that every prompt's first token stands at position 0, padding zero behind it."""

    def __init__(self, batch: PromptBatch) -> None:
        mask = batch.attention_mask != 0
        self.order = mask.int().argsort(dim=1, descending=True, stable=True)
        self.mask = mask.gather(1, self.order)

    def __call__(self, values: Float[Tensor, "prompt layer head position"]) -> Tensor:
        """The values in their new order, on the CPU."""
        found = values.cpu().gather(3, self.order[:, None, None, :].expand(values.shape))
        return found.masked_fill(~self.mask[:, None, None, :], 0.0)


def _uncapped(
    logits: Float[Tensor, "prompt vocab"], before: Float[Tensor, "prompt vocab"], model: BridgedModel
) -> Float[Tensor, "prompt vocab"]:
    """The logits; where a family caps them at the end (Gemma 2), what they were before."""
    from attnbalance.models.forward import base_of

    cap = getattr(base_of(model.hooked.model).config.get_text_config(), "final_logit_softcapping", None)
    capped = bool(cap) and torch.allclose(logits, cap * torch.tanh(before / cap), atol=TOLERANCE)
    return before if capped else logits


def _joined(parts: list[Ledger], order: Tensor, contrasts: Contrasts) -> Ledger:
    """The ledgers of all batches as one, in the order of the contrasts, positions padded to the longest prompt."""
    width = max(part.rows.shape[-1] for part in parts)

    def join(name: str) -> Tensor:
        pieces = [getattr(part, name) for part in parts]
        if pieces[0].dim() == 4:
            pieces = [torch.nn.functional.pad(piece, (0, width - piece.shape[-1])) for piece in pieces]
        return torch.cat(pieces)[order]

    roles = dict.fromkeys(role for part in parts for role in part.spans)
    spans = {
        role: torch.cat(
            [
                torch.nn.functional.pad(part.spans[role], (0, width - part.rows.shape[-1]))
                if role in part.spans
                else torch.zeros(len(part.contrast), width, dtype=torch.bool)
                for part in parts
            ]
        )[order]
        for role in roles
    }
    names = ("contrast", "embedding", "rows", "stored", "bias", "mlp", "constant")
    return Ledger(
        **{name: join(name) for name in names}, spans=spans, layers=parts[0].layers, encodings=contrasts.encodings
    )
