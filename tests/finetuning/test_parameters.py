"""Choosing what is trained, against layouts written by hand, and training that alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import transformers
from partly_trained import check_moved, full, train
from peft import PeftModel
from tiny import GROUPED, tiny_config
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from uneven import uneven

from attnbalance.errors import DataError, ModelError
from attnbalance.finetuning.adapters import add_lora
from attnbalance.finetuning.parameters import (
    NAMES,
    Chosen,
    FrozenWeights,
    parse_parts,
    select_weights,
    train_only,
)

FAMILIES: dict[str, PretrainedConfig] = {
    family: tiny_config(family) for family in ("llama", "gpt2", "neox", "bloom", "falcon", "qwen3")
} | {"phi3": transformers.Phi3Config(**GROUPED, pad_token_id=None)}
"""All have 2 layers of 4 query heads of 8 numbers; llama, qwen3 and phi3 have 2 heads of keys and values, falcon 1."""

TEXTS = ("qk", "ov", "q@1", "qk@0.1", "o@1.2-3")
ROW = torch.arange(96)
PER_HEAD = ROW.reshape(4, 3, 8)  # head, query-key-value, d_head

# what is chosen, written by hand: rows of fused projections (columns of gpt2's), by family
FUSED: dict[str, tuple[str, str, dict[str, Tensor]]] = {
    "gpt2": (
        "transformer.h.{}.attn.c_attn",
        "transformer.h.{}.attn.c_proj",
        {"q": ROW[:32], "k": ROW[32:64], "v": ROW[64:], "q.1": ROW[8:16], "k.1": ROW[40:48]},
    ),
    "neox": (
        "gpt_neox.layers.{}.attention.query_key_value",
        "gpt_neox.layers.{}.attention.dense",
        {
            "q": PER_HEAD[:, 0].flatten(),
            "k": PER_HEAD[:, 1].flatten(),
            "v": PER_HEAD[:, 2].flatten(),
            "q.1": PER_HEAD[1, 0],
            "k.1": PER_HEAD[1, 1],
        },
    ),
    "bloom": (
        "transformer.h.{}.self_attention.query_key_value",
        "transformer.h.{}.self_attention.dense",
        {
            "q": PER_HEAD[:, 0].flatten(),
            "k": PER_HEAD[:, 1].flatten(),
            "v": PER_HEAD[:, 2].flatten(),
            "q.1": PER_HEAD[1, 0],
            "k.1": PER_HEAD[1, 1],
        },
    ),
    "falcon": (
        "transformer.h.{}.self_attention.query_key_value",
        "transformer.h.{}.self_attention.dense",
        {"q": ROW[:32], "k": ROW[32:40], "v": ROW[40:48], "q.1": ROW[8:16], "k.1": ROW[32:40]},
    ),
    "phi3": (
        "model.layers.{}.self_attn.qkv_proj",
        "model.layers.{}.self_attn.o_proj",
        {"q": ROW[:32], "k": ROW[32:48], "v": ROW[48:64], "q.1": ROW[8:16], "k.1": ROW[32:40]},
    ),
}


def by_hand(family: str, text: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries that a text of TEXTS names, in a family whose projections are fused."""
    fused, out, rows = FUSED[family]
    columns = family == "gpt2"  # its weights stand the other way round
    masks = {name: torch.zeros(parameter.shape, dtype=torch.bool) for name, parameter in own.items()}

    def choose_outputs(module: str, outputs: Tensor) -> None:
        for name in (f"{module}.weight", f"{module}.bias"):
            if name in masks:
                masks[name][(..., outputs) if columns else outputs] = True

    for layer in {"qk": (0, 1), "ov": (0, 1), "q@1": (1,), "qk@0.1": (0,), "o@1.2-3": (1,)}[text]:
        if text == "o@1.2-3":  # what heads 2 and 3 give: inputs of the output projection; its bias is no head's
            masks[f"{out.format(layer)}.weight"][(slice(16, 32),) if columns else (..., slice(16, 32))] = True
        for role in {"qk": "q k", "ov": "v", "q@1": "q", "qk@0.1": "q.1 k.1", "o@1.2-3": ""}[text].split():
            choose_outputs(fused.format(layer), rows[role])
        if text == "ov":
            choose_outputs(out.format(layer), ROW[:32])
    return {name: mask for name, mask in masks.items() if mask.any()}


def unfused(text: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same for llama and qwen3: query heads 0 and 1 read key-value head 0."""
    masks = {name: torch.zeros(parameter.shape, dtype=torch.bool) for name, parameter in own.items()}
    for name, mask in masks.items():
        layer, part = ("layers.1." in name), name.split(".")[-2]
        if text == "qk":
            mask[:] = part in ("q_proj", "k_proj", "q_norm", "k_norm")
        elif text == "ov":
            mask[:] = part in ("o_proj", "v_proj")
        elif text == "q@1":
            mask[:] = layer and part in ("q_proj", "q_norm")
        elif text == "qk@0.1" and not layer and part in ("q_proj", "k_proj"):
            mask[slice(8, 16) if part == "q_proj" else slice(0, 8)] = True
        elif text == "o@1.2-3" and layer and part == "o_proj":
            mask[:, 16:] = True
    return {name: mask for name, mask in masks.items() if mask.any()}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> PreTrainedModel:
    return uneven(FAMILIES[family])


@pytest.fixture(scope="module")
def choices(model: PreTrainedModel) -> dict[str, Chosen]:
    return {text: select_weights(model, text) for text in TEXTS}


@pytest.fixture
def expected(family: str, model: PreTrainedModel) -> Callable[[str], dict[str, Tensor]]:
    own = dict(model.named_parameters())
    return lambda text: by_hand(family, text, own) if family in FUSED else unfused(text, own)


@pytest.mark.parametrize("text", TEXTS)
def test_a_choice_is_what_the_layout_says(
    model: PreTrainedModel, choices: Mapping[str, Chosen], expected: Callable[[str], dict[str, Tensor]], text: str
) -> None:
    own, chosen = dict(model.named_parameters()), choices[text]
    masks, wanted = full(chosen, own), expected(text)
    assert set(masks) == set(wanted)
    assert all(torch.equal(masks[name], mask) for name, mask in wanted.items())
    assert chosen.numbers == sum(int(mask.sum()) for mask in wanted.values())
    assert {name for name, mask in chosen.masks.items() if mask is None} == {n for n, m in wanted.items() if m.all()}


@pytest.mark.parametrize("text", TEXTS)
def test_full_training_leaves_the_rest_equal_to_the_bit(
    model: PreTrainedModel, choices: Mapping[str, Chosen], expected: Callable[[str], dict[str, Tensor]], text: str
) -> None:
    twin = copy.deepcopy(model)
    frozen = train_only(twin, choices[text])
    assert frozen.trained(twin) == choices[text].numbers
    train(twin, frozen)
    wanted = expected(text)
    assert bool(frozen) == any(not mask.all() for mask in wanted.values())
    # nearly all: a step may bring a number back to where it was
    check_moved(dict(model.named_parameters()), dict(twin.named_parameters()), wanted, moved=0.99)
    buffers = dict(twin.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("text", TEXTS)
def test_lora_changes_the_chosen_weights_and_nothing_else(
    model: PreTrainedModel,
    choices: Mapping[str, Chosen],
    expected: Callable[[str], dict[str, Tensor]],
    text: str,
    tmp_path: Path,
) -> None:
    adapted, frozen = add_lora(copy.deepcopy(model), choices[text], rank=3, alpha=6)
    torch.manual_seed(0)
    train(adapted, frozen)
    adapted.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path).merge_and_unload()
    weights = {  # biases and norms are left to full training
        name: mask for name, mask in expected(text).items() if mask.dim() == 2
    }
    check_moved(dict(model.named_parameters()), dict(again.named_parameters()), weights, moved=0.99)
    with torch.no_grad():
        pairs = zip(again.named_parameters(), adapted.merge_and_unload().named_parameters(), strict=True)
        assert all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)


def test_without_the_guard_weight_decay_reaches_what_is_not_chosen(model: PreTrainedModel) -> None:
    twin = copy.deepcopy(model)
    chosen = select_weights(twin, "qk@0.1")
    train_only(twin, chosen)
    train(twin, FrozenWeights({}), steps=2)
    own = dict(model.named_parameters())
    masks = full(chosen, own)
    assert any(not torch.equal(twin.get_parameter(name)[~mask], own[name][~mask]) for name, mask in masks.items())


def test_parts_and_places_add_up(model: PreTrainedModel) -> None:
    texts = (*NAMES, "all@0", "all@1", "qk+q@1.1", "q@0.1", "q@0.2,0.3", "o+v@0-1", "q@0-1,1")
    count = {text: select_weights(model, text).numbers for text in texts}
    total = sum(parameter.numel() for parameter in model.parameters())
    assert select_weights(model, "all").total == count["all"] == total
    assert count["q"] + count["k"] == count["qk"] == count["qk+q@1.1"]
    assert count["o"] + count["v"] == count["ov"] == count["o+v@0-1"]
    assert count["qk"] + count["ov"] == count["attention"]  # none of these families has sinks
    assert count["all@0"] == count["all@1"]
    assert 0 < count["attention"] + count["mlp"] < count["all@0"] + count["all@1"] < total  # norms, then embeddings
    assert count["q@0.2,0.3"] == 2 * count["q@0.1"]
    assert count["q@0-1,1"] == count["q"]


def test_choosing_all_needs_nothing_but_parameters_and_counts_tied_weights_once() -> None:
    config = tiny_config("falcon", new_decoder_architecture=True, num_kv_heads=2)  # no family of TransformerLens
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    chosen = select_weights(model, "all")
    assert chosen.numbers == chosen.total == sum(parameter.numel() for parameter in model.parameters())
    assert not train_only(model, chosen)
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ModelError, match=r"FalconForCausalLM"):
        select_weights(model, "qk")


def test_choosing_leaves_the_model_and_the_random_numbers_alone(model: PreTrainedModel) -> None:
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    select_weights(model, "qk")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_what_is_trained_is_said_in_a_line() -> None:
    # 2 x 420 x 32 in embeddings, and in a layer 3072 in attention, 3 x 32 x 48 in the MLP, 64 in norms; 32 in the last
    model = uneven("llama")
    assert select_weights(model, "q").describe() == "2,048 of 42,400 weights (4.83%) in 2 tensors (q)"
    assert select_weights(model, "q@0.1").describe() == "256 of 42,400 weights (0.604%) in 1 tensor (q@0.1)"
    assert select_weights(model, "all").describe().startswith("42,400 of 42,400 weights (100%) in ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"no part '' of the weights \(in ''\); there are all, q, k, v, o, qk, ov, attention, mlp"),
        ("qv", r"no part 'qv'"),
        ("qk+heads@3", r"no part 'heads'"),
        ("mlp@3.1", r"mlp has no heads \(in 'mlp@3\.1'\); name layers only, such as mlp@3"),
        ("all@0.1", r"all has no heads"),
        ("qk@", r"expected a layer \(4\), .* got '' in 'qk@'"),
        ("qk@7-4", r"expected a layer .* got '7-4' in 'qk@7-4'"),
        ("q@3.4-1", r"'3\.4-1'"),
        ("q@1.2.3", r"'1\.2\.3'"),
        ("q@1,mlp", r"'mlp' in 'q@1,mlp'"),
        ("q@-1", r"'-1'"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused_without_a_model(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_parts(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("qk@2", r"layer 2 \(in 'qk@2'\): the model has layers 0 to 1"),
        ("q+mlp@0-7", r"layer 7 .* layers 0 to 1"),
        ("k@1.2-4", r"head 4 \(in 'k@1\.2-4'\): layer 1 has heads 0 to 3"),
    ],
)
def test_layers_and_heads_that_a_model_lacks_are_refused(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        select_weights(uneven("llama"), text)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_lora_on_all_is_that_of_every_linear_layer(model: PreTrainedModel) -> None:
    adapted, frozen = add_lora(copy.deepcopy(model), select_weights(model, "all"), 2, 4)
    adapted_modules = {name.split(".lora_")[0] for name, _ in adapted.named_parameters() if ".lora_" in name}
    linear = (nn.Linear, transformers.pytorch_utils.Conv1D)
    wanted = {name for name, module in model.named_modules() if isinstance(module, linear) and "head" not in name}
    assert {name.removeprefix("base_model.model.") for name in adapted_modules} == wanted
    assert not frozen
    assert frozen.trained(adapted) == adapted.get_nb_trainable_parameters()[0]


def test_sinks_go_with_attention_and_with_no_projection_or_head() -> None:
    model, name = uneven("gpt_oss"), "model.layers.0.self_attn.sinks"
    for text, there in (("attention", True), ("all@0", True), ("qk", False), ("ov", False), ("attention@0.1", False)):
        assert (name in select_weights(model, text).masks) == there
