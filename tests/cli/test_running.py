"""`demo` and `study` from the command line, and the version."""

from __future__ import annotations

import json
from pathlib import Path

from commands import run_command


def test_relations_need_facts_in_the_demo(tmp_path: Path) -> None:
    code, text = run_command("demo", "--relations", "country", "--out", tmp_path / "out")
    assert code == 2
    assert "--facts" in text


def test_study_prints_its_table_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    recipe = "{steps: 5, batch_size: 8, layers: 1, d_model: 16, heads: 2, vocabulary: 400}"
    config = tmp_path / "study.yaml"
    config.write_text(
        f"worlds: {{tiny: {{facts: synthetic, subjects: 30, answers: 3, recipe: {recipe}}}}}\nsplits: [top]\n"
        "methods: {plain: {steps: 2, batch_size: 8}}"
    )
    code, text = run_command("study", config, "--out", tmp_path / "out")
    assert code == 0, text
    assert "| plain | top |" in text
    code, text = run_command("study", tmp_path / "none.yaml", "--out", tmp_path / "other")
    assert code == 2
    assert text.startswith("error: cannot read the study")


def test_the_version_is_that_of_the_package() -> None:
    assert run_command("--version") == (0, "0.1.0\n")


def test_a_dry_run_prints_what_is_left_to_do_and_makes_no_folder(tmp_path: Path) -> None:
    options = ("--scale", "tiny", "--seeds", 2, "--out", tmp_path / "out", "--dry-run")
    code, text = run_command("reproduce", "goyal-prop1", *options)
    assert code == 0, text
    assert text.splitlines()[0].startswith("| figure | cells | left |")
    assert "| goyal-prop1 | 6 | 6 |" in text
    assert not (tmp_path / "out").exists()
    code, text = run_command("--json", "reproduce", "goyal-prop1", *options)
    assert code == 0, text
    [printed] = [line for line in text.splitlines() if line.startswith("{")]
    [forecast] = json.loads(printed)["results"]["forecast"]
    assert (forecast["figure"], forecast["left"], forecast["gpu_hours"]) == ("goyal-prop1", 6, None)
    code, text = run_command("reproduce", "ghosal-fig5", *options)
    assert code == 2
    assert "a pretrained language model is needed" in text


def test_squad_is_a_source_of_its_own(tmp_path: Path) -> None:
    given = ("--out", str(tmp_path / "out"), "--seeds", "2", "--dry-run")
    code, text = run_command("reproduce", "goyal-fig4c", *given, "--squad", str(tmp_path / "train.json"))
    assert code == 2
    assert "pass `--model`" in text
    assert "pass `--conflicts`" in text
    assert "--squad" not in text
    code, text = run_command("reproduce", "goyal-fig4c", *given)
    assert code == 2
    assert (
        "a file of SQuAD is needed (such as train-v1.1.json of rajpurkar.github.io/SQuAD-explorer): pass `--squad`"
        in text
    )
