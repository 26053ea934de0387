"""`attnbalance knowledge`, end to end on a tiny model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from base_oracle import SPORTS, TOWNS
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnbalance.comparison.specs import MeasureSettings, ModelSpec
from attnbalance.data.facts import FactSet
from attnbalance.errors import BadRowsError, DataError
from attnbalance.readings import knowledge as reading
from attnbalance.readings.knowledge import CATEGORIES
from attnbalance.survey.compare_knowledge import compare_knowledge

HOW = MeasureSettings(template="plain", recall=True, batch_size=32)
FACTS = FactSet((*TOWNS, *SPORTS[:5]))


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "DRAWS", 2)
    monkeypatch.setattr(reading, "SAMPLES", 2)


def test_the_folder_holds_the_table_the_numbers_and_every_fact(long_llama_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    specs = [ModelSpec("a", str(long_llama_folder)), ModelSpec("b/..", str(long_llama_folder))]
    answer = compare_knowledge(specs, FACTS, HOW, out)
    assert answer.startswith(f"Of these {len(FACTS)} facts a knows ")
    assert f" Of these {len(FACTS)} facts b/.. knows " in answer
    names = {path.name for path in out.iterdir()}
    assert {"table.md", "knowledge.json", "knowledge.png", "facts.jsonl", "attnbalance.json"} <= names
    lines = [json.loads(line) for line in (out / "facts.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * len(FACTS)
    half = len(FACTS)
    for a, b in zip(lines[:half], lines[half:], strict=True):  # the same model under two labels
        assert a | {"model": ""} == b | {"model": ""}
    numbers = json.loads((out / "knowledge.json").read_text())["a"]
    counted = [sum(line["category"] == name for line in lines[:half]) for name in CATEGORIES]
    assert list(numbers["all"]["categories"].values()) == counted
    sure = [line for line in lines[half:] if line["category"] == "HighlyKnown"]
    against = json.loads((out / "knowledge.json").read_text())["b/.."]["against"]
    assert against["model"] == "a"
    assert against["kept"]["few-shot"] == (None if not sure else against["kept"]["few-shot"] | {"mean": 1.0})
    assert "Against a, asked in each form." in (out / "table.md").read_text()
    assert compare_knowledge(specs, FACTS, HOW, out) == answer


def test_a_killed_run_does_not_ask_again(
    long_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, calls = reading.generate, []

    def counted(*asked: object, **how: object) -> list[str]:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(1)
        return generate(*asked, **how)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(reading, "generate", counted)
    with pytest.raises(KeyboardInterrupt):
        compare_knowledge([ModelSpec("a", str(long_llama_folder))], FACTS, HOW, tmp_path / "out")
    monkeypatch.setattr(reading, "generate", lambda *asked, **how: calls.append(1) or generate(*asked, **how))
    compare_knowledge([ModelSpec("a", str(long_llama_folder))], FACTS, HOW, tmp_path / "out")
    killed = len(calls)
    calls.clear()
    compare_knowledge([ModelSpec("a", str(long_llama_folder))], FACTS, HOW, tmp_path / "whole")
    assert len(calls) == killed


def test_relations_with_too_few_subjects_are_refused_or_dropped_and_counted(
    long_llama_folder: Path, tmp_path: Path
) -> None:
    facts = FactSet((*TOWNS, *SPORTS[:4]))
    with pytest.raises(BadRowsError, match="relation with fewer than five subjects"):
        compare_knowledge([ModelSpec("a", str(long_llama_folder))], facts, HOW, tmp_path / "out")
    answer = compare_knowledge([ModelSpec("a", str(long_llama_folder))], facts, HOW, tmp_path / "out", skip_bad=True)
    assert answer.startswith(f"Of these {len(TOWNS)} facts")
    dropped = json.loads((tmp_path / "out/attnbalance.json").read_text())["dropped"]
    assert list(dropped.values()) == [4]


def test_facts_too_long_for_a_form_are_refused_or_dropped_before_anything_is_asked(
    long_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "generate", lambda *asked, **how: pytest.fail("a model was asked"))
    long = replace(TOWNS[0], subject="Ab" * 220, question=None)  # fits alone, and not after four examples
    facts = FactSet((*TOWNS, long))
    with pytest.raises(BadRowsError, match="too long to be asked after 4 others within the model's 512") as caught:
        compare_knowledge([ModelSpec("a", str(long_llama_folder))], facts, HOW, tmp_path / "out")
    assert caught.value.indices == (len(TOWNS),)  # not the facts that it is an example for


def test_no_model_and_a_chat_are_refused(long_llama_folder: Path, tmp_path: Path) -> None:
    for specs, how in (([], HOW), ([ModelSpec("a", str(long_llama_folder))], MeasureSettings(chat=True))):
        with pytest.raises(DataError, match=r"expected at least one LABEL=MODEL to ask, and no chat"):
            compare_knowledge(specs, FACTS, how, tmp_path / "out")


def test_questions_about_training_facts_of_a_model_are_counted(long_llama_folder: Path, tmp_path: Path) -> None:
    tuned = tmp_path / "tuned"
    shutil.copytree(long_llama_folder, tuned)
    (tuned / "attnbalance.json").write_text(json.dumps({"kind": "finetune"}))
    (tuned / "train.jsonl").write_text("".join(json.dumps(fact.as_dict()) + "\n" for fact in list(FACTS)[:3]))
    specs = [ModelSpec("a", str(long_llama_folder)), ModelSpec("b", str(tuned))]
    answer = compare_knowledge(specs, FACTS, HOW, tmp_path / "out")
    assert f" b was finetuned on the facts of 3 of these {len(FACTS)}" in answer


def test_models_of_two_dtypes_are_said_to_be_of_two(long_llama_folder: Path, tmp_path: Path) -> None:
    rounded = tmp_path / "rounded"
    shutil.copytree(long_llama_folder, rounded)
    AutoModelForCausalLM.from_pretrained(rounded).bfloat16().save_pretrained(rounded)
    specs = [ModelSpec("a", str(long_llama_folder)), ModelSpec("b", str(rounded))]
    answer = compare_knowledge(specs, FACTS, HOW, tmp_path / "out")
    assert "a was read in float32 and b in bfloat16, so small differences may be rounding" in answer


def test_models_that_are_asked_differently_are_named(long_llama_folder: Path, tmp_path: Path) -> None:
    """The same weights twice: another chat template, and another split of the line breaks of few-shot prompts."""
    other = tmp_path / "other"
    shutil.copytree(long_llama_folder, other)
    for folder, template in ((long_llama_folder, "{{ messages[0].content }}"), (other, "Q: {{ messages[0].content }}")):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
    specs = [ModelSpec("a", str(long_llama_folder)), ModelSpec("b", str(other))]
    answer = compare_knowledge(specs, FACTS, HOW, tmp_path / "out")
    assert answer.endswith(
        "b has another chat template than a, or one of them has none, which changes what is asked in chats."
    )
    tokenizer = AutoTokenizer.from_pretrained(long_llama_folder)
    tokenizer.add_tokens(["\n\n"])  # only few-shot prompts have such lines
    tokenizer.save_pretrained(other)
    model = AutoModelForCausalLM.from_pretrained(other)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(other)
    answer = compare_knowledge(specs, FACTS, HOW, tmp_path / "again")
    assert answer.endswith("b splits these prompts into different tokens than a, which changes answers.")
    assert "chat template" not in answer
