"""Configurations of checkpoints, kept from choosing the code that attention and experts run."""

from __future__ import annotations

import math
from collections.abc import Iterator

from transformers import AutoConfig, PreTrainedConfig
from transformers.utils.import_utils import is_kernels_available

from attnbalance.errors import ModelError

IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
"""Fields, also with "_" before and "_internal" after them, whose value may be the Hub id of a kernel: code to run."""


QUANTISATIONS = ("eetq", "fbgemm_fp8", "fp8", "gguf", "metal", "mxfp4", "mxfp8", "nvfp4")
"""Methods of quantisation for which transformers fetches kernels from the Hub, where that package is installed."""


def load_config(path: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a folder or Hub id, with the default implementations of attention and experts.

    transformers fetches and runs what a configuration names there (also "flash_attention_2", as a kernel of the Hub,
    if that package is absent). Raises `ModelError` for a configuration that names a kernel of the Hub, unless
    `trust_remote_code`, or an epsilon that is no finite number; and what transformers raises for a configuration that
    cannot be read.
    """
    if not trust_remote_code:
        content = PreTrainedConfig.get_config_dict(path)[0]
        method = next((method for method in _methods(content) if method in QUANTISATIONS), None)
        if method is not None and is_kernels_available():
            raise ModelError(
                f"{path} has quantised weights ({method}), for which transformers fetches kernels from the Hub, which "
                "is code to run: uninstall the package kernels, or pass `trust_remote_code=True`"
            )
        for field, value in _kernels("", content):
            raise ModelError(
                f"the configuration of {path} asks for a kernel from the Hub, which is code to run: {field} is "
                f"{str(value)[:80]!r}; remove that line, or, where the model is only measured, pass "
                "`trust_remote_code=True`"
            )
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    for part in _with_inner(config):
        part._attn_implementation = part._experts_implementation = None  # pyright: ignore[reportAttributeAccessIssue]
        for name, value in vars(part).items():
            if name.endswith(("eps", "epsilon")) and isinstance(value, float) and not math.isfinite(value):
                raise ModelError(f"{name} in the configuration of {path} must be a finite number, got {value}")
    return config


def _with_inner(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A configuration and those within it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _with_inner(value)


def _methods(content: object) -> Iterator[object]:
    """The methods of quantisation that a configuration file names, also for a part of the model."""
    if isinstance(content, dict):
        for name, part in content.items():
            if name == "quantization_config" and isinstance(part, dict):
                yield part.get("quant_method")
            yield from _methods(part)


def _kernels(field: str, value: object) -> Iterator[tuple[str, object]]:
    """The fields of a configuration file that name a kernel of the Hub, with their values."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _kernels(f"{field}.{name}" if field else str(name), part)
    elif isinstance(value, list):
        for part in value:
            yield from _kernels(field, part)
    else:
        hub_id = isinstance(value, str) and "/" in value and any(name in field for name in IMPLEMENTATIONS)
        if hub_id or (value and {"use_kernels", "kernel_config"} & set(field.split("."))):
            yield field, value
