"""Forms in which the base is asked, and adapters that are switched off and on again."""

from __future__ import annotations

import pytest
import torch
from base_oracle import (
    base,
)
from peft import LoraConfig, get_peft_model
from tiny import tiny_model, tiny_tokenizer
from trainers import lora

from attnbalance import Fact
from attnbalance.finetuning.examples import make_examples
from attnbalance.finetuning.objectives.base_model import BaseModel, base_is_kept, without_adapters
from attnbalance.models.hooked import hook


@pytest.mark.parametrize("form", ["few-shot", "few-shot-statement", "best"])
def test_a_fact_has_the_same_shots_in_whichever_order_relations_come(form):
    cities = [Fact(f"Town {i}", "city", (f"Rome {i}",)) for i in range(8)]
    sports = [Fact(f"Ann {i}", "sport", (f"golf {i}",)) for i in range(8)]
    tokenizer = tiny_tokenizer()
    train = make_examples([*cities, *sports], tokenizer)
    best = {"city": "few-shot", "sport": "few-shot"}
    base = BaseModel(hook(tiny_model("llama"), tokenizer, "tiny"), among=train, best=best)
    asked = {prompt.fact: prompt.text for prompt in base.ask(form, train)}
    for facts in ([*sports, *cities], sports, sports[3:]):
        prompts = base.ask(form, make_examples(facts, tokenizer))
        assert [prompt.text for prompt in prompts] == [asked[fact] for fact in facts]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("switched_on", [False, True])
def test_adapters_and_whole_modules_stay_switched_as_they_were(native: bool, switched_on: bool) -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    model = tiny_model("llama")
    if native:
        model.add_adapter(config)
    model = model if native else get_peft_model(model, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1)
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "use_cache": False}
    with torch.no_grad():
        adapted = model(**inputs).logits
        if not switched_on:
            model.disable_adapters() if native else model.base_model.disable_adapter_layers()
        before = model(**inputs).logits
        with without_adapters(model):
            meanwhile = model(**inputs).logits
        after = model(**inputs).logits
    plain = base()[1](**inputs).logits
    torch.testing.assert_close(meanwhile, plain, atol=2e-5, rtol=1e-5)  # float32, another kernel
    assert torch.equal(after, before)
    assert torch.equal(before, adapted) == switched_on


@pytest.mark.parametrize(("trained_parts", "kept"), [("lora", True), ("lora and a norm", False), ("all", False)])
def test_the_base_is_kept_where_only_adapters_learn(trained_parts, kept):
    model = tiny_model("llama")
    if trained_parts != "all":
        model = lora(model)
    if trained_parts == "lora and a norm":
        next(p for name, p in model.named_parameters() if "layernorm" in name).requires_grad_(True)
    assert base_is_kept(model) is kept
