"""Fingerprints tell bases apart and nothing else."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, PeftConfig, VeraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import tiny_config, tiny_model
from transformers import AutoModelForCausalLM

from attnbalance.models.fingerprint import (
    adapters_fingerprint,
    files_fingerprint,
    fingerprint,
    has_fingerprint,
    quick_sums,
)

WEIGHTS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")


def test_an_adapter_and_a_coarser_dtype_leave_the_fingerprint_and_a_changed_weight_does_not() -> None:
    model = tiny_model("llama")
    own = fingerprint(model)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        other = tiny_model("llama").to(dtype)
        assert has_fingerprint(other, own)
        assert has_fingerprint(model, fingerprint(other))
    config = LoraConfig(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")  # pyright: ignore[reportArgumentType]
    assert fingerprint(get_peft_model(tiny_model("llama"), config)) == own
    assert has_fingerprint(tiny_model("gpt2"), own) is False
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    assert has_fingerprint(model, own) is False


def test_signs_that_are_turned_in_pairs_change_the_fingerprint_in_each_dtype() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        model = tiny_model("llama").to(dtype)
        own = fingerprint(model)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight.neg_()
        assert has_fingerprint(model, own) is False
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight.neg_()
        assert has_fingerprint(model, own)


def test_a_saved_buffer_counts_and_tokens_that_an_adapter_trains_do_not() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.register_buffer("bias", torch.zeros(4))
    model.model.layers[1].mlp.register_buffer("cache", torch.zeros(4), persistent=False)
    own = fingerprint(model)
    model.model.layers[1].mlp.cache[0] = 1.0
    assert has_fingerprint(model, own)
    model.model.layers[1].mlp.bias[0] = 1.0
    assert has_fingerprint(model, own) is False
    config = LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 2])
    assert fingerprint(get_peft_model(tiny_model("llama"), config)) == fingerprint(tiny_model("llama"))


def test_bfloat16_and_float16_are_the_same_weights_only_if_one_was_rounded_from_the_other() -> None:
    whole = tiny_model("llama")
    halves = {dtype: tiny_model("llama").to(dtype) for dtype in (torch.bfloat16, torch.float16)}
    coarse = tiny_model("llama").to(torch.bfloat16).to(torch.float16)
    assert has_fingerprint(coarse, fingerprint(halves[torch.bfloat16]))
    assert has_fingerprint(halves[torch.bfloat16], fingerprint(coarse))
    assert has_fingerprint(halves[torch.float16], fingerprint(halves[torch.bfloat16])) is None
    assert has_fingerprint(whole, {"dtype": "nonsense"}) is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_edited_head_row_column_and_weight_changes_the_fingerprint(dtype: torch.dtype) -> None:
    config = tiny_config("llama", hidden_size=64, num_attention_heads=16, num_key_value_heads=16)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    own = fingerprint(model)
    q, o, down = (model.get_parameter(f"model.layers.1.{name}.weight") for name in WEIGHTS)
    edits = [(q, slice(4 * head, 4 * head + 4)) for head in range(16)]
    edits += [(o, (slice(None), slice(4 * head, 4 * head + 4))) for head in range(16)]
    edits += [(down, (slice(None), slice(1, None))), (down, (3, 5)), (q, (63, 63)), (o, (0, 0))]
    for weight, part in edits:
        before = weight.detach().clone()
        with torch.no_grad():
            weight[part] = 0.0
        assert has_fingerprint(model, own) is False
        with torch.no_grad():
            weight.copy_(before)
    with torch.no_grad():
        q[[0, 1]] = q[[1, 0]].clone()  # the same values in another order
    assert has_fingerprint(model, own) is False


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(target_modules=["q_proj"], use_dora=True, modules_to_save=["lm_head"], init_lora_weights=False),
        IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False),
        LoHaConfig(target_modules=["q_proj"], init_weights=False),
        VeraConfig(target_modules=["q_proj", "v_proj"], r=4, init_weights=False),  # layers share its projections
    ],
)
def test_trained_adapters_of_any_kind_leave_the_fingerprint_and_change_their_own(config: PeftConfig) -> None:
    own = fingerprint(tiny_model("llama"))
    model = get_peft_model(tiny_model("llama"), config)
    states = [adapters_fingerprint(model), adapters_fingerprint(model)]
    assert states[0] == states[1]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
                states.append(adapters_fingerprint(model))
    with model.disable_adapter():
        states.append(adapters_fingerprint(model))
    assert len(set(states)) == len(states) - 1
    assert fingerprint(model) == own


def test_the_files_of_a_folder_tell_when_its_weights_were_written_anew(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    own = files_fingerprint(tmp_path)
    model.save_pretrained(tmp_path)
    assert files_fingerprint(tmp_path) == own
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    model.save_pretrained(tmp_path)
    assert files_fingerprint(tmp_path) != own


def test_weights_below_the_folder_count_where_its_index_names_them(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="10KB")
    index = tmp_path / "model.safetensors.index.json"
    names = json.loads(index.read_text())
    shard = names["weight_map"]["model.layers.0.mlp.up_proj.weight"]
    (tmp_path / "shards").mkdir()
    (tmp_path / shard).rename(tmp_path / "shards" / shard)
    moved = {name: f"shards/{shard}" if file == shard else file for name, file in names["weight_map"].items()}
    index.write_text(json.dumps(names | {"weight_map": moved}))
    own = files_fingerprint(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(
        loaded.model.layers[0].mlp.up_proj.weight, tiny_model("llama").model.layers[0].mlp.up_proj.weight
    )
    weights = load_file(tmp_path / "shards" / shard)
    weights["model.layers.0.mlp.up_proj.weight"] *= 1.5
    save_file(weights, tmp_path / "shards" / shard, metadata={"format": "pt"})
    assert files_fingerprint(tmp_path) != own


def test_weights_that_the_configuration_names_count(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_weights": "best/w.safetensors"}))
    (tmp_path / "best").mkdir()
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights, tmp_path / "best" / "w.safetensors", metadata={"format": "pt"})
    own = files_fingerprint(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(weights | {name: 2 * weights[name]}, tmp_path / "best" / "w.safetensors", metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.layers[0].mlp.up_proj.weight, 2 * weights[name])
    assert files_fingerprint(tmp_path) != own


def cached(cache: Path, commit: str, name: str = "config.json") -> None:
    """Write a file of owner/name into a Hub cache, at a commit that "main" then points to."""
    repository = cache / "models--owner--name"
    for path, text in ((f"snapshots/{commit}/{name}", "{}"), ("refs/main", commit)):
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(text)


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_a_model_on_the_hub_is_known_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert files_fingerprint("owner/name") is None
    for commit in ("a" * 40, "b" * 40):
        cached(tmp_path, commit, name)
        assert files_fingerprint("owner/name") == commit
    for no_repository in ("no such folder", "a/b/c"):
        assert files_fingerprint(no_repository) is None


def resaved(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Write the weights anew after an edit, with the old modification time."""
    path = folder / "model.safetensors"
    time, weights = path.stat().st_mtime_ns, load_file(path)
    edit(weights)
    save_file(weights, path, metadata={"format": "pt"})
    os.utime(path, ns=(time, time))


def test_a_single_edited_head_changes_the_fingerprint_wherever_it_is(tmp_path: Path) -> None:
    config = tiny_config("llama", hidden_size=128, num_attention_heads=16, num_key_value_heads=16)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    own = files_fingerprint(tmp_path / "model")
    name = "model.layers.{}.self_attn.q_proj.weight"
    for layer, head in itertools.product(range(2), range(16)):
        edited = shutil.copytree(tmp_path / "model", tmp_path / f"{layer}-{head}")
        resaved(edited, lambda w: w[name.format(layer)][8 * head : 8 * head + 8].zero_())  # noqa: B023
        assert files_fingerprint(edited) != own, (layer, head)


def test_a_copied_or_touched_model_keeps_its_fingerprint(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    own = files_fingerprint(tmp_path / "model")
    assert files_fingerprint(shutil.copytree(tmp_path / "model", tmp_path / "copy")) == own
    (tmp_path / "model/model.safetensors").touch()
    assert files_fingerprint(tmp_path / "model") == own


def test_every_byte_of_a_gguf_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(2**21))
    own = files_fingerprint(path)
    path.write_bytes(bytes(5000) + b"x" + bytes(2**21 - 5001))
    assert files_fingerprint(path) != own


@pytest.mark.parametrize("name", ["modeling_own.py", "additional_chat_templates/rag.jinja", "qwen.tiktoken"])
def test_the_code_and_the_templates_of_a_model_count(tmp_path: Path, name: str) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    own = files_fingerprint(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("other")
    assert files_fingerprint(tmp_path) != own


def test_code_that_stands_in_another_folder_counts(tmp_path: Path) -> None:
    """Two files of settings may name it, as one class or as a list of two, of which the second is often null."""
    model, code = tmp_path / "model", tmp_path / "code"
    tiny_model("llama").save_pretrained(model)
    code.mkdir()
    settings = {"config.json": f"{code}--modeling_own.Own", "tokenizer_config.json": [f"{code}--tokens.Own", None]}
    for name, value in settings.items():
        content = json.loads((model / name).read_text()) if (model / name).is_file() else {}
        plain = json.dumps(content)
        (model / name).write_text(json.dumps(content | {"auto_map": {"AutoModelForCausalLM": value}}))
        (code / "modeling_own.py").write_text("SCALE = 1")
        before = files_fingerprint(model)
        assert files_fingerprint(model) == before
        (code / "modeling_own.py").write_text("SCALE = 2")
        assert files_fingerprint(model) != before
        (model / name).write_text(plain)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_code_in_folders_below_counts(tmp_path: Path, elsewhere: bool) -> None:
    """As "lib/modeling_own.Own" names it, and what that imports from beside it; a checkpoint below changes nothing."""
    model = tmp_path / "model"
    tiny_model("llama").save_pretrained(model)
    source = tmp_path / "code" if elsewhere else model
    config = json.loads((model / "config.json").read_text())
    named = f"{source}--lib/modeling_own.Own" if elsewhere else "lib/modeling_own.Own"
    (model / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": named}}))
    for name, counts in {
        "lib/modeling_own.py": True,
        "lib/side.py": True,
        "checkpoint-2/modeling_own.py": False,
    }.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("SCALE = 1")
        before = files_fingerprint(model)
        (source / name).write_text("SCALE = 2")
        assert (files_fingerprint(model) != before) == counts


def test_code_is_found_by_any_spelling_of_a_folder_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    tiny_model("llama").save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    (model / "modeling_own.py").write_text("SCALE = 1")
    monkeypatch.chdir(tmp_path)
    for named, elsewhere in ((f"{model}--modeling_own.Own", True), ("--own.Own", False), ("../own.Own", False)):
        (model / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": named}}))
        assert files_fingerprint(model) == files_fingerprint("model")
        before = files_fingerprint(model)
        (tmp_path / "own.py").write_text(named)
        assert files_fingerprint(model) == before
        if elsewhere:
            (model / "modeling_own.py").write_text("SCALE = 2")
            assert files_fingerprint(model) != before


@pytest.mark.parametrize(
    ("settings", "auto_map", "own"),
    [
        ("tokenizer_config.json", {"AutoTokenizer": [None, "tokens_own.Own"]}, True),
        ("tokenizer_config.json", ["tokens_own.Own", None], True),
        ("config.json", {"AutoTokenizer": "tokens_own.Own"}, True),
        ("tokenizer_config.json", {"AutoProcessor": "process_own.Own"}, False),
        ("tokenizer_config.json", None, False),
    ],
)
def test_vocabularies_of_any_name_beside_a_tokenizer_with_its_own_code_count(
    tmp_path: Path, settings: str, auto_map: object, own: bool
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    content = json.loads((tmp_path / settings).read_text()) if (tmp_path / settings).is_file() else {}
    (tmp_path / settings).write_text(json.dumps(content | ({"auto_map": auto_map} if auto_map else {})))
    counted = dict.fromkeys(("words.txt", "bpe.codes", "tokenizer.model.v3", "rwkv_vocab"), own)
    for name, counts in (counted | dict.fromkeys(("README.md", "run.log", "run.lock", "optimizer.pt"), False)).items():
        (tmp_path / name).write_text("a b")
        before = files_fingerprint(tmp_path)
        (tmp_path / name).write_text("b a")
        assert (files_fingerprint(tmp_path) != before) == counts, name


def test_quick_sums_are_those_of_the_bytes_as_whole_numbers() -> None:
    """Of sizes that are no multiple of eight bytes, and of a parameter that begins within a storage."""
    storage = torch.randn(64).bfloat16()
    module = torch.nn.Module()
    for name, values in {"odd": storage[:13], "within": storage[3:32], "single": torch.randn(5, 3)}.items():
        module.register_parameter(name, torch.nn.Parameter(values))
    for name, parameter in module.named_parameters():
        data = parameter.detach().clone().view(torch.uint8).numpy().tobytes()
        whole = len(data) // 8 * 8
        words = [int.from_bytes(data[i : i + 8], sys.byteorder, signed=True) for i in range(0, whole, 8)]
        total = (sum(words) + 2**63) % 2**64 - 2**63  # of 64 bits, wrapped
        assert quick_sums(module)[name] == total + sum(data[whole:])
    before = quick_sums(module)
    with torch.no_grad():
        module.single[4, 2] += 1e-3
    assert {name for name, value in quick_sums(module).items() if value != before[name]} == {"single"}
