"""Rows of a TransformerBridge against those of `load_model`, which does not use TransformerLens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import FAMILIES, tiny_model, tiny_prompts, tiny_tokenizer
from transformer_lens.model_bridge import TransformerBridge
from uneven import uneven

from attnbalance import load_model, read_attention
from attnbalance.errors import ArgumentError, BadRowsError, ModelError

pytestmark = pytest.mark.filterwarnings("ignore")  # TransformerLens warns of what it does to the model


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    uneven(request.param).save_pretrained(tmp_path)
    tiny_tokenizer("bos").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_rows_of_a_bridge_are_those_of_the_model_that_it_was_made_from(folder: Path) -> None:
    """Float32 sums in another order: 1e-6. A wrong mask or position shows as 1e-2 and more."""
    bridge = TransformerBridge.boot_transformers(str(folder))
    ours, theirs = (read_attention(model, tiny_prompts(), batch_size=4) for model in (load_model(folder), bridge))
    torch.testing.assert_close(theirs.values, ours.values, atol=1e-5, rtol=0)
    assert (theirs.tokens, theirs.layers, theirs.prompts) == (ours.tokens, ours.layers, ours.prompts)
    second = read_attention(bridge, tiny_prompts(), layers=[1], batch_size=4)
    assert second.layers == (1,)
    assert torch.equal(second.values, theirs.values[:, 1:2])
    assert torch.equal(theirs.to("subject").values, theirs.to("subject", "max").values)
    assert all(torch.equal(theirs.spans[role], span) for role, span in ours.spans.items())


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_the_users_hooks_count_and_none_of_ours_stay(folder: Path) -> None:
    bridge = TransformerBridge.boot_transformers(str(folder))
    before = read_attention(bridge, tiny_prompts())

    def silence(queries: torch.Tensor, hook: object) -> torch.Tensor:
        return torch.zeros_like(queries)

    with bridge.hooks(fwd_hooks=[("blocks.1.attn.hook_q", silence)]):
        silenced = read_attention(bridge, tiny_prompts())
    assert torch.equal(silenced.values[:, 0], before.values[:, 0])
    for row, tokens in zip(silenced.values[:, 1], silenced.tokens, strict=True):  # without scores, all tokens are alike
        uniform = torch.full((4, len(tokens)), 1 / len(tokens))
        torch.testing.assert_close(row[:, : len(tokens)], uniform, atol=1e-6, rtol=0)
    assert torch.equal(read_attention(bridge, tiny_prompts()).values, before.values)


@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
def test_what_cannot_be_read_is_refused_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for model in (tiny_model("gpt2"), "gpt2", None):
        with pytest.raises(ArgumentError, match=r"model must be a HookedModel .* or a TransformerBridge, got"):
            read_attention(model, tiny_prompts())  # pyright: ignore[reportArgumentType]
    bridge = TransformerBridge.boot_transformers(str(folder))
    bridge.original_model.config.n_positions = 9
    with pytest.raises(BadRowsError, match="longer than the model's 9 positions"):
        read_attention(bridge, tiny_prompts())
    bridge.original_model.config.n_positions = 96
    monkeypatch.setattr(bridge, "run_with_hooks", lambda *args, **options: None)
    with pytest.raises(ModelError, match="gives no attention pattern in layer 0"):
        read_attention(bridge, tiny_prompts())
    bridge.tokenizer = None
    with pytest.raises(ModelError, match="has no tokenizer"):
        read_attention(bridge, tiny_prompts())
