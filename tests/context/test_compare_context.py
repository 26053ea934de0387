"""`attnbalance context`, end to end on a tiny model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from commands import run_command
from conflict_facts import CONFLICTS
from tiny import tiny_tokenizer
from transformers import AutoModelForCausalLM

from attnbalance.comparison.specs import MeasureSettings, ModelSpec
from attnbalance.context import compare_context as module
from attnbalance.context.compare_context import WITHOUT, compare_context
from attnbalance.data.conflicts import Conflict
from attnbalance.data.facts import FactSet
from attnbalance.data.prompts import Prompt, make_prompts
from attnbalance.errors import BadRowsError, DataError

HOW = MeasureSettings(template="context", batch_size=4)
FACTS = FactSet(CONFLICTS)


def test_the_folder_holds_table_numbers_figures_and_every_answer(long_llama_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    specs = [ModelSpec("a", str(long_llama_folder)), ModelSpec("b", str(long_llama_folder))]
    said = compare_context(specs, FACTS, HOW, out)
    assert "From the context: b +0.0 points" in said
    names = {path.name for path in out.iterdir()}
    assert {"table.md", "context.json", "answers.jsonl", "context.png", "attention.png", "attnbalance.json"} <= names
    lines = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * len(CONFLICTS)
    saved = json.loads((out / "context.json").read_text())
    assert saved["a"] == saved["b"]
    read = pq.read_table(out / "readings.parquet").to_pandas()
    assert set(read.reading) == {
        f"{role} attention (sum)" for role in ("context", "subject", "rest", "context answer", "memory answer")
    }
    assert len(read) == 2 * 5 * len(CONFLICTS) * 2 * 4  # models, readings, conflicts, layers, heads
    by_layer = read[(read.label == "b") & (read.reading == "context attention (sum)")].groupby("layer").value.mean()
    assert by_layer.tolist() == pytest.approx(saved["b"]["attention"]["context"]["mean"])
    counted = sum(line["from"] == "neither" for line in lines) / len(lines)
    assert saved["a"]["from"]["neither"]["mean"] == pytest.approx(counted)
    assert compare_context(specs, FACTS, HOW, out) == said


def test_a_killed_run_reads_only_what_is_left(
    long_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded = tmp_path / "rounded"
    shutil.copytree(long_llama_folder, rounded)
    AutoModelForCausalLM.from_pretrained(rounded).bfloat16().save_pretrained(rounded)
    specs, read = [ModelSpec("a", str(long_llama_folder)), ModelSpec("b", str(rounded))], module.read_reliance
    calls = list[int]()

    def dying(*arguments: object, **settings: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return read(*arguments, **settings)  # pyright: ignore

    monkeypatch.setattr(module, "read_reliance", dying)
    with pytest.raises(KeyboardInterrupt):
        compare_context(specs, FACTS, HOW, tmp_path / "out")
    said = compare_context(specs, FACTS, HOW, tmp_path / "out")
    assert said.endswith(
        " a was read in float32 and b in bfloat16, so small differences may be rounding (read all in float32)."
    )
    assert len(calls) == 3
    monkeypatch.undo()
    assert compare_context(specs, FACTS, HOW, tmp_path / "whole") == said
    for name in ("context.json", "answers.jsonl", "table.md"):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_training_facts_few_subjects_and_other_tokens_are_named(long_llama_folder: Path, tmp_path: Path) -> None:
    tuned = Path(shutil.copytree(long_llama_folder, tmp_path / "tuned"))
    tiny_tokenizer("metaspace").save_pretrained(tuned)
    (tuned / "attnbalance.json").write_text(json.dumps({"kind": "finetune"}))
    about = {"subject": CONFLICTS[0].subject, "relation": CONFLICTS[0].relation, "answers": ["x"]}
    (tuned / "train.jsonl").write_text(json.dumps(about) + "\n")
    said = compare_context(
        [ModelSpec("a", str(long_llama_folder)), ModelSpec("b", str(tuned))], FACTS, HOW, tmp_path / "out"
    )
    assert f"b was finetuned on the facts of 1 of these {len(CONFLICTS)}" in said
    assert "b splits these prompts into different tokens than a" in said


def test_what_cannot_be_asked_is_refused_or_dropped(long_llama_folder: Path, tmp_path: Path) -> None:
    specs = [ModelSpec("a", str(long_llama_folder))]
    with pytest.raises(
        DataError,
        match="one of the templates context, alpaca-context, alpaca-context-only, quote; got 1 models and 'qa'",
    ):
        compare_context(specs, FACTS, replace(HOW, template="qa"), tmp_path / "out")
    with pytest.raises(DataError, match="must hold conflicts, but the fact of 'France' has no context"):
        compare_context(specs, FactSet((CONFLICTS[0].remembered,)), HOW, tmp_path / "out")
    long = replace(CONFLICTS[0], context=f"NewFrance {'a ' * 600}")
    with pytest.raises(BadRowsError, match="prompts are longer than the model's 512 positions"):
        compare_context(specs, FactSet((*CONFLICTS[1:], long)), HOW, tmp_path / "out")
    compare_context(specs, FactSet((*CONFLICTS[1:], long)), HOW, tmp_path / "out", skip_bad=True)
    assert list(json.loads((tmp_path / "out" / "attnbalance.json").read_text())["dropped"].values()) == [1]


def test_the_command_reads_a_file_of_conflicts_and_swaps_facts(long_llama_folder: Path, tmp_path: Path) -> None:
    rows = [
        {"context": c.context, "question": c.question, "answer": c.answer, "memory_answer": c.memory_answers[0]}
        for c in CONFLICTS
    ]
    (tmp_path / "conflicts.json").write_text(json.dumps([*rows, rows[0] | {"answer": "Nice"}]))
    out = tmp_path / "out"
    code, text = run_command(
        "context", f"a={long_llama_folder}", "--conflicts", tmp_path / "conflicts.json", "--out", out
    )
    assert code == 0, text
    assert "Of 6 conflicts a answers" in text.replace("\n", " ")
    assert "Left out: 1 (the context holds no accepted answer)." in text.replace("\n", " ")
    assert json.loads((out / "attnbalance.json").read_text())["dropped"] == {"the context holds no accepted answer": 1}
    facts = [{"subject": name, "relation": "capital", "answers": [name[::-1]]} for name in ("Oslo", "Rome", "Bern")]
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in facts))
    swapped = (
        "context",
        f"a={long_llama_folder}",
        "--conflicts",
        f"swapped:{tmp_path / 'facts.jsonl'}",
        "--out",
        tmp_path / "s",
    )
    code, text = run_command(*swapped)
    assert code == 0, text
    code, text = run_command(
        "context", f"a={long_llama_folder}", "--conflicts", tmp_path / "facts.jsonl", "--out", tmp_path / "n"
    )
    assert code == 2
    assert "no 'context'; a file of conflicts needs context, question, answer" in text.replace("\n", " ")


def test_answers_to_other_prompts_are_not_taken_for_those_of_today(
    long_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat template that writes the date: the run is killed on one day and goes on on the next."""
    specs, read = [ModelSpec("a", str(long_llama_folder)), ModelSpec("b", str(long_llama_folder))], module.read_reliance
    prompts, calls, day = module.usable_prompts, list[str](), ["Monday"]

    def dated(*arguments: object, **settings: object) -> object:
        asked, dropped = prompts(*arguments, **settings)  # pyright: ignore
        texts = [replace(prompt, text=f"{prompt.text} {day[0]}") for prompt in asked]
        return module.PromptSet.of(texts, asked.tokenizer), dropped

    def dying(model: object, asked: list[Prompt], *arguments: object, **settings: object) -> object:
        calls.append(asked[0].text.split()[-1])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return read(model, asked, *arguments, **settings)  # pyright: ignore

    monkeypatch.setattr(module, "usable_prompts", dated)
    monkeypatch.setattr(module, "read_reliance", dying)
    with pytest.raises(KeyboardInterrupt):
        compare_context(specs, FACTS, HOW, tmp_path / "out")
    day[0] = "Tuesday"
    compare_context(specs, FACTS, HOW, tmp_path / "out")
    assert calls == ["Monday", "Monday", "Tuesday", "Tuesday"]


@pytest.mark.parametrize(
    ("template", "asked", "alone"),
    [
        (
            "context",
            "Context: C Q lives in Delta. Question: Where does Q live? Answer:",
            "Question: Where does Q live? Answer:",
        ),
        (
            "alpaca-context",
            "### Instruction:\nWhere does Q live?\n\n### Input:\nC Q lives in Delta.\n\n### Response:\n",
            "### Instruction:\nWhere does Q live?\n\n### Response:\n",
        ),
        (
            "alpaca-context-only",
            "### Instruction:\nAnswer the question based on the input context only. Where does Q live?\n\n### Input:\n"
            "C Q lives in Delta.\n\n### Response:\n",
            "### Instruction:\nWhere does Q live?\n\n### Response:\n",
        ),
        ("quote", "C Q lives in Delta.: Where does Q live?", "Where does Q live?"),
    ],
)
def test_each_template_asks_with_the_context_and_without_it(template: str, asked: str, alone: str) -> None:
    conflict = Conflict(
        "Q", "home", ("Delta",), question="Where does Q live?", context="C Q lives in Delta.", memory_answers=("Echo",)
    )
    (prompt,), (bare,) = make_prompts([conflict], template), make_prompts([conflict], WITHOUT[template])
    assert (prompt.text, bare.text) == (asked, alone)
    assert prompt.part("context") == "C Q lives in Delta."
    assert prompt.part("subject") == bare.part("subject") == "Q"
