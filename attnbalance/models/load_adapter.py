"""Adapters of peft from a folder or the Hub, refused on a base that they were not made for."""

from __future__ import annotations

import warnings
from pathlib import Path

from torch.nn import Module

from attnbalance.errors import ModelError, shortened
from attnbalance.files.outputs import MARKER, read_json
from attnbalance.models.gguf import as_safetensors
from attnbalance.models.load_base import LOAD_ERRORS, brief


def split_adapter(path: str, adapter: str | Path | None) -> tuple[str, str | Path | None]:
    """The base and the adapter if `path` is itself the folder of an adapter; otherwise both as they are.

    For a GGUF file, the base is the folder that it was converted into (see `as_safetensors`). Raises `ModelError` for a
    local path that does not exist or is another file, and for an adapter whose base is unknown.
    """
    path = as_safetensors(path)
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ModelError(
            f"model {path} is a file; name the folder that holds config.json and model.safetensors, or a .gguf file"
        )
    if not folder.exists() and _looks_local(path):
        raise ModelError(f"no model folder at {path}")
    if not (folder / "adapter_config.json").is_file() or (folder / "config.json").is_file():
        return path, adapter
    if adapter is not None:
        raise ModelError(f"{path} is an adapter; name its base model before the '+', not another adapter")
    base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        problem = f"names {base!r} as its base, not a folder or Hub id" if base else "does not say its base"
        raise ModelError(f"adapter {path} {problem}; write BASE+{path}")
    if _looks_local(base) and not Path(base).is_dir():
        raise ModelError(f"adapter {path} was made for {base}, which is not there; name the base: BASE+{path}")
    return base, path


def load_adapter(base: Module, adapter: str, base_path: str) -> Module:
    """The base with an adapter on top, unmerged; `base_path` names the base in messages.

    Raises `ModelError` for an adapter that is missing, damaged, pickled, not a change of weights, or made for another
    base.
    """
    from peft import PeftModel, load_peft_weights, set_peft_model_state_dict

    made_for = check_adapter(adapter)
    _check_base(base, adapter, base_path, made_for)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = PeftModel.from_pretrained(base, adapter)  # pyright: ignore[reportArgumentType]
            # again, since the line above does not say what it left out
            left_out = set_peft_model_state_dict(model, load_peft_weights(adapter, device="cpu")).unexpected_keys
    except LOAD_ERRORS as error:
        raise ModelError(f"adapter {adapter} does not fit {base_path}: {brief(error)}") from error
    if left_out:
        raise ModelError(
            f"adapter {adapter} holds {len(left_out)} weights that {base_path} has no layer for, first {left_out[0]} "
            f"(made for {made_for})"
        )
    if any("missing adapter keys" in str(warning.message).lower() for warning in caught):
        raise ModelError(
            f"adapter {adapter} lacks weights for some of its target modules in {base_path} (made for {made_for})"
        )
    return model


def check_adapter(adapter: str) -> str | None:
    """The base that an adapter names, from its files, before any weights are loaded.

    Raises `ModelError` for an adapter that is missing, damaged, pickled, or not a change of weights.
    """
    from peft import PeftConfig

    folder = Path(adapter)
    if folder.is_dir() and not (folder / "adapter_model.safetensors").is_file():
        raise ModelError(f"adapter {adapter} holds no adapter_model.safetensors (pickled adapters are not read)")
    if not folder.is_dir() and (_looks_local(adapter) or "/" not in adapter):
        raise ModelError(f"no adapter folder at {adapter}")
    try:
        config = PeftConfig.from_pretrained(adapter)
    except LOAD_ERRORS as error:
        raise ModelError(f"cannot load adapter {adapter}: {brief(error)}") from error
    if config.is_prompt_learning:
        raise ModelError(
            f"adapter {adapter} is of type {config.peft_type}, which puts tokens before the prompt; only adapters "
            "that change weights (such as LoRA) can be read"
        )
    base = config.base_model_name_or_path
    if base is not None and not isinstance(base, str):
        raise ModelError(f"adapter {adapter} must name its base as text in adapter_config.json, got {base!r}")
    return base


def _looks_local(path: str) -> bool:
    """Whether a name cannot be a Hub id, which is NAME or OWNER/NAME."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def _check_base(base: Module, adapter: str, base_path: str, made_for: str | None) -> None:
    """Refuse a base whose weights are not those that the adapter's run recorded; warn if only the name differs.

    The base must not yet be wrapped by peft, which copies parameters.
    """
    from attnbalance.models.fingerprint import has_fingerprint

    expected = read_json(Path(adapter) / MARKER).get("base_fingerprint")
    if expected is None:
        if made_for and made_for != base_path and Path(made_for).name != Path(base_path).name:
            warnings.warn(
                shortened(f"adapter {adapter} was made for {made_for} and is loaded on {base_path}"), stacklevel=4
            )
    elif (same := has_fingerprint(base, expected) if isinstance(expected, dict) else None) is False:
        raise ModelError(
            f"adapter {adapter} was made for another base ({made_for}): the weights of {base_path} differ from its"
        )
    elif same is None:
        warnings.warn(
            shortened(
                f"whether {base_path} is the base of adapter {adapter} could not be checked: the fingerprint in its "
                f"{MARKER} is of another version or of another 16-bit dtype"
            ),
            stacklevel=4,
        )
