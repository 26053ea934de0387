"""Norms at a fixed scale against autograd through the model's own norms."""

from __future__ import annotations

import pytest
import torch
from uneven import hooked, uneven

from attnbalance.models.bridge import bridge_of

pytestmark = pytest.mark.filterwarnings("ignore:.*is outside")


# Float32 sums of 32 products of entries up to 10, in another order: 1e-6. A wrong head or bias shows as 0.1 and more.
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.mark.parametrize(
    ("family", "path", "place"),
    [
        ("gpt2", ("ln_final",), "transformer.ln_f"),
        ("neox", (1, "ln1"), "gpt_neox.layers.1.input_layernorm"),
        ("llama", ("ln_final",), "model.norm"),
        ("gemma2", ("ln_final",), "model.norm"),
        ("gemma2", (1, "ln1_post"), "model.layers.1.post_attention_layernorm"),
    ],
)
def test_a_norm_at_a_fixed_scale_is_what_autograd_says_it_is(family: str, path: tuple, place: str) -> None:
    model, norm = uneven(family), bridge_of(hooked(family)).norm(*path)
    own = model.get_submodule(place)
    state = own.state_dict()
    weight, bias = state["weight"] + (family == "gemma2"), state.get("bias", torch.zeros(32))
    x, direction = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    x = x.requires_grad_()
    centred = x - x.mean(-1, keepdim=True) if "bias" in state else x
    scale = (centred.square().mean(-1) + getattr(own, "eps", 1e-6)).sqrt().detach()
    read = ((centred / scale[:, None] * weight + bias) * direction).sum(-1)
    torch.testing.assert_close(read, (own(x) * direction).sum(-1), **CLOSE)  # the formula above is the module's
    (gradient,) = torch.autograd.grad(read.sum(), x)
    with torch.no_grad():
        torch.testing.assert_close(norm.scale(x, own(x)), scale, atol=0, rtol=1e-5)
        assert norm.scale(torch.zeros(1, 32), own(torch.zeros(1, 32))).tolist() == [1.0]
        before, constant = norm.backward(direction, scale)
        torch.testing.assert_close(before, gradient, **CLOSE)
        torch.testing.assert_close((before * x).sum(-1) + constant, read, **CLOSE)
        torch.testing.assert_close(norm.at_scale_one(x), (own(x) - bias) * scale[:, None], **CLOSE)


def test_where_a_model_has_no_such_norm_it_is_the_identity() -> None:
    norm, x = bridge_of(hooked("gpt2")).norm(0, "ln1_post"), torch.randn(3, 32)
    before, constant = norm.backward(x, norm.scale(x, x))
    assert norm.identity
    assert norm.at_scale_one(x) is x
    assert torch.equal(before, x)
    assert not constant.any()
