"""The demonstration, made small: its files, its going on after interruptions, its answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_demo import make_demo_small

import attnbalance.demo as demonstration
from attnbalance.demo import demo
from attnbalance.errors import DataError, OutputError

NUMBERS = ("curves.json", "recall.json", "answers.jsonl", "prompts.jsonl", "readings.parquet")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_demo_small(monkeypatch)


def test_the_demo_leaves_models_numbers_and_a_report(tmp_path: Path) -> None:
    answer = demo(tmp_path / "out")
    held = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"base", "ft-top", "ft-bottom", "ft-whole", "report.html", "curves.png", *NUMBERS} <= held
    labels = [curve["label"] for curve in json.loads((tmp_path / "out" / "curves.json").read_text())["curves"]]
    assert labels == ["base", "FT-Top", "FT-Bottom", "FT-Whole"]
    assert "FT-Top" in answer
    assert answer.endswith(".")


def test_no_held_out_subject_was_trained_on(tmp_path: Path) -> None:
    demo(tmp_path / "out")
    asked = {json.loads(line)["subject"] for line in (tmp_path / "out" / "prompts.jsonl").read_text().splitlines()}
    for run in ("ft-top", "ft-bottom", "ft-whole"):
        lines = (tmp_path / "out" / run / "train.jsonl").read_text().splitlines()
        assert lines
        assert not asked & {json.loads(line)["subject"] for line in lines}


@pytest.mark.parametrize("stage", ["pretrain", "finetune", "measure_all", "write_results"])
def test_an_interrupted_demo_goes_on_to_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    demo(tmp_path / "unbroken")
    work = getattr(demonstration, stage)

    def interrupted(*arguments: object, **options: object) -> None:
        work(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demonstration, stage, interrupted)
        with pytest.raises(KeyboardInterrupt):
            demo(tmp_path / "broken")
    demo(tmp_path / "broken")
    for name in NUMBERS:
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "unbroken" / name).read_bytes()


def test_a_finished_demo_does_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = demo(tmp_path / "out")
    for stage in ("pretrain", "finetune", "measure_all", "write_results"):
        monkeypatch.setattr(demonstration, stage, lambda *_, **__: pytest.fail("done again"))
    assert demo(tmp_path / "out") == answer


def test_another_seed_needs_another_folder(tmp_path: Path) -> None:
    demo(tmp_path / "out")
    with pytest.raises(OutputError, match="seed"):
        demo(tmp_path / "out", seed=1)


def test_the_demo_runs_on_real_facts(tmp_path: Path, popqa: Path) -> None:
    demo(tmp_path / "out", source=f"popqa:{popqa}", relations=["country", "sport"], limit=60)
    prompts = [json.loads(line) for line in (tmp_path / "out" / "prompts.jsonl").read_text().splitlines()]
    assert {prompt["relation"] for prompt in prompts} == {"country", "sport"}
    for prompt in prompts:
        start, end = prompt["spans"]["subject"]
        assert prompt["text"][start:end] == prompt["subject"]


def test_facts_that_cannot_be_used_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    rows = [{"subject": f"s{i}", "relation": "r", "answers": ["a"]} for i in range(40)]
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="popularity"):
        demo(tmp_path / "out", source=str(tmp_path / "facts.jsonl"))
    assert not (tmp_path / "out").exists()
