"""Scaled adapters: against plain weights on the line from base to finetuned model, and refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, OFTConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from short_runs import SPLIT, short
from transformers import AutoModelForCausalLM

from attnbalance.comparison.specs import ModelSpec
from attnbalance.errors import DataError, ModelError, OutputError
from attnbalance.files.outputs import MARKER, read_json
from attnbalance.finetuning.finetune import finetune
from attnbalance.finetuning.model_card import CARD
from attnbalance.finetuning.scale_adapter import scale_adapter
from attnbalance.models.load import load_model

IDS = torch.arange(3, 30)[None]


def adapter(base, folder, dtype=torch.float32, config=LoraConfig, embeddings=False, **fields):
    """The folder of an adapter of peft whose weights are random; `embeddings`: the base's stand beside them."""
    fields = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "down_proj"]} | fields
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config(**fields))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.data = (0.3 * torch.randn_like(weight)).to(dtype)
    model.save_pretrained(folder, save_embedding_layers=embeddings)
    return folder


def weights(base, folder=None):
    """All weights of a model, its adapter merged by peft."""
    model = AutoModelForCausalLM.from_pretrained(base)
    if folder is not None:
        model = PeftModel.from_pretrained(model, folder).merge_and_unload()  # pyright: ignore
    return dict(model.named_parameters())


@pytest.mark.parametrize("factor", [0.5, 0.7, 2])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_rslora": True, "r": 4},
        {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"q_proj": 3}},
        {"target_modules": ["embed_tokens", "v_proj"]},
        {"target_modules": ["up_proj"], "target_parameters": ["o_proj.weight"], "lora_dropout": 0.0},
    ],
    ids=["lora", "rslora", "patterns", "embeddings", "parameters"],
)
def test_the_model_lies_on_the_line_from_the_base_to_the_finetuned_one(llama, tmp_path, fields, factor):
    whole = adapter(llama, tmp_path / "whole", **fields)
    scaled = scale_adapter(whole, factor, tmp_path / "scaled")
    before, after = weights(llama), weights(llama, whole)
    expected = {name: before[name] + factor * (after[name] - before[name]) for name in before}
    assert any(not torch.equal(before[name], after[name]) for name in before)
    for name, weight in weights(llama, scaled).items():
        # one product of B A and one sum in float32 differ by a few roundings of numbers up to about 3
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


def test_the_adapter_that_is_not_merged_gives_the_logits_of_the_weights_on_the_line(llama, tmp_path):
    whole = adapter(llama, tmp_path / "whole")
    before, after = weights(llama), weights(llama, whole)
    model = AutoModelForCausalLM.from_pretrained(llama)
    model.load_state_dict({name: before[name].lerp(after[name], 0.7) for name in before}, strict=False)
    with torch.no_grad():
        ours = load_model(scale_adapter(whole, 0.7, tmp_path / "scaled")).model(IDS).logits
        torch.testing.assert_close(ours, model(IDS).logits, rtol=1e-4, atol=1e-4)  # B A x against (B A) x, 2 layers


def test_the_factor_one_leaves_each_tensor_and_each_file_beside_them_as_it_was(llama, tmp_path):
    run = finetune(llama, SPLIT, tmp_path / "run", short(lora_rank=2, learning_rate=0.01)).path
    scaled = scale_adapter(run, 1.0, tmp_path / "scaled")
    before, after = load_file(run / "adapter_model.safetensors"), load_file(scaled / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    same = {"adapter_config.json", "objective_base.json", *(path.name for path in run.glob("tokenizer*"))}
    assert {path.name for path in scaled.iterdir()} == same | {"adapter_model.safetensors", CARD, "attnbalance.json"}
    assert all((run / name).read_bytes() == (scaled / name).read_bytes() for name in same)


def test_the_bias_of_b_is_scaled_with_it(llama, tmp_path):
    whole = adapter(llama, tmp_path / "whole", lora_bias=True)
    scaled = load_file(scale_adapter(whole, 0.5, tmp_path / "scaled") / "adapter_model.safetensors")
    model, half = (
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(llama), folder)
        for folder in (whole, tmp_path / "scaled")
    )
    assert [name for name in scaled if name.endswith("lora_B.bias")]
    inputs = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    layers = [each.base_model.model.model.layers[0].self_attn.q_proj for each in (model, half)]
    with torch.no_grad():
        base, full, middle = layers[0].base_layer(inputs), layers[0](inputs), layers[1](inputs)
    torch.testing.assert_close(middle, (base + full) / 2)


def test_bfloat16_is_scaled_in_float32_and_rounded_once(llama, tmp_path):
    whole = adapter(llama, tmp_path / "whole", torch.bfloat16)
    scaled = load_file(scale_adapter(whole, 0.7, tmp_path / "scaled") / "adapter_model.safetensors")
    for name, tensor in load_file(whole / "adapter_model.safetensors").items():
        assert tensor.dtype == torch.bfloat16
        expected = (0.7 * tensor.double()).bfloat16() if "lora_B" in name else tensor
        # float32's own rounding may tip a tie: at most one step of bfloat16, 2 ** -8
        torch.testing.assert_close(scaled[name], expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize(
    ("dtype", "message"), [(torch.int8, "is stored as I8"), (torch.float8_e4m3fn, "float8_e4m3fn")]
)
def test_factors_in_other_dtypes_are_refused(llama, tmp_path, dtype, message):
    whole = adapter(llama, tmp_path / "whole")
    held = {name: tensor.to(dtype) for name, tensor in load_file(whole / "adapter_model.safetensors").items()}
    save_file(held, whole / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=message):
        scale_adapter(whole, 0.5, tmp_path / "scaled")
    if dtype == torch.int8:
        with pytest.raises(ModelError, match=message):
            load_model(whole)


def test_a_scaled_run_knows_its_base_and_refuses_another_and_changed_weights(llama, tmp_path):
    run = finetune(llama, SPLIT, tmp_path / "run", short(lora_rank=2, learning_rate=0.01)).path
    scaled = scale_adapter(run, 0.5, tmp_path / "scaled")
    other = AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match="made for another base"):
        load_model(tmp_path / "other", adapter=scaled, tokenizer=load_model(llama).tokenizer)
    for folder in (scaled, run):
        file = folder / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(OutputError, match=r"adapter_model\.safetensors was changed"):
        load_model(scaled)
    for out in ("scaled", "other run"):
        with pytest.raises(OutputError, match=r"adapter_model\.safetensors was changed"):
            scale_adapter(run, 0.5, tmp_path / out)


def test_a_scaled_run_keeps_its_shortcuts(llama, tmp_path):
    run = finetune(llama, SPLIT, tmp_path / "run", short(lora_rank=2))
    scaled = scale_adapter(scale_adapter(run.path, 0.7, tmp_path / "once"), 0.7, tmp_path / "twice")
    shortcuts = ModelSpec("scaled", str(llama), str(scaled)).run["shortcuts"]
    assert read_json(scaled / MARKER)["tied_relations"] == list(SPLIT.train.tied_relations())
    assert shortcuts == {relation: list(answers) for relation, answers in run.shortcuts.items()} != {}


def test_a_checkpoint_is_scaled_and_a_scaled_adapter_is_scaled_again(llama, tmp_path):
    run = finetune(llama, SPLIT, tmp_path / "run", short(lora_rank=2, learning_rate=0.01, checkpoint_every=2))
    [first, *_] = run.checkpoints.values()
    half = scale_adapter(first, 0.5, tmp_path / "half")
    quarter = load_file(scale_adapter(half, 0.5, tmp_path / "quarter") / "adapter_model.safetensors")
    for name, tensor in load_file(first / "adapter_model.safetensors").items():
        assert torch.equal(quarter[name], tensor / 4 if "lora_B" in name else tensor)
    record = read_json(tmp_path / "quarter" / "attnbalance.json")
    assert record["config"]["adapter"] == str(half)
    assert record["base_fingerprint"] == read_json(run.path / "attnbalance.json")["base_fingerprint"]


def test_a_finished_folder_is_left_as_it_is_and_another_factor_is_refused(llama, tmp_path):
    whole = adapter(llama, tmp_path / "whole")
    scaled = scale_adapter(whole, 0.5, tmp_path / "scaled")
    marker = (scaled / "attnbalance.json").stat().st_mtime_ns
    assert scale_adapter(whole, 0.5, tmp_path / "scaled") == scaled
    assert (scaled / "attnbalance.json").stat().st_mtime_ns == marker
    with pytest.raises(OutputError, match="factor"):
        scale_adapter(whole, 0.6, tmp_path / "scaled")
    with pytest.raises(OutputError, match="whole"):
        scale_adapter(whole, 0.5, whole)
    assert load_model(whole).model.active_adapters == ["default"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "lora_magnitude_vector"),
        ({"modules_to_save": ["lm_head"]}, "lm_head"),
        ({"target_modules": ["embed_tokens"], "embeddings": True}, r"embed_tokens\.base_layer\.weight"),
        ({"trainable_token_indices": [3, 4]}, "trainable_tokens"),
        ({"init_lora_weights": "pissa"}, "'pissa'"),
        ({"init_lora_weights": "olora"}, "'olora'"),
        ({"config": OFTConfig, "oft_block_size": 4}, "type OFT"),
    ],
)
def test_what_is_no_product_of_two_factors_is_refused_by_name(llama, tmp_path, fields, message):
    whole = adapter(llama, tmp_path / "whole", **fields)
    with pytest.raises(ModelError, match=message):
        scale_adapter(whole, 0.5, tmp_path / "scaled")
    assert not (tmp_path / "scaled").exists()


@pytest.mark.parametrize("start", ["corda", "lora_ga"])
def test_starts_that_change_the_base_are_refused_by_what_the_adapter_says(llama, tmp_path, start):
    whole = adapter(llama, tmp_path / "whole")
    config = read_json(whole / "adapter_config.json")
    (whole / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": start}))
    with pytest.raises(ModelError, match=f"init_lora_weights='{start}', which changes the base's weights"):
        scale_adapter(whole, 0.5, tmp_path / "scaled")


@pytest.mark.parametrize("factor", [0, -1, float("nan"), float("inf"), True, "0.5"])
def test_a_wrong_factor_is_refused(tmp_path, factor):
    with pytest.raises(DataError, match="`factor` must be"):
        scale_adapter(tmp_path, factor, tmp_path / "scaled")


def test_a_folder_without_an_adapter_and_an_overflow_are_refused(llama, tmp_path):
    with pytest.raises(ModelError, match=r"holds no adapter_config\.json"):
        scale_adapter(llama, 0.5, tmp_path / "scaled")
    half = adapter(llama, tmp_path / "whole", torch.float16)
    with pytest.raises(DataError, match=r"not finite in torch\.float16"):
        scale_adapter(half, 1e9, tmp_path / "scaled")
    with pytest.raises(DataError, match=r"too small for torch\.float16, whose rounding would change it by"):
        scale_adapter(half, 1e-8, tmp_path / "scaled")
    with pytest.raises(DataError, match=r"too small for torch\.float32, whose rounding would change it by 100\.0%"):
        scale_adapter(adapter(llama, tmp_path / "float32"), 1e-300, tmp_path / "scaled")
    (half / "adapter_model.safetensors").write_bytes(b"junk")
    with pytest.raises(ModelError, match=r"cannot read .*adapter_model\.safetensors"):
        scale_adapter(half, 0.5, tmp_path / "scaled")
    (half / "adapter_config.json").write_text(json.dumps({"peft_type": "NONE"}))
    with pytest.raises(ModelError, match="cannot load adapter"):
        scale_adapter(half, 0.5, tmp_path / "scaled")
