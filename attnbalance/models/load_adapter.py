"""Adapters of peft from a folder or the Hub, refused on a base that they were not made for."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path

from torch.nn import Module

from attnbalance.errors import ModelError, shortened
from attnbalance.files.outputs import MARKER, provenance, read_json
from attnbalance.files.seals import check_model
from attnbalance.models.adapter_kinds import unreadable
from attnbalance.models.config import load_config
from attnbalance.models.config_changes import differing_settings, settings_of
from attnbalance.models.forward import base_of
from attnbalance.models.gguf import as_safetensors
from attnbalance.models.load_base import LOAD_ERRORS, brief, check_no_integers, check_weights


def split_adapter(path: str, adapter: str | Path | None) -> tuple[str, str | Path | None]:
    """The base and the adapter if `path` is itself the folder of an adapter; otherwise both as they are.

    For a GGUF file, the base is the folder that it was converted into (see `as_safetensors`). Raises `ModelError` for a
    local path that does not exist or is another file, for a folder that is both a model and an adapter, and for an
    adapter whose base is unknown, or another revision of a Hub model than "main".
    """
    path = as_safetensors(path)
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ModelError(
            f"model {path} is a file; name the folder that holds config.json and model.safetensors, or a .gguf file"
        )
    if not folder.exists() and (_looks_local(path) or (len(folder.parts) > 1 and folder.parent.is_dir())):
        start, plus, end = path.partition("+")
        if plus and Path(start).is_dir():  # as the command line writes it
            raise ModelError(f"no model folder at {path}; to put an adapter on {start}, pass adapter={end!r}")
        there = sorted(part.name for part in folder.parent.glob("[!.]*/")) if folder.parent.is_dir() else []
        raise ModelError(
            f"no model folder at {path}" + (f"; {folder.parent} holds {', '.join(there)}" if there else "")
        )
    if not (folder / "adapter_config.json").is_file():
        if adapter is not None:
            _check_revision(path, adapter)
        return path, adapter
    _refuse_both(folder)
    if adapter is not None:
        raise ModelError(f"{path} is an adapter; name its base model before the '+', not another adapter")
    base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        problem = f"names {base!r} as its base, not a folder or Hub id" if base else "does not say its base"
        raise ModelError(f"adapter {path} {problem}; write BASE+{path}")
    if _looks_local(base) and not Path(base).is_dir():
        raise ModelError(f"adapter {path} was made for {base}, which is not there; name the base: BASE+{path}")
    _check_revision(base, path)
    return base, path


def _check_revision(base: str, adapter: str | Path) -> None:
    """Raise `ModelError` for an adapter of another revision of a Hub model than "main", which would be loaded."""
    revision = read_json(Path(adapter) / "adapter_config.json").get("revision")
    if revision not in (None, "main") and not Path(base).is_dir():
        raise ModelError(
            f"adapter {adapter} was made for revision {revision!r} of {base}, and the revision 'main' would be loaded; "
            f"download that revision into a folder, and write FOLDER+{adapter}"
        )


def _refuse_both(folder: Path) -> None:
    """Raise `ModelError` for a folder that holds an adapter and whole weights: which of them is meant?

    transformers would put the adapter on the weights, also where it is merged into them already.
    """
    names = ("model", "model-*-of-*", "pytorch_model", "pytorch_model-*-of-*")  # not pytorch_model_fsdp
    whole = sorted(
        path.name for name in names for end in ("safetensors", "bin") for path in folder.glob(f"{name}.{end}")
    )
    if (folder / "adapter_config.json").is_file() and whole:
        raise ModelError(
            f"{folder} holds both an adapter (adapter_config.json) and a whole model ({whole[0]}), such as one merged "
            "with it; move one of them into a folder of its own"
        )


def load_adapter(base: Module, adapter: str, base_path: str) -> Module:
    """The base with an adapter on top, unmerged; `base_path` names the base in messages.

    Raises `ModelError` for an adapter that is missing, damaged, pickled, not a change of weights, or made for another
    base; `OutputError` for one of ours of which a file was changed (see `check_model`).
    """
    check_model(Path(adapter))
    made_for = check_adapter(adapter)
    check_base(base, adapter, base_path, made_for)
    return put_on(base, adapter, base_path)


def put_on(base: Module, adapter: str, base_path: str) -> Module:
    """The base with an adapter that was checked.

    Raises `ModelError` for weights that are missing, fit nothing, are not finite or too large.
    """
    from peft import PeftModel, load_peft_weights, set_peft_model_state_dict

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = PeftModel.from_pretrained(base, adapter)  # pyright: ignore[reportArgumentType]
            # again, since the line above does not say what it left out
            weights = load_peft_weights(adapter, device="cpu")
            left_out = set_peft_model_state_dict(model, weights).unexpected_keys
    except LOAD_ERRORS as error:
        raise ModelError(f"adapter {adapter} does not fit {base_path}: {brief(error)}") from error
    check_weights(weights.items(), f"adapter {adapter}")
    if left_out:
        raise ModelError(
            f"adapter {adapter} holds {len(left_out)} weights that {base_path} has no layer for, first {left_out[0]} "
            f"(made for {check_adapter(adapter)})"
        )
    if any("missing adapter keys" in str(warning.message).lower() for warning in caught):
        raise ModelError(
            f"adapter {adapter} lacks weights for some of its target modules in {base_path} "
            f"(made for {check_adapter(adapter)})"
        )
    return model


def check_adapter(adapter: str) -> str | None:
    """The base that an adapter names, from its files, before any weights are loaded.

    Raises `ModelError` for an adapter that is missing, damaged, pickled, or not a change of weights.
    """
    from peft import PeftConfig

    folder = Path(adapter)
    _refuse_both(folder)
    if folder.is_dir() and not (folder / "adapter_model.safetensors").is_file():
        raise ModelError(f"adapter {adapter} holds no adapter_model.safetensors (pickled adapters are not read)")
    check_no_integers(folder / "adapter_model.safetensors", lambda name: "lora_" in name)
    if not folder.is_dir() and (_looks_local(adapter) or "/" not in adapter):
        raise ModelError(f"no adapter folder at {adapter}")
    try:
        config = PeftConfig.from_pretrained(adapter)
    except LOAD_ERRORS as error:
        raise ModelError(f"cannot load adapter {adapter}: {brief(error)}") from error
    if reason := unreadable(config):
        raise ModelError(f"adapter {adapter} {reason}")
    start = str(getattr(config, "init_lora_weights", ""))
    if start.startswith("pissa_niter"):
        raise ModelError(
            f"adapter {adapter} was made with init_lora_weights={start!r}, which peft draws at random again at every "
            "load, on another base each time; save it as plain LoRA (peft: save_pretrained with "
            "path_initial_model_for_weight_conversion)"
        )
    base = config.base_model_name_or_path
    if base is not None and not isinstance(base, str):
        raise ModelError(f"adapter {adapter} must name its base as text in adapter_config.json, got {base!r}")
    return base


def _looks_local(path: str) -> bool:
    """Whether a name cannot be a Hub id, which is NAME or OWNER/NAME."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def check_base(base: Module, adapter: str, base_path: str, made_for: str | None) -> None:
    """Refuse a base that differs, in weights or settings, from the one that the adapter's run recorded.

    The base must not yet be wrapped by peft, which copies parameters.
    """
    from attnbalance.models.fingerprint import has_fingerprint

    record = read_json(Path(adapter) / MARKER)
    expected = record.get("base_fingerprint")
    if expected is None:
        _compare_with_named(adapter, base_path, made_for)
        return
    same = has_fingerprint(base, expected) if isinstance(expected, dict) else None
    if same is False:
        raise ModelError(
            f"adapter {adapter} was made for another base ({made_for}): the weights of {base_path} differ from its"
        )
    if same is None:
        _warn(
            f"whether {base_path} is the base of adapter {adapter} could not be checked: the fingerprint in its "
            f"{MARKER} is of another version or of another 16-bit dtype"
        )
    if isinstance(recorded := record.get("base_settings"), dict):
        own = settings_of(base_of(base).config)
        if record.get("versions") != provenance()["versions"]:  # other versions may have more settings, or fewer
            shared = own.keys() & recorded.keys()
            own, recorded = ({name: settings[name] for name in shared} for settings in (own, recorded))
        _check_settings(adapter, base_path, made_for, recorded, own)


def _compare_with_named(adapter: str, base_path: str, made_for: str | None) -> None:
    """Compare a base with the one that an adapter without a record of ours names.

    Refuse other settings. Warn of other files or, where either is no local folder, of another last part of the name.
    """
    from attnbalance.models.fingerprint import files_fingerprint

    paths = (made_for or base_path, base_path)
    alike = Path(paths[0]).name == Path(paths[1]).name
    if all(map(os.path.isdir, paths)) and not os.path.samefile(*paths):
        alike = files_fingerprint(paths[0]) == files_fingerprint(paths[1])
        try:
            then, now = (settings_of(load_config(path)) for path in paths)
        except LOAD_ERRORS:  # the folder that the adapter names holds no model any more
            then, now = {}, {}
        _check_settings(adapter, base_path, made_for, then, now)
    if not alike:
        _warn(f"adapter {adapter} was made for {made_for} and is loaded on {base_path}")


def _check_settings(
    adapter: str, base_path: str, made_for: str | None, then: Mapping[str, object], now: Mapping[str, object]
) -> None:
    """Refuse a base whose settings differ from those that an adapter was made with."""
    changed = [
        f"{name} was {before!r:.80}, is {after!r:.80}"
        for name, (before, after) in differing_settings(then, now).items()
    ]
    if changed:
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        raise ModelError(
            f"adapter {adapter} was made for a base with other settings ({made_for}) than {base_path}: "
            f"{'; '.join(changed[:5])}{more}. Restore config.json, or name the base that it was made for"
        )


def _warn(message: str) -> None:
    warnings.warn(shortened(message), stacklevel=6)
