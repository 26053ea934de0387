"""The folder that `attnbalance curve` writes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import FACTS, tiny_config, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnbalance import FactSet
from attnbalance.comparison.compare import compare
from attnbalance.comparison.specs import MeasureSettings, ModelSpec
from attnbalance.errors import DataError, ModelError, OutputError

SETTINGS = MeasureSettings(recall=True, batch_size=4)
FILES = {"answers.jsonl", "attnbalance.json", "curves.json", "curves.png", "prompts.jsonl"}
FILES |= {"readings.parquet", "recall.json", "report.html", "differences.json"}


def by_plain_transformers(folder: Path, model: Path) -> torch.Tensor:
    """The curve from the written prompts alone: eager attention, one prompt at a time, no padding."""
    eager = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(model)
    curves = []
    for line in (folder / "prompts.jsonl").read_text().splitlines():
        prompt = json.loads(line)
        found = tokenizer(prompt["text"], return_tensors="pt", return_offsets_mapping=True)
        offsets = found.pop("offset_mapping")[0].tolist()
        start, end = prompt["spans"]["subject"]
        inside = [j for j, (a, b) in enumerate(offsets) if a < end and b > start]
        with torch.no_grad():
            maps = eager(**found, output_attentions=True).attentions
        curves.append(torch.stack([one[0, :, -1, inside].amax(-1).mean() for one in maps]))
    return torch.stack(curves).mean(0)


@pytest.fixture
def specs(llama_folder: Path, gpt2_folder: Path) -> list[ModelSpec]:
    return [ModelSpec("a", str(llama_folder)), ModelSpec("b", str(gpt2_folder))]


def test_the_folder_holds_the_curve_of_plain_transformers(specs: list[ModelSpec], tmp_path: Path) -> None:
    out = tmp_path / "out"
    answer = compare(specs, FactSet(FACTS), SETTINGS, out, command="attnbalance curve <x>")
    assert {path.name for path in out.iterdir()} == FILES
    assert json.loads((out / "differences.json").read_text())["pair"] == ["b", "a"]  # the second minus the first
    curves = json.loads((out / "curves.json").read_text())["curves"]
    assert [one["label"] for one in curves] == ["a", "b"]
    for one, spec in zip(curves, specs, strict=True):
        expected = by_plain_transformers(out, Path(spec.model))
        torch.testing.assert_close(torch.tensor(one["mean"]), expected, atol=1e-5, rtol=0)
    table = pq.read_table(out / "readings.parquet")
    assert len(table) == 2 * len(FACTS) * 2 * 4  # labels, prompts, layers, heads
    page = (out / "report.html").read_text()
    assert "curve &lt;x&gt;" in page
    assert json.loads((out / "attnbalance.json").read_text())["answer"] == answer
    assert len((out / "answers.jsonl").read_text().splitlines()) == 2 * len(FACTS)


def test_a_finished_folder_is_left_as_it_is(
    specs: list[ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = compare(specs[:1], FactSet(FACTS), MeasureSettings(), tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    monkeypatch.setattr("attnbalance.comparison.compare.measure_all", lambda *_, **__: pytest.fail("measured again"))
    assert compare(specs[:1], FactSet(FACTS), MeasureSettings(), tmp_path / "out") == answer
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    assert not list(tmp_path.glob(".out*"))


def test_other_settings_do_not_overwrite_a_finished_folder(specs: list[ModelSpec], tmp_path: Path) -> None:
    compare(specs[:1], FactSet(FACTS), MeasureSettings(), tmp_path / "out")
    with pytest.raises(OutputError, match="other settings: reduce is .max. there, .sum. here"):
        compare(specs[:1], FactSet(FACTS), MeasureSettings(reduce="sum"), tmp_path / "out")


def test_a_finished_folder_that_lacks_a_reading_is_refused(specs: list[ModelSpec], tmp_path: Path) -> None:
    compare(specs[:1], FactSet(FACTS), MeasureSettings(), tmp_path / "out")
    with pytest.raises(OutputError, match=r"other settings: readings\[1\] is absent there, 'rest share' here"):
        compare(specs[:1], FactSet(FACTS), MeasureSettings(), tmp_path / "out", readings=["rest share"])


def test_further_readings_are_in_every_file_and_the_headline_stays(specs: list[ModelSpec], tmp_path: Path) -> None:
    further = ["first token share", "attention entropy"]
    plain = compare(specs, FactSet(FACTS), MeasureSettings(), tmp_path / "plain")
    assert compare(specs, FactSet(FACTS), MeasureSettings(), tmp_path / "out", readings=further) == plain
    curves = json.loads((tmp_path / "out" / "curves.json").read_text())
    assert curves["curves"] == json.loads((tmp_path / "plain" / "curves.json").read_text())["curves"]
    assert [entry["name"] for entry in curves["further"]] == further
    assert set(pq.read_table(tmp_path / "out" / "readings.parquet")["reading"].to_pylist()) == {
        "subject attention (max)",
        *further,
    }
    page = (tmp_path / "out" / "report.html").read_text()
    assert "First token share by layer" in page
    assert "<em>Attention entropy</em> is how widely" in page
    assert "Attention entropy" not in (tmp_path / "plain" / "report.html").read_text()


def test_a_reading_that_prompts_cannot_have_is_refused(specs: list[ModelSpec], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not every prompt has a span 'relation'; there are subject"):
        compare(specs[:1], FactSet(FACTS), MeasureSettings(), tmp_path / "out", readings=["relation share"])
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_refused_and_kept(specs: list[ModelSpec], tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("ten years of work")
    with pytest.raises(OutputError, match=r"thesis\.txt"):
        compare(specs[:1], FactSet(FACTS), MeasureSettings(), tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "ten years of work"


def test_an_interrupted_run_leaves_no_half_results_and_goes_on(
    specs: list[ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import attnbalance.comparison.specs as specs_module

    load, loaded = specs_module.load_model, []

    def second_fails(model: str, **options: object) -> object:
        loaded.append(model)
        if len(loaded) == 2:
            raise KeyboardInterrupt
        return load(model, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(specs_module, "load_model", second_fails)
    with pytest.raises(KeyboardInterrupt):
        compare(specs, FactSet(FACTS), SETTINGS, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    compare(specs, FactSet(FACTS), SETTINGS, tmp_path / "out")
    assert loaded == [specs[0].model, specs[1].model, specs[1].model]
    monkeypatch.undo()
    compare(specs, FactSet(FACTS), SETTINGS, tmp_path / "unbroken")
    for name in ("curves.json", "recall.json", "answers.jsonl", "prompts.jsonl", "readings.parquet"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "unbroken" / name).read_bytes()


def test_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="at least one LABEL=MODEL"):
        compare([], FactSet(FACTS), MeasureSettings(), tmp_path / "out")


def test_a_refused_run_leaves_nothing_behind(specs: list[ModelSpec], tmp_path: Path) -> None:
    (Path(specs[0].model) / "model.safetensors").write_bytes(b"damaged")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ModelError, match="cannot load model"):
        compare(specs, FactSet(FACTS), MeasureSettings(), tmp_path / "out")
    with pytest.raises(DataError, match="label 'a' is used for more than one model"):
        compare([specs[0], specs[0]], FactSet(FACTS), MeasureSettings(), tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_a_difference_between_two_tokenizers_is_said_to_be_one(specs: list[ModelSpec], tmp_path: Path) -> None:
    facts, other = FactSet(FACTS), tmp_path / "other"
    assert "different tokens" not in compare(specs, facts, MeasureSettings(), tmp_path / "alike")
    shutil.copytree(specs[0].model, other)
    tiny_tokenizer("metaspace").save_pretrained(other)
    assert "different tokens" in compare(
        [specs[0], ModelSpec("c", str(other))], facts, MeasureSettings(), tmp_path / "out"
    )


def test_models_of_two_dtypes_are_said_to_be_of_two(specs: list[ModelSpec], tmp_path: Path) -> None:
    rounded, facts = tmp_path / "rounded", FactSet(FACTS)
    AutoModelForCausalLM.from_pretrained(specs[0].model).bfloat16().save_pretrained(rounded)
    tiny_tokenizer("bos").save_pretrained(rounded)
    pair = [specs[0], ModelSpec("c", str(rounded))]
    assert "a was read in float32 and c in bfloat16" in compare(pair, facts, MeasureSettings(), tmp_path / "out")
    alike = MeasureSettings(dtype="float32")
    assert "was read in" not in compare(pair, facts, alike, tmp_path / "alike")


def test_a_missing_adapter_is_refused_before_another_model_is_measured(specs: list[ModelSpec], tmp_path: Path) -> None:
    absent = ModelSpec("b", specs[1].model, str(tmp_path / "absent"))
    with pytest.raises(ModelError, match="no adapter folder at"):
        compare([specs[0], absent], FactSet(FACTS), SETTINGS, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_a_changed_config_is_not_taken_for_finished(specs: list[ModelSpec], tmp_path: Path) -> None:
    compare(specs[:1], FactSet(FACTS), MeasureSettings(), tmp_path / "out")
    config = Path(specs[0].model) / "config.json"
    config.write_text(config.read_text().replace("10000.0", "500.0"))
    with pytest.raises(OutputError, match="files"):
        compare(specs[:1], FactSet(FACTS), MeasureSettings(), tmp_path / "out")


def test_a_model_with_one_head_zeroed_is_not_taken_for_finished(specs: list[ModelSpec], tmp_path: Path) -> None:
    config = tiny_config("llama", hidden_size=256, num_attention_heads=32, num_key_value_heads=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(specs[0].model)
    compare(specs[:1], FactSet(FACTS), MeasureSettings(), tmp_path / "out")
    path = Path(specs[0].model) / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.self_attn.q_proj.weight"][80:88] = 0  # 8 of 256 rows: head 10
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(OutputError, match="files"):
        compare(specs[:1], FactSet(FACTS), MeasureSettings(), tmp_path / "out")


def test_a_model_that_changes_while_it_is_measured_is_refused(
    specs: list[ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["attnbalance.comparison.compare"]
    plain, config = module.measure_all, Path(specs[1].model) / "config.json"

    def measure_and_edit(*arguments: Any, **rest: Any) -> Any:
        measured = plain(*arguments, **rest)
        config.write_text(config.read_text() + " ")
        return measured

    monkeypatch.setattr(module, "measure_all", measure_and_edit)
    with pytest.raises(ModelError, match="the files of model b changed while it was measured"):
        compare(specs, FactSet(FACTS), SETTINGS, tmp_path / "out")
    assert not (tmp_path / "out").exists()
