"""`instruct` from the command line: checkpoints that `context` reads."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from commands import run_command

from attnbalance.files.outputs import MARKER
from attnbalance.finetuning.runs import load_run

ROWS = [
    {"instruction": f"Name {place} {i}.", "input": f"{place} is in {land}." if i % 2 else "", "output": land}
    for i, (place, land) in enumerate([("Bife", "Sipi"), ("Rozi", "Tele"), ("Ponu", "Keva"), ("Neta", "Sipi")] * 3)
]


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    """A list with Alpaca's columns; one row has no output."""
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([*ROWS, {"instruction": "Write nothing.", "input": "", "output": " "}]))
    return path


def test_instruct_makes_checkpoints_that_context_reads(llama_folder: Path, tmp_path: Path, rows_file: Path) -> None:
    run = tmp_path / "a run"
    options = ("--data", rows_file, "--steps", 4, "--batch-size", 4, "--checkpoint-every", 2, "--validation", 2)
    code, text = run_command("instruct", llama_folder, *options, "--lora-rank", 2, "--out", run)
    assert code == 0, text
    assert f"Trained on 10 instructions (1.6 times) of {rows_file}; validated on 2." in text
    assert "Left out: 1 (no output)." in text
    command = shlex.split(next(line for line in text.splitlines() if line.startswith("Next: ")))[1:]
    models = [f"step-{step}={llama_folder}+{path}" for step, path in load_run(run).checkpoints.items()]
    assert command[:5] == ["attnbalance", "context", f"base={llama_folder}", *models]
    conflicts = tmp_path / "conflicts.json"
    rows = [
        {"context": f"Bife is in {land}.", "question": "Where is Bife?", "answer": land, "memory_answer": "Rome"}
        for land in ("Sipi", "Tele", "Keva")
    ]
    conflicts.write_text(json.dumps(rows))
    filled = {"--conflicts": str(conflicts), "--out": str(tmp_path / "reliance")}
    asked = [filled.get(command[i - 1], word) for i, word in enumerate(command)]
    code, text = run_command(*asked[1:])
    assert code == 0, text
    table = (tmp_path / "reliance" / "table.md").read_text()
    assert all(label in table for label in ("base", "step-2", "step-4")), table
    _, text = run_command("instruct", llama_folder, *options, "--lora-rank", 2, "--out", run)
    assert "already finished" in text


def test_instruct_reads_only_instructions_with_an_input_and_says_when_the_base_is_better(
    llama_folder: Path, tmp_path: Path, rows_file: Path
) -> None:
    options = ("--data", rows_file, "--with-input", "--steps", 2, "--batch-size", 2, "--validation", 2)
    code, text = run_command("instruct", llama_folder, *options, "--lr", 10, "--decay", "--out", tmp_path / "run")
    assert code == 0, text
    assert f"Trained on 4 instructions of {rows_file}; validated on 2." in text
    assert json.loads((tmp_path / "run" / MARKER).read_text())["config"]["decay"] is True
    assert "Left out: 1 (no output), 6 (no input)." in text
    run = load_run(tmp_path / "run")
    assert run.base_loss is not None
    assert f"The base itself is better: validation loss {run.base_loss:.3f} nats a token; try a lower --lr." in text


def test_bad_input_is_refused_with_one_message(llama_folder: Path, tmp_path: Path, rows_file: Path) -> None:
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps([{"question": "Who?", "answer": "Ada"}]))
    cases = (
        ((tmp_path / "none.json",), "no file at"),
        ((facts,), "row 1: no column 'instruction'"),
        ((rows_file, "--validation", 12), "expected more than 12 instructions"),
        ((rows_file, "--peft", "[1]"), "--peft must be a JSON object"),
    )
    for (data, *options), said in cases:
        code, text = run_command("instruct", llama_folder, "--data", data, *options, "--out", tmp_path / "run")
        assert (code, said in text, "Traceback" in text) == (2, True, False), text


def test_the_instructions_that_need_their_input_are_data_for_instruct(
    llama_folder: Path, tmp_path: Path, rows_file: Path
) -> None:
    asked = ("context-critical", llama_folder, "--data", rows_file, "--out", tmp_path / "critical")
    code, text = run_command(*asked)
    assert code == 0, text
    assert "Of 6 instructions with an input" in text
    assert "Kept: 5, with " in text
    command = shlex.split(next(line for line in text.splitlines() if line.startswith("Next: ")))[1:]
    names = tmp_path / "names.txt"
    names.write_text("\nRozi\n", encoding="utf-8")
    run = tmp_path / "run"
    options = ("--not-naming", names, "--steps", 1, "--batch-size", 1, "--validation", 1)
    code, text = run_command(*command[1:-1], run, *options)
    assert code == 0, text
    kept = json.loads((tmp_path / "critical" / "instructions.json").read_text())
    named = sum("Rozi" in f"{row['instruction']} {row['input']} {row['output']}" for row in kept)
    assert named > 0
    assert f"Left out: {named} (names one of the given)." in text
    assert load_run(run).instructions["train"] == len(kept) - named - 1
    code, text = run_command(*asked[:-1], tmp_path / "other", "--share", 1)
    assert (code, "share must be > 0 and < 1, got 1.0" in text) == (2, True)
    for content, message in ((b"\n", "holds no names; write one a line"), (b"\xff\xfe", "is not UTF-8 text")):
        names.write_bytes(content)
        code, text = run_command(*command[1:-1], tmp_path / "other", *options)
        assert (code, message in text) == (2, True), text
    code, text = run_command(*command[1:-1], tmp_path / "other", "--not-naming", tmp_path / "none.txt")
    assert (code, "cannot read" in text) == (2, True)
