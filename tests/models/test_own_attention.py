"""A model whose readable attention computes something else than its own is refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from tiny import SIZES, tiny_config, tiny_model, tiny_tokenizer

from attnbalance import load_model
from attnbalance.errors import ModelError
from attnbalance.models.own_attention import LOGITS, check_own, own_outputs
from attnbalance.models.self_check import _random_prompts

FALCON = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
"""As in falcon-rw-1b. Eager attention adds its ALiBi twice, SDPA once."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_falcon_with_alibi_is_refused_and_left_as_it_was(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = transformers.FalconConfig(**SIZES | FALCON | {"initializer_range": 0.1})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        before = model(ids).logits
    with pytest.raises(ModelError, match=r"computes something else .*\(eager\) than with its own \(sdpa\): "):
        load_model(model, tokenizer=tiny_tokenizer())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_other_kernels_pass_and_another_scale_of_scores_does_not(dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype)
    for name, weight in model.named_parameters():
        if "_proj" in name:  # far from uniform attention
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[-1] ** -0.5)
    for prompt in _random_prompts(model, [64, 9]):
        model.set_attn_implementation("sdpa")
        own = own_outputs(model, prompt)
        assert len(own.inputs) == model.config.num_hidden_layers
        model.set_attn_implementation("eager")
        check_own(model, prompt, own, "it", "sdpa")
        wrong = copy.deepcopy(model)
        for layer in wrong.model.layers:
            layer.self_attn.scaling *= 1.5
        with pytest.raises(ModelError, match=r"it computes something else .* a difference of .*% in "):
            check_own(wrong, prompt, own, "it", "sdpa")


def test_without_layers_that_can_be_hooked_the_logits_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    [prompt, _] = _random_prompts(model, [64, 9])
    monkeypatch.setattr("attnbalance.models.eager_reference.layer_list", lambda base: [])
    own = own_outputs(model, prompt)
    assert not own.inputs
    check_own(model, prompt, own, "it", "sdpa")
    model.lm_head.weight.data *= 1.5
    with pytest.raises(ModelError, match=r"a difference of 50\.0% in the logits"):
        check_own(model, prompt, own, "it", "sdpa")


def test_the_last_logits_are_those_of_a_whole_pass_and_no_more_are_computed_on_a_long_prompt() -> None:
    torch.manual_seed(0)
    window = LOGITS + 40  # the self-check's third prompt is longer than the window
    config = tiny_config("gemma2", sliding_window=window, max_position_embeddings=2 * window)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    [prompt] = _random_prompts(model, [window + 9])
    with torch.no_grad():
        whole = model(torch.tensor([prompt.ids])).logits[0]
    own = own_outputs(model, prompt)
    # one product of matrices over fewer rows: float32 sums in another order, differences of 1e-7 here
    torch.testing.assert_close(own.logits, whole[-LOGITS:], atol=1e-5, rtol=0)

    read, computed = list[int](), list[int]()
    model.model.register_forward_hook(lambda module, inputs, output: read.append(output[0].shape[1]))
    model.lm_head.register_forward_hook(lambda module, inputs, output: computed.append(output.shape[1]))
    load_model(model, tokenizer=tiny_tokenizer())
    assert max(read) == window + 9
    assert max(computed) == LOGITS
