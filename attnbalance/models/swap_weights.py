"""The weights of a checkpoint copied into a model of the same shape that is already loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import GenerationConfig

from attnbalance.errors import ModelError
from attnbalance.files.seals import check_model
from attnbalance.models.config import load_config
from attnbalance.models.config_changes import differing_settings, settings_of
from attnbalance.models.forward import base_of
from attnbalance.models.hooked import HookedModel
from attnbalance.models.load_base import LOAD_ERRORS, brief, check_folder, check_weights, weight_files

ALONE = "measure it by itself with `attnbalance curve`"
IN_ONE = "read all in one dtype: --dtype float32, or dtype= in Python"


@dataclass(frozen=True)
class WeightFiles:
    """What the safetensors files of a folder hold, from their headers.

    files: the file of each tensor, by the tensor's name.
    kinds: dtype and shape of each tensor, by its name; the dtype is the one of loading, if that is named.
    dtype: the dtype that config.json names; None if it names none, and where the dtype of loading is named.
    settings: the settings of config.json that outputs depend on.
    tied: whether config.json ties the output embedding to the input's.
    """

    files: Mapping[str, Path]
    kinds: Mapping[str, tuple[str, tuple[int, ...]]]
    dtype: str | None
    settings: Mapping[str, object]
    tied: object


def open_weights(path: str, trust_remote_code: bool = False, read_in: str | torch.dtype | None = None) -> WeightFiles:
    """The headers of a model folder; raises `ModelError` for one that is half-written, damaged or holds no weights.

    read_in: the dtype in which the weights are read, whatever the one of the files; None for that of the files.
    """
    folder = Path(path)
    check_model(folder)
    check_folder(path)
    stored = weight_files(folder)
    gone = [file.name for file in stored if not file.is_file()] if stored else ["model.safetensors"]
    if gone:
        raise ModelError(f"{path} is incomplete: it holds no {gone[0]}; it may have been half-written. Remove it")
    files, kinds = dict[str, Path](), dict[str, tuple[str, tuple[int, ...]]]()
    try:
        config = load_config(path, trust_remote_code)
        for file in stored:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - not a mapping
                    part = opened.get_slice(key)
                    kept = part.get_dtype() if read_in is None else str(read_in)
                    files[key], kinds[key] = file, (kept, tuple(part.get_shape()))
    except ModelError:
        raise
    except LOAD_ERRORS as error:
        raise ModelError(f"cannot load model {path}: {brief(error)}") from error
    tied = getattr(config.get_text_config(), "tie_word_embeddings", None)
    dtype = None if config.dtype is None or read_in is not None else str(config.dtype)
    return WeightFiles(files, kinds, dtype, settings_of(config), tied)


def check_swappable(model: HookedModel, weights: WeightFiles) -> None:
    """Raise `ModelError` for a model into which weights cannot be copied by their names in the files.

    That is so for families whose weights transformers renames or joins on loading, for quantised models, for parts that
    are not in memory, and where files hold two values for one tied weight.
    """
    own, base = _tensors(model), base_of(model.model)
    if unknown := sorted(weights.kinds.keys() - own.keys()):
        raise ModelError(f"{model.name}: {unknown[0]} has another name once it is loaded, or none; {ALONE}")
    covered = {id(own[name]) for name in weights.kinds}
    if missing := sorted(name for name, tensor in own.items() if id(tensor) not in covered):
        raise ModelError(f"{model.name}: its files do not hold {missing[0]}, which the loaded model has; {ALONE}")
    if len(covered) < len(weights.kinds):
        raise ModelError(f"{model.name}: its files hold a tied weight more than once; {ALONE}")
    if getattr(base, "hf_quantizer", None) is not None or any(tensor.is_meta for tensor in own.values()):
        raise ModelError(f"{model.name} is quantised, or not wholly in memory; {ALONE}")
    for name, (_, shape) in weights.kinds.items():
        if tuple(own[name].shape) != shape:
            raise ModelError(f"{model.name}: {name} has another shape once it is loaded; {ALONE}")


@torch.no_grad()
def swap_weights(
    model: HookedModel,
    weights: WeightFiles,
    path: str,
    trust_remote_code: bool = False,
    read_in: str | torch.dtype | None = None,
) -> None:
    """Copy the weights of a checkpoint into a model; all is compared before anything is copied.

    model: the model, as loaded from the folder that `weights` describes (see `check_swappable`).
    weights: what the folder holds that the model was loaded from.
    path: the folder of the checkpoint.
    read_in: the dtype in which the model was asked to be loaded, and `weights` opened.

    A tensor is converted as on loading: each value is rounded to the dtype that it has in the loaded model. Raises
    `ModelError` for a checkpoint that is incomplete or differs in settings, or in the names, shapes or dtypes of its
    weights, and for weights that are not finite. The settings of generation become the checkpoint's.
    """
    new = open_weights(path, trust_remote_code, read_in)
    compare_weights(weights, new, path, model.name)
    own = _tensors(model)
    for file in sorted(set(new.files.values())):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                own[name].copy_(opened.get_tensor(name))
    base = base_of(model.model)
    check_weights(base.named_parameters(), path)
    base.generation_config = generation_settings(path, trust_remote_code)


def generation_settings(path: str, trust_remote_code: bool) -> GenerationConfig:
    """A checkpoint's own settings of generation, such as the tokens that end an answer, as transformers loads them."""
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:  # it has no generation_config.json, or a damaged one
        return GenerationConfig.from_model_config(load_config(path, trust_remote_code))


def _tensors(model: HookedModel) -> dict[str, Tensor]:
    """The parameters and saved buffers of a model by name; tied ones are one tensor under several names."""
    return dict(base_of(model.model).state_dict(keep_vars=True))


def compare_weights(old: WeightFiles, new: WeightFiles, path: str, other: str) -> None:
    """Refuse a checkpoint that differs from another in more than the values of its weights."""
    where = f"{path} must differ from {other} in the values of its weights only, but"
    if old.dtype != new.dtype:
        raise ModelError(f"{where} config.json names dtype {new.dtype}, not {old.dtype}; {IN_ONE}")
    if old.tied != new.tied:
        raise ModelError(f"{where} config.json has tie_word_embeddings {new.tied}, not {old.tied}; {ALONE}")
    if changed := differing_settings(old.settings, new.settings):
        name, (before, after) = next(iter(changed.items()))
        raise ModelError(f"{where} {name} is {after!r:.80}, not {before!r:.80}; {ALONE}")
    if old.kinds != new.kinds:
        names = sorted(
            name for name in old.kinds.keys() | new.kinds.keys() if old.kinds.get(name) != new.kinds.get(name)
        )
        kinds = [_words(weights.kinds.get(names[0])) for weights in (new, old)]
        shapes = [{name: shape for name, (_, shape) in weights.kinds.items()} for weights in (new, old)]
        remedy = IN_ONE if shapes[0] == shapes[1] else ALONE
        raise ModelError(f"{where} {names[0]} is {kinds[0]}, not {kinds[1]} ({len(names)} such weights); {remedy}")


def _words(kind: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if kind is None else f"{kind[0]} of shape {list(kind[1])}"
