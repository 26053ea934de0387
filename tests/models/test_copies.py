"""Copies of models: they compute with their own weights, also after trl's trainer had the original."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import MethodType, SimpleNamespace

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from datasets import Dataset
from tiny import FACTS, tiny_model, tiny_tokenizer

from attnbalance.data.prompts import make_prompts
from attnbalance.errors import ModelError
from attnbalance.models.copies import copy_model
from attnbalance.models.load import load_model
from attnbalance.models.weights import transplant_weights
from attnbalance.readings.answer_probability import read_answer_probability
from attnbalance.readings.answer_tokens import make_answer_tokens
from attnbalance.readings.change import read_change

IDS = torch.tensor([[5, 6, 7, 8]])


def as_sft_trainer_leaves_it(folder, model):
    trl = pytest.importorskip("trl")
    rows = [{"prompt": str(fact.question), "completion": f" {fact.answer}"} for fact in FACTS if fact.question]
    args = trl.SFTConfig(str(folder), max_steps=1, learning_rate=0.05, report_to=[], save_strategy="no", use_cpu=True,
                         bf16=False)  # fmt: skip
    tokenizer = tiny_tokenizer("bos")
    trl.SFTTrainer(model=model, args=args, processing_class=tokenizer, train_dataset=Dataset.from_list(rows)).train()
    assert "forward" in vars(model)
    return model.eval()


def test_a_model_that_trls_trainer_had_is_transplanted_into_and_taken_apart_as_one_with_the_same_weights(tmp_path):
    live = as_sft_trainer_leaves_it(tmp_path, tiny_model("llama"))
    plain, base = tiny_model("llama"), tiny_model("llama")
    plain.load_state_dict(live.state_dict())
    prompts = make_prompts(FACTS, "qa")
    handles = [load_model(model.eval(), tokenizer=tiny_tokenizer("bos")) for model in (live, plain, base)]
    own, same, start = (read_answer_probability(handle, prompts) for handle in handles)
    torch.testing.assert_close(own, same, rtol=0, atol=1e-6)
    assert float((own - start).abs().max()) > 0.01
    for parts in (["qk"], ["ov"], ["mlp"], ["qk", "ov", "mlp", "rest"]):
        moved = [read_answer_probability(transplant_weights(into, handles[2], parts), prompts) for into in handles[:2]]
        torch.testing.assert_close(*moved, rtol=0, atol=1e-6)
        assert float((moved[0] - own).abs().max()) > 1e-3
    together = [replace(fact, relation="answer") for fact in FACTS]  # each answer has rivals
    tokens = make_answer_tokens(make_prompts(together, "qa"), tiny_tokenizer("bos"))
    changes = [read_change(handles[2], after, tokens) for after in handles[:2]]
    torch.testing.assert_close(changes[0].after, changes[1].after, rtol=0, atol=1e-5)


def patched(model):
    """As in a notebook: the model's own forward pass, held in a closure."""
    own = model.forward

    @functools.wraps(own)
    def forward(self, *args, **kwargs):
        return own(*args, **kwargs)

    model.forward = MethodType(forward, model)
    return model


def test_a_forward_pass_that_would_run_the_original_is_refused_by_name():
    model = patched(tiny_model("llama"))
    with pytest.raises(ModelError, match="LlamaForCausalLM.forward was replaced on the object, and a copy may"):
        copy_model(model)
    compiled = tiny_model("llama")
    compiled.forward = torch.compile(compiled.forward, backend="eager")
    with pytest.raises(ModelError, match="LlamaForCausalLM.forward was replaced"):
        copy_model(compiled)
    inner = tiny_model("llama")
    layer = inner.model.layers[1].mlp
    layer.forward = functools.partial(lambda own, x: own(x) * layer.down_proj.weight.sum(), layer.forward)
    with pytest.raises(ModelError, match="LlamaMLP.forward was replaced on the object"):
        copy_model(inner)


KEPT = SimpleNamespace()
"""Stands for the globals of a notebook."""


class Calling:
    """An object that is called as a forward pass."""

    def __init__(self, own):
        self.own = own

    def __call__(self, *args, **kwargs):
        return self.own(*args, **kwargs)


@pytest.mark.parametrize("kind", ["global", "default", "partial", "argument", "object", "method", "weight"])
def test_a_forward_pass_that_may_hold_the_original_anywhere_is_refused(kind):
    model = tiny_model("llama")
    KEPT.own = own = model.forward
    weight = model.lm_head.weight
    model.forward = {
        "global": lambda *args, **kwargs: KEPT.own(*args, **kwargs),
        "default": lambda *args, _own=own, **kwargs: _own(*args, **kwargs),
        "partial": functools.partial(lambda self, *args, _own=own, **kwargs: _own(*args, **kwargs), model),
        "argument": functools.partial(lambda held, *args, **kwargs: held(*args, **kwargs), lambda *args: own(*args)),
        "object": Calling(lambda *args, **kwargs: own(*args, **kwargs)),
        "method": Calling(own).__call__,
        "weight": lambda *args, **kwargs: weight.sum(),
    }[kind]
    with pytest.raises(ModelError, match="LlamaForCausalLM.forward was replaced on the object, and a copy may run it"):
        copy_model(model)


class Doubling(ModelHook):
    """Doubles what a module gives."""

    def post_forward(self, module, output):
        return 2 * output


def test_what_accelerate_puts_on_a_model_is_kept():
    model = tiny_model("llama").eval()
    add_hook_to_module(model.model.layers[0].mlp, Doubling())
    add_hook_to_module(model.model.layers[1].mlp, Doubling())
    remove_hook_from_module(model.model.layers[1].mlp)
    plain = tiny_model("llama").eval()
    plain.model.layers[0].mlp.down_proj.weight.data.mul_(2)
    twin = copy_model(model)
    with torch.no_grad():
        torch.testing.assert_close(twin(IDS).logits, plain(IDS).logits, rtol=0, atol=1e-6)
        before = model(IDS).logits
        twin.model.layers[0].mlp.down_proj.weight.zero_()
        twin.model.layers[1].mlp.down_proj.weight.zero_()
        assert torch.equal(model(IDS).logits, before)
        plain.model.layers[0].mlp.down_proj.weight.zero_()
        plain.model.layers[1].mlp.down_proj.weight.zero_()
        torch.testing.assert_close(twin(IDS).logits, plain(IDS).logits, rtol=0, atol=1e-6)


def test_a_replaced_forward_pass_is_found_under_accelerates():
    model = tiny_model("llama")
    own = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda states, _own=own: _own(states)
    add_hook_to_module(model.model.layers[0].mlp, Doubling())
    with pytest.raises(ModelError, match="LlamaMLP.forward was replaced on the object"):
        copy_model(model)
