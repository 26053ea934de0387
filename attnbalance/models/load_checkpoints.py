"""Checkpoints of one training run, one after the other in the same loaded model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import Module

from attnbalance.errors import ModelError
from attnbalance.files.outputs import MARKER, read_json
from attnbalance.files.seals import check_model
from attnbalance.models.fingerprint import base_name, base_parameters, quick_sums
from attnbalance.models.forward import base_of
from attnbalance.models.hooked import HookedModel, hook
from attnbalance.models.load import compare_tokenizers, load_model, load_tokenizer, tokenizer_differences
from attnbalance.models.load_adapter import check_adapter, check_base, put_on, split_adapter
from attnbalance.models.load_base import LOAD_ERRORS, brief
from attnbalance.models.swap_weights import ALONE, check_swappable, compare_weights, open_weights, swap_weights

SAFE_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of LoRA's `init_lora_weights` with which loading an adapter leaves the weights of its base as they are."""


def load_checkpoints(
    checkpoints: Sequence[tuple[str, str | None]],
    *,
    tokenizer: str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
) -> Iterator[HookedModel]:
    """Each checkpoint in turn, read as `load_model` would load it; all of them share one loaded model.

    A checkpoint that was handed out is no longer valid once the next one is. The base of adapters is loaded once, and
    adapters are taken off again. Of full checkpoints the first is loaded, and the weights of the others are copied into
    it. The self-check compares the code that reads rows with the family's own, which no value of a weight changes: it
    runs once for full checkpoints, whose settings must be equal, and once for each adapter_config.json.

    Adapters may follow their base, without an adapter, as the first checkpoint.

    Raises `ModelError` as `load_model` does. Before any is loaded, it refuses adapters of several bases, or beside full
    checkpoints; adapters that are no LoRA, that change their base when they are loaded, or that are damaged; and full
    checkpoints that differ in their tokenizer (unless one is given), in settings, or in the names, shapes or dtypes
    (unless one is given) of their weights.

    checkpoints: model and adapter of each, as `load_model` takes them; local folders.
    tokenizer, dtype, device, trust_remote_code: see `load_model`.
    """
    pairs = [split_adapter(model, adapter) for model, adapter in checkpoints]
    _check_pairs(pairs, tokenizer, dtype, trust_remote_code)

    def load(path: str) -> HookedModel:
        return load_model(path, tokenizer=tokenizer, dtype=dtype, device=device, trust_remote_code=trust_remote_code)

    if any(adapter is not None for _, adapter in pairs):
        return _adapters(pairs[0][0], [None if adapter is None else str(adapter) for _, adapter in pairs], load)
    return _full([path for path, _ in pairs], load, dtype, trust_remote_code)


def _check_pairs(
    pairs: Sequence[tuple[str, str | Path | None]],
    tokenizer: str | Path | None,
    dtype: str | torch.dtype | None,
    trust_remote_code: bool,
) -> None:
    """Refuse checkpoints that cannot share one loaded model, from their files alone."""
    adapters = [str(adapter) for _, adapter in pairs if adapter is not None]
    if adapters and any(adapter is None for _, adapter in pairs[1:]):  # the first may be their base
        raise ModelError("expected either full checkpoints or adapters, got both; measure them in two runs")
    bases = list(dict.fromkeys(model for model, _ in pairs))
    if adapters:
        if len(bases) > 1:
            raise ModelError(f"expected adapters of one base, got those of {bases[0]} and {bases[1]}; name their base")
        for adapter in adapters:
            _check_adapter(adapter)
        if tokenizer is None:
            used = load_tokenizer(bases[0], trust_remote_code)
            for adapter in adapters:
                compare_tokenizers(used, adapter)
    elif len(pairs) > 1:
        if missing := [path for path, _ in pairs if not Path(path).is_dir()]:
            raise ModelError(
                f"full checkpoints must be local folders, got {missing[0]}; download it, and name its folder"
            )
        if tokenizer is None:
            _check_tokenizers([path for path, _ in pairs], trust_remote_code)
        first = open_weights(pairs[0][0], trust_remote_code, dtype)
        for path, _ in pairs[1:]:
            compare_weights(first, open_weights(path, trust_remote_code, dtype), path, pairs[0][0])


def _check_tokenizers(paths: Sequence[str], trust_remote_code: bool) -> None:
    """Refuse full checkpoints whose tokenizer gives other tokens, or ends answers otherwise, than the first one's."""
    first = load_tokenizer(paths[0], trust_remote_code)
    for path in paths[1:]:
        other = load_tokenizer(path, trust_remote_code)
        parts = tokenizer_differences(other, first)
        parts += ["end of sequence"] * (other.eos_token_id != first.eos_token_id)
        if parts:
            raise ModelError(
                f"{path} must have the tokenizer of {paths[0]}, but differs in its {' and '.join(parts)}; name one for "
                "all: --tokenizer, or tokenizer= in Python"
            )


def _full(
    paths: Sequence[str],
    load: Callable[..., HookedModel],
    dtype: str | torch.dtype | None,
    trust_remote_code: bool,
) -> Iterator[HookedModel]:
    """Full checkpoints: the first loaded, the others' weights copied into it."""
    if not paths:
        return
    model = load(paths[0])
    if len(paths) == 1:
        yield model
        return
    weights = open_weights(paths[0], trust_remote_code, dtype)
    check_swappable(model, weights)
    yield model
    for path in paths[1:]:
        swap_weights(model, weights, path, trust_remote_code, dtype)
        yield replace(model, name=path)


def _adapters(
    base_path: str, adapters: Sequence[str | None], load: Callable[..., HookedModel]
) -> Iterator[HookedModel]:
    """Adapters: each put on the loaded base, and taken off before the next; None: the base itself, at first."""
    model = load(base_path)
    base, tokenizer = base_of(model.model), model.tokenizer
    restore, sums = _structure(base), quick_sums(base)
    checked: object = None
    settings: object = None
    for adapter in adapters:
        if adapter is None:
            yield model
            continue
        made_for, record = check_adapter(adapter), read_json(Path(adapter) / MARKER)
        if checked != (wanted := (made_for, record.get("base_fingerprint"), record.get("base_settings"))):
            check_base(base, adapter, base_path, made_for)
            checked = wanted
        own = _own_weights(base, adapter)
        loaded, name = put_on(base, adapter, base_path), f"{base_path}+{adapter}"
        _check_unchanged(loaded, sums, {id(tensor) for tensor, _ in own}, adapter)
        if not getattr(base, "hf_device_map", None):  # accelerate has spread the base, and put_on its adapter
            loaded = loaded.to(base.device)
        if settings != (config := read_json(Path(adapter) / "adapter_config.json")):
            model, settings = hook(loaded, tokenizer, name), config
        yield replace(model, model=loaded, name=name)
        restore()
        with torch.no_grad():
            for tensor, values in own:
                tensor.copy_(values)


def _check_adapter(adapter: str) -> None:
    """Refuse an adapter that is incomplete, or that peft cannot put on without a change of the base's own weights."""
    check_model(Path(adapter))
    check_adapter(adapter)
    _weight_names(adapter)
    config = read_json(Path(adapter) / "adapter_config.json")
    if (kind := config.get("peft_type")) != "LORA":
        raise ModelError(f"adapter {adapter} is of type {kind}; only LoRA adapters share a loaded base: {ALONE}")
    if (start := config.get("init_lora_weights")) not in SAFE_STARTS:
        raise ModelError(
            f"adapter {adapter} was made with init_lora_weights={start!r}, which changes the weights of its base; "
            f"{ALONE}"
        )
    if config.get("kasa_config") is not None:
        raise ModelError(
            f"adapter {adapter} has a kasa_config, with which peft cuts small singular values off its base's weights; "
            f"{ALONE}"
        )


def _check_unchanged(loaded: Module, sums: Mapping[str, int], own: Collection[int], adapter: str) -> None:
    """Refuse an adapter that changed a weight of the base when it was put on, other than by values in its file.

    `own` are the `id`s of the weights that its file holds values of; a tied weight has one name of several.
    """
    in_file = {name for name, parameter in base_parameters(loaded) if id(parameter) in own}
    now = quick_sums(loaded)
    changed = [name for name in sums if name in now and name not in in_file and now[name] != sums[name]]
    if changed:
        raise ModelError(
            f"adapter {adapter} changed {changed[0]} of its base ({len(changed)} of {len(sums)} weights) when it was "
            f"put on; {ALONE}"
        )


def _structure(base: Module) -> Callable[[], None]:
    """What undoes all that peft does to the modules of a model: their parts, hooks and attributes, not the values.

    peft's own `unload` leaves trained copies of whole modules (`modules_to_save`) in the place of the base's.
    """

    def copied(attributes: dict[str, object]) -> dict[str, object]:
        return {name: value.copy() if isinstance(value, dict) else value for name, value in attributes.items()}

    saved = [(module, copied(vars(module))) for module in base.modules()]

    def restore() -> None:
        for module, attributes in saved:
            vars(module).clear()
            vars(module).update(copied(attributes))

    return restore


def _own_weights(base: Module, adapter: str) -> list[tuple[Tensor, Tensor]]:
    """The base's weights that an adapter's file holds too, such as embeddings, with copies of their values.

    peft writes those of the file over the base's.
    """
    own = base.state_dict(keep_vars=True)
    return [(own[name], own[name].detach().clone()) for name in _weight_names(adapter) if name in own]


def _weight_names(adapter: str) -> list[str]:
    """The names of the weights in an adapter's file, without the parts that peft adds."""
    try:
        with safe_open(Path(adapter) / "adapter_model.safetensors", framework="pt") as opened:
            return [base_name(name) for name in opened.keys()]  # noqa: SIM118 - not a mapping
    except LOAD_ERRORS as error:
        raise ModelError(f"cannot load adapter {adapter}: {brief(error)}") from error
