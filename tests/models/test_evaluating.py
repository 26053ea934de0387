"""A model as it is read: in evaluation mode, and without the autocast that training leaves around it."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from tiny import FACTS, tiny_lora, tiny_model, tiny_prompts, tiny_tokenizer

from attnbalance import HookedModel, load_model, recall
from attnbalance.data.prompts import make_prompts
from attnbalance.errors import ModelError
from attnbalance.models.bridge import bridge_of
from attnbalance.models.evaluating import evaluating
from attnbalance.models.forward import base_of
from attnbalance.models.hooked import hook
from attnbalance.models.weights import check_shapes
from attnbalance.readings.answer_probability import read_answer_probability
from attnbalance.readings.answer_tokens import make_answer_tokens
from attnbalance.readings.attention import read_subject_attention
from attnbalance.readings.change import read_change
from attnbalance.readings.direct_attribution import read_direct_attribution
from attnbalance.readings.drift import read_drift
from attnbalance.readings.relevance import read_relevance
from attnbalance.readings.salience import read_mlp_salience, read_readout_ranks, read_value_salience
from attnbalance.readings.value_weighted import read_value_weighted_attention

RIVALS = make_prompts([replace(fact, relation="made") for fact in FACTS])
READINGS = {
    "rows": lambda model, alone: read_subject_attention(model, tiny_prompts()).values,
    "answers": lambda model, alone: torch.tensor([list(map(ord, text)) for text in outputs(model)]),
    "probability": lambda model, alone: read_answer_probability(model, tiny_prompts()),
    "relevance": lambda model, alone: read_relevance(model, tiny_prompts()).push.values,
    "value-weighted": lambda model, alone: read_value_weighted_attention(bridge_of(model), tiny_prompts()).values,
    "attribution": lambda model, alone: (
        read_direct_attribution(bridge_of(model), make_answer_tokens(RIVALS, model.tokenizer)).value_salience().values
    ),
    "ranks": lambda model, alone: read_readout_ranks(
        bridge_of(model), make_answer_tokens(RIVALS, model.tokenizer)
    ).rank.float(),
    "value salience": lambda model, alone: (
        read_value_salience(bridge_of(model), make_answer_tokens(RIVALS, model.tokenizer)).values
    ),
    "MLP salience": lambda model, alone: (
        read_mlp_salience(bridge_of(model), make_answer_tokens(RIVALS, model.tokenizer)).values
    ),
    "change": lambda model, alone: change(model),
    "drift": lambda model, alone: read_drift(model, alone, ["Ada went to Rome.", "So did Bo."]),
}


def change(model: HookedModel) -> torch.Tensor:
    """Of all parts between a model and one whose last heads write twice as much."""
    other = base_of(copy.deepcopy(model.model))
    with torch.no_grad():
        [*other.parameters()][-1].mul_(2)
    read = read_change(model, hook(other, model.tokenizer, "other"), make_answer_tokens(RIVALS, model.tokenizer))
    return torch.stack([read.before, read.after, *read.parts.values()])


def outputs(model: HookedModel) -> list[str]:
    return [text.ljust(40)[:40] for text in recall(model, tiny_prompts()).outputs]


def test_evaluating_gives_every_part_its_mode_back_even_after_an_error() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout()).train()
    model[1].eval()
    with pytest.raises(ZeroDivisionError), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise ZeroDivisionError
    assert [module.training for module in model.modules()] == [True, True, False]


@pytest.fixture(scope="module", params=["plain", "lora"])
def trained(request: pytest.FixtureRequest) -> tuple[HookedModel, HookedModel]:
    """A model as training in bfloat16 leaves it, hooked before; and a copy that was never trained."""
    model = tiny_model("llama")
    model = tiny_lora(model, ["q_proj", "v_proj"]) if request.param == "lora" else model
    alone, hooked = (load_model(each, tokenizer=tiny_tokenizer()) for each in (copy.deepcopy(model), model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AcceleratorState, "_shared_state", {})  # trainers of other tests may have set it, to float32
        Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert not torch.equal(hooked.model(ids).logits, alone.model(ids).logits)  # bfloat16 outside of readings
    return hooked, alone


@pytest.mark.parametrize("name", READINGS)
def test_after_training_in_bfloat16_a_model_is_read_in_its_weights_precision(trained, name: str) -> None:
    hooked, alone = trained
    wrapped = hooked.model.forward
    assert torch.equal(READINGS[name](hooked, alone), READINGS[name](alone, alone))
    assert hooked.model.forward is wrapped


@pytest.mark.parametrize("name", READINGS)
def test_a_callers_autocast_changes_nothing_that_is_read(name: str) -> None:
    """As with a model that was loaded, and read, without it."""
    model = tiny_model("llama")
    alone, within = (load_model(copy.deepcopy(model), tokenizer=tiny_tokenizer()) for _ in range(2))
    expected = READINGS[name](alone, alone)
    with torch.autocast("cpu", torch.bfloat16):
        assert within.model(torch.tensor([[5, 6, 7]])).logits.dtype == torch.bfloat16  # outside of readings
        assert torch.equal(READINGS[name](within, alone), expected)
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", READINGS)
def test_another_default_dtype_changes_nothing_that_is_read(name: str) -> None:
    model = tiny_model("llama")
    alone, within = (load_model(copy.deepcopy(model), tokenizer=tiny_tokenizer()) for _ in range(2))
    expected = READINGS[name](alone, alone)
    torch.set_default_dtype(torch.bfloat16)
    try:
        read = READINGS[name](within, alone)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(read, expected)


@pytest.mark.parametrize("adapted", [False, True])
def test_after_training_in_bfloat16_a_model_can_be_loaded(adapted: bool) -> None:
    model = tiny_model("llama")
    alone = load_model(copy.deepcopy(model), tokenizer=tiny_tokenizer())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AcceleratorState, "_shared_state", {})
        Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    if adapted:  # which change nothing yet
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    rows = [READINGS["rows"](each, alone) for each in (load_model(model, tokenizer=tiny_tokenizer()), alone)]
    assert torch.equal(*rows)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", READINGS)
def test_a_handle_on_a_base_into_which_adapters_were_put_is_refused(name: str, native: bool) -> None:
    model, config = tiny_model("llama"), LoraConfig(target_modules=["q_proj"])
    before = load_model(model, tokenizer=tiny_tokenizer())
    if native:
        model.add_adapter(config)
    after = load_model(model if native else get_peft_model(model, config), tokenizer=tiny_tokenizer())
    READINGS[name](after, after)
    with pytest.raises(ModelError, match="^adapters were put into LlamaForCausalLM after it was loaded"):
        READINGS[name](before, before)


@pytest.mark.parametrize("compare", [check_shapes, lambda a, b: read_drift(a, b, ["Ada went to Rome."])])
def test_two_handles_on_one_object_are_not_compared(compare) -> None:
    model = tiny_model("llama")
    before = load_model(model, tokenizer=tiny_tokenizer())
    with torch.no_grad():
        model.lm_head.weight.mul_(2)  # trained in place
    after = load_model(model, tokenizer=tiny_tokenizer())
    with pytest.raises(ModelError, match="are one model object in memory.*load the first one again"):
        compare(before, after)
    compare(before, load_model(copy.deepcopy(model), tokenizer=tiny_tokenizer()))
