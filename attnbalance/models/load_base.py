"""Base models from a folder or the Hub: safetensors only, with errors that say what is wrong and what to do."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnbalance.errors import ModelError
from attnbalance.files.outputs import read_json
from attnbalance.files.seals import check_model
from attnbalance.models.config import load_config

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes that a model may be loaded in."""

LOAD_ERRORS = (Exception,)
"""What transformers, tokenizers and peft raise for files that they cannot load: for damaged ones, any kind."""

WEIGHTS = ("weight", "bias", "sinks")
"""How names of weights end; names of buffers that old checkpoints hold end otherwise, or in the name of a part."""

LARGEST_WEIGHT = 1e18
"""Above this, squares in norms and products of weights overflow float32 (3.4e38)."""


def load_base(
    path: str,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    device_map: str | None = None,
) -> PreTrainedModel:
    """The causal language model of a folder or Hub id, as transformers loads it, from safetensors alone.

    `dtype` defaults to the checkpoint's. Raises `ModelError` for a folder without a config or with pickled weights
    only, for weights that are damaged, missing, of another shape, integers without a quantisation or left
    out by the config, and for an encoder-decoder model; `OutputError` for a model of ours of which a file
    was changed (see `check_model`).
    """
    check_model(Path(path))
    check_folder(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, report = AutoModelForCausalLM.from_pretrained(  # pyright: ignore
                path,
                config=load_config(path, trust_remote_code),
                dtype="auto" if dtype is None else dtype_of(dtype),
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                device_map=device_map,
            )
    except ModelError:
        raise
    except LOAD_ERRORS as error:
        absent = "" if Path(path).exists() else "there is no such folder here, and from the Hub: "
        raise ModelError(f"cannot load model {path}: {absent}{brief(error)}") from error
    if "generate" in vars(model):  # of custom_generate/, which trusted code may bring
        del model.generate
        warnings.warn(f"{path}: its own way to generate (custom_generate) is left out", stacklevel=3)
    missing = sorted(report["missing_keys"])
    if missing or report["mismatched_keys"]:
        names = missing or sorted(str(key) for key in report["mismatched_keys"])
        raise ModelError(
            f"{path}: {len(names)} weights are missing or have another shape than config.json says, first {names[0]}"
        )
    if getattr(model, "peft_config", None):
        raise ModelError(
            f"{path} holds both a whole model and an adapter, which transformers put on top; name a repository or "
            "folder that holds one of them"
        )
    _check_quantisation(model, path)
    _check_no_integers(model, path)
    _check_left_out(model, sorted(report["unexpected_keys"]), path)
    check_weights(model.named_parameters(), path)
    return model


def dtype_of(dtype: str | torch.dtype) -> torch.dtype:
    """A dtype by its name or itself; raises `ModelError` unless it is among `DTYPES`.

    >>> dtype_of("bfloat16")
    torch.bfloat16
    """
    known = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if known not in DTYPES:
        raise ModelError(f"`dtype` must be float32, bfloat16, float16 or float64, got {dtype!r}")
    return known


def brief(error: BaseException) -> str:
    """The kind of an error that another library raised and the beginning of its message, on one line.

    >>> brief(ValueError("bad header"))
    'ValueError: bad header'
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300] or 'no message'}"


def check_config(path: str) -> None:
    """Raise `ModelError` for a folder without a configuration; a Hub id passes."""
    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        inner = sorted(part.name for part in folder.glob("checkpoint-*"))
        hint = f"; name one of the checkpoints in it, such as {folder / inner[0]}" if inner else ""
        raise ModelError(f"{path} holds no config.json: not a Hugging Face model folder{hint}")


def check_folder(path: str) -> None:
    """Raise `ModelError` for a folder that holds no decoder-only model in safetensors; a Hub id passes."""
    check_config(path)
    folder = Path(path)
    if not folder.is_dir():
        return
    if read_json(folder / "config.json").get("is_encoder_decoder"):
        raise ModelError(f"{path} is an encoder-decoder model; only decoder-only causal language models can be read")
    if not any(folder.glob("*.safetensors")):
        pickles = [p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern)]
        held = f"only pickled weights ({pickles[0]}), which can run code when read" if pickles else "no weights"
        raise ModelError(f"{path} holds {held}; save it with save_pretrained(..., safe_serialization=True)")
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    shards = read_json(index).get("weight_map") if weight_files(folder) == [single] and single.is_file() else None
    others = sorted({str(name) for name in shards.values()} - {single.name}) if isinstance(shards, dict) else []
    if others and (folder / others[0]).is_file():
        raise ModelError(
            f"{path} holds {single.name}, which would be read, and an index of other weights, first {others[0]}: "
            "remove those that are old"
        )


def _check_left_out(model: PreTrainedModel, names: Sequence[str], path: str) -> None:
    """Refuse weights in the file for which config.json has no place in the model; warn of parts beside the model.

    No place: another layer like those there are, a part of a layer, or a bias of a part that is there. Layers that
    predict further tokens are beside the model, as the configuration counts them.
    """
    config = model.config.get_text_config()
    depth, further = getattr(config, "num_hidden_layers", 0), getattr(config, "num_nextn_predict_layers", None) or 0
    parts = dict(model.named_modules())
    layers = set(map(_any_layer, parts))
    for name in names:
        part, _, leaf = name.rpartition(".")
        number = next((int(piece) for piece in name.split(".") if piece.isdigit()), -1)
        if depth <= number < depth + further:
            continue
        within = part not in parts and leaf in WEIGHTS and re.search(r"\.\d+(\.|$)", _nearest(part, parts))
        if hasattr(parts.get(part), "weight") or (part not in parts and _any_layer(part) in layers) or within:
            raise ModelError(
                f"{path}: config.json leaves out {len(names)} weights that the files hold, such as {name}; put the "
                "configuration right that these weights were saved with, or save the model anew"
            )
    if names:
        warnings.warn(
            f"{path}: {len(names)} weights are no part of this model and are not used, first {names[0]}", stacklevel=4
        )


def _nearest(part: str, parts: Collection[str]) -> str:
    """The innermost part around a part that is not there."""
    while part and part not in parts:
        part = part.rpartition(".")[0]
    return part


def _any_layer(part: str) -> str:
    """The name of a part without its numbers: "layers.*.mlp" for "layers.1.mlp"."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", part)


def _check_quantisation(model: PreTrainedModel, path: str) -> None:
    """Refuse a quantisation that transformers does not know, and would ignore with no more than a log line."""
    parts = (model.config, model.config.get_text_config())
    named = [own for part in parts if (own := getattr(part, "quantization_config", None)) is not None]
    config = next(iter(named), None)
    if config is not None and getattr(model, "hf_quantizer", None) is None:
        method = config.get("quant_method") if isinstance(config, dict) else config
        raise ModelError(
            f"{path}: transformers does not know the quantisation {method!r} that config.json names; save the model "
            "with one that it knows, or without quantization_config"
        )


def _check_no_integers(model: PreTrainedModel, path: str) -> None:
    """Refuse integer weights that no quantisation explains; of a model from the Hub, in its files in the cache."""
    if getattr(model, "hf_quantizer", None) is not None:
        return
    folder = Path(path)
    if not folder.is_dir():
        cached = try_to_load_from_cache(path, "config.json")
        if not isinstance(cached, str):
            return
        folder = Path(cached).parent
    parameters = {name for name, _ in model.named_parameters()}
    for file in weight_files(folder):
        check_no_integers(
            file,
            lambda name: name.endswith(".weight") or bool({name, f"{model.base_model_prefix}.{name}"} & parameters),
        )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files from which transformers loads a folder's weights, there or not.

    config.json may name one or an index (`transformers_weights`); else it is model.safetensors, or the shards of
    its index if there is no such file.
    """
    named = read_json(folder / "config.json").get("transformers_weights")
    first = folder / (named if isinstance(named, str) else "model.safetensors")
    index = first if first.name.endswith(".index.json") else folder / "model.safetensors.index.json"
    if first != index and (isinstance(named, str) or first.is_file() or not index.is_file()):
        return [first]
    shards = read_json(index).get("weight_map")
    return sorted({folder / str(name) for name in shards.values()}) if isinstance(shards, dict) else []


def check_no_integers(file: Path, is_weight: Callable[[str], bool]) -> None:
    """Refuse a file that stores weights as integers or booleans: they would be taken as they are, without a scale.

    A file that cannot be read is left to whoever loads it.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            dtypes = {name: opened.get_slice(name).get_dtype() for name in opened.keys() if is_weight(name)}  # noqa: SIM118
    except LOAD_ERRORS:
        return
    for name, dtype in dtypes.items():
        if dtype == "BOOL" or dtype[0] in "IU":
            raise ModelError(
                f"{file}: {name} is stored as {dtype}, and no quantisation is named that scales it; save weights in "
                "floating point, or with their quantization_config"
            )


def check_weights(weights: Iterable[tuple[str, torch.Tensor]], path: str) -> None:
    """Refuse weights that are not finite, or so large that what is computed from them would not be."""
    for name, parameter in weights:
        if not parameter.is_meta and parameter.numel() and parameter.dtype in DTYPES:
            low, high = (float(end) for end in torch.aminmax(parameter.detach()))
            if not max(-low, high) <= LARGEST_WEIGHT:
                raise ModelError(
                    f"{path}: weights of {name} must be finite and at most {LARGEST_WEIGHT:.0e}, got {low:g} to "
                    f"{high:g}; the checkpoint is damaged"
                )
