"""`attnbalance salience`, end to end on tiny models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from attnbalance import Fact
from attnbalance.comparison.specs import MeasureSettings, ModelSpec
from attnbalance.data.facts import FactSet
from attnbalance.errors import DataError
from attnbalance.storage import compare_salience as salience_module
from attnbalance.storage.compare_salience import compare_salience

FACTS = FactSet(
    tuple(
        Fact(f"Subject {i}", "city" if i % 2 else "sport", (("Paris", "London", "Rome", "Oslo")[i % 4],), 50.0 - i)
        for i in range(24)
    )
)
HOW = MeasureSettings(template="The {relation} of {subject} is", recall=True, batch_size=8)


def test_salience_writes_numbers_for_every_reading_and_popularity(
    llama_folder: Path, lora_folder: Path, tmp_path: Path
) -> None:
    import pyarrow.parquet as pq

    out = tmp_path / "out"
    specs = [ModelSpec("a", str(llama_folder)), ModelSpec("b", str(llama_folder), str(lora_folder))]
    answer = compare_salience(specs, FACTS, HOW, out)
    assert answer.startswith("a: ")
    assert " b: " in answer
    found = json.loads((out / "salience.json").read_text())
    assert [one["label"] for one in found] == ["a", "b"]
    assert [(one["ambiguous"], one["left_out"]) for one in found] == [(0, None)] * 2
    names = [reading["name"] for reading in found[0]["readings"]]
    assert {"value salience (subject, in context)", "value salience (extended)", "push towards the subject"} <= set(
        names
    )
    assert all(len(reading["popularity"]) == 2 for reading in found[0]["readings"])
    table = pq.read_table(out / "salience.parquet")
    heads = [1 if name.startswith("MLP") else 4 for name in names]
    assert len(table) == 2 * len(FACTS) * 2 * sum(heads)
    assert {"salience.png", "popularity.png", "prompts.jsonl", "attnbalance.json"} <= {p.name for p in out.iterdir()}
    assert compare_salience(specs, FACTS, HOW, out) == answer


def test_training_facts_few_subjects_and_two_dtypes_are_named(llama_folder: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    facts = FactSet(FACTS.facts[:6])
    run = tmp_path / "run"
    AutoModelForCausalLM.from_pretrained(llama_folder).to(torch.bfloat16).save_pretrained(run)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (run / name).write_bytes((llama_folder / name).read_bytes())
    (run / "attnbalance.json").write_text(json.dumps({"kind": "finetune"}))
    (run / "train.jsonl").write_text("".join(json.dumps(fact.as_dict()) + "\n" for fact in facts.facts[:2]))
    specs = [ModelSpec("base", str(llama_folder)), ModelSpec("tuned", str(run))]
    answer = compare_salience(specs, facts, HOW, tmp_path / "out")
    assert "tuned was finetuned on the facts of 2 of these 6; 6 subjects are too few to trust the intervals; " in answer
    assert answer.endswith("so small differences may be rounding (read all in float32).")
    found = json.loads((tmp_path / "out" / "salience.json").read_text())
    assert [model["dtype"] for model in found] == ["float32", "bfloat16"]


def test_answers_with_the_first_token_of_another_are_counted(llama_folder: Path, tmp_path: Path) -> None:
    names = ("New York", "New Orleans", "Paris")
    facts = FactSet(tuple(Fact(f"Subject {i}", "city", (names[i % 3],)) for i in range(12)))
    answer = compare_salience([ModelSpec("a", str(llama_folder))], facts, HOW, tmp_path / "out")
    assert " 8 of 12 answers begin with the same token as a wrong answer, and are not told from it. 12 subj" in answer
    assert json.loads((tmp_path / "out/salience.json").read_text())[0]["ambiguous"] == 8


def test_salience_of_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected at least one LABEL=MODEL to read, got none"):
        compare_salience([], FACTS, HOW, tmp_path / "out")


def test_salience_of_a_model_whose_rows_cannot_be_edited_leaves_out_what_edits_give(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = salience_module.load_spec
    monkeypatch.setattr(salience_module, "load_spec", lambda *asked: replace(load(*asked), editable=False))
    answer = compare_salience([ModelSpec("a", str(llama_folder))], FACTS, HOW, tmp_path / "out")
    found = json.loads((tmp_path / "out/salience.json").read_text())[0]
    assert "left out for a, whose family runs several attentions under one layer number" in found["left_out"]
    assert answer.endswith(found["left_out"])
    names = {reading["name"] for reading in found["readings"]}
    assert "value salience (extended)" in names
    assert "push towards the subject" not in names
