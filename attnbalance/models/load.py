"""Loading models, tokenizers and adapters from a local path or the Hub, with errors that say what to do."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch.nn import Module
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from attnbalance.errors import ModelError
from attnbalance.models.forward import position_limit
from attnbalance.models.hooked import HookedModel, hook
from attnbalance.outputs import MARKER, read_json

if TYPE_CHECKING:
    from peft import PeftModel

LOAD_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ImportError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
)
"""What transformers and peft raise for files that they cannot load."""


def load_model(
    model: str | Path | PreTrainedModel | PeftModel,
    *,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    adapter: str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
) -> HookedModel:
    """A model whose attention rows can be read, proven on the spot against its family's eager attention.

    `model` is a local folder, a Hub id, a folder with a peft adapter (its base is loaded too) or a model object, which
    is used in place: its attention implementation is set to ours, which gives the outputs of SDPA. `tokenizer` defaults
    to the model's own, and must be given with an object. `adapter` is a peft folder or Hub id, loaded on top and left
    unmerged. `dtype` ("float32", "bfloat16", ...) defaults to the checkpoint's, `device` to "cuda" where there is one;
    device "auto" spreads the layers over all GPUs. Only safetensors are read.

    Raises `ModelError` for anything that cannot be loaded, is not a causal language model, lacks weights, gives
    logits that are not numbers, or whose rows differ from those of eager attention.
    """
    name = str(model) if isinstance(model, str | Path) else type(model).__name__
    spread = str(device) == "auto"
    if isinstance(model, str | Path):
        base, adapter = _split_adapter(str(model), adapter)
        loaded: Module = load_base(base, dtype, trust_remote_code, "auto" if spread else None)
        tokenizer = tokenizer if tokenizer is not None else base
    else:
        base, loaded = name, model if dtype is None else model.to(dtype=_dtype(dtype))  # pyright: ignore
    if adapter is not None:
        loaded = _load_adapter(loaded, str(adapter), base)
        name = f"{base}+{adapter}"
    if tokenizer is None:
        raise ModelError(
            f"a {name} object comes without a tokenizer: pass tokenizer= (an object, a folder or a Hub id)"
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        tokenizer = load_tokenizer(str(tokenizer), trust_remote_code)
    if not spread and (device is not None or isinstance(model, str | Path)):
        loaded = _moved(loaded, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return hook(loaded, tokenizer, name)


def load_base(
    path: str,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    device_map: str | None = None,
) -> PreTrainedModel:
    """The causal language model of a folder or Hub id, as transformers loads it, from safetensors alone.

    `dtype` defaults to the checkpoint's. Raises `ModelError` for a folder without a config or with pickled weights
    only, for weights that are damaged, missing or of another shape, and for an encoder-decoder model.
    """
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{path} holds no config.json: not a Hugging Face model folder")
        if read_json(folder / "config.json").get("is_encoder_decoder"):
            raise ModelError(
                f"{path} is an encoder-decoder model; only decoder-only causal language models can be read"
            )
        if not any(folder.glob("*.safetensors")):
            pickles = [p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern)]
            held = f"only pickled weights ({pickles[0]}), which can run code when read" if pickles else "no weights"
            raise ModelError(f"{path} holds {held}; save it with save_pretrained(..., safe_serialization=True)")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, report = AutoModelForCausalLM.from_pretrained(  # pyright: ignore
                path,
                dtype="auto" if dtype is None else _dtype(dtype),
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                device_map=device_map,
            )
    except LOAD_ERRORS as error:
        raise ModelError(f"cannot load model {path}: {brief(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing or report["mismatched_keys"]:
        what = missing or sorted(str(key) for key in report["mismatched_keys"])
        raise ModelError(
            f"{path}: {len(what)} weights are missing or have another shape than config.json says, first {what[0]}"
        )
    return model


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub id; raises `ModelError` where there is none that can be loaded."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except LOAD_ERRORS as error:
        raise ModelError(f"cannot load a tokenizer from {path}: {brief(error)}; name one with --tokenizer") from error


def load_limits(
    model: str, tokenizer: str | None = None, trust_remote_code: bool = False
) -> tuple[PreTrainedTokenizerBase, int | None]:
    """The tokenizer of a model that is not loaded, and its longest input in tokens (None for no limit).

    `model` may be the folder of an adapter, whose base is meant. Raises `ModelError` where either cannot be loaded.
    """
    base, _ = _split_adapter(model, None)
    try:
        config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
    except LOAD_ERRORS as error:
        raise ModelError(f"cannot load model {base}: {brief(error)}") from error
    return load_tokenizer(tokenizer or base, trust_remote_code), position_limit(config)


def brief(error: BaseException) -> str:
    """The kind of an error that another library raised and the beginning of its message, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300] or 'no message'}"


def _split_adapter(path: str, adapter: str | Path | None) -> tuple[str, str | Path | None]:
    """The base and the adapter, where `path` is itself an adapter's folder; else both as they are."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ModelError(f"model {path} is a file; name the folder that holds config.json and model.safetensors")
    if not folder.exists() and _looks_local(path):
        raise ModelError(f"no model folder at {path}")
    if not (folder / "adapter_config.json").is_file() or (folder / "config.json").is_file():
        return path, adapter
    if adapter is not None:
        raise ModelError(f"{path} is an adapter; name its base model before the '+', not another adapter")
    base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    if not base:
        raise ModelError(f"adapter {path} does not say which base it was made for; write BASE+{path}")
    if _looks_local(str(base)) and not Path(base).is_dir():
        raise ModelError(f"adapter {path} was made for {base}, which is not there; name the base: BASE+{path}")
    return str(base), path


def _looks_local(path: str) -> bool:
    """Whether a name cannot be a Hub id, which is NAME or OWNER/NAME."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def _moved(model: Module, device: str | torch.device) -> Module:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:  # an unknown device, one that is not there, or one that is full
        raise ModelError(f"cannot put the model on device {str(device)!r}: {brief(error)}") from error


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ModelError(f"dtype must be float32, bfloat16, float16 or float64, got {dtype!r}")
    return found


def _load_adapter(base: Module, adapter: str, base_path: str) -> Module:
    from peft import PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict

    folder = Path(adapter)
    if folder.is_dir() and not (folder / "adapter_model.safetensors").is_file():
        raise ModelError(f"adapter {adapter} holds no adapter_model.safetensors (pickled adapters are not read)")
    if not folder.is_dir() and (_looks_local(adapter) or "/" not in adapter):
        raise ModelError(f"no adapter folder at {adapter}")
    try:
        made_for = PeftConfig.from_pretrained(adapter).base_model_name_or_path
        _check_base(base, adapter, base_path, made_for)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = PeftModel.from_pretrained(base, adapter)  # pyright: ignore[reportArgumentType]
            # again, since the line above does not tell what it left out
            left_out = set_peft_model_state_dict(model, load_peft_weights(adapter, device="cpu")).unexpected_keys
    except LOAD_ERRORS as error:
        raise ModelError(f"adapter {adapter} does not fit {base_path}: {brief(error)}") from error
    if left_out:
        raise ModelError(
            f"adapter {adapter} holds {len(left_out)} weights that {base_path} has no place for, first {left_out[0]} "
            f"(made for {made_for})"
        )
    if any("missing adapter keys" in str(warning.message).lower() for warning in said):
        raise ModelError(
            f"adapter {adapter} lacks weights for some of its target modules in {base_path} (made for {made_for})"
        )
    return model


def _check_base(base: Module, adapter: str, base_path: str, made_for: str | None) -> None:
    """Refuse a base whose weights are not those that the adapter's run recorded; warn where only the name differs.

    Asked of the base alone, before peft wraps or copies any of its parameters.
    """
    from attnbalance.models.fingerprint import fingerprint, same_weights

    expected = read_json(Path(adapter) / MARKER).get("base_fingerprint")
    if expected is None:
        if made_for and made_for != base_path and Path(made_for).name != Path(base_path).name:
            warnings.warn(f"adapter {adapter} was made for {made_for} and is loaded on {base_path}", stacklevel=4)
    elif not same_weights(expected, fingerprint(base)):
        raise ModelError(
            f"adapter {adapter} was made for another base ({made_for}): the weights of {base_path} differ from its"
        )
