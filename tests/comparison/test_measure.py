"""Measuring several models on the same prompts."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import FACTS

from attnbalance import (
    FactSet,
    HookedModel,
    bridge_of,
    load_model,
    make_prompts,
    read_attention,
    read_attention_by_part,
    read_value_weighted_attention,
    recall,
)
from attnbalance.comparison.known_readings import READINGS, chosen_readings
from attnbalance.comparison.measure import measure_all
from attnbalance.comparison.specs import MeasureSettings, ModelSpec
from attnbalance.errors import DataError
from attnbalance.files.outputs import write_json
from attnbalance.models.generate import generate
from attnbalance.readings.recall import NEW_TOKENS

GOOD = FactSet(FACTS)
SETTINGS = MeasureSettings(recall=True, batch_size=4)


def test_a_label_used_twice_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    spec = ModelSpec("a", str(llama_folder))
    with pytest.raises(DataError, match="label 'a' is used for more than one model"):
        measure_all([spec, spec], make_prompts(GOOD), SETTINGS, tmp_path)


def test_what_is_measured_is_what_the_library_reads(llama_folder: Path, tmp_path: Path) -> None:
    prompts = make_prompts(GOOD)
    (one,) = measure_all([ModelSpec("a", str(llama_folder))], prompts, SETTINGS, tmp_path)
    rows = read_attention(load_model(llama_folder), prompts)
    torch.testing.assert_close(one.reading().values, rows.to("subject").values, atol=1e-6, rtol=0)
    assert one.reading().prompt_ids == tuple(prompt.prompt_id for prompt in prompts)
    assert len(one.examples) == 3
    for example in one.examples:
        assert all(abs(sum(weights) - 1) < 1e-5 for weights in example.weights)
        assert len(example.tokens) == len(example.in_subject) == len(example.weights[0])


def test_an_answer_that_is_longer_than_usual_is_heard_to_its_end(llama_folder: Path, tmp_path: Path) -> None:
    """What `curve --recall` calls: the fact accepts the 25 tokens that the model says, of which 10 hold no answer."""
    model, fact = load_model(llama_folder), FACTS[0]
    said = generate(model, make_prompts([fact]), max_new_tokens=25, batch_size=1)[0]
    whole = max((line.strip() for line in said.splitlines()), key=len)
    assert len(model.tokenizer(whole, add_special_tokens=False)["input_ids"]) > NEW_TOKENS
    prompts = make_prompts(FactSet((replace(fact, answers=(whole,)), *FACTS[1:])))
    settings = replace(SETTINGS, scoring="containment")
    (measured,) = measure_all([ModelSpec("a", str(llama_folder))], prompts, settings, tmp_path)
    assert measured.recall is not None
    assert measured.recall.correct[0]
    with pytest.warns(UserWarning, match="accept an answer of more than 10 tokens"):
        assert not recall(model, prompts, scoring="containment", max_new_tokens=NEW_TOKENS).correct[0]


def test_what_was_measured_is_not_measured_again(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs, prompts = [ModelSpec("a", str(llama_folder))], make_prompts(GOOD)
    first = measure_all(specs, prompts, SETTINGS, tmp_path)
    monkeypatch.setattr("attnbalance.comparison.specs.load_model", lambda *_, **__: pytest.fail("loaded again"))
    again = measure_all(specs, prompts, SETTINGS, tmp_path)
    assert torch.equal(first[0].reading().values, again[0].reading().values)
    assert (first[0].recall, first[0].examples) == (again[0].recall, again[0].examples)
    assert dict(first[0].source) == dict(again[0].source)


@pytest.mark.parametrize(
    "settings",
    [
        MeasureSettings(recall=True, batch_size=4, reduce="sum"),
        MeasureSettings(batch_size=4),
        MeasureSettings(template="plain"),
    ],
)
def test_another_way_of_asking_is_measured_anew(llama_folder: Path, tmp_path: Path, settings: MeasureSettings) -> None:
    specs = [ModelSpec("a", str(llama_folder))]
    first = measure_all(specs, make_prompts(GOOD), SETTINGS, tmp_path)
    other = measure_all(specs, make_prompts(GOOD, settings.template), settings, tmp_path)
    assert not torch.equal(first[0].reading().values, other[0].reading().values) or other[0].recall is None


def test_the_shortcuts_that_a_run_recorded_are_used(stories: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in stories.iterdir():
        shutil.copyfile(file, folder / file.name)
    specs, prompts = [ModelSpec("a", str(folder))], make_prompts(GOOD)
    (plain,) = measure_all(specs, prompts, SETTINGS, tmp_path / "plain")
    assert plain.recall
    words = [re.findall("[a-z]+", text.split("\n")[0].lower()) for text in plain.recall.outputs]
    said = next(word for line in words for word in line if len(word) > 3)
    shortcuts = {relation: [said] for relation in GOOD.relations}
    write_json(folder / "attnbalance.json", {"kind": "finetune", "shortcuts": shortcuts})
    (run,) = measure_all(specs, prompts, SETTINGS, tmp_path / "run")
    assert run.recall
    expected = [not ok and said in line for ok, line in zip(run.recall.correct, words, strict=True)]
    assert list(run.recall.shortcut) == expected
    assert any(expected)
    assert run.source["shortcuts_from"] == "the training facts of a"
    marker = {"kind": "finetune", "shortcuts": shortcuts, "tied_relations": ["capital", "sport"]}
    write_json(folder / "attnbalance.json", marker)
    (tied,) = measure_all(specs, prompts, SETTINGS, tmp_path / "tied")
    assert tied.source["shortcuts_from"] == (
        "the training facts of a (of capital and sport, several answers are equally frequent, and the first in the "
        "alphabet counts)"
    )
    write_json(folder / "attnbalance.json", {"kind": "instruct", "shortcuts": {}})  # a run about no facts
    (instructed,) = measure_all(specs, prompts, SETTINGS, tmp_path / "instructed")
    assert instructed.recall
    assert instructed.recall.shortcut == plain.recall.shortcut != run.recall.shortcut
    assert instructed.source["shortcuts_from"] == plain.source["shortcuts_from"]
    assert plain.source["shortcuts_from"] == (
        "the facts asked about (of country, several answers are equally frequent, and the first in the alphabet counts)"
    )


def test_further_readings_are_those_of_the_library_from_one_pass(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, passes, rows = make_prompts(GOOD, "It is the {relation}: {subject} is"), [], HookedModel.rows
    counting = lambda self, batch, *rest: passes.append(len(batch.prompts)) or rows(self, batch, *rest)  # noqa: E731
    monkeypatch.setattr(HookedModel, "rows", counting)
    titles = [title for title in READINGS if title != "context share"]
    (measured,) = measure_all([ModelSpec("a", str(llama_folder))], prompts, SETTINGS, tmp_path, readings=titles)
    assert sum(passes) == len(prompts) + 3  # the three of which rows are shown
    model = load_model(llama_folder)
    shares = {f"{part} share": reading for part, reading in read_attention_by_part(model, prompts).items()}
    own = read_attention(model, prompts)
    weighted = read_value_weighted_attention(bridge_of(model), prompts).to("subject")
    expected = {"subject attention": own.to("subject"), **shares, "attention entropy": own.entropy()}
    expected |= {"value-weighted subject attention": weighted}
    assert [reading.title for reading in measured.readings] == titles
    for title in titles:
        torch.testing.assert_close(measured.reading(title).values, expected[title].values, atol=1e-5, rtol=0)
        assert measured.reading(title).unit == expected[title].unit


def test_other_readings_are_measured_anew(llama_folder: Path, tmp_path: Path) -> None:
    specs, prompts = [ModelSpec("a", str(llama_folder))], make_prompts(GOOD)
    (first,) = measure_all(specs, prompts, SETTINGS, tmp_path)
    (other,) = measure_all(specs, prompts, SETTINGS, tmp_path, readings=chosen_readings(["attention entropy"]))
    assert [reading.title for reading in first.readings] == ["subject attention"]
    assert [reading.title for reading in other.readings] == ["subject attention", "attention entropy"]
