"""The parts of the residual stream against the transformers model's own hidden states, one prompt at a time."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_prompts, tiny_tokenizer
from uneven import hooked, uneven

from attnbalance.data.batches import pad
from attnbalance.data.tokens import encode
from attnbalance.errors import DataError
from attnbalance.models.bridge import bridge_of
from attnbalance.models.residual_parts import take_apart

pytestmark = pytest.mark.filterwarnings("ignore:.*is outside")

NORMS = {"gpt2": "transformer.ln_f", "llama": "model.norm", "gemma2": "model.norm", "neox": "gpt_neox.final_layer_norm"}
# Some 300 float32 products of entries up to 10: 1e-5. A part left out, or a wrong head, shows as 0.1 and more.
CLOSE = {"atol": 5e-5, "rtol": 1e-5}


def test_a_batch_padded_on_the_right_is_refused() -> None:
    bridged, encodings = bridge_of(hooked("llama")), encode(tiny_prompts(), tiny_tokenizer())
    with pytest.raises(DataError, match="padded on the left"):
        take_apart(bridged, pad(encodings, padding_side="right"))


@pytest.mark.parametrize("family", NORMS)
def test_along_any_direction_the_parts_add_up_to_the_stream_and_its_norm(family: str) -> None:
    model, bridged = uneven(family), bridge_of(hooked(family))
    encodings = encode(tiny_prompts(), tiny_tokenizer())
    parts = take_apart(bridged, pad(encodings, bridged.hooked.pad_id))
    directions = torch.randn(len(encodings), parts.embedding.shape[1], generator=torch.Generator().manual_seed(1))

    whole, seen = (parts.embedding * directions).sum(-1), list[tuple[torch.Tensor, torch.Tensor]]()
    for column, i in enumerate(bridged.layers):
        readout, bias, mlp = parts.of_layer(i, directions)
        whole = whole + (parts.rows[:, column] * readout).sum((1, 2)) + bias + mlp
    before, constant = parts.before_final_norm(directions)

    norm = model.get_submodule(NORMS[family])
    hook = norm.register_forward_hook(lambda _, given, out: seen.append((given[0][0, -1], out[0, -1])))
    try:
        for encoding, logits in zip(encodings, parts.logits, strict=True):
            own = model(torch.tensor([encoding.ids])).logits[0, -1]
            cap = getattr(model.config, "final_logit_softcapping", None)
            torch.testing.assert_close(cap * torch.tanh(logits / cap) if cap else logits, own, **CLOSE)
    finally:
        hook.remove()
    streams, normed = (torch.stack(side) for side in zip(*seen, strict=True))
    torch.testing.assert_close(whole, (streams * directions).sum(-1), **CLOSE)
    torch.testing.assert_close((streams * before).sum(-1) + constant, (normed * directions).sum(-1), **CLOSE)
