"""Finetuning a causal language model on a split's questions: all weights or LoRA, resumable, with early stopping."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from attnbalance.arguments import expects
from attnbalance.errors import ModelError
from attnbalance.files.outputs import MARKER, as_folder, read_json
from attnbalance.files.seals import check_files
from attnbalance.files.work import close_work, is_finished
from attnbalance.finetuning.runs import KIND, Run, load_run
from attnbalance.finetuning.settings import FinetuneSettings
from attnbalance.finetuning.splits import Split
from attnbalance.models.fingerprint import files_fingerprint
from attnbalance.models.gguf import as_safetensors

DEFAULTS = FinetuneSettings()


@expects(split=Split, settings=FinetuneSettings)
def finetune(
    model: str | Path,
    split: Split,
    out: str | Path,
    settings: FinetuneSettings = DEFAULTS,
    *,
    progress: bool = False,
) -> Run:
    """Finetune a local model or Hub id on the answers to the training facts; returns the run in the folder `out`.

    AdamW at a learning rate that is constant, or falls linearly to 0 (`decay`), gradients clipped at norm 1; loss on
    the tokens of the answer only. At each checkpoint the objective is measured on `split.validation`, and `out` itself
    is the best checkpoint. GPUs multiply in bfloat16 if they can, unless the settings name another precision.

    A folder that is finished with the same settings is returned at once. A killed run is resumed; after an interrupt
    its checkpoints so far are usable models (the error names the newest). Raises `ModelError` for a model that cannot
    be loaded and a non-finite loss or gradient, `DataError` for facts or settings that cannot be used, `OutputError`
    for a folder that holds something else, or a finished run of which a file was changed. Checkpoints are checked where
    they are loaded.

    Args:
        model: A local model folder, GGUF file or Hub id.
        split: The facts to train on, to validate on, and to keep for testing.
        out: The folder of the run.
        settings: How to train.
        progress: Whether to draw a progress bar.
    """
    out, base = as_folder(out), absolute_model(model)
    config = {
        "model": base,
        "model_files": files_fingerprint(base),
        "split": split.name,
        "facts_sha256": {part: facts.sha256 for part, facts in split.parts.items()},
        **({} if split.replay_share is None else {"replay_share": split.replay_share}),
        **settings.record(),
    }

    def train() -> None:
        from attnbalance.finetuning.finetune_model import finetune_model  # takes torch

        finetune_model(base, split, out, settings, config, progress=progress)

    return run_in(out, config, train)


def run_in(out: Path, config: Mapping[str, object], train: Callable[[], None]) -> Run:
    """The finished run in a folder; `train` makes it unless it is there, with the same config and unchanged files."""
    if is_finished(out, KIND, config):
        check_files(out)
        now, versions = metadata.version("attnbalance"), read_json(out / MARKER).get("versions")
        if isinstance(versions, dict) and versions.get("attnbalance") not in (None, now):
            warnings.warn(
                f"{out} was trained by attnbalance {versions['attnbalance']}, and is not trained again by {now}; "
                "remove it, or name another folder, to do so",
                stacklevel=4,
            )
    else:
        train()
    close_work(out)
    return load_run(out)


def absolute_model(model: str | Path) -> str:
    """A local model's absolute folder, so that an adapter finds its base from anywhere; a Hub id as it is."""
    try:
        path = Path(as_safetensors(str(Path(model).expanduser())))
    except RuntimeError as error:  # ~ of an unknown user
        raise ModelError(f"no model folder at {model}: {error}") from error
    if not path.is_dir():
        return str(model)
    if (path / "adapter_config.json").is_file():
        raise ModelError(f"{model} is an adapter; merge it into its base (peft's merge_and_unload) and finetune that")
    return str(path.resolve())
