"""The proof made on load: rows and logits against the family's own eager attention, padding, and causality."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from attnbalance.errors import ModelError
from attnbalance.facts import Fact
from attnbalance.models.forward import NoRowsError, attention_maps, base_of, evaluating, forward_rows, position_limit
from attnbalance.models.rows import IMPLEMENTATION
from attnbalance.prompts import Prompt
from attnbalance.tokens import Encoding, PromptBatch, pad

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference allowed in a probability, and in a logit relative to the largest one, by the model's dtype.

Float32 kernels sum in another order (differences of 1e-6 here, 1e-5 in large models); half precision rounds eager
probabilities to 8 or 11 bits. A wrong mask, scale or position shows as 1e-2 to 1 in float32.
"""

LONGEST = 9


@torch.no_grad()
def prove(model: Module, name: str) -> tuple[str, int]:
    """Check a model whose attention is about to be read; returns the kernel ("sdpa" or "eager") and the number of rows.

    Two prompts of random tokens and different lengths: eager attention on each alone, without mask and position ids, is
    the reference; the rows of both together, padded left and right, must equal it, and so must the logits. A later
    token must not change an earlier logit. Raises `ModelError` otherwise, with the model as it was.
    """
    base = base_of(model)
    own = base.config._attn_implementation
    try:
        with evaluating(model):
            return _prove(model, base, name)
    except Exception as error:
        base.config._attn_implementation = own
        if isinstance(error, ModelError) and not isinstance(error, NoRowsError):
            raise
        raise ModelError(
            f"{name} ({type(base).__name__}) gives no attention that could be read from a prompt of random tokens: "
            f"{type(error).__name__}: {str(error)[:200]}"
        ) from error


def _prove(model: Module, base: PreTrainedModel, name: str) -> tuple[str, int]:
    encodings = _random_prompts(base)
    interface = _interface(base)
    _set_attention(base, "eager", interface)
    reference = [_reference(model, one) for one in encodings]
    if not all(bool(part.isfinite().all()) for both in reference for part in both):
        raise ModelError(
            f"{name} gives NaN or infinite numbers; its weights may be damaged, or its dtype too narrow "
            "(try --dtype float32)"
        )
    if interface:
        _set_attention(base, IMPLEMENTATION, interface)
    kernel = "sdpa" if interface and _gives_rows(model, encodings) else "eager"
    if kernel == "eager":
        _set_attention(base, "eager", interface)
    _check_causal(model, encodings[0], name)
    for side in ("left", "right"):
        _check_rows(model, pad(encodings, padding_side=side), reference, kernel, f"{name}, padded {side}")
    return kernel, len(reference[0][0])


def _interface(base: PreTrainedModel) -> bool:
    """Whether the family takes attention functions, ours among them."""
    try:
        if not type(base)._can_set_attn_implementation():
            return False
        base.set_attn_implementation(IMPLEMENTATION)
    except (ValueError, KeyError, AttributeError):
        return False
    return True


def _set_attention(base: PreTrainedModel, implementation: str, interface: bool) -> None:
    """Set the attention; a family outside the interface looks it up in its configuration, where it looks at all.

    Falcon, left at SDPA, builds the mask for SDPA and then adds it as if it were eager's: padding is not masked.
    """
    if interface:
        base.set_attn_implementation(implementation)
    else:
        base.config._attn_implementation = implementation


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
    longest = min(LONGEST, position_limit(base.config) or LONGEST)
    fact = Fact("s", "r", ("a",))
    return [
        Encoding(
            Prompt("random tokens", {}, str(i), fact),
            tuple(torch.randint(vocabulary, (n,), generator=generator).tolist()),
            ("",) * n,
            {},
        )
        for i, n in enumerate((longest, (longest + 1) // 2))
    ]


def _reference(model: Module, encoding: Encoding) -> tuple[Tensor, Tensor]:
    """Rows [layer, head, position] and last logits of one prompt alone, from the model's whole attention maps."""
    ids = torch.tensor([encoding.ids], device=base_of(model).device)
    output = model(input_ids=ids, output_attentions=True, use_cache=False)
    maps, logits = attention_maps(output)
    return torch.stack([one[0, :, -1].to(ids.device) for one in maps]).float(), logits[0, -1]


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
                f"{where}: rows differ by {off:.1e} and logits by {off_logits:.1e} from eager attention on one prompt "
                f"alone (allowed {tolerance:.0e}); this model cannot be read reliably"
            )


def _check_causal(model: Module, encoding: Encoding, name: str) -> None:
    base = base_of(model)
    ids = torch.tensor([encoding.ids, encoding.ids], device=base.device)
    ids[1, -1] = (ids[1, -1] + 1) % base.config.get_text_config().vocab_size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    change = float((logits[0] - logits[1]).abs().max())
    if change > TOLERANCE.get(base.dtype, 5e-2) * (1 + float(logits.abs().max())):
        raise ModelError(
            f"{name} is not causal: a later token changes an earlier logit by {change:.2g}; it reads ahead"
        )
