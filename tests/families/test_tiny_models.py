"""Tiny models of every family: small, random, far from uniform attention, and with a length that prompts cross."""

from __future__ import annotations

import pytest
import torch

from attnbalance.families.tiny_models import FAR, NEAR, build, class_of, families, has_threshold


def test_every_class_is_named_once() -> None:
    names = families()
    assert names == sorted(names)
    assert {"llama", "gpt2", "gemma3_text", "deepseek_v32"} <= set(names)
    classes = [class_of(name) for name in names]
    assert len(set(classes)) == len(classes)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen3_moe", "gemma3_text"])
def test_a_model_is_tiny_the_same_each_time_and_attends_unevenly(family: str) -> None:
    model, again = build(family, near=False), build(family, near=False)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1e6
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(torch.arange(2, 32)[None], output_attentions=True, use_cache=False)
    largest = torch.stack([layer[0, :, -1].max() for layer in output.attentions])
    assert float(largest.min()) > 3 / 30  # uniform attention over 30 tokens has 1 / 30 everywhere


def test_the_second_configuration_has_a_length_that_prompts_cross() -> None:
    assert has_threshold("mistral")
    assert not has_threshold("gpt2")
    assert build("mistral", near=True).config.sliding_window == NEAR
    assert build("mistral", near=False).config.sliding_window == FAR
