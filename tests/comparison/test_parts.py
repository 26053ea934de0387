"""Prompts in parts: what is measured is what whole runs measure, killed runs repeat no part, processes share them."""

from __future__ import annotations

import json
import shutil
from itertools import chain
from pathlib import Path

import pytest
import torch
from commands import run_command, run_in_two_processes
from tiny import FACTS

from attnbalance import FactSet, load_model, make_prompts, read_attention, recall
from attnbalance.comparison import measure
from attnbalance.comparison.measure import measure_all
from attnbalance.comparison.parts import BATCHES, part_of, ranges_of_parts
from attnbalance.comparison.saved import save_measured
from attnbalance.comparison.specs import MeasureSettings, ModelSpec
from attnbalance.data.facts import Fact
from attnbalance.errors import OutputError

MANY = FactSet(tuple(Fact(f"Town {i}", "country", (f"Land {i % 7}",), float(i)) for i in range(11)) + FACTS)
"""20 facts."""
SETTINGS = MeasureSettings(recall=True, batch_size=1)
"""At most eight prompts a part, so that these facts make three."""


@pytest.mark.parametrize("batch_size", [1, 2, 32])
@pytest.mark.parametrize("prompts", [1, 7, 8, 9, 255, 256, 257, 1000])
def test_parts_hold_each_prompt_once_in_order_and_are_alike_in_size(prompts: int, batch_size: int) -> None:
    parts = ranges_of_parts(prompts, batch_size)
    assert list(chain(*parts)) == list(range(prompts))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= BATCHES * batch_size
    assert sum(sizes) > BATCHES * batch_size * (len(parts) - 1)  # no fewer would do


def test_what_is_measured_in_parts_is_what_the_library_reads_of_all_prompts(llama_folder: Path, tmp_path: Path) -> None:
    prompts, model = make_prompts(MANY), load_model(llama_folder)
    (measured,) = measure_all([ModelSpec("a", str(llama_folder))], prompts, SETTINGS, tmp_path)
    assert sorted(path.name for path in (tmp_path / "measured-0").iterdir()) == ["part-0", "part-1", "part-2"]
    whole = read_attention(model, prompts).to("subject")
    torch.testing.assert_close(measured.reading().values, whole.values, atol=1e-6, rtol=0)  # batches differ: rounding
    assert measured.reading().prompt_ids == whole.prompt_ids
    assert measured.recall == recall(model, prompts)
    rows, ids = read_attention(model, prompts), [prompt.prompt_id for prompt in prompts]
    assert len(measured.examples) == 3
    for example in measured.examples:
        own = rows.values[ids.index(example.prompt_id)].mean(dim=1)[:, : len(example.tokens)]
        torch.testing.assert_close(torch.tensor(example.weights), own, atol=1e-6, rtol=0)
    counts = [int(rows.spans["subject"][i].sum()) for i in range(20)]
    assert measured.source["subject_tokens"] == pytest.approx(sum(counts) / 20)


def test_tokens_are_alike_for_models_of_one_tokenizer_alone(llama_folder: Path, tmp_path: Path) -> None:
    prompts, specs = make_prompts(MANY), [ModelSpec("a", str(llama_folder)), ModelSpec("b", str(llama_folder))]
    a, b = measure_all(specs, prompts, MeasureSettings(batch_size=1), tmp_path / "work")
    (c,) = measure_all(specs[:1], make_prompts(MANY, "plain"), MeasureSettings(batch_size=1), tmp_path / "other")
    assert a.source["tokens_sha256"] == b.source["tokens_sha256"] != c.source["tokens_sha256"]


def test_a_killed_run_repeats_no_part_and_ends_with_the_same_numbers(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs, prompts, saved = [ModelSpec("a", str(llama_folder))], make_prompts(MANY), list[str]()

    def save(measured: measure.Measured, folder: Path, key: str) -> None:
        if len(saved) == 2:
            saved.append("killed")
            raise KeyboardInterrupt
        save_measured(measured, folder, key)
        saved.append(folder.name)

    monkeypatch.setattr(measure, "save_measured", save)
    with pytest.raises(KeyboardInterrupt):
        measure_all(specs, prompts, SETTINGS, tmp_path / "work")
    (resumed,) = measure_all(specs, prompts, SETTINGS, tmp_path / "work")
    assert saved == ["part-0", "part-1", "killed", "part-2"]
    (unbroken,) = measure_all(specs, prompts, SETTINGS, tmp_path / "unbroken")
    assert torch.equal(resumed.reading().values, unbroken.reading().values)
    assert (resumed.recall, resumed.examples) == (unbroken.recall, unbroken.examples)
    assert dict(resumed.source) == dict(unbroken.source)


def test_a_part_that_goes_while_others_are_measured_is_missed(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(measured: measure.Measured, folder: Path, key: str) -> None:
        save_measured(measured, folder, key)
        if folder.name == "part-2":
            shutil.rmtree(part_of(folder.parent, 1))

    monkeypatch.setattr(measure, "save_measured", save)
    with pytest.raises(OutputError, match="part-1 was removed or changed while the run went on"):
        measure_all([ModelSpec("a", str(llama_folder))], make_prompts(MANY), SETTINGS, tmp_path)


@pytest.mark.parametrize("kind", ["curve", "trajectory"])
def test_two_processes_share_the_parts_and_write_the_numbers_of_one(
    llama_folder: Path, tmp_path: Path, kind: str
) -> None:
    facts = tmp_path / "facts.jsonl"
    lines = [
        {"subject": f.subject, "relation": f.relation, "answers": f.answers, "popularity": f.popularity} for f in MANY
    ]
    facts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps = [tmp_path / f"run/checkpoint-{step}" for step in (1, 2)]
    for step in steps:
        shutil.copytree(llama_folder, step)
    models = {"curve": [f"a={steps[0]}", f"b={steps[1]}"], "trajectory": [tmp_path / "run"]}[kind]
    options = ("--facts", facts, "--recall", "--batch-size", 1, "--out")
    script = Path(__file__).parents[1] / "measured_together.py"
    run_in_two_processes(script, tmp_path / "measured", kind, *models, *options, tmp_path / "two")
    shares = [(tmp_path / f"measured.{rank}").read_text().split() for rank in (0, 1)]
    parts = [f"measured-{model}/part-{part}" for model in (0, 1) for part in range(3)]
    assert shares == [parts[::2], parts[1::2]]
    assert not list(tmp_path.glob(".*"))
    run_in_two_processes(script, tmp_path / "again", kind, *models, *options, tmp_path / "two")  # finished: as it is
    assert not list(tmp_path.glob("again.*"))

    code, text = run_command(kind, *models, *options, tmp_path / "one")
    assert code == 0, text
    names = ["prompts.jsonl", "curves.json", "recall.json", "answers.jsonl", "readings.parquet"]
    for name in names + ["trajectory.json"] * (kind == "trajectory"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name
