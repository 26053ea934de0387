"""The command line: what it prints, its exit codes, and that bad input leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import FACTS
from typer.testing import CliRunner

from attnbalance.cli import app

runner = CliRunner()


@pytest.fixture
def facts_file(tmp_path: Path) -> Path:
    path = tmp_path / "facts.jsonl"
    path.write_text("".join(json.dumps(fact.as_dict()) + "\n" for fact in FACTS))
    return path


def said(*arguments: object) -> tuple[int, str]:
    """Exit code and everything printed."""
    found = runner.invoke(app, [str(argument) for argument in arguments])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.output


def test_curve_prints_the_answer_and_where_the_report_is(
    llama_folder: Path, lora_folder: Path, facts_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    models = (f"a={llama_folder}", f"b={llama_folder}+{lora_folder}")
    code, text = said("curve", *models, "--facts", facts_file, "--recall", "--out", out)
    assert code == 0, text
    assert json.loads((out / "attnbalance.json").read_text())["answer"] in text.replace("\n", " ")
    assert str(out / "report.html") in text
    recall = json.loads((out / "recall.json").read_text())
    assert [one["label"] for one in recall] == ["a", "b"]
    assert {"accuracy", "low", "high", "n", "shortcut_rate", "by_popularity"} <= set(recall[0])


def test_finetune_makes_a_model_that_curve_reads_on_held_out_facts(
    llama_folder: Path, tmp_path: Path, facts_file: Path
) -> None:
    run = tmp_path / "run"
    options = ("--split", "whole", "--steps", 4, "--batch-size", 4, "--checkpoint-every", 2, "--lora-rank", 2)
    code, text = said("finetune", llama_folder, "--facts", facts_file, *options, "--out", run)
    assert code == 0, text
    assert "validation loss" in text
    models = (f"base={llama_folder}", f"tuned={llama_folder}+{run}")
    code, text = said("curve", *models, "--facts", run / "heldout.jsonl", "--out", tmp_path / "out")
    assert code == 0, text


def bad_rows(path: Path, **change: object) -> Path:
    path.write_text(json.dumps(FACTS[0].as_dict() | change) + "\n")
    return path


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"popularty": 1}, ["popularty", "popularity"]),
        ({"popularity": "many"}, ["'many'", "number"]),
        ({"answers": []}, ["answers"]),
        ({"question": "Where is it?"}, ["Zürich", "0 times", "--skip-bad"]),
        ({"question": "Is Zürich Zürich?"}, ["Zürich", "2 times", "--skip-bad"]),
        ({"question": "Where, " + "oh where, " * 90 + "is Zürich?"}, ["positions", "--skip-bad"]),
    ],
)
def test_bad_facts_give_one_message_and_code_2(
    llama_folder: Path, tmp_path: Path, change: dict[str, object], expected: list[str]
) -> None:
    path = bad_rows(tmp_path / "facts.jsonl", **({"subject_start": None} | change))
    out = tmp_path / "out"
    code, text = said("curve", f"a={llama_folder}", "--facts", path, "--out", out)
    assert code == 2
    assert text.startswith("error: ")
    assert all(part in text for part in expected), text
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--facts", "nowhere.jsonl"], "no facts file at nowhere.jsonl"),
        (["--facts", "facts.docx"], "must end in .jsonl"),
        (["--relations", "colour"], "no facts of relation 'colour'"),
        (["--template", "{name}?"], "{name}"),
        (["--template", "Hello"], "must name the subject once"),
        (["--reduce", "mean"], "--reduce must be one of max, sum, got 'mean'"),
        (["--dtype", "int7"], "dtype must be float32"),
        (["--chat"], "has no chat template"),
        (["--tokenizer", "./nowhere"], "cannot load a tokenizer from ./nowhere"),
    ],
)
def test_bad_options_give_one_message_and_code_2(
    llama_folder: Path, facts_file: Path, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    given = ["--facts", facts_file, *arguments] if "--facts" not in arguments else arguments
    code, text = said("curve", f"a={llama_folder}", *given, "--out", tmp_path / "out")
    assert code == 2
    assert text.startswith("error: ")
    assert expected in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model", ["a=./nowhere", "a=", "=x"])
def test_a_model_that_is_not_there_gives_one_message_and_code_2(facts_file: Path, tmp_path: Path, model: str) -> None:
    code, text = said("curve", model, "--facts", facts_file, "--out", tmp_path / "out")
    assert code == 2
    assert text.startswith("error: ")


def test_a_folder_that_cannot_be_written_gives_code_2(llama_folder: Path, facts_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, text = said("curve", f"a={llama_folder}", "--facts", facts_file, "--out", tmp_path / "file" / "out")
    assert code == 2
    assert str(tmp_path / "file") in text


def test_a_full_disk_gives_code_2_and_nothing_half_written(
    llama_folder: Path, facts_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("attnbalance.results.write_report", full)
    code, text = said("curve", f"a={llama_folder}", "--facts", facts_file, "--out", tmp_path / "out")
    assert code == 2
    assert "the disk is full" in text
    assert not (tmp_path / "out").exists()


def test_relations_need_facts_in_the_demo(tmp_path: Path) -> None:
    code, text = said("demo", "--relations", "country", "--out", tmp_path / "out")
    assert code == 2
    assert "--facts" in text


def test_an_error_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("attnbalance.demo.demo", lambda *_, **__: 1 / 0)
    assert isinstance(runner.invoke(app, ["demo", "--out", str(tmp_path)]).exception, ZeroDivisionError)


def test_control_c_gives_one_message_and_code_2(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", "from attnbalance.cli import main; main()", "demo", "--out", str(out)]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a shell's background jobs
    )
    try:
        deadline = time.monotonic() + 120
        while not (out / "attnbalance.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 2
    assert "error: interrupted; run the same command again to go on" in message
    assert "Traceback" not in message


def test_finetune_trains_the_parts_and_the_objective_that_are_named(
    llama_folder: Path, tmp_path: Path, facts_file: Path
) -> None:
    run, options = tmp_path / "run", ("--split", "whole", "--steps", 4, "--batch-size", 4, "--checkpoint-every", 2)
    aim = ("--train", "qk", "--objective", "ce + 0.3*row-anchor(statement)", "--curriculum", "popular-first")
    code, text = said("finetune", llama_folder, "--facts", facts_file, *options, *aim, "--out", run)
    assert code == 0, text
    assert "Trained: qk, " in text
    assert len(json.loads((run / "trajectory.json").read_text())["trajectory"]) == 2
    for wrong, expected in (
        (("--objective", "ce + magic"), "There are ce; kl(statement|question|few-shot)"),
        (("--objective", "floor(2)"), "SHARE between 0 and 1"),
        (("--train", "heads"), "no part 'heads'"),
        (("--curriculum", "hard"), "no curriculum 'hard'"),
        (("--objective", "ce + kl(statement)"), "other settings"),
    ):
        out = run if expected == "other settings" else tmp_path / "other"
        code, text = said("finetune", llama_folder, "--facts", facts_file, *options, *wrong, "--out", out)
        assert (code, text.startswith("error: "), expected in text) == (2, True, True), text
    assert not (tmp_path / "other").exists()


def test_study_prints_its_table_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    recipe = "{steps: 5, batch_size: 8, layers: 1, d_model: 16, heads: 2, vocabulary: 400}"
    config = tmp_path / "study.yaml"
    config.write_text(
        f"worlds: {{tiny: {{facts: synthetic, subjects: 30, answers: 3, recipe: {recipe}}}}}\nsplits: [top]\n"
        "methods: {plain: {steps: 2, batch_size: 8}}"
    )
    code, text = said("study", config, "--out", tmp_path / "out")
    assert code == 0, text
    assert "| plain | top |" in text
    code, text = said("study", tmp_path / "none.yaml", "--out", tmp_path / "other")
    assert code == 2
    assert text.startswith("error: cannot read the study")


def test_the_version_is_that_of_the_package() -> None:
    assert said("--version") == (0, "0.1.0\n")


def test_finetune_ranks_by_what_the_model_shows_and_drops_what_cannot_be_ranked(
    llama_folder: Path, tmp_path: Path
) -> None:
    facts = [(f"Subject {i}", "city", ("Paris", "Rome")[i % 2]) for i in range(20)] + [("Alone", "king", "Juan")]
    path = tmp_path / "facts.jsonl"
    lines = [json.dumps({"subject": s, "relation": r, "answers": [a]}) + "\n" for s, r, a in facts]
    path.write_text("".join(lines))
    options = ("--facts", path, "--template", "The {relation} of {subject} is", "--steps", 2, "--checkpoint-every", 2)
    ranked = ("--split", "top", "--rank-by", "salience", "--out", tmp_path / "out")
    code, text = said("finetune", llama_folder, *options, *ranked)
    assert code == 2
    assert "no other answer to be set against" in text
    code, text = said("finetune", llama_folder, *options, *ranked, "--skip-bad")
    assert code == 0, text
    assert json.loads((tmp_path / "out" / "attnbalance.json").read_text())["config"]["split"] == "top by salience"
    code, text = said("finetune", llama_folder, *options, "--split", "whole", "--rank-by", "loss", "--out", tmp_path)
    assert code == 2
    assert "split whole does not rank facts" in text
