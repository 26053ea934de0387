"""LoRA adapters scaled after training: a smaller change of the weights loses less of what the base knew."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
from peft import PeftConfig
from safetensors.torch import load_file, save_file

from attnbalance.arguments import expects
from attnbalance.errors import DataError, ModelError
from attnbalance.files.outputs import MARKER, as_folder, provenance, read_json, write_saved, write_text, writing
from attnbalance.files.seals import SCALED, check_files, check_model, hash_files
from attnbalance.files.work import close_work, finishing, is_finished, working
from attnbalance.finetuning.checkpoints import STATE
from attnbalance.finetuning.model_card import CARD
from attnbalance.finetuning.runs import TRAJECTORY
from attnbalance.finetuning.schedule import check_rate
from attnbalance.models.fingerprint import FILES, files_fingerprint
from attnbalance.models.load_adapter import check_adapter
from attnbalance.models.load_base import DTYPES, LOAD_ERRORS, brief

WEIGHTS = "adapter_model.safetensors"

FACTORS = re.compile(r"\.lora_(embedding_)?(?P<factor>[AB])(\.weight|\.bias)?$")
"""The ends of the names of LoRA's tensors."""

CHANGES_BASE = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""Beginnings of peft's `init_lora_weights` that change the base's own weights, when training begins or on loading."""

KEPT = ("base_fingerprint", "base_settings", "versions", "shortcuts", "tied_relations")
"""What the record of a run says about its base, by which `load_adapter` checks it, and about its answers."""

MOST_ERROR = 0.01
"""The largest change of a scaled B by rounding to its dtype, relative to its norm; bfloat16's own is at most 0.004."""

TINY = 1e-300
"""Below the norm of any other B than one of zeros, which has no relative error."""


@expects(adapter=(str, Path), out=(str, Path))
def scale_adapter(adapter: str | Path, factor: float, out: str | Path) -> Path:
    """Write a copy of a LoRA adapter whose change of the weights is `factor` times as large; returns its folder.

    W + B A becomes W + factor B A. This is a point on the line from the base's weights to the finetuned ones. Wortsman
    et al. (2022, "Robust fine-tuning of zero-shot models") look on this line for models that keep what the base could
    do. They average all weights; here each layer without an adapter is the base's, so it is on the line as well. The
    product factor B is taken in float32 and rounded to the adapter's dtype; if this changes its norm by more than
    1%, as where it falls below the dtype's least numbers, it is refused. The folder is an adapter like any other,
    for the same base.

    Args:
        adapter: The folder of a finished run with LoRA, of one of its checkpoints, or of any LoRA adapter of peft.
        factor: By how much; > 0. 1 is the adapter itself, 0 would be the base.
        out: The new folder. One that is finished with the same adapter and factor is left as it is.

    Raises `ModelError` for a folder that is not there or holds no adapter, another kind than LoRA, or weights that are
    not a product B A (DoRA's magnitudes, whole trained layers, adapters that change the base), or cannot be read;
    `DataError` for a wrong factor, or one that makes B too large or small for its dtype; `OutputError` for a run of
    which a file was changed, and if `out` cannot be written or holds something else.
    """
    check_rate("factor", factor)
    source, out = as_folder(adapter), as_folder(out)
    if not source.is_dir():
        raise ModelError(f"no folder at {source}; name the folder of a LoRA adapter")
    if not (source / "adapter_config.json").is_file():
        raise ModelError(f"expected the folder of a LoRA adapter at {source}, which holds no adapter_config.json")
    check_model(source)
    check_adapter(str(source))
    config = {"adapter": str(source), "adapter_files": files_fingerprint(source), "factor": float(factor)}
    if is_finished(out, SCALED, config):
        check_files(out)
    else:
        tensors = _scaled(source, factor)
        with working(out, SCALED, config) as work, finishing(out, SCALED, config, work) as folder:
            _copy_about(source, factor, folder)
            with writing(folder / WEIGHTS):
                save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
            recorded = read_json(source / MARKER)
            about = provenance() | {name: recorded[name] for name in KEPT if name in recorded}
            record = {"kind": SCALED, "config": config, **about}
            write_saved(folder / MARKER, record | {"files_sha256": hash_files(folder, but=[MARKER, CARD])})
    close_work(out)
    return out


def _scaled(adapter: Path, factor: float) -> dict[str, torch.Tensor]:
    """The tensors of an adapter by name, B times the factor; raises `ModelError` if that would not scale its change."""
    settings = PeftConfig.from_pretrained(str(adapter))
    kind = str(getattr(settings.peft_type, "value", settings.peft_type))
    if kind != "LORA":
        raise ModelError(f"{adapter} is an adapter of type {kind}; only LoRA's change of the weights can be scaled")
    start = str(getattr(settings, "init_lora_weights", ""))
    if start.lower().startswith(CHANGES_BASE):
        raise ModelError(
            f"{adapter} was made with init_lora_weights={start!r}, which changes the base's weights: "
            "scaled, it would not lie between base and finetuned model; save it as plain LoRA (peft: save_pretrained "
            "with path_initial_model_for_weight_conversion)"
        )
    scaled = {}
    try:
        tensors = load_file(adapter / WEIGHTS)
    except LOAD_ERRORS as error:
        raise ModelError(f"cannot read {adapter / WEIGHTS}: {brief(error)}") from error
    for name, tensor in tensors.items():
        match = FACTORS.search(name)
        if match is None:
            raise ModelError(
                f"{adapter} holds {name}, which is no factor of a LoRA product; only W + B A can be scaled (no DoRA, "
                "modules_to_save, trained biases or tokens, or saved embeddings)"
            )
        if tensor.dtype not in DTYPES:
            raise ModelError(f"{adapter} holds {name} in {tensor.dtype}; save it in float32, bfloat16 or float16")
        scaled[name] = (tensor.float() * factor).to(tensor.dtype) if match["factor"] == "B" else tensor
        if not bool(scaled[name].isfinite().all()):
            raise DataError(f"{name} of {adapter} times {factor} is not finite in {tensor.dtype}; use a smaller factor")
        if match["factor"] == "B":
            before = tensor.double()
            error = float((scaled[name].double() / factor - before).norm() / before.norm().clamp_min(TINY))
            if error > MOST_ERROR:
                raise DataError(
                    f"{name} of {adapter} times {factor} is too small for {tensor.dtype}, whose rounding would change "
                    f"it by {error:.1%}; use a larger factor, or save the adapter in float32"
                )
    return scaled


def _copy_about(adapter: Path, factor: float, folder: Path) -> None:
    """Copy what stands beside an adapter's weights: its configuration, tokenizer, chat templates, and model card.

    The card says what the adapter was before, so the factor is added.
    """
    with writing(folder):
        for path in (path for pattern in (*FILES, CARD) for path in adapter.glob(pattern)):
            if path.suffix != ".safetensors" and path.name not in (MARKER, TRAJECTORY, STATE):
                target = folder / path.relative_to(adapter)
                target.parent.mkdir(exist_ok=True)
                shutil.copy2(path, target)
        if (folder / CARD).exists():
            said = f"\nScaled with attnbalance: {factor:g} times the change of the adapter described here.\n"
            write_text(folder / CARD, (adapter / CARD).read_text() + said)
