"""Finished runs on disk."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attnbalance.errors import ModelError, OutputError
from attnbalance.files.outputs import MARKER, write_json
from attnbalance.finetuning.runs import KIND, TRAJECTORY, load_run

RECORD = {
    "kind": KIND,
    "base": "gpt2",
    "config": {},
    "shortcuts": {"country": ["Peru"]},
    "validation_loss": [[2, 0.5]],
    "best_step": 2,
}


def test_a_folder_without_a_run_is_refused(llama, tmp_path):
    for path, held in ((llama, "the result of `pretrain`"), (tmp_path, f"no {MARKER}"), (tmp_path / "x", "nothing")):
        with pytest.raises(ModelError, match=held):
            load_run(path)


@pytest.mark.parametrize("name", [name for name in RECORD if name != "kind"])
def test_a_run_whose_record_was_changed_is_refused_by_the_name_that_is_wrong(tmp_path: Path, name: str) -> None:
    write_json(tmp_path / MARKER, RECORD)
    assert load_run(tmp_path).validation_loss == {2: 0.5}
    for changed in (RECORD | {name: None}, {kept: value for kept, value in RECORD.items() if kept != name}):
        write_json(tmp_path / MARKER, changed)
        with pytest.raises(
            OutputError, match=f"{tmp_path / MARKER} was changed: '{name}' must be .* remove {tmp_path}"
        ):
            load_run(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [{"best_step": 99}, {"validation_loss": [[2]]}, {"validation_loss": [[2, "a"]]}, {"validation_loss": []}],
)
def test_losses_without_the_best_steps_are_refused(tmp_path: Path, changed: dict[str, object]) -> None:
    write_json(tmp_path / MARKER, RECORD | changed)
    losses = (RECORD | changed)["validation_loss"]
    with pytest.raises(OutputError, match=re.escape(f"got {losses}; restore the file")):
        load_run(tmp_path)


def test_shares_completed_are_numbers(tmp_path: Path) -> None:
    write_json(tmp_path / MARKER, RECORD | {"base_completes": {"statement": "x"}})
    with pytest.raises(OutputError, match="'statement' must be float, got 'x'"):
        load_run(tmp_path)


def test_the_bases_loss_may_be_unknown_and_is_refused_as_a_text(tmp_path: Path) -> None:
    for known in (0.7, None):
        write_json(tmp_path / MARKER, RECORD | {"base_loss": known})
        assert load_run(tmp_path).base_loss == known
    write_json(tmp_path / MARKER, RECORD)
    assert load_run(tmp_path).base_loss is None
    write_json(tmp_path / MARKER, RECORD | {"base_loss": "0.7"})
    with pytest.raises(OutputError, match="'base_loss' must be float or None, got '0.7'"):
        load_run(tmp_path)


def test_shortcuts_and_a_trajectory_that_were_changed_are_refused(tmp_path: Path) -> None:
    write_json(tmp_path / MARKER, RECORD)
    write_json(tmp_path / TRAJECTORY, {"trajectory": 3})
    with pytest.raises(
        OutputError, match=f"{TRAJECTORY} was changed: 'trajectory' must be a collection of dict, got 3"
    ):
        _ = load_run(tmp_path).trajectory
    write_json(tmp_path / MARKER, RECORD | {"shortcuts": {"country": "Peru"}})
    with pytest.raises(OutputError, match="'country' must be a collection of str, got 'Peru'"):
        load_run(tmp_path)
