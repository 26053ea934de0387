"""The proof made on load: rows and logits against the family's own eager attention, padding, and causality."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from attnbalance.errors import ModelError
from attnbalance.facts import Fact
from attnbalance.models.forward import NoRowsError, attention_set, base_of, evaluating, forward_rows
from attnbalance.models.rows import IMPLEMENTATION
from attnbalance.prompts import Prompt
from attnbalance.tokens import Encoding, PromptBatch, pad

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference allowed in a probability, and in a logit relative to the largest one, by the model's dtype.

Float32 kernels sum in another order (differences of 1e-6 here, 1e-5 in large models); half precision rounds eager
probabilities to 8 or 11 bits. A wrong mask, scale or position shows as 1e-2 to 1 in float32.
"""

LENGTHS = (9, 5)


@torch.no_grad()
def prove(model: Module, name: str) -> str:
    """Check a model whose attention is about to be read; returns the kernel to read it through, "sdpa" or "eager".

    Two prompts of random tokens and different lengths: eager attention on each alone is the reference; the rows of
    both together, padded left and right, must equal it, and so must the logits. A later token must not change an
    earlier logit. Raises `ModelError` otherwise.
    """
    base = base_of(model)
    encodings = _random_prompts(base)
    with evaluating(model):
        if not _interface(base):
            reference = _reference(model, encodings, None)
            kernel = "eager"
        else:
            reference = _reference(model, encodings, "eager")
            kernel = "sdpa" if _gives_rows(model, encodings) else "eager"
            if kernel == "eager":
                base.set_attn_implementation("eager")
        _check_causal(model, encodings[0], name)
        for side in ("left", "right"):
            _check_rows(model, pad(encodings, padding_side=side), reference, kernel, f"{name}, padded {side}")
    return kernel


def _interface(base: PreTrainedModel) -> bool:
    """Whether the family takes attention functions; switches ours on where it does."""
    try:
        if not type(base)._can_set_attn_implementation():
            return False
        base.set_attn_implementation(IMPLEMENTATION)
    except (ValueError, KeyError, AttributeError):
        return False
    return True


def _gives_rows(model: Module, encodings: list[Encoding]) -> bool:
    """Whether the query index reaches the attention function and its row comes back (some layers drop keywords)."""
    try:
        batch = pad(encodings)
        rows, _ = forward_rows(model, batch, "sdpa")
    except (NoRowsError, TypeError):
        return False
    return rows.dim() == 4 and rows.shape[-1] == batch.input_ids.shape[1]


def _random_prompts(base: PreTrainedModel) -> list[Encoding]:
    vocabulary = base.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    fact = Fact("s", "r", ("a",))
    return [
        Encoding(
            Prompt("random tokens", {}, str(i), fact),
            tuple(torch.randint(vocabulary, (n,), generator=generator).tolist()),
            {},
        )
        for i, n in enumerate(LENGTHS)
    ]


def _reference(model: Module, encodings: list[Encoding], implementation: str | None) -> list[tuple[Tensor, Tensor]]:
    """Rows and last logits of each prompt alone, from whole eager attention maps."""
    found = []
    base = base_of(model)
    for one in encodings:
        batch = pad([one])
        if implementation is None:
            rows, logits = forward_rows(model, batch, "eager")
        else:
            with attention_set(base, implementation):
                rows, logits = forward_rows(model, batch, "eager")
        found.append((rows[0], logits[0, -1]))
    return found


def _check_rows(
    model: Module, batch: PromptBatch, reference: list[tuple[Tensor, Tensor]], kernel: str, where: str
) -> None:
    rows, logits = forward_rows(model, batch, kernel)
    tolerance = TOLERANCE.get(base_of(model).dtype, 5e-2)
    for i, (expected, expected_logits) in enumerate(reference):
        places = (batch.attention_mask[i] != 0).to(rows.device)
        off = float((rows[i][..., places] - expected.to(rows.device)).abs().max())
        scale = 1 + float(expected_logits.abs().max())
        at_query = logits[i, -1] if logits.shape[1] == 1 else logits[i, int(batch.query_index[i])]
        is_query = logits.shape[1] > 1 or int(batch.query_index[i]) == batch.input_ids.shape[1] - 1
        off_logits = float((at_query - expected_logits.to(logits.device)).abs().max()) / scale if is_query else 0.0
        if not (off <= tolerance and off_logits <= tolerance):  # NaN fails too
            raise ModelError(
                f"{where}: rows differ by {off:.1e} and logits by {off_logits:.1e} from eager attention on one prompt alone "
                f"(allowed {tolerance:.0e}); this model cannot be read reliably"
            )


def _check_causal(model: Module, encoding: Encoding, name: str) -> None:
    base = base_of(model)
    ids = torch.tensor([encoding.ids, encoding.ids], device=base.device)
    ids[1, -1] = (ids[1, -1] + 1) % base.config.get_text_config().vocab_size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    if not bool(logits.isfinite().all()):
        raise ModelError(
            f"{name} gives NaN or infinite logits; its weights may be damaged, or its dtype too narrow (try --dtype float32)"
        )
    change = float((logits[0] - logits[1]).abs().max())
    if change > 0.1 * float(logits.std()):
        raise ModelError(
            f"{name} is not causal: a later token changes an earlier logit by {change:.2g}; it reads ahead"
        )
