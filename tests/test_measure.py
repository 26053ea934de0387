"""Measuring several models on the same prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import FACTS, POSITIONS

from attnbalance import Fact, FactSet, load_model, make_prompts, read_attention
from attnbalance.errors import BadRowsError, DataError
from attnbalance.measure import How, ModelSpec, measure_all, parse_spec, usable_prompts
from attnbalance.outputs import write_json

GOOD = FactSet(FACTS)
LONG = Fact("Otto", "country", ("Chad",), 1.0, "In what country is " + "very " * POSITIONS + "old Otto?")
TWICE = Fact("Anna", "mother", ("Eve",), 1.0, "Is Anna the mother of Anna?")
HOW = How(recall=True, batch_size=4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=some/model", ModelSpec("a", "some/model")),
        ("a=some/model+runs/lora", ModelSpec("a", "some/model", "runs/lora")),
        ("some/model", ModelSpec("model", "some/model")),
        ("some/model+runs/lora", ModelSpec("model", "some/model", "runs/lora")),
        ("a=b=c", ModelSpec("a", "b=c")),
    ],
)
def test_a_model_is_named_by_label_path_and_adapter(text: str, expected: ModelSpec) -> None:
    assert parse_spec(text) == expected


@pytest.mark.parametrize("text", ["=x", "a=", "a=+lora", "a=model+", ""])
def test_half_a_model_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="expected LABEL=MODEL"):
        parse_spec(text)


def test_a_plus_belongs_to_a_folder_that_exists(tmp_path: Path) -> None:
    folder = tmp_path / "c++"
    folder.mkdir()
    assert parse_spec(f"a={folder}") == ModelSpec("a", str(folder))


def test_an_equals_sign_belongs_to_a_path_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lr=1e-4").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse_spec("lr=1e-4") == ModelSpec("lr=1e-4", "lr=1e-4")
    assert parse_spec("a=lr=1e-4") == ModelSpec("a", "lr=1e-4")


def test_bad_facts_are_refused_with_the_count_and_the_first_rows(llama_folder: Path) -> None:
    facts = FactSet((*FACTS, TWICE, TWICE))
    with pytest.raises(BadRowsError, match=r"2 of 11 questions(.|\n)*row 10: subject 'Anna' occurs 2 times"):
        usable_prompts(facts, [ModelSpec("a", str(llama_folder))], HOW, skip_bad=False)


def test_bad_facts_are_dropped_and_counted_by_reason_when_asked(llama_folder: Path) -> None:
    facts = FactSet((TWICE, *FACTS, LONG))
    prompts, dropped = usable_prompts(facts, [ModelSpec("a", str(llama_folder))], HOW, skip_bad=True)
    assert [prompt.fact for prompt in prompts] == list(FACTS)
    assert sorted(dropped.values()) == [1, 1]
    assert any("positions" in reason for reason in dropped)


def test_a_set_of_which_nothing_is_left_is_refused(llama_folder: Path) -> None:
    with pytest.raises(DataError, match="no usable facts are left"):
        usable_prompts(FactSet((TWICE,)), [ModelSpec("a", str(llama_folder))], HOW, skip_bad=True)


def test_a_label_used_twice_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    spec = ModelSpec("a", str(llama_folder))
    with pytest.raises(DataError, match="label 'a' is used for more than one model"):
        measure_all([spec, spec], make_prompts(GOOD), HOW, tmp_path)


def test_what_is_measured_is_what_the_library_reads(llama_folder: Path, tmp_path: Path) -> None:
    prompts = make_prompts(GOOD)
    (one,) = measure_all([ModelSpec("a", str(llama_folder))], prompts, HOW, tmp_path)
    rows = read_attention(load_model(llama_folder), prompts)
    torch.testing.assert_close(one.attention.values, rows.to("subject").values, atol=1e-6, rtol=0)
    assert one.attention.prompt_ids == tuple(prompt.prompt_id for prompt in prompts)
    assert len(one.examples) == 3
    for example in one.examples:
        assert all(abs(sum(weights) - 1) < 1e-5 for weights in example.weights)
        assert len(example.tokens) == len(example.in_subject) == len(example.weights[0])


def test_what_was_measured_is_not_measured_again(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs, prompts = [ModelSpec("a", str(llama_folder))], make_prompts(GOOD)
    first = measure_all(specs, prompts, HOW, tmp_path)
    monkeypatch.setattr("attnbalance.measure.load_model", lambda *_, **__: pytest.fail("loaded again"))
    again = measure_all(specs, prompts, HOW, tmp_path)
    assert torch.equal(first[0].attention.values, again[0].attention.values)
    assert (first[0].recall, first[0].examples) == (again[0].recall, again[0].examples)
    assert dict(first[0].source) == dict(again[0].source)


@pytest.mark.parametrize(
    "how", [How(recall=True, batch_size=4, reduce="sum"), How(batch_size=4), How(template="plain")]
)
def test_another_way_of_asking_is_measured_anew(llama_folder: Path, tmp_path: Path, how: How) -> None:
    specs = [ModelSpec("a", str(llama_folder))]
    first = measure_all(specs, make_prompts(GOOD), HOW, tmp_path)
    other = measure_all(specs, make_prompts(GOOD, how.template), how, tmp_path)
    assert not torch.equal(first[0].attention.values, other[0].attention.values) or other[0].recall is None


def test_the_shortcuts_that_a_run_recorded_are_used(llama_folder: Path, tmp_path: Path) -> None:
    specs, prompts = [ModelSpec("a", str(llama_folder))], make_prompts(GOOD)
    (plain,) = measure_all(specs, prompts, HOW, tmp_path / "plain")
    assert plain.recall
    said = next(text for text in plain.recall.outputs if text.strip())
    shortcuts = {relation: [said] for relation in GOOD.relations}
    write_json(llama_folder / "attnbalance.json", {"kind": "finetune", "shortcuts": shortcuts})
    (run,) = measure_all(specs, prompts, HOW, tmp_path / "run")
    assert run.recall
    expected = [
        not ok and said.lower().strip() in text.lower()
        for ok, text in zip(run.recall.correct, run.recall.outputs, strict=True)
    ]
    assert list(run.recall.shortcut) == expected
    assert any(expected)
    assert run.source["shortcuts_from"] == "the training facts of a"


def test_a_home_folder_is_found_behind_a_label(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_spec("a=~/model+~/adapter") == ModelSpec("a", f"{tmp_path}/model", f"{tmp_path}/adapter")
