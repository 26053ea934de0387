"""Where figures have facts and models from, and what they record of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnbalance.errors import DataError, ModelError, OutputError
from attnbalance.papers.cell_files import sources_of, write_cell
from attnbalance.papers.figure import Cell
from attnbalance.papers.finetuned import finetuning_of
from attnbalance.papers.sources import (
    Sources,
    choices_of,
    conflicts_of,
    facts_of,
    instructions_of,
    model_of,
)


def test_a_local_file_of_facts_is_recorded_and_refused_once_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "facts.jsonl"
    path.write_text(json.dumps({"subject": "Oslo", "relation": "country", "answers": ["Norway"]}))
    settings = Sources(str(path)).of_facts()
    assert [fact.subject for fact in facts_of(settings)] == ["Oslo"]
    path.write_text(path.read_text().replace("Oslo", "Rome"))
    assert Sources(str(path)).of_facts() != settings
    with pytest.raises(DataError, match=r"facts.jsonl was changed or moved since the cells were listed"):
        facts_of(settings)
    path.unlink()
    with pytest.raises(DataError, match=r"facts.jsonl was changed or moved since"):
        facts_of(settings)
    assert Sources("popqa").of_facts() == {"facts": "popqa"}


def test_a_folder_of_facts_and_facts_behind_a_name_are_recorded_too(tmp_path: Path) -> None:
    folder = tmp_path / "relations"
    folder.mkdir()
    for name, question in (("P17", "Which country is Oslo located in?"), ("P36", "What is the capital of Norway?")):
        rows = [{"question": question, "answers": ["It"]}]
        (folder / f"{name}.dev.json").write_text(json.dumps(rows))
    settings = Sources(f"entityquestions:{folder}").of_facts()
    before = len(facts_of(settings))
    path = folder / "P36.dev.json"
    path.write_text(path.read_text().replace("It", "They"))
    assert Sources(f"entityquestions:{folder}").of_facts() != settings
    with pytest.raises(DataError, match="relations was changed or moved since the cells were listed"):
        facts_of(settings)
    path.write_text(path.read_text().replace("They", "It"))
    assert len(facts_of(settings)) == before
    own = tmp_path / "facts.jsonl"
    own.write_text("{}")
    hashes = [Sources(f"{prefix}{own}").of_facts()["facts_file"] for prefix in ("", "swapped:", "lre:", "swapped:lre:")]
    assert len(set(hashes)) == 1


def test_a_folder_of_a_source_s_name_is_not_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "popqa").mkdir()
    (tmp_path / "popqa" / "report.html").write_text("")
    assert Sources("popqa").of_facts() == {"facts": "popqa"}
    assert Sources("swapped:popqa").of_facts() == {"facts": "swapped:popqa"}


def test_a_model_is_recorded_with_its_files_and_refused_once_they_changed(llama_folder: Path) -> None:
    settings = Sources(model=str(llama_folder)).of_model()
    assert model_of(settings) == str(llama_folder)
    config = llama_folder / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(ModelError, match="llama changed since the cells were listed"):
        model_of(settings)
    with pytest.raises(ModelError, match="no model was given"):
        Sources().of_model()


def test_files_of_instructions_and_conflicts_are_recorded_and_refused_once_they_changed(tmp_path: Path) -> None:
    rows, conflicts = tmp_path / "rows.json", tmp_path / "conflicts.json"
    rows.write_text(json.dumps([{"instruction": "Name a city.", "output": "Rome"}]))
    about = {"context": "It is in Lyon.", "question": "Where is it?", "answer": "Lyon", "memory_answer": "Paris"}
    conflicts.write_text(json.dumps([about]))
    sources = Sources(instructions=str(rows), conflicts=str(conflicts))
    settings = sources.of_file("instructions") | sources.of_file("conflicts")
    assert [row.output for row in instructions_of(settings).rows] == ["Rome"]
    assert [fact.answer for fact in conflicts_of(settings)] == ["Lyon"]
    for name, path, load in (("instructions", rows, instructions_of), ("conflicts", conflicts, conflicts_of)):
        path.write_text(path.read_text() + " ")
        with pytest.raises(DataError, match=f"{path.name} was changed or moved since the cells were listed"):
            load(settings)
        path.unlink()
        with pytest.raises(DataError, match=f"{path.name} was changed or moved"):
            load(settings)
        with pytest.raises(DataError, match=f"{path.name}, the file of {name}, does not exist"):
            load(sources.of_file(name))


def test_a_precision_is_part_of_a_models_cells_and_one_folder_has_one(llama_folder: Path, tmp_path: Path) -> None:
    settings = Sources(model=str(llama_folder), mixed_precision="bf16").of_model()
    training = finetuning_of({**settings, "training": {"steps": 3}, "seed": 4})
    assert (training.mixed_precision, training.steps, training.seed) == ("bf16", 3, 4)
    assert finetuning_of({"training": {"steps": 3}}).mixed_precision is None
    with pytest.raises(DataError, match="`mixed_precision` must be no or bf16, got 'fp32'"):
        Sources(mixed_precision="fp32")
    given = {"model": None, "mixed_precision": None}
    for name, own in (("with", settings), ("without", {"model": str(llama_folder)}), ("simulated", {})):
        write_cell(tmp_path / name, Cell("a", own), {}, 1.0)
    assert sources_of(tmp_path / "with", given).mixed_precision == "bf16"
    with pytest.raises(OutputError, match="were run with `mixed_precision` bf16, got no"):
        sources_of(tmp_path / "with", given | {"mixed_precision": "no"})
    with pytest.raises(OutputError, match="were run without `mixed_precision`; leave it out, or name a new folder"):
        sources_of(tmp_path / "without", given | {"mixed_precision": "no"})
    assert sources_of(tmp_path / "simulated", given | {"mixed_precision": "no"}).mixed_precision == "no"


def test_what_a_figure_needs_and_was_not_given_is_named() -> None:
    assert Sources(model="a", instructions="b", conflicts="c").missing(("model", "instructions", "conflicts")) == ""
    missing = Sources(model="a").missing(("model", "instructions", "conflicts"))
    assert missing == (
        "a file of instructions is needed (with Alpaca's columns: alpaca_data.json of "
        "github.com/tatsu-lab/stanford_alpaca): pass `instructions`, and a file of knowledge conflicts is needed (such "
        "as world_facts.json of github.com/locuslab/context-parametric-inversion): pass `conflicts`"
    )
    assert Sources().missing(()) == ""


def test_questions_are_recorded_file_by_file_and_refused_once_one_changed(tmp_path: Path) -> None:
    (tmp_path / "mmlu" / "val").mkdir(parents=True)
    file = tmp_path / "mmlu" / "val" / "prehistory_val.csv"
    file.write_text("Which?,iron,stone,B\n")
    for path in (tmp_path / "mmlu", file):
        settings = Sources(choices=str(path)).of_choices()
        assert [row.output for row in choices_of(settings).rows] == [" B"]
    whole = Sources(choices=str(tmp_path / "mmlu")).of_choices()
    (tmp_path / "mmlu" / "more.csv").write_text("Who?,he,she,A\n")
    assert len(choices_of(settings)) == 1  # the one file is as it was
    with pytest.raises(DataError, match="mmlu were changed or moved since the cells were listed"):
        choices_of(whole)
    with pytest.raises(DataError, match="no questions at"):
        choices_of(Sources(choices=str(tmp_path / "absent")).of_choices())
