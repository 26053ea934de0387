"""Copying a checkpoint's weights into a loaded model: exact, or refused with what differs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import tiny_config, tiny_model, tiny_prompts, tiny_tokenizer

from attnbalance import load_model, read_attention
from attnbalance.errors import ModelError
from attnbalance.models.fingerprint import fingerprint
from attnbalance.models.load_checkpoints import load_checkpoints
from attnbalance.models.swap_weights import check_swappable, open_weights, swap_weights

WEIGHTS = "model.safetensors"


def copy_of(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target))


def configured(folder: Path, **settings: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def truncate(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-64])


def lose_a_shard(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    next(folder.glob("model-00002*")).unlink()


def resize(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(430)
    model.save_pretrained(folder)


def other_family(folder: Path) -> None:
    shutil.rmtree(folder)
    tiny_model("qwen2").save_pretrained(folder)


def other_dtype(folder: Path) -> None:
    transformers.AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)


def one_in_half(folder: Path) -> None:
    rewritten(folder, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].half()}))


DAMAGES: dict[Callable[[Path], None], str] = {
    truncate: "cannot load model .*other: SafetensorError",
    lose_a_shard: "other is incomplete: it holds no model-00002",
    resize: r"vocab_size is 430, not 420; measure it by itself with `attnbalance curve`",
    other_family: "must differ from .* in the values of its weights only",
    other_dtype: "config.json names dtype torch.bfloat16",
    one_in_half: r"norm.weight is F16 of shape \[32\], not F32 of shape \[32\] \(1 such weights\); read all",
    lambda folder: configured(folder, rms_norm_eps=0.1): "rms_norm_eps is 0.1, not 1e-06",
    lambda folder: rewritten(folder, lambda tensors: tensors.pop("model.norm.weight")): "model.norm.weight is absent",
    lambda folder: (folder / WEIGHTS).unlink(): "holds no weights",
    lambda folder: (folder / "config.json").unlink(): "holds no config.json",
}


@pytest.mark.parametrize("index", [False, True])
def test_the_weights_are_those_of_the_file_that_config_names(checkpoint: Path, tmp_path: Path, index: bool) -> None:
    """Beside it lies a model.safetensors of other numbers, which transformers does not load."""
    other = copy_of(checkpoint, tmp_path / "other")
    names = list(load_file(other / WEIGHTS))
    rewritten(other, lambda tensors: tensors["model.norm.weight"].mul_(2))
    (other / WEIGHTS).rename(other / "mine.safetensors")
    (other / "mine.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "mine.safetensors")})
    )
    configured(other, transformers_weights="mine.safetensors.index.json" if index else "mine.safetensors")
    shutil.copy(checkpoint / WEIGHTS, other / WEIGHTS)
    model = load_model(checkpoint)
    swap_weights(model, open_weights(str(other)), str(other))
    expected = transformers.AutoModelForCausalLM.from_pretrained(other).model.norm.weight
    assert torch.equal(model.model.model.norm.weight, expected)
    assert not torch.equal(expected, load_file(checkpoint / WEIGHTS)["model.norm.weight"])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_differs_in_more_than_values_is_refused_and_nothing_is_copied(
    checkpoint: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    other = copy_of(checkpoint, tmp_path / "other")
    rewritten(other, lambda tensors: tensors.update({name: 2 * values for name, values in tensors.items()}))
    damage(other)
    model, before = load_model(checkpoint), fingerprint(load_model(checkpoint).model)
    with pytest.raises(ModelError, match=DAMAGES[damage]):
        swap_weights(model, open_weights(str(checkpoint)), str(other))
    assert fingerprint(model.model) == before


def test_weights_that_are_not_numbers_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = copy_of(checkpoint, tmp_path / "other")
    rewritten(other, lambda tensors: tensors["model.norm.weight"].fill_(torch.nan))
    with pytest.raises(ModelError, match=r"model.norm.weight must be finite"):
        swap_weights(load_model(checkpoint), open_weights(str(checkpoint)), str(other))


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_tied_embeddings_stay_tied_and_are_read_as_on_loading(family: str, tmp_path: Path) -> None:
    for i in range(2):
        torch.manual_seed(i)
        model = transformers.AutoModelForCausalLM.from_config(tiny_config(family, tie_word_embeddings=True))
        model.save_pretrained(tmp_path / str(i))
        tiny_tokenizer("bos").save_pretrained(tmp_path / str(i))
    assert not any("lm_head" in name for name in load_file(tmp_path / "0" / WEIGHTS))
    for model in load_checkpoints([(str(tmp_path / str(i)), None) for i in range(2)]):
        alone = load_model(model.name)
        assert torch.equal(read_attention(model, tiny_prompts()).values, read_attention(alone, tiny_prompts()).values)
        own = model.model
        assert own.get_output_embeddings().weight is own.get_input_embeddings().weight  # pyright: ignore
        ids = torch.arange(9)[None]
        assert torch.equal(own(ids).logits, alone.model(ids).logits)


def test_a_model_whose_weights_have_other_names_in_its_files_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = copy_of(checkpoint, tmp_path / "other")
    rewritten(other, lambda tensors: tensors.update({"model.old.inv_freq": torch.ones(2)}))
    with pytest.raises(ModelError, match=r"model.old.inv_freq has another name once it is loaded, or none"):
        check_swappable(load_model(checkpoint), open_weights(str(other)))


def test_a_model_with_more_weights_than_its_files_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = copy_of(checkpoint, tmp_path / "other")
    rewritten(other, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ModelError, match=r"files do not hold model.norm.weight"):
        check_swappable(load_model(checkpoint), open_weights(str(other)))


def test_two_values_for_one_tied_weight_are_refused(tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(tiny_config("qwen2", tie_word_embeddings=True)).save_pretrained(
        tmp_path / "tied"
    )
    tiny_tokenizer("bos").save_pretrained(tmp_path / "tied")
    model = load_model(tmp_path / "tied")
    rewritten(
        tmp_path / "tied",
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}),
    )
    with pytest.raises(ModelError, match="files hold a tied weight more than once"):
        check_swappable(model, open_weights(str(tmp_path / "tied")))


def test_a_weight_that_has_another_shape_in_the_model_is_refused(checkpoint: Path) -> None:
    weights = open_weights(str(checkpoint))
    turned = replace(weights, kinds={**weights.kinds, "lm_head.weight": ("F32", (32, 420))})
    with pytest.raises(ModelError, match=r"lm_head.weight has another shape once it is loaded"):
        check_swappable(load_model(checkpoint), turned)


def test_a_quantised_model_is_refused(checkpoint: Path) -> None:
    model = load_model(checkpoint)
    model.model.hf_quantizer = object()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ModelError, match="is quantised, or not wholly in memory"):
        check_swappable(model, open_weights(str(checkpoint)))
