"""Loading a model, its tokenizer and its adapter from a local path or the Hub, ready to be read."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch.nn import Module
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from attnbalance.arguments import expects
from attnbalance.data.prompt_sets import is_same
from attnbalance.errors import ModelError
from attnbalance.models.config import load_config
from attnbalance.models.fingerprint import adapter_states, hub_file, quick_sums
from attnbalance.models.forward import base_of, position_limit
from attnbalance.models.hooked import READ, HookedModel, hook
from attnbalance.models.load_adapter import check_adapter, load_adapter, split_adapter
from attnbalance.models.load_base import LOAD_ERRORS, brief, check_config, dtype_of, load_base

if TYPE_CHECKING:
    from peft import PeftModel


@expects(model=(str, Path, Module), tokenizer=(str, Path, PreTrainedTokenizerBase, NoneType))
def load_model(
    model: str | Path | PreTrainedModel | PeftModel,
    *,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    adapter: str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
) -> HookedModel:
    """A model whose attention rows can be read, checked against its family's eager attention on loading.

    Only safetensors are read. Raises `ModelError` for anything that cannot be loaded, is not a causal language model,
    lacks weights, gives logits that are not numbers, or whose rows differ from those of eager attention; `OutputError`
    for a model of ours of which a file was changed (see `check_model`).

    Arguments:
        model: a local folder, a Hub id, a folder with a peft adapter (its base is loaded too), a GGUF file (converted
            once into a folder beside it), or a model object. An object is used in place: its attention implementation
            is set to ours, which gives the outputs of SDPA (and, like SDPA, no maps for `output_attentions`). Training
            it, changing its adapters or hooking into it changes what is read, also through handles made before. Hooks
            are not warned of.
        tokenizer: by default the model's own; required with a model object. An adapter's folder may hold another one,
            which is not used unless named here; a warning says so.
        adapter: a peft folder or Hub id, loaded on top and left unmerged.
        dtype: "float32", "bfloat16", "float16" or "float64"; by default the checkpoint's.
        device: by default "cuda" if there is one, else "cpu"; "auto" spreads the layers over all GPUs.
        trust_remote_code: whether code from the model's folder or the Hub may run.
    """
    name = str(model) if isinstance(model, str | Path) else type(model).__name__
    spread = str(device) == "auto"
    if isinstance(model, str | Path):
        base, adapter = split_adapter(str(model), adapter)
        if adapter is not None:
            check_adapter(str(adapter))  # before the base is loaded, which may take minutes
        loaded: Module = load_base(base, dtype, trust_remote_code, "auto" if spread else None)
        if tokenizer is None:
            tokenizer = load_tokenizer(base, trust_remote_code)
            if adapter is not None:
                compare_tokenizers(tokenizer, str(adapter))
    else:
        if spread and not getattr(model, "hf_device_map", None):
            raise ModelError(
                f'device="auto" spreads a model while it is loaded, got a loaded {name}; pass its folder or Hub id, or '
                'load it with `device_map="auto"`'
            )
        base, loaded = name, model if dtype is None else _in_dtype(model, dtype_of(dtype))
        if adapter is None:
            _check_bare(model, name)
        else:
            _check_unused(model, name)
    if adapter is not None:
        loaded = load_adapter(loaded, str(adapter), base)
        name = f"{base}+{adapter}"
    if tokenizer is None:
        raise ModelError(
            f"a {name} object comes without a tokenizer: pass tokenizer= (an object, a folder or a Hub id)"
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        tokenizer = load_tokenizer(str(tokenizer), trust_remote_code)
    if not spread and (device is not None or isinstance(model, str | Path)):
        usual = "cuda" if torch.cuda.is_available() else "cpu"
        loaded = _moved(loaded, usual if device is None else device)
    hooked = hook(loaded, tokenizer, name)
    if not spread:
        _warn_of_changed(hooked)
    return hooked


Loaded = tuple[ReferenceType[HookedModel], dict[str, int], str]
"""What reads a model object, with the sums of its weights and the states of its adapters when it was loaded."""

LOADED: WeakKeyDictionary[PreTrainedModel, list[Loaded]] = WeakKeyDictionary()


def _warn_of_changed(hooked: HookedModel) -> None:
    """Warn where an earlier handle on the same model object now reads another model than the one that it loaded.

    A handle without adapters refuses a model that has some now, so that only its weights count.
    """
    base, sums, states = base_of(hooked.model), quick_sums(hooked.model), adapter_states(hooked.model)
    alive = [loaded for loaded in LOADED.get(base, []) if loaded[0]() is not None]
    for reader, before, own_states in alive:
        earlier = reader()
        same = all(sums.get(name) == value for name, value in before.items())
        if earlier is not None and not (same and (earlier.bare or states == own_states)):
            warnings.warn(
                f"this {type(base).__name__} object has changed since it was loaded as {earlier.name} (it was trained, "
                "cast, or its adapters were trained, merged, switched or removed), and what was loaded first reads it "
                "as it is now; to compare the two, load the first one again, from its path (if you no longer use it, "
                "ignore this)",
                stacklevel=4,
            )
            break
    LOADED[base] = [*alive, (ref(hooked), sums, states)]


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub id; raises `ModelError` if there is none that can be loaded."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except LOAD_ERRORS as error:
        raise ModelError(
            f"cannot load a tokenizer from {path}: {brief(error)}; save one there, or pass one as `tokenizer`"
        ) from error


def load_limits(
    model: str, tokenizer: str | None = None, trust_remote_code: bool = False, adapter: str | None = None
) -> tuple[PreTrainedTokenizerBase, int | None]:
    """The tokenizer of a model that is not loaded, and its longest input in tokens (None for no limit).

    `model` may be the folder of an adapter: then its base counts. Raises `ModelError` if either cannot be loaded, and
    for an adapter that `check_adapter` refuses.
    """
    base, on_top = split_adapter(model, adapter)
    if on_top is not None:
        check_adapter(str(on_top))
    check_config(base)
    try:
        config = load_config(base, trust_remote_code)
    except ModelError:
        raise
    except LOAD_ERRORS as error:
        raise ModelError(f"cannot load model {base}: {brief(error)}") from error
    limit = position_limit(config)
    return load_tokenizer(base if tokenizer is None else tokenizer, trust_remote_code), limit


def compare_tokenizers(used: PreTrainedTokenizerBase, adapter: str) -> None:
    """Warn of an adapter that was saved with another tokenizer, or chat template, than its base's, which is used."""
    folder, name = Path(adapter), "tokenizer_config.json"
    if not ((folder / name).is_file() if folder.is_dir() else hub_file(adapter, name)):
        return
    try:
        differing = tokenizer_differences(load_tokenizer(adapter), used)
        problem = f"gives other {' and another '.join(differing)}" if differing else ""
    except ModelError:
        problem = "cannot be loaded"
    if problem:
        warnings.warn(
            f"the tokenizer in {adapter} {problem}; that of its base {used.name_or_path} is used. To use the other, "
            f"name it: --tokenizer {adapter} (for all models of the command), or tokenizer= in Python",
            stacklevel=4,
        )


def tokenizer_differences(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> list[str]:
    """In what two tokenizers differ that changes prompts: "tokens", "chat template".

    Tokens of slow tokenizers are compared by their vocabulary.
    """
    alike = is_same(a, b) if a.is_fast and b.is_fast else a.get_vocab() == b.get_vocab()
    parts = {"tokens": alike, "chat template": a.chat_template == b.chat_template}
    return [part for part, same in parts.items() if not same]


def _check_unused(model: Module, name: str) -> None:
    """Raise `ModelError` for a model object to which no adapter can be added without changing what else reads it."""
    remedy = "pass the path of the model"
    if hasattr(model, "peft_config"):
        what = "has adapters"
    elif any(parameter.is_meta for parameter in model.parameters()):
        what, remedy = "is not wholly in memory (offloaded)", "load it on one device"
    elif base_of(model) in READ:
        what, remedy = "is already read", f"{remedy}, or a copy (copy.deepcopy)"
    else:
        return
    raise ModelError(f"this {name} object {what}, and an adapter would be put into it in place; {remedy}")


def _check_bare(model: Module, name: str) -> None:
    """Raise `ModelError` for a transformers model into which peft has put adapters, passed without its PeftModel."""
    injected = isinstance(model, PreTrainedModel) and hasattr(model, "peft_config")
    if injected and not getattr(model, "_hf_peft_config_loaded", False):
        raise ModelError(
            f"adapters were put into this {name} object: pass the PeftModel around it, unload() them, or pass the path "
            "of the model"
        )


def _in_dtype(model: Module, dtype: torch.dtype) -> Module:
    """A model in another dtype, but for what `from_pretrained` leaves in float32.

    These are the frequencies of rotary positions, which in 16 bits would turn far positions by wrong angles, and the
    weights that the family names, such as the biases of routers.
    """
    base = base_of(model)
    names = set(base._keep_in_fp32_modules_strict or ()) if dtype in (torch.float16, torch.bfloat16) else set[str]()
    names |= set(base._keep_in_fp32_modules or ()) if dtype == torch.float16 else set()
    kept = {
        name: tensor.detach()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if name.endswith("inv_freq") or any(re.search(part, name) for part in names)
    }
    model.to(dtype=dtype)
    for name, tensor in kept.items():
        owner, _, leaf = name.rpartition(".")
        part = model.get_submodule(owner)
        if leaf in part._parameters:
            part.get_parameter(leaf).data = tensor
        else:
            setattr(part, leaf, tensor)
    return model


def _moved(model: Module, device: str | torch.device) -> Module:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:  # an unknown device, one that is not there, or one that is full
        raise ModelError(f"cannot put the model on device {str(device)!r}: {brief(error)}") from error
