"""The folder that `attnbalance trajectory` writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from peft import PeftModel
from tiny import FACTS, tiny_lora, tiny_model, tiny_tokenizer

from attnbalance import (
    FactSet,
    HookedModel,
    bridge_of,
    load_model,
    make_prompts,
    read_attention,
    read_value_weighted_attention,
    recall,
)
from attnbalance.comparison import measure
from attnbalance.comparison.specs import MeasureSettings
from attnbalance.errors import ModelError, OutputError
from attnbalance.readings.attention import read_subject_attention
from attnbalance.trajectory.compare_checkpoints import compare_checkpoints

FACTS_ASKED = FactSet(FACTS)
SETTINGS = MeasureSettings(recall=True, batch_size=4)
STEPS = (10, 20, 100)
FILES = {"answers.jsonl", "attnbalance.json", "curves.json", "prompts.jsonl", "readings.parquet"}
FILES |= {"recall.json", "report.html", "trajectory.json", "trajectory.png"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Trainer's folder with three adapters, beside their base."""
    folder = tmp_path_factory.mktemp("run")
    tiny_model("llama").save_pretrained(folder / "base")
    tiny_tokenizer("bos").save_pretrained(folder / "base")
    for step in STEPS:
        base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
        tiny_lora(base, ["q_proj", "v_proj"], seed=step).save_pretrained(folder / f"checkpoint-{step}")
    return folder


@pytest.fixture(scope="module")
def full(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same checkpoints as full weights."""
    folder = tmp_path_factory.mktemp("full")
    for step in STEPS:
        base = transformers.AutoModelForCausalLM.from_pretrained(run / "base")
        merged = PeftModel.from_pretrained(base, run / f"checkpoint-{step}").merge_and_unload()
        merged.save_pretrained(folder / f"checkpoint-{step}")
        tiny_tokenizer("bos").save_pretrained(folder / f"checkpoint-{step}")
    return folder


@pytest.mark.parametrize("kind", ["run", "full"])
def test_the_folder_holds_the_readings_of_each_checkpoint_loaded_by_itself(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Bit for bit the readings of `load_model`; means against numpy's (float64: 1e-12)."""
    folder, out = request.getfixturevalue(kind), tmp_path / "out"
    answer = compare_checkpoints(folder, FACTS_ASKED, SETTINGS, out, command="attnbalance trajectory")
    assert {path.name for path in out.iterdir()} == FILES
    table, prompts = pq.read_table(out / "readings.parquet").to_pandas(), make_prompts(FACTS_ASKED)
    saved = json.loads((out / "trajectory.json").read_text())
    paths = {step: folder / f"checkpoint-{step}" for step in STEPS}
    if kind == "run":
        paths = {0: folder / "base", **paths}
    assert [entry["step"] for entry in saved["checkpoints"]] == list(paths)
    alone = list[torch.Tensor]()
    for i, (step, path) in enumerate(paths.items()):
        model = load_model(path)
        alone.append(read_subject_attention(model, prompts, batch_size=4).values)
        there = table[table.label == f"step {step}"].value.to_numpy()
        assert np.array_equal(there, alone[-1].numpy().ravel())
        assert saved["readings"][0]["mean"][i]["mean"] == pytest.approx(float(alone[-1].double().mean()), abs=1e-12)
        right = recall(model, prompts, {}).correct
        assert saved["checkpoints"][i]["accuracy"]["mean"] == pytest.approx(sum(right) / len(right))
    change = (alone[-1] - alone[0]).double().mean()
    assert saved["readings"][0]["change"][-1]["mean"] == pytest.approx(float(change), abs=1e-12)
    assert f"difference {float(change):+.3f}" in answer
    assert answer in (out / "report.html").read_text()


def test_the_model_before_full_checkpoints_is_step_0_where_it_is_named(run: Path, full: Path, tmp_path: Path) -> None:
    answer = compare_checkpoints(full, FACTS_ASKED, SETTINGS, tmp_path / "full", base=run / "base")
    assert "at step 0" in answer or "from step 0" in answer
    compare_checkpoints(run, FACTS_ASKED, SETTINGS, tmp_path / "run")
    tables = [pq.read_table(tmp_path / kind / "readings.parquet").to_pandas() for kind in ("full", "run")]
    assert [list(dict.fromkeys(table.label)) for table in tables] == [[f"step {step}" for step in (0, *STEPS)]] * 2
    # merged weights and adapters round differently (float32: 1e-6); the base is the same to the bit
    np.testing.assert_allclose(tables[0].value, tables[1].value, atol=1e-5)
    bases = [table[table.label == "step 0"].value.to_numpy() for table in tables]
    assert np.array_equal(*bases)


def test_further_readings_are_followed_along_the_steps_and_the_headline_stays(run: Path, tmp_path: Path) -> None:
    """The means of the library's own readings of each checkpoint, loaded by itself: sums in float64, 1e-7."""
    further = ["first token share", "attention entropy", "value-weighted subject attention"]
    answer = compare_checkpoints(run, FACTS_ASKED, SETTINGS, tmp_path / "out", readings=further)
    assert answer == compare_checkpoints(run, FACTS_ASKED, SETTINGS, tmp_path / "plain")
    saved = json.loads((tmp_path / "out" / "trajectory.json").read_text())["readings"]
    assert [entry["name"] for entry in saved] == ["subject attention (max)", *further[:2], f"{further[2]} (max)"]
    for i, name in enumerate(("base", *(f"checkpoint-{step}" for step in STEPS))):
        model, prompts = load_model(run / name), make_prompts(FACTS_ASKED)
        rows = read_attention(model, prompts, batch_size=4)
        weighted = read_value_weighted_attention(bridge_of(model), prompts, batch_size=4).to("subject")
        for entry, reading in zip(saved[1:], (rows.share("first token"), rows.entropy(), weighted), strict=True):
            assert entry["mean"][i]["mean"] == pytest.approx(float(reading.values.double().mean()), abs=1e-7)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "First token share along the run" in page
    assert "<em>Attention entropy</em> is how widely" in page


def test_the_headline_is_what_plain_transformers_gives(full: Path, tmp_path: Path) -> None:
    """Eager attention, one prompt at a time, without this package; float32 sums in another order: 1e-5."""
    out = tmp_path / "out"
    compare_checkpoints(str(full / "checkpoint-*"), FACTS_ASKED, SETTINGS, out)
    saved = json.loads((out / "trajectory.json").read_text())["readings"][0]
    for i, step in enumerate(STEPS):
        path = full / f"checkpoint-{step}"
        eager = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
        tokenizer, means = transformers.AutoTokenizer.from_pretrained(path), list[float]()
        for line in (out / "prompts.jsonl").read_text().splitlines():
            prompt = json.loads(line)
            encoded = tokenizer(prompt["text"], return_tensors="pt", return_offsets_mapping=True)
            offsets = encoded.pop("offset_mapping")[0].tolist()
            start, end = prompt["spans"]["subject"]
            inside = [j for j, (a, b) in enumerate(offsets) if a < end and b > start]
            with torch.no_grad():
                maps = eager(**encoded, output_attentions=True).attentions
            means.append(float(torch.stack([layer[0, :, -1, inside].amax(-1).mean() for layer in maps]).mean()))
        assert saved["mean"][i]["mean"] == pytest.approx(sum(means) / len(means), abs=1e-5)


def interrupted_at(monkeypatch: pytest.MonkeyPatch, last: int) -> list[str]:
    """The names of the models that are measured from now on; after `last` of them the run is interrupted."""
    names, read = list[str](), measure.read_from_rows

    def read_or_stop(model: HookedModel, *args: object, **options: object) -> object:
        if len(names) == last:
            raise KeyboardInterrupt
        names.append(model.name)
        return read(model, *args, **options)  # pyright: ignore

    monkeypatch.setattr(measure, "read_from_rows", read_or_stop)
    return names


def test_an_interrupted_run_resumes_at_the_checkpoint_that_was_not_measured(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    compare_checkpoints(run, FACTS_ASKED, SETTINGS, whole)
    with monkeypatch.context() as patched:
        assert len(interrupted_at(patched, 3)) == 0
        with pytest.raises(KeyboardInterrupt):
            compare_checkpoints(run, FACTS_ASKED, SETTINGS, out)
    names = interrupted_at(monkeypatch, 9)
    compare_checkpoints(run, FACTS_ASKED, SETTINGS, out)
    assert [Path(name).name for name in names] == ["checkpoint-100"]
    for name in ("trajectory.json", "readings.parquet", "answers.jsonl"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    compare_checkpoints(run, FACTS_ASKED, SETTINGS, out)
    assert len(names) == 1


def test_a_last_checkpoint_of_another_shape_is_refused_before_anything_is_measured_and_again(
    full: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(full, tmp_path / "copy"))
    config = json.loads((copy / "checkpoint-100" / "config.json").read_text())
    (copy / "checkpoint-100" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    for _ in range(2):
        with pytest.raises(ModelError, match="checkpoint-100 must differ from .*checkpoint-10 in the values .* only"):
            compare_checkpoints(copy, FACTS_ASKED, SETTINGS, tmp_path / "out")


def test_another_tokenizer_in_one_checkpoint_is_refused_unless_one_is_given(full: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(full, tmp_path / "copy"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(copy / "checkpoint-20")
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.add_special_tokens({"eos_token": "?"})
    tokenizer.save_pretrained(copy / "checkpoint-20")
    with pytest.raises(
        ModelError, match="checkpoint-20 must have the tokenizer of .* its tokens and chat template and end of"
    ):
        compare_checkpoints(copy, FACTS_ASKED, SETTINGS, tmp_path / "out")
    named = MeasureSettings(batch_size=4, tokenizer=str(full / "checkpoint-10"))
    assert "accuracy was not measured" in compare_checkpoints(copy, FACTS_ASKED, named, tmp_path / "out")


def test_a_tokenizer_that_was_saved_again_is_the_same(full: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(full, tmp_path / "copy"))
    path = copy / "checkpoint-20" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"note": "saved by another version"}, indent=7))
    compare_checkpoints(copy, FACTS_ASKED, MeasureSettings(), tmp_path / "out")


def test_a_folder_of_another_trajectory_is_refused(run: Path, full: Path, tmp_path: Path) -> None:
    compare_checkpoints(run, FACTS_ASKED, SETTINGS, tmp_path / "out")
    with pytest.raises(OutputError, match="holds the result of `trajectory` with other settings"):
        compare_checkpoints(full, FACTS_ASKED, SETTINGS, tmp_path / "out")


def test_questions_about_facts_that_the_run_was_trained_on_are_counted(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "attnbalance.json").write_text(json.dumps({"kind": "finetune"}))
    (tmp_path / "run" / "train.jsonl").write_text("".join(json.dumps(fact.as_dict()) + "\n" for fact in FACTS[:4]))
    where = [tmp_path / "run" / f"checkpoint-{step}" for step in STEPS]
    answer = compare_checkpoints(where, FACTS_ASKED, SETTINGS, tmp_path / "out")
    assert f"; step 100 was finetuned on the facts of 4 of these {len(FACTS)}; " in answer


def test_facts_that_the_base_of_full_checkpoints_was_trained_on_are_counted(
    full: Path, llama_folder: Path, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(llama_folder, tmp_path / "base"))
    (base / "attnbalance.json").write_text(json.dumps({"kind": "finetune"}))
    (base / "train.jsonl").write_text("".join(json.dumps(fact.as_dict()) + "\n" for fact in FACTS[:4]))
    answer = compare_checkpoints(full, FACTS_ASKED, SETTINGS, tmp_path / "out", base=base)
    assert f"; step 0 was finetuned on the facts of 4 of these {len(FACTS)}; " in answer
