"""The ways to read attention, and to run a model without it, that `reading.py` compares."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from attnbalance import HookedModel
from attnbalance.data.batches import pad
from attnbalance.data.tokens import Encoding
from attnbalance.models.forward import base_of, forward_rows
from attnbalance.models.rows import IMPLEMENTATION
from attnbalance.models.shared_prefixes import rows_by_batch


@dataclass(frozen=True)
class Workload:
    """Prompts that are read in batches of a size."""

    name: str
    encodings: list[Encoding]
    batch_size: int


Way = Callable[[], list[Tensor]]
"""A way to run a workload, giving what it keeps of attention."""


def traced_by_nnsight(eager: Any) -> Callable[[dict[str, Tensor]], list[Tensor]] | None:
    """What reads the last token's rows of a batch in a trace of nnsight; None if it is not installed."""
    if find_spec("nnsight") is None:
        return None
    from nnsight import NNsight  # pyright: ignore[reportMissingImports]

    traced = NNsight(copy.deepcopy(eager))
    modules = [traced.get(name) for name, _ in eager.named_modules() if name.endswith(("self_attn", ".attn"))]

    def read(batch: dict[str, Tensor]) -> list[Tensor]:
        rows = []
        with traced.trace(**batch):
            for module in modules:
                rows.append(module.output[1][:, :, -1].save())
        return rows

    return read


def ways_of(
    model: HookedModel, rounded: HookedModel, bridge: Any, traced: Callable | None, workload: Workload
) -> dict[str, Way]:
    """The ways to run a workload, by name; `rounded` is the model in bfloat16, `traced` reads with nnsight."""
    base: Any = base_of(model.model)
    rounded_base: Any = base_of(rounded.model)
    encodings, size = workload.encodings, workload.batch_size
    batches = [pad(encodings[i : i + size], model.pad_id) for i in range(0, len(encodings), size)]
    half = model.layers[: len(model.layers) // 2]
    inputs = [{"input_ids": b.input_ids, "attention_mask": b.attention_mask.long()} for b in batches]

    def each(implementation: str, run: Callable[[dict[str, Tensor]], Sequence[Tensor]]) -> Way:
        def way() -> list[Tensor]:
            base.set_attn_implementation(implementation)
            return [tensor for batch in inputs for tensor in run(batch)]

        return way

    def ours(read: Callable[[], list[Tensor]]) -> Way:
        def way() -> list[Tensor]:
            base.set_attn_implementation(IMPLEMENTATION)
            return read()

        return way

    def cached(batch: dict[str, Tensor], **which: Any) -> list[Tensor]:
        kept = bridge.run_with_cache(batch["input_ids"], attention_mask=batch["attention_mask"], **which)[1]
        return [tensor for tensor in kept.values() if isinstance(tensor, Tensor)]

    return {
        "backbone": each("sdpa", lambda batch: [base.base_model(**batch).last_hidden_state[:0].clone()]),
        "model": each("sdpa", lambda batch: [base(**batch).logits[:0].clone()]),
        "row and logits": ours(lambda: [forward_rows(base, batch, "sdpa")[0] for batch in batches]),
        "plain": ours(lambda: [batch.unpadded(model.rows(batch)) for _, batch in model.batches(encodings, size)]),
        "ours": ours(lambda: [batch.unpadded(rows) for _, batch, rows in rows_by_batch(model, encodings, size)]),
        "ours, half": ours(
            lambda: [batch.unpadded(rows) for _, batch, rows in rows_by_batch(model, encodings, size, layers=half)]
        ),
        "model, 16 bits": lambda: [rounded_base(**batch).logits[:0].clone() for batch in inputs],
        "ours, 16 bits": lambda: [batch.unpadded(rows) for _, batch, rows in rows_by_batch(rounded, encodings, size)],
        "eager": each("eager", lambda batch: base(**batch, output_attentions=True).attentions),
        "TL patterns": each(
            "sdpa", lambda batch: cached(batch, names_filter=lambda name: name.endswith("attn.hook_pattern"))
        ),
        "TL all": each("sdpa", cached),
    } | ({} if traced is None else {"nnsight rows": each("sdpa", traced)})
