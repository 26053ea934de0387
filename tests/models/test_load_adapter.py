"""Adapters: read unmerged on their base, and refused with what is wrong on any other."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from tiny import eager, tiny_config, tiny_lora, tiny_model, tiny_prompts, tiny_tokenizer

from attnbalance import load_model, read_attention
from attnbalance.data.tokens import encode
from attnbalance.errors import ModelError
from attnbalance.files.outputs import MARKER


@pytest.mark.parametrize(
    ("family", "targets"), [("llama", ["q_proj", "k_proj"]), ("gpt2", ["c_attn"]), ("neox", ["query_key_value"])]
)
def test_rows_of_an_unmerged_adapter_equal_eager_attention_of_the_merged_model(
    family: str, targets: list[str], tmp_path: Path
) -> None:
    tiny_lora(tiny_model(family), targets).save_pretrained(tmp_path / "lora")
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


def with_rope(folder: Path, theta: float) -> Path:
    """The folder, with another base of the rotary angles in its config.json alone."""
    config = folder / "config.json"
    settings = json.loads(config.read_text())
    settings["rope_parameters"]["rope_theta"] = theta
    config.write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("versions", ["its own", "others"])
def test_an_adapter_is_refused_on_other_settings_than_it_was_made_for(
    versions: str, copied: Path, adapter: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(adapter, tmp_path / "lora"))
    assert load_model(copied, adapter=folder).model is not None
    if versions == "others":
        record = json.loads((folder / MARKER).read_text())
        del record["base_settings"]["rms_norm_eps"]
        (folder / MARKER).write_text(json.dumps(record | {"versions": {"transformers": "5.0"}}))
        assert load_model(copied, adapter=folder).model is not None
    with_rope(copied, 500.0)
    with pytest.raises(ModelError, match=r"other settings .*copy: rope_parameters.rope_theta was 10000.0, is 500.0\."):
        load_model(copied, adapter=folder)
    record = json.loads((folder / MARKER).read_text())
    (folder / MARKER).write_text(json.dumps({"base_fingerprint": record["base_fingerprint"]}))
    assert load_model(copied, adapter=folder).model is not None  # an older run did not record them


def test_a_base_that_could_not_be_checked_is_warned_of(checkpoint: Path, adapter: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(adapter, tmp_path / "lora"))
    rounded = {**json.loads((adapter / MARKER).read_text())["base_fingerprint"], "dtype": "float16", "float16": "other"}
    for recorded in ("a fingerprint of another version", {**rounded, "bfloat16": "other"}):
        (folder / MARKER).write_text(json.dumps({"base_fingerprint": recorded}))
        with pytest.warns(UserWarning, match="could not be checked"):
            load_model(checkpoint, adapter=folder, dtype="bfloat16")


def test_an_adapter_of_another_shape_is_refused_with_both_shapes(adapter: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(adapter, tmp_path / "lora"))
    (bare / MARKER).unlink()
    wider = transformers.AutoModelForCausalLM.from_config(tiny_config("llama", hidden_size=64, head_dim=16))
    with pytest.raises(ModelError, match=r"lora does not fit LlamaForCausalLM: .*size mismatch"):
        load_model(wider, tokenizer=tiny_tokenizer(), adapter=bare)
    with pytest.raises(ModelError, match=r"lora does not fit GPT2LMHeadModel: .*q_proj"):
        load_model(tiny_model("gpt2"), tokenizer=tiny_tokenizer(), adapter=bare)


def test_an_adapter_of_a_deeper_model_is_refused_with_the_first_weight_left_out(copied: Path, tmp_path: Path) -> None:
    deeper = transformers.AutoModelForCausalLM.from_config(tiny_config("llama", num_hidden_layers=4))
    tiny_lora(deeper, ["q_proj", "v_proj"]).save_pretrained(tmp_path / "lora")
    with pytest.raises(ModelError, match=r"lora holds 8 weights that .*copy has no layer for, first .*layers.2.self_"):
        load_model(copied, adapter=tmp_path / "lora")


def test_an_unmarked_adapter_is_compared_with_the_base_that_it_names(
    checkpoint: Path, adapter: Path, tmp_path: Path
) -> None:
    bare = Path(shutil.copytree(adapter, tmp_path / "lora"))
    twin = Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))
    (bare / MARKER).unlink()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*was made for")
        load_model(twin, adapter=bare)
    other = tiny_model("llama")
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.mul_(1.1)
    other.save_pretrained(twin)
    with pytest.warns(UserWarning, match=rf"was made for {checkpoint} and is loaded on {twin}"):
        load_model(twin, adapter=bare)
    with pytest.raises(
        ModelError, match=rf"other settings \({checkpoint}\) than {twin}: rope_parameters.rope_theta was"
    ):
        load_model(with_rope(twin, 500.0), adapter=bare)


def test_an_unmarked_adapter_whose_base_is_elsewhere_goes_by_its_name(
    copied: Path, adapter: Path, tmp_path: Path
) -> None:
    bare = Path(shutil.copytree(adapter, tmp_path / "lora"))
    (bare / MARKER).unlink()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*was made for")
        load_model(copied, adapter=changed(bare, "adapter_config.json", base_model_name_or_path="owner/copy"))
    changed(bare, "adapter_config.json", base_model_name_or_path="owner/other")
    with pytest.warns(UserWarning, match=r"was made for owner/other and is loaded on .*copy"):
        load_model(copied, adapter=bare)


def test_an_adapter_that_lengthens_the_prompt_is_refused(tmp_path: Path) -> None:
    config = PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")  # pyright: ignore[reportArgumentType]
    prefixed = get_peft_model(tiny_model("gpt2"), config)
    with pytest.raises(ModelError, match="PREFIX_TUNING, which puts tokens before the prompt"):
        load_model(prefixed, tokenizer=tiny_tokenizer())  # pyright: ignore[reportArgumentType]


def test_an_activated_adapter_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[5])  # pyright: ignore[reportArgumentType]
    activated = get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(checkpoint), config)
    with pytest.raises(ModelError, match="an adapter of .* is an activated LoRA"):
        load_model(activated, tokenizer=tiny_tokenizer())  # pyright: ignore[reportArgumentType]
    activated.save_pretrained(tmp_path / "activated")
    with pytest.raises(ModelError, match="adapter .*activated is an activated LoRA"):
        load_model(checkpoint, adapter=tmp_path / "activated")


def test_an_adapter_whose_base_is_gone_or_unnamed_asks_for_it(adapter: Path, tmp_path: Path) -> None:
    lost = Path(shutil.copytree(adapter, tmp_path / "lost"))
    config = json.loads((lost / "adapter_config.json").read_text())
    for base, message in [("/gone/base", r"made for /gone/base, which is not there.*BASE\+"), (None, "does not say")]:
        (lost / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
        with pytest.raises(ModelError, match=message):
            load_model(lost)


@pytest.mark.parametrize("spoil", ["pickle", "truncated", "lacking", "large", "nan"])
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
        if spoil == "lacking":
            kept = {name: value for name, value in kept.items() if "layers.1" not in name}
        else:
            kept[min(kept)][0, 1] = {"large": 1e30, "nan": float("nan")}[spoil]
        save_file(kept, weights)
    expected = {"pickle": "no adapter_model.safetensors", "truncated": "does not fit", "lacking": "lacks weights"}
    expected |= dict.fromkeys(("large", "nan"), r"weights of .*lora_A.* must be finite and at most 1e\+18")
    with pytest.raises(ModelError, match=f"bad.*{expected[spoil]}"):
        load_model(checkpoint, adapter=bad)


def changed(folder: Path, name: str, **values: object) -> Path:
    """The folder, with settings in one of its JSON files changed."""
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


@pytest.mark.parametrize("targets", ["((([", ["(["]])
def test_targets_of_an_adapter_that_are_no_pattern_or_no_layer_are_refused(
    targets: object, llama_folder: Path, lora_folder: Path
) -> None:
    changed(lora_folder, "adapter_config.json", target_modules=targets)
    with pytest.raises(ModelError, match=r"lora does not fit .*llama"):
        load_model(llama_folder, adapter=lora_folder)


@pytest.mark.parametrize("base", [["a"], 3, {"a": 1}, True])
def test_a_base_that_is_not_text_is_refused(base: object, llama_folder: Path, lora_folder: Path) -> None:
    changed(lora_folder, "adapter_config.json", base_model_name_or_path=base)
    for load in (lambda: load_model(llama_folder, adapter=lora_folder), lambda: load_model(lora_folder)):
        with pytest.raises(ModelError, match="base"):
            load()


def test_an_adapter_that_reads_a_pickle_of_its_own_is_refused_before_that_is_opened(
    llama_folder: Path, lora_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = tmp_path / "states.pt"
    states.write_bytes(b"\x80\x04 no pickle")
    settings = {"peft_type": "MULTITASK_PROMPT_TUNING", "num_virtual_tokens": 2, "num_tasks": 1}
    settings |= {"prompt_tuning_init": "AVERAGE_SOURCE_TASKS", "prompt_tuning_init_state_dict_path": str(states)}
    changed(lora_folder, "adapter_config.json", **settings)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was opened"))
    with pytest.raises(ModelError, match="MULTITASK_PROMPT_TUNING, which puts tokens before the prompt"):
        load_model(llama_folder, adapter=lora_folder)


def test_an_adapter_that_peft_draws_anew_at_every_load_is_refused(tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa_niter_4")
    get_peft_model(tiny_model("llama"), config).save_pretrained(tmp_path / "lora")
    with pytest.raises(ModelError, match="'pissa_niter_4', which peft draws at random again"):
        load_model(tiny_model("llama"), tokenizer=tiny_tokenizer(), adapter=tmp_path / "lora")


def test_a_model_merged_into_its_adapters_own_folder_is_refused_and_read_once_it_stands_alone(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Transformers would put the adapter once more on the weights into which it is merged."""
    both = tmp_path / "both"
    adapted = tiny_lora(transformers.AutoModelForCausalLM.from_pretrained(checkpoint), ["q_proj", "v_proj"])
    adapted.save_pretrained(both)
    merged = adapted.merge_and_unload()
    merged.save_pretrained(both)
    tiny_tokenizer().save_pretrained(both)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = merged.eval()(ids).logits
        twice = transformers.AutoModelForCausalLM.from_pretrained(both)(ids).logits
    assert (twice - expected).abs().max() > 0.01  # what would be read
    message = r"both holds both an adapter \(adapter_config.json\) and a whole model \(model.safetensors\)"
    for given in ({"model": both}, {"model": both, "adapter": both}, {"model": checkpoint, "adapter": both}):
        with pytest.raises(ModelError, match=message):
            load_model(**given)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (both / name).unlink()
    with torch.no_grad():
        torch.testing.assert_close(load_model(both).model(ids).logits, expected, rtol=0, atol=1e-5)


def test_an_adapter_beside_a_configuration_is_read_as_an_adapter(
    checkpoint: Path, adapter: Path, tmp_path: Path
) -> None:
    """Some trainers leave the base's config.json in the folder of the adapter."""
    copy = Path(shutil.copytree(adapter, tmp_path / "copy"))
    shutil.copy(checkpoint / "config.json", copy)
    rows = read_attention(load_model(copy), tiny_prompts()).values
    assert torch.equal(rows, read_attention(load_model(adapter), tiny_prompts()).values)


def test_shards_of_a_trainer_beside_an_adapter_are_no_model(checkpoint: Path, adapter: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(adapter, tmp_path / "copy"))
    (copy / "pytorch_model_fsdp.bin").write_bytes(b"")  # accelerate's, of FSDP
    assert load_model(checkpoint, adapter=copy).model is not None


def test_an_adapter_of_another_revision_is_read_on_that_revisions_folder_alone(
    checkpoint: Path, adapter: Path, tmp_path: Path
) -> None:
    """Peft names the revision beside the base, and its own loader follows it; "main" would be another model."""
    for base in ("owner/name", str(checkpoint)):
        other = Path(shutil.copytree(adapter, tmp_path / base.replace("/", "-")))
        (other / MARKER).unlink(missing_ok=True)
        config = json.loads((other / "adapter_config.json").read_text())
        config |= {"base_model_name_or_path": base, "revision": "step10"}
        (other / "adapter_config.json").write_text(json.dumps(config))
        for model, on_top in ((other, None), ("owner/name", other)):
            if base == "owner/name" or on_top is not None:
                with pytest.raises(ModelError, match=r"made for revision 'step10' of owner/name, .* FOLDER\+"):
                    load_model(model, adapter=on_top)
        assert load_model(checkpoint, adapter=other).name == f"{checkpoint}+{other}"
        config["revision"] = "main"
        (other / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match="owner/name") as error:  # which is not on this machine
            load_model("owner/name", adapter=other)
        assert "revision" not in str(error.value)
