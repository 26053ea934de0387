"""Copies of models: they compute with their own weights, also after trl's trainer had the original."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import MethodType, SimpleNamespace

import pytest
import torch
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
    with pytest.raises(ModelError, match="LlamaForCausalLM.forward was replaced on the object, and a copy would"):
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


@pytest.mark.parametrize("kind", ["global", "default", "keyword", "list", "partial", "object"])
def test_a_forward_pass_that_holds_the_original_elsewhere_than_in_a_closure_is_refused(kind):
    model = tiny_model("llama")
    KEPT.own = own = model.forward
    held = {"list": [own], "partial": functools.partial(own), "object": SimpleNamespace(inner={"own": own})}.get(kind)
    model.forward = {
        "global": lambda *args, **kwargs: next(KEPT.own(*args, **kwargs) for _ in range(1)),
        "default": lambda *args, _own=own, **kwargs: _own(*args, **kwargs),
        "keyword": functools.partial(lambda self, *args, _own=own, **kwargs: _own(*args, **kwargs), model),
    }.get(kind, lambda *args, **kwargs: held and own)
    with pytest.raises(ModelError, match="LlamaForCausalLM.forward was replaced on the object, and a copy would"):
        copy_model(model)


def test_a_forward_pass_that_copying_follows_is_kept():
    """As accelerate's hooks are: a function of the module that it is bound to."""

    def doubled(self, *args, **kwargs):
        return 2 * self._old_forward(*args, **kwargs)

    model = tiny_model("llama").eval()
    layer = model.model.layers[0].mlp
    layer._old_forward = layer.forward
    layer.forward = functools.partial(doubled, layer)
    twin = copy_model(model)
    with torch.no_grad():
        torch.testing.assert_close(twin(IDS).logits, model(IDS).logits, rtol=0, atol=0)
        before = model(IDS).logits
        twin.model.layers[0].mlp.down_proj.weight.zero_()
        assert torch.equal(model(IDS).logits, before)
        assert not torch.equal(twin(IDS).logits, before)
