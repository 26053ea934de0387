"""The instructions whose output a model predicts worst without their input (Goyal et al. 2024, section 3.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from attnbalance.arguments import expects
from attnbalance.data.instructions import InstructionSet
from attnbalance.errors import DataError
from attnbalance.files.kept_tensors import keep, kept
from attnbalance.files.outputs import as_folder, write_json, write_json_lines
from attnbalance.files.result_folder import ResultFolder
from attnbalance.finetuning.finetune import absolute_model
from attnbalance.finetuning.output_loss import least_foreseen, read_output_loss, usable_with_input
from attnbalance.models.fingerprint import check_unchanged, files_fingerprint
from attnbalance.models.hooked import HookedModel
from attnbalance.models.load import load_model
from attnbalance.report.wording import left_out

KIND = "context-critical"

CHUNK = 512
"""Rows between two points at which a killed run goes on."""


@expects(instructions=InstructionSet)
def context_critical(
    model: str | Path,
    instructions: InstructionSet,
    out: str | Path,
    *,
    share: float = 0.75,
    batch_size: int = 8,
    dtype: str | None = None,
    device: str | None = None,
    command: str = "",
    progress: bool = False,
) -> str:
    """Keep the instructions whose output has the highest perplexity without the input; returns what was found.

    Goyal et al. (2024, section 3.4) drop a quarter of the rows in this way: those whose input the model hardly needs.
    Writes two files to the folder `out`. instructions.json holds the rows that are kept, in their order, with Alpaca's
    columns (for `instruct`). losses.jsonl holds, for every row, its loss with and without its input, in nats a token,
    and whether it is kept. Rows without an input are left out, and so are those that the model cannot read. A killed
    run resumes. A folder that is finished with the same rows, settings and weights is left as it is. Raises `DataError`
    for a share outside (0, 1) and if no row is left, and `AttnBalanceError` for models and folders that cannot be used.

    Args:
        model: A local model folder, GGUF file or Hub id: the model that is to be finetuned.
        instructions: The rows to choose from (see `load_instructions`).
        out: The folder to write.
        share: The share of rows to keep; rounded up to whole rows.
        batch_size: Rows in a forward pass.
        dtype: As in `load_model`.
        device: As in `load_model`.
        command: The command line that the results name.
        progress: Whether to draw progress bars.
    """
    if not 0 < share < 1:
        raise DataError(f"share must be > 0 and < 1, got {share}")
    out, base = as_folder(out), absolute_model(model)
    config = {
        "model": base,
        "model_files": files_fingerprint(base),
        "instructions_sha256": instructions.sha256,
        "share": share,
        "dtype": dtype,
        "attnbalance_version": metadata.version("attnbalance"),
    }
    results = ResultFolder(out, KIND, config, command)
    if not results.is_finished():
        with results.working() as work:
            hooked = load_model(base, dtype=dtype, device=device)
            check_unchanged(base, config["model_files"])
            rows = usable_with_input(hooked, instructions)
            losses = {
                name: _read(hooked, chosen, work / name, str(config), batch_size, progress)
                for name, chosen in (("with input", rows), ("without input", rows.bare()))
            }
            without = losses["without input"]
            chosen = least_foreseen(without, share)
            answer = _answer(losses, len(chosen), float(without[chosen].min()), rows.dropped)
            with results.writing(work, answer=answer, dropped=rows.dropped) as folder:
                _write(folder, rows, losses, set(chosen))
    return results.close()


def _read(model: HookedModel, rows: InstructionSet, work: Path, key: str, batch_size: int, progress: bool) -> Tensor:
    """The losses of all rows, read chunk by chunk; chunks that an earlier run read are taken from `work`."""
    chunks = []
    for start in range(0, len(rows), CHUNK):
        folder = work.with_name(f"{work.name} {start}")
        of_chunk = f"{folder.name} of {key}"
        if (saved := kept(folder, of_chunk)) is None:
            part = rows.without({}, rows.rows[start : start + CHUNK])
            saved = {}, {"loss": read_output_loss(model, part, batch_size=batch_size, progress=progress)}
            keep(folder, of_chunk, *saved)
        chunks.append(saved[1]["loss"])
    return torch.cat(chunks)


def _answer(losses: Mapping[str, Tensor], count: int, least: float, dropped: Mapping[str, int]) -> str:
    medians = {name: median(values.tolist()) for name, values in losses.items()}
    words = (
        f"Of {len(losses['with input'])} instructions with an input, the median output costs "
        f"{medians['with input']:.2f} nats a token with the input and {medians['without input']:.2f} without it. Kept: "
        f"{count}, with {least:.2f} nats or more without it."
    )
    return f"{words} {left_out(dropped)}".strip()


def _write(folder: Path, rows: InstructionSet, losses: dict[str, Tensor], chosen: set[int]) -> None:
    columns: dict[str, Sequence[float]] = {name: values.tolist() for name, values in losses.items()}
    write_json(folder / "instructions.json", [asdict(row) for i, row in enumerate(rows.rows) if i in chosen])
    write_json_lines(
        folder / "losses.jsonl",
        (
            asdict(row)
            | {"loss": columns["with input"][i], "loss_without_input": columns["without input"][i], "kept": i in chosen}
            for i, row in enumerate(rows.rows)
        ),
    )
