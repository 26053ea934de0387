"""The instructions that need their input, against losses sorted by hand; killed runs; refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attnbalance.context import critical as module
from attnbalance.context.critical import context_critical
from attnbalance.data.instructions import Instruction, InstructionSet
from attnbalance.data.sources.instructions import load_instructions
from attnbalance.errors import DataError, ModelError, OutputError
from attnbalance.finetuning.output_loss import read_output_loss
from attnbalance.models.hooked import HookedModel
from attnbalance.models.load import load_model

NAMES = ("Bife", "Sipi", "Rozi", "Tele", "Ponu")
ROWS = InstructionSet(
    (
        *(
            Instruction(f"Where is {name}?", f"{name} is {'far ' * i}away.", f"{name} left.")
            for i, name in enumerate(NAMES)
        ),
        Instruction("Say nothing.", "Nothing."),
        Instruction("Say much.", "Much " * 5000, "Much."),
    ),
    "memory",
    {"no output": 1},
)


def test_the_rows_with_the_highest_loss_without_input_are_kept_in_their_order(
    long_llama_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    answer = context_critical(str(long_llama_folder), ROWS, out, share=0.5)
    model = load_model(str(long_llama_folder))
    with_input = InstructionSet(ROWS.rows[:5])
    losses = [read_output_loss(model, rows).tolist() for rows in (with_input, with_input.bare())]
    best = sorted(range(5), key=lambda i: -losses[1][i])[:3]  # half of five, rounded up
    kept = load_instructions(out / "instructions.json")
    assert kept.rows == tuple(ROWS.rows[i] for i in sorted(best))
    lines = [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]
    assert [line["kept"] for line in lines] == [i in best for i in range(5)]
    assert [line["loss"] for line in lines] == pytest.approx(losses[0], abs=1e-4)  # padded with the others of a batch
    assert [line["loss_without_input"] for line in lines] == pytest.approx(losses[1], abs=1e-4)
    medians = [sorted(values)[2] for values in losses]
    costs = f"{medians[0]:.2f} nats a token with the input and {medians[1]:.2f} without it"
    assert answer.startswith(f"Of 5 instructions with an input, the median output costs {costs}. Kept: 3")
    assert "Left out: 1 (no output), 1 (no input), 1 (more than" in answer
    assert f"Kept: 3, with {min(losses[1][i] for i in best):.2f} nats or more without it." in answer
    dropped = json.loads((out / "attnbalance.json").read_text())["dropped"]
    assert {"no output": 1, "no input": 1}.items() <= dropped.items()
    assert [count for reason, count in dropped.items() if "tokens" in reason] == [1]


def test_a_killed_run_reads_only_what_is_left(
    long_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = context_critical(str(long_llama_folder), ROWS, tmp_path / "whole")
    monkeypatch.setattr(module, "CHUNK", 2)
    sizes = []

    def read(model, rows, **how):
        sizes.append(len(rows))
        if len(sizes) == 4:
            raise KeyboardInterrupt
        return read_output_loss(model, rows, **how)

    monkeypatch.setattr(module, "read_output_loss", read)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        context_critical(str(long_llama_folder), ROWS, out)
    assert context_critical(str(long_llama_folder), ROWS, out) == whole
    assert sizes == [2, 2, 1, 2, 2, 2, 1]  # the fourth was killed, and is read again
    assert (out / "instructions.json").read_bytes() == (tmp_path / "whole" / "instructions.json").read_bytes()
    context_critical(str(long_llama_folder), ROWS, out)
    assert len(sizes) == 7  # a finished folder is left as it is


def test_a_share_of_the_rows_is_not_rounded_up_by_the_error_of_floats(
    long_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = InstructionSet(tuple(Instruction(f"Say {i}.", f"{i}", f"{i}") for i in range(20)))
    losses = torch.arange(20.0)
    monkeypatch.setattr(module, "read_output_loss", lambda model, rows, **how: losses[: len(rows)])
    for share, count in ((0.55, 11), (0.35, 7), (0.36, 8)):
        said = context_critical(str(long_llama_folder), rows, tmp_path / f"{share}", share=share)
        assert f"the median output costs {9.5:.2f} nats" in said
        assert len(load_instructions(tmp_path / f"{share}" / "instructions.json")) == count


def test_a_model_that_is_replaced_while_it_is_loaded_is_refused(
    long_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(path: str, **how: Any) -> HookedModel:
        config = Path(path) / "config.json"
        config.write_text(config.read_text() + " ")
        return load_model(path, **how)

    monkeypatch.setattr(module, "load_model", slow)
    with pytest.raises(ModelError, match=f"the files of model {long_llama_folder} changed while it was loaded"):
        context_critical(str(long_llama_folder), ROWS, tmp_path / "out")


def test_what_cannot_be_chosen_from_is_refused(long_llama_folder: Path, tmp_path: Path) -> None:
    for share in (0.0, 1.0, float("nan")):
        with pytest.raises(DataError, match=f"share must be > 0 and < 1, got {share}"):
            context_critical(str(long_llama_folder), ROWS, tmp_path / "out", share=share)
    bare = InstructionSet(ROWS.rows[5:6], "here")
    with pytest.raises(DataError, match="here has no instruction with an input that"):
        context_critical(str(long_llama_folder), bare, tmp_path / "out")
    context_critical(str(long_llama_folder), ROWS, tmp_path / "other")
    with pytest.raises(OutputError, match="share"):
        context_critical(str(long_llama_folder), ROWS, tmp_path / "other", share=0.5)
