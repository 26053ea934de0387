"""Base models that are damaged or hostile: each refused by name, with what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import SIZES, tiny_config, tiny_model, tiny_tokenizer

from attnbalance import Fact, load_model, make_prompts, recall
from attnbalance.errors import ModelError
from attnbalance.models import load_base as loading
from attnbalance.models.load import load_limits
from attnbalance.models.load_base import LARGEST_WEIGHT, load_base


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


def _add_index(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickle": (_pickle_only, r"only pickled weights \(pytorch_model.bin\), which can run code.*safe_serialization"),
    "two models": (
        _add_index,
        "model.safetensors, which would be read, and an index of other weights, first model-0",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no weights"),
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]),
        "cannot load model .*copy: Safetensor",
    ),
    "no header": (lambda f: (f / "model.safetensors").write_bytes(b"no weights here"), "cannot load model .*copy"),
    "missing": (_drop_weight, r"1 weights are missing .* first model.layers.1.self_attn.k_proj.weight"),
    "shape": (_edit_config(intermediate_size=96), "copy.*(mismatch|another shape)"),
    "nan": (
        _spoil_weight,
        r"copy: weights of model.layers.0.self_attn.q_proj.weight must be finite .* the checkpoint is damaged",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "holds no config.json: not a Hugging Face model folder"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "cannot load model .*copy"),
    "odd config": (_edit_config(hidden_size="wide"), "cannot load model .*copy.*hidden_size"),
    "other kind": (_edit_config(model_type="nothing"), "cannot load model .*copy.*nothing"),
    "encoder-decoder": (_edit_config(is_encoder_decoder=True), "is an encoder-decoder model; only decoder-only"),
    "no tokenizer": (
        lambda f: [(f / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")],
        "cannot load a tokenizer from .*copy.*`tokenizer`",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_folder_is_refused_with_its_name_and_what_is_wrong(what: str, copied: Path) -> None:
    damage, message = DAMAGE[what]
    damage(copied)
    with pytest.raises(ModelError, match=message):
        load_model(copied)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "half-ish", "Tensor", torch.int64])
def test_a_dtype_that_no_model_computes_in_is_refused(dtype: str | torch.dtype) -> None:
    with pytest.raises(ModelError, match=r"`dtype` must be float32, bfloat16, float16 or float64, got"):
        load_model(tiny_model("gpt2"), tokenizer=tiny_tokenizer(), dtype=dtype)


def changed(folder: Path, name: str, **values: object) -> Path:
    """The folder, with settings in one of its JSON files changed."""
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


CONFIGS = {
    "no heads": ({"num_attention_heads": 0}, "cannot load model .*: "),
    "half a head": ({"num_attention_heads": 1.5}, "cannot load model .*: "),
    "no key-value heads": ({"num_key_value_heads": 0}, "cannot load model .*: "),
    "padding outside the vocabulary": ({"pad_token_id": 99999}, "cannot load model .*: "),
    "an unknown quantisation": (
        {"quantization_config": {"quant_method": "foo"}},
        "does not know the quantisation 'foo'",
    ),
    "a quantisation without a name": ({"quantization_config": {"bits": 4}}, "quant"),
}


@pytest.mark.parametrize(("change", "message"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_that_no_model_can_be_made_of_is_refused(
    change: dict[str, object], message: str, llama_folder: Path
) -> None:
    changed(llama_folder, "config.json", **change)
    with pytest.raises(ModelError, match=message) as refusal:
        load_base(str(llama_folder))
    assert str(llama_folder) in str(refusal.value)


@pytest.mark.parametrize("limit", [0, -1, -100])
def test_a_model_of_no_positions_is_refused_before_anything_is_measured(limit: int, llama_folder: Path) -> None:
    changed(llama_folder, "config.json", max_position_embeddings=limit)
    for load in (lambda: load_limits(str(llama_folder)), lambda: load_model(llama_folder)):
        with pytest.raises(
            ModelError, match=f"max_position_embeddings of .*{llama_folder.name} must be at least 1, got {limit}"
        ):
            load()


@pytest.mark.parametrize("epsilon", [float("inf"), float("nan")])
def test_an_epsilon_that_is_no_number_is_refused_by_name(epsilon: float, llama_folder: Path) -> None:
    changed(llama_folder, "config.json", rms_norm_eps=epsilon)
    with pytest.raises(
        ModelError, match=f"rms_norm_eps in .*{llama_folder.name} must be a finite number, got {epsilon}"
    ):
        load_model(llama_folder)


@pytest.mark.parametrize("value", [1e30, -1e30, float("inf"), float("nan")])
def test_weights_that_could_only_give_infinite_numbers_are_refused_by_name(value: float, llama_folder: Path) -> None:
    weights = load_file(llama_folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(weights, llama_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"weights of model.layers.1.mlp.up_proj.weight must be finite and at most 1e\+18"
    ):
        load_base(str(llama_folder))


def with_integers(folder: Path, name: str, dtype: torch.dtype) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[name] = (weights[name] / weights[name].abs().max() * 127).round().abs().to(dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool])
def test_integers_that_no_quantisation_scales_are_refused_by_name(llama_folder: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    with_integers(llama_folder, name, dtype)
    with pytest.raises(ModelError, match=rf"{name} is stored as (I8|U8|BOOL), and no quantisation is named"):
        load_base(str(llama_folder))


def test_integers_under_another_name_and_from_the_hub_are_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models--me--toy/snapshots/abc"
    tiny_model("gpt_oss").save_pretrained(folder)
    with_integers(folder, "model.layers.0.mlp.experts.down_proj", torch.int8)
    with pytest.raises(ModelError, match="down_proj is stored as I8"):
        load_base(str(folder))
    monkeypatch.setattr(loading, "try_to_load_from_cache", lambda name, file: str(folder / file))
    model = tiny_model("gpt_oss")
    with pytest.raises(ModelError, match="down_proj is stored as I8"):
        loading._check_no_integers(model, "me/toy")


@pytest.mark.parametrize("index", [False, True])
def test_integers_are_refused_in_the_files_that_transformers_loads(llama_folder: Path, index: bool) -> None:
    """model.safetensors beside an index of shards that are gone, and a file or an index that config.json names."""
    name = "model.layers.0.mlp.up_proj.weight"
    with_integers(llama_folder, name, torch.int8)
    old = llama_folder / "model.safetensors.index.json"
    old.write_text(json.dumps({"weight_map": {name: "model-00001-of-00001.safetensors"}}))
    with pytest.raises(ModelError, match=rf"{name} is stored as I8"):
        load_base(str(llama_folder))
    old.unlink()
    (llama_folder / "model.safetensors").rename(llama_folder / "mine.safetensors")
    keys = dict.fromkeys(load_file(llama_folder / "mine.safetensors"), "mine.safetensors")
    (llama_folder / "mine.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": keys}))
    _edit_config(transformers_weights="mine.safetensors.index.json" if index else "mine.safetensors")(llama_folder)
    with pytest.raises(ModelError, match=rf"{name} is stored as I8"):
        load_base(str(llama_folder))


def test_integers_in_a_file_that_is_not_loaded_are_let_be(llama_folder: Path) -> None:
    save_file({"x.weight": torch.ones(3, dtype=torch.int8)}, llama_folder / "other.safetensors", {"format": "pt"})
    load_base(str(llama_folder))


def test_weights_of_the_largest_size_that_is_allowed_give_finite_squares() -> None:
    assert torch.tensor(LARGEST_WEIGHT).square().isfinite()
    assert not torch.tensor(100 * LARGEST_WEIGHT).square().isfinite()


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        ({"num_hidden_layers": 1}, "9 weights that the files hold, such as model.layers.1"),
        ({"attention_bias": False}, "8"),
    ],
)
def test_weights_that_the_configuration_leaves_out_are_refused(changes: dict, left_out: str, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(tiny_config("llama", attention_bias=True))
    weights = len(list(model.model.layers[1].parameters()))
    model.save_pretrained(tmp_path)
    _edit_config(**changes)(tmp_path)
    left_out = left_out.replace("9 weights", f"{weights} weights")
    with pytest.raises(ModelError, match=f"config.json leaves out {left_out}"):
        load_base(str(tmp_path))


def test_norms_that_the_configuration_leaves_out_are_refused(tmp_path: Path) -> None:
    config = transformers.StableLmConfig(**SIZES, qk_layernorm=True, bos_token_id=None, eos_token_id=None)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    _edit_config(qk_layernorm=False)(tmp_path)
    with pytest.raises(ModelError, match=r"config.json leaves out .* such as model.layers.0.self_attn.k_layernorm"):
        load_base(str(tmp_path))


def test_layers_that_predict_further_tokens_are_beside_the_model(llama_folder: Path) -> None:
    weights = load_file(llama_folder / "model.safetensors")
    weights |= {name.replace(".1.", ".2."): weights[name].clone() for name in weights if ".layers.1." in name}
    save_file(weights, llama_folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="config.json leaves out 9 weights"):
        load_base(str(llama_folder))
    _edit_config(num_nextn_predict_layers=1)(llama_folder)
    with pytest.warns(UserWarning, match="9 weights are no part of this model"):
        load_base(str(llama_folder))


def test_weights_beside_the_model_are_warned_of(llama_folder: Path) -> None:
    weights = load_file(llama_folder / "model.safetensors") | {"v_head.summary.weight": torch.ones(1, 32)}
    save_file(weights, llama_folder / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match="1 weights are no part of this model and are not used, first v_head.summary"):
        load_base(str(llama_folder))


def test_an_index_of_the_one_file_that_is_there_is_no_second_model(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    index = {"weight_map": {"lm_head.weight": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    load_base(str(tmp_path))


def test_a_models_own_way_to_generate_is_left_out_also_of_trusted_code(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate" / "generate.py").write_text(
        "def generate(model, input_ids, **more):\n    return input_ids\n"
    )
    with pytest.warns(UserWarning, match="its own way to generate .* is left out"):
        hooked = load_model(tmp_path, trust_remote_code=True)
    prompts = make_prompts([Fact("France", "capital", ("Paris",))])
    usual = load_model(model, tokenizer=tokenizer)
    answers = [recall(each, prompts, max_new_tokens=4).outputs for each in (hooked, usual)]
    assert answers[0] == answers[1] != ("",)
