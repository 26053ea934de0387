"""Checkpoints of one training run, one after the other in the same loaded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import Module

from attnbalance.errors import ModelError
from attnbalance.files.outputs import MARKER, read_json
from attnbalance.files.seals import check_model
from attnbalance.models.fingerprint import base_name
from attnbalance.models.forward import base_of
from attnbalance.models.hooked import HookedModel, hook
from attnbalance.models.load import load_model
from attnbalance.models.load_adapter import check_adapter, check_base, put_on, split_adapter
from attnbalance.models.load_base import LOAD_ERRORS, brief
from attnbalance.models.swap_weights import ALONE, check_swappable, open_weights, swap_weights

SAFE_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
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

    Raises `ModelError` as `load_model` does; for adapters of several bases, or beside full checkpoints; for adapters
    that change their base when they are loaded; and for full checkpoints that differ in settings, or in the names,
    shapes or dtypes of their weights (see `swap_weights`).

    checkpoints: model and adapter of each, as `load_model` takes them.
    tokenizer, dtype, device, trust_remote_code: see `load_model`.
    """
    pairs = [split_adapter(model, adapter) for model, adapter in checkpoints]
    if len({adapter is None for _, adapter in pairs}) > 1:
        raise ModelError("expected either full checkpoints or adapters, got both; measure them in two runs")
    bases = list(dict.fromkeys(model for model, adapter in pairs if adapter is not None))
    if len(bases) > 1:
        raise ModelError(f"expected adapters of one base, got those of {bases[0]} and {bases[1]}; name their base")

    def load(path: str, adapter: str | None = None) -> HookedModel:
        return load_model(
            path,
            adapter=adapter,
            tokenizer=tokenizer,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
        )

    if bases:
        return _adapters(bases[0], [str(adapter) for _, adapter in pairs], load)
    return _full([path for path, _ in pairs], load, trust_remote_code)


def _full(paths: Sequence[str], load: Callable[..., HookedModel], trust_remote_code: bool) -> Iterator[HookedModel]:
    """Full checkpoints: the first loaded, the others' weights copied into it."""
    if not paths:
        return
    model = load(paths[0])
    yield model
    if len(paths) == 1:
        return
    weights = open_weights(paths[0], trust_remote_code)
    check_swappable(model, weights)
    for path in paths[1:]:
        swap_weights(model, weights, path, trust_remote_code)
        yield replace(model, name=path)


def _adapters(base_path: str, adapters: Sequence[str], load: Callable[..., HookedModel]) -> Iterator[HookedModel]:
    """Adapters: each put on the loaded base, and taken off before the next."""
    for adapter in adapters:
        _check_adapter(adapter)
    model = load(base_path)
    base, tokenizer = base_of(model.model), model.tokenizer
    restore = _structure(base)
    checked: object = None
    settings: object = None
    for adapter in adapters:
        made_for, record = check_adapter(adapter), read_json(Path(adapter) / MARKER)
        if checked != (wanted := (made_for, record.get("base_fingerprint"), record.get("base_settings"))):
            check_base(base, adapter, base_path, made_for)
            checked = wanted
        own = _own_weights(base, adapter)
        loaded, name = put_on(base, adapter, base_path).to(base.device), f"{base_path}+{adapter}"
        if settings != (found := read_json(Path(adapter) / "adapter_config.json")):
            model, settings = hook(loaded, tokenizer, name), found
        yield replace(model, model=loaded, name=name)
        restore()
        with torch.no_grad():
            for tensor, values in own:
                tensor.copy_(values)


def _check_adapter(adapter: str) -> None:
    """Refuse an adapter that is incomplete, or that peft cannot put on without a change of the base's own weights."""
    check_model(Path(adapter))
    check_adapter(adapter)
    config = read_json(Path(adapter) / "adapter_config.json")
    if (kind := config.get("peft_type")) != "LORA":
        raise ModelError(f"adapter {adapter} is of type {kind}; only LoRA adapters share a loaded base: {ALONE}")
    if (start := config.get("init_lora_weights")) not in SAFE_STARTS:
        raise ModelError(
            f"adapter {adapter} was made with init_lora_weights={start!r}, which changes the weights of its base; {ALONE}"
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
    try:
        with safe_open(Path(adapter) / "adapter_model.safetensors", framework="pt") as opened:
            names = [base_name(name) for name in opened.keys()]  # noqa: SIM118 - not a mapping
    except LOAD_ERRORS as error:
        raise ModelError(f"cannot load adapter {adapter}: {brief(error)}") from error
    return [(own[name], own[name].detach().clone()) for name in names if name in own]
