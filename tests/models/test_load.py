"""Loading: what is accepted, and what each refusal says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from tiny import GPT2, SIZES, eager, tiny_config, tiny_model, tiny_prompts, tiny_tokenizer
from torch.nn import Module

from attnbalance import load_model, read_attention
from attnbalance.errors import ModelError
from attnbalance.models.fingerprint import fingerprint
from attnbalance.models.forward import position_limit
from attnbalance.models.load import load_limits
from attnbalance.outputs import MARKER
from attnbalance.tokens import encode


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama and its tokenizer; copied by tests that damage it."""
    folder = tmp_path_factory.mktemp("llama") / "checkpoint"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer("bos").save_pretrained(folder)
    return folder


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def lora(base: Module, targets: list[str], seed: int = 1) -> PeftModel:
    """An adapter with weights of its own, as after training; peft begins with zeros, which change nothing."""
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))  # pyright: ignore[reportArgumentType]
    torch.manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    assert isinstance(adapted, PeftModel)
    return adapted


@pytest.fixture(scope="session")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "lora"
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    made_for = fingerprint(base)
    lora(base, ["q_proj", "v_proj"]).save_pretrained(folder)
    (folder / MARKER).write_text(json.dumps({"base_fingerprint": made_for}))
    return folder


def test_a_folder_and_the_object_in_it_give_the_same_rows(checkpoint: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    by_path = load_model(checkpoint)
    by_object = load_model(model, tokenizer=checkpoint)
    assert (by_path.name, by_object.name, by_path.kernel) == (str(checkpoint), "LlamaForCausalLM", "sdpa")
    found, again = (read_attention(each, tiny_prompts()).values for each in (by_path, by_object))
    torch.testing.assert_close(found, again, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("family", "targets"), [("llama", ["q_proj", "k_proj"]), ("gpt2", ["c_attn"]), ("neox", ["query_key_value"])]
)
def test_rows_of_an_unmerged_adapter_equal_eager_attention_of_the_merged_model(
    family: str, targets: list[str], tmp_path: Path
) -> None:
    lora(tiny_model(family), targets).save_pretrained(tmp_path / "lora")
    merged = PeftModel.from_pretrained(tiny_model(family), tmp_path / "lora").merge_and_unload()
    oracle = eager(merged)
    hooked = load_model(tiny_model(family), tokenizer=tiny_tokenizer(), adapter=tmp_path / "lora")
    assert isinstance(hooked.model, PeftModel)
    assert any("lora_" in name for name, _ in hooked.model.named_parameters())
    bare = read_attention(load_model(tiny_model(family), tokenizer=tiny_tokenizer()), tiny_prompts())
    found = read_attention(hooked, tiny_prompts())
    assert (found.values - bare.values).abs().max() > 0.05  # or the adapter was not there
    for values, one in zip(found.values, encode(tiny_prompts(), tiny_tokenizer()), strict=True):
        with torch.no_grad():
            maps = oracle(input_ids=torch.tensor([one.ids]), output_attentions=True).attentions
        expected = torch.stack([each[0, :, -1] for each in maps])
        # merging rounds W + BA once more than running both: a few units in the sixth place, seen 2e-6
        torch.testing.assert_close(values[..., : len(one.ids)], expected, atol=1e-5, rtol=0)


def test_an_adapters_folder_brings_its_base_and_its_name_says_both(checkpoint: Path, adapter: Path) -> None:
    alone = load_model(adapter)
    on_top = load_model(checkpoint, adapter=adapter)
    assert alone.name == on_top.name == f"{checkpoint}+{adapter}"
    found, again = (read_attention(each, tiny_prompts()).values for each in (alone, on_top))
    assert torch.equal(found, again)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_an_adapter_knows_its_base_in_any_usual_dtype(checkpoint: Path, adapter: Path, dtype: str) -> None:
    assert load_model(checkpoint, adapter=adapter, dtype=dtype).model is not None


def test_an_adapter_is_refused_on_other_weights_than_it_was_made_for(copied: Path, adapter: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(copied)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.1)
    model.save_pretrained(copied)
    with pytest.raises(ModelError, match=r"made for another base .*checkpoint.*weights of .*copy differ"):
        load_model(copied, adapter=adapter)


def test_an_adapter_of_another_shape_is_refused_with_both_shapes(adapter: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(adapter, tmp_path / "lora"))
    (bare / MARKER).unlink()
    wider = transformers.AutoModelForCausalLM.from_config(tiny_config("llama", hidden_size=64, head_dim=16))
    with pytest.raises(ModelError, match=r"lora does not fit LlamaForCausalLM: .*size mismatch"):
        load_model(wider, tokenizer=tiny_tokenizer(), adapter=bare)
    with pytest.raises(ModelError, match=r"lora does not fit GPT2LMHeadModel: .*q_proj"):
        load_model(tiny_model("gpt2"), tokenizer=tiny_tokenizer(), adapter=bare)


def test_an_adapter_of_a_deeper_model_is_refused_with_what_has_no_place(copied: Path, tmp_path: Path) -> None:
    deeper = transformers.AutoModelForCausalLM.from_config(tiny_config("llama", num_hidden_layers=4))
    lora(deeper, ["q_proj", "v_proj"]).save_pretrained(tmp_path / "lora")
    with pytest.raises(ModelError, match=r"lora holds 8 weights that .*copy has no place for, first .*layers.2.self_"):
        load_model(copied, adapter=tmp_path / "lora")


def test_an_unmarked_adapter_on_a_base_of_another_name_is_warned_of(
    copied: Path, adapter: Path, tmp_path: Path
) -> None:
    bare = Path(shutil.copytree(adapter, tmp_path / "lora"))
    (bare / MARKER).unlink()
    with pytest.warns(UserWarning, match=r"was made for .*checkpoint and is loaded on .*copy"):
        load_model(copied, adapter=bare)


def test_an_adapter_that_lengthens_the_prompt_is_refused(tmp_path: Path) -> None:
    config = PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")  # pyright: ignore[reportArgumentType]
    prefixed = get_peft_model(tiny_model("gpt2"), config)
    with pytest.raises(ModelError, match="PREFIX_TUNING, which puts tokens of its own before the prompt"):
        load_model(prefixed, tokenizer=tiny_tokenizer())  # pyright: ignore[reportArgumentType]


def test_a_given_model_keeps_its_own_mode_part_by_part() -> None:
    model = tiny_model("gpt2").train()
    model.transformer.h[0].attn.eval()
    before = {name: module.training for name, module in model.named_modules()}
    hooked = load_model(model, tokenizer=tiny_tokenizer())
    found = read_attention(hooked, tiny_prompts())
    assert {name: module.training for name, module in model.named_modules()} == before
    assert hooked.model is model
    calm = read_attention(load_model(tiny_model("gpt2"), tokenizer=tiny_tokenizer()), tiny_prompts())
    torch.testing.assert_close(found.values, calm.values)  # no dropout in what is read


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_given_model_may_have_been_loaded_with_any_attention(implementation: str) -> None:
    model = tiny_model("mistral")
    model.set_attn_implementation(implementation)
    found = read_attention(load_model(model, tokenizer=tiny_tokenizer()), tiny_prompts()).values
    expected = read_attention(load_model(tiny_model("mistral"), tokenizer=tiny_tokenizer()), tiny_prompts()).values
    assert torch.equal(found, expected)


def _pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def _edit_config(**changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def _drop_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _spoil_weight(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0, 0] = torch.nan
    model.save_pretrained(folder)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickle": (_pickle_only, r"only pickled weights \(pytorch_model.bin\), which can run code.*safe_serialization"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no weights"),
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]),
        "cannot load model .*copy: Safetensor",
    ),
    "no header": (lambda f: (f / "model.safetensors").write_bytes(b"no weights here"), "cannot load model .*copy"),
    "missing": (_drop_weight, r"1 weights are missing .* first model.layers.1.self_attn.k_proj.weight"),
    "shape": (_edit_config(intermediate_size=96), "copy.*(mismatch|another shape)"),
    "nan": (_spoil_weight, r"copy gives NaN or infinite numbers; its weights may be damaged.*float32"),
    "no config": (lambda f: (f / "config.json").unlink(), "holds no config.json: not a Hugging Face model folder"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "cannot load model .*copy"),
    "odd config": (_edit_config(hidden_size="wide"), "cannot load model .*copy.*hidden_size"),
    "other kind": (_edit_config(model_type="nothing"), "cannot load model .*copy.*nothing"),
    "encoder-decoder": (_edit_config(is_encoder_decoder=True), "is an encoder-decoder model; only decoder-only"),
    "no tokenizer": (
        lambda f: [(f / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")],
        "cannot load a tokenizer from .*copy.*--tokenizer",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_folder_is_refused_with_its_name_and_what_is_wrong(what: str, copied: Path) -> None:
    damage, message = DAMAGE[what]
    damage(copied)
    with pytest.raises(ModelError, match=message):
        load_model(copied)


def test_names_that_lead_nowhere_are_refused(tmp_path: Path, adapter: Path, checkpoint: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("x")
    with pytest.raises(ModelError, match=r"is a file; name the folder"):
        load_model(file)
    with pytest.raises(ModelError, match=f"no model folder at {tmp_path}/absent"):
        load_model(tmp_path / "absent")
    with pytest.raises(ModelError, match="no adapter folder at"):
        load_model(checkpoint, adapter=tmp_path / "absent")
    with pytest.raises(ModelError, match=r"is an adapter; name its base model before the '\+'"):
        load_model(adapter, adapter=adapter)
    with pytest.raises(ModelError, match=r"cannot load model nobody/nothing"):
        load_model("nobody/nothing")


def test_an_adapter_whose_base_is_gone_or_unnamed_asks_for_it(adapter: Path, tmp_path: Path) -> None:
    lost = Path(shutil.copytree(adapter, tmp_path / "lost"))
    config = json.loads((lost / "adapter_config.json").read_text())
    for base, message in [("/gone/base", r"made for /gone/base, which is not there.*BASE\+"), (None, "does not say")]:
        (lost / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
        with pytest.raises(ModelError, match=message):
            load_model(lost)


@pytest.mark.parametrize("spoil", ["pickle", "truncated", "lacking"])
def test_a_damaged_adapter_is_refused(spoil: str, checkpoint: Path, adapter: Path, tmp_path: Path) -> None:
    bad = Path(shutil.copytree(adapter, tmp_path / "bad"))
    weights = bad / "adapter_model.safetensors"
    if spoil == "pickle":
        weights.rename(bad / "adapter_model.bin")
    elif spoil == "truncated":
        weights.write_bytes(weights.read_bytes()[:2000])
    else:
        from safetensors.torch import load_file, save_file

        kept = load_file(weights)
        save_file({name: value for name, value in kept.items() if "layers.1" not in name}, weights)
    expected = {"pickle": "no adapter_model.safetensors", "truncated": "does not fit", "lacking": "lacks weights"}
    with pytest.raises(ModelError, match=f"bad.*{expected[spoil]}"):
        load_model(checkpoint, adapter=bad)


@pytest.mark.parametrize("limit", [96, 0, -1])
def test_limits_are_those_of_the_loaded_model(limit: int, copied: Path) -> None:
    _edit_config(max_position_embeddings=limit)(copied)
    config = transformers.AutoConfig.from_pretrained(copied)
    expected = limit if limit > 0 else None
    assert load_limits(str(copied))[1] == position_limit(config) == expected


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "half-ish", "Tensor", torch.int64])
def test_a_dtype_that_no_model_computes_in_is_refused(dtype: str | torch.dtype) -> None:
    with pytest.raises(ModelError, match=r"dtype must be float32, bfloat16, float16 or float64, got"):
        load_model(tiny_model("gpt2"), tokenizer=tiny_tokenizer(), dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "xpu"])
def test_a_device_that_is_not_there_is_named(device: str, checkpoint: Path) -> None:
    with pytest.raises(ModelError, match=f"cannot put the model on device '{device}'"):
        load_model(checkpoint, device=device)


def test_an_object_needs_a_tokenizer() -> None:
    with pytest.raises(ModelError, match=r"LlamaForCausalLM object comes without a tokenizer: pass tokenizer="):
        load_model(tiny_model("llama"))


def test_models_that_are_not_causal_language_models_are_refused_by_kind() -> None:
    torch.manual_seed(0)
    bert = transformers.BertLMHeadModel(transformers.BertConfig(**SIZES, intermediate_size=48))  # pyright: ignore[reportArgumentType]
    headless = transformers.GPT2Model(transformers.GPT2Config(**GPT2))  # pyright: ignore[reportArgumentType]
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    )
    for model, message in [
        (bert, "BertLMHeadModel is not causal: a later token changes an earlier logit"),
        (headless, r"GPT2Model without a language-model head; load its ...ForCausalLM class"),
        (t5, "T5ForConditionalGeneration; only decoder-only causal"),
        (torch.nn.Linear(2, 2), "a Linear is no transformers model; load one with AutoModelForCausalLM"),
    ]:
        with pytest.raises(ModelError, match=message):
            load_model(model, tokenizer=tiny_tokenizer())  # pyright: ignore[reportArgumentType]
