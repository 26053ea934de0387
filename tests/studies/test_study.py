"""The study: the same table however it is run, killed or divided, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import warnings
from collections import Counter
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file, save_file

from attnbalance.data.synthetic import synthetic_facts
from attnbalance.errors import DataError, ModelError, OutputError
from attnbalance.files.outputs import HASH, MARKER, read_json, write_json, write_saved
from attnbalance.files.work import in_place, locked
from attnbalance.finetuning.splits import split_facts
from attnbalance.studies import run_fit
from attnbalance.studies.plan import parse_study, variants
from attnbalance.studies.run_fit import RESULT
from attnbalance.studies.study import KIND, _warn_of_precisions, check_grid, study

CONTROLS = ("no training: statement", "no training: question", "no training: few-shot", "constant answer")


def numbers(out: Path) -> list[dict]:
    return [
        {k: v for k, v in row.items() if k != "seconds"} for row in json.loads((out / "study.json").read_text())["rows"]
    ]


def test_every_method_split_and_world_has_its_row(done: Path) -> None:
    rows = numbers(done)
    assert [(r["method"], r["split"], r["seeds"]) for r in rows] == [
        *((control, split, 2) for split in ("top", "bottom") for control in CONTROLS),
        ("plain", "top", 2),
        ("recommended", "top", 2),
        ("plain", "bottom", 2),
        ("recommended", "bottom", 2),
    ]
    text = (done / "table.md").read_text()
    assert all(text.count(f"| {control} | {split} |") == 1 for control in CONTROLS for split in ("top", "bottom"))
    contrasts = text.split("FT-Top minus FT-Bottom, points")[1:]
    assert [[f"| {method} | 2 |" in part for method in ("plain", "recommended")] for part in contrasts] == [
        [True, True]
    ]
    assert "| recommended | bottom |" in text
    assert "Extraction ratio:" in text
    assert (done / "study.png").stat().st_size > 10_000


def test_controls_are_scored_on_the_held_out_questions_of_each_split(done: Path) -> None:
    shares = []
    for seed in (0, 1):
        facts = synthetic_facts(seed, subjects=30, answers=3)
        split = split_facts(facts, "bottom", seed=seed)
        usual = {
            relation: Counter(fact.answer for fact in split.train if fact.relation == relation).most_common(1)[0][0]
            for relation in facts.relations
        }
        shares.append(np.mean([fact.answer == usual[fact.relation] for fact in split.heldout]))
    rows = {(row["method"], row["split"]): row for row in numbers(done)}
    assert rows["constant answer", "bottom"]["accuracy"]["mean"] == pytest.approx(np.mean(shares))
    base = rows["no training: statement", "top"]
    assert base["extraction"]["mean"] == base["kept"]["mean"] == 1
    assert base["new_facts"] is base["drift"] is base["attention"] is None


def test_two_workers_give_the_table_of_one(config: Path, done: Path) -> None:
    out = config.parent / "two"
    assert "4 of 8 fits are done" in study(config, out, worker="1/2")
    study(config, out, worker="0/2")
    assert numbers(out) == numbers(done)


def test_a_study_killed_in_the_middle_ends_with_the_same_table(
    config: Path, done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """Stands for SIGKILL."""

    out, measured, left = config.parent / "killed", run_fit._measured, [0, 2]

    def dying(*arguments: object) -> object:
        if left and not left[0]:
            left.pop(0)
            raise Killed
        if left:
            left[0] -= 1
        return measured(*arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(run_fit, "_measured", dying)
    for _ in range(2):
        with pytest.raises(Killed):
            study(config, out)
    study(config, out)
    assert numbers(out) == numbers(done)


def test_a_study_whose_folder_is_removed_is_no_success_and_can_be_run_again(
    config: Path, done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, measured = config.parent / "removed", run_fit._measured

    def removing(*arguments: object) -> object:
        result = measured(*arguments)  # pyright: ignore[reportArgumentType]
        shutil.rmtree(out)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(run_fit, "_measured", removing)
        with pytest.raises(OutputError, match="was removed or changed while it was written"):
            study(config, out)
    study(config, out)
    assert numbers(out) == numbers(done)


@pytest.mark.parametrize("name", ["bases/tiny-0-statement.json", f"fits/tiny/seed-0/top/plain/{RESULT}"])
def test_a_damaged_part_of_a_study_is_set_aside_and_made_again(
    config: Path, done: Path, tmp_path: Path, name: str
) -> None:
    out = Path(shutil.copytree(done, tmp_path / "out"))
    for made in ("recommended", "plain/run-0", "plain/run-1"):  # these name the base where it was made
        shutil.rmtree(out / "fits/tiny/seed-0/top" / made)
    (out / name).write_text((out / name).read_text()[:-20])
    with pytest.warns(UserWarning, match="set aside as damaged-"):
        study(config, out)
    assert numbers(out) == numbers(done)


FITS, TOP_0 = "fits/tiny", "fits/tiny/seed-0/top/plain"


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (f"{FITS}/seed-1/top/plain/{RESULT}", f"{TOP_0}/{RESULT}", "holds the result of fits/tiny/seed-1/top/plain"),
        (f"{FITS}/seed-0/bottom/plain/{RESULT}", f"{TOP_0}/{RESULT}", "holds the result of fits/tiny/seed-0/bottom"),
        ("bases/tiny-0-heldout-few-shot.json", "bases/tiny-0-heldout-question.json", "holds answers to other prompts"),
        ("bases/tiny-1-statement.json", "bases/tiny-0-statement.json", "holds answers to other prompts"),
    ],
)
def test_a_part_that_was_put_in_the_place_of_another_is_refused(
    config: Path, done: Path, tmp_path: Path, source: str, target: str, message: str
) -> None:
    out = Path(shutil.copytree(done, tmp_path / "out"))
    shutil.copy(out / source, out / target)
    with pytest.raises(OutputError, match=f"{out / target} {message}"):
        study(config, out)


def test_answers_of_another_base_are_refused(config: Path, done: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(done, tmp_path / "out"))
    path = out / "bases/tiny-0-statement.json"
    saved = read_json(path)
    write_saved(path, {name: saved[name] for name in saved if name != HASH} | {"model_files": "of another model"})
    with pytest.raises(OutputError, match="holds answers to other prompts, or of another model or dtype; remove it"):
        study(config, out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drift": "none"}, "'drift' must be float, got 'none'"),
        ({"correct": None}, "'correct' must be a collection of bool, got None"),
        ({"method_settings": []}, "'method_settings' must be dict"),
    ],
)
def test_a_result_that_was_changed_is_refused_by_the_name_of_its_file(
    config: Path, done: Path, tmp_path: Path, change: dict, message: str
) -> None:
    out = Path(shutil.copytree(done, tmp_path / "out"))
    path = out / "fits/tiny/seed-0/top/plain" / RESULT
    made = read_json(path)
    write_json(path, made | {"drift": 0.0})
    with pytest.raises(OutputError, match=f"{path} was changed: its content must have SHA-256 {made.pop(HASH)}"):
        study(config, out)
    for content in (made | change, {k: v for k, v in made.items() if k not in change}):
        write_json(path, content)
        with pytest.raises(OutputError, match=f"{path} was changed: {message.partition(',')[0]}"):
            study(config, out)


@pytest.mark.parametrize("changed", [None, {"worlds": None}, {"worlds": {"tiny": None}}])
def test_a_study_whose_record_was_changed_is_refused(config: Path, tmp_path: Path, changed: object) -> None:
    write_json(tmp_path / "out" / MARKER, {"kind": KIND, "config": changed})
    with pytest.raises(OutputError, match=f"{MARKER} was changed: .* must be dict, got None; restore the file"):
        study(config, tmp_path / "out")


def test_two_commands_at_the_same_part_of_a_study_do_not_meet(config: Path, tmp_path: Path) -> None:
    with (
        in_place(tmp_path / "out", KIND, {"worlds": parse_study(config).worlds}),  # another worker's study
        locked(tmp_path / "out/fits/tiny/seed-0"),
        pytest.raises(OutputError, match=rf"process {os.getpid()} on .* is at work on .*seed-0"),
    ):
        study(config, tmp_path / "out", worker="0/2")


def test_the_record_of_a_study_at_work_is_not_rewritten(config: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other.yaml"
    other.write_text(config.read_text().replace("answers: 3", "answers: 4"))
    assert other.read_text() != config.read_text()
    with in_place(out, KIND, {"worlds": parse_study(config).worlds}), locked(out / "fits/tiny/seed-1"):
        before = (out / MARKER).read_text()
        with pytest.raises(OutputError, match=r"other settings: worlds\.tiny\.answers is 3 there, 4 here"):
            study(other, out)
        assert (out / MARKER).read_text() == before


def test_a_method_may_be_added_and_none_changed(config: Path, done: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(done, out)
    more, other = tmp_path / "more.yaml", tmp_path / "other.yaml"
    more.write_text(config.read_text().replace("methods:", "methods:\n  qk: {train: qk}"))
    other.write_text(config.read_text().replace("objective: recommended", "objective: ce"))
    before = (out / "fits/tiny/seed-0/top/plain" / RESULT).stat().st_mtime_ns
    assert "| qk | top |" in study(more, out)
    assert (out / "fits/tiny/seed-0/top/plain" / RESULT).stat().st_mtime_ns == before
    with pytest.raises(OutputError, match="fit with other settings"):
        study(other, out)


WORLD = "{{facts: synthetic, subjects: 30, answers: 3, {}}}"


@pytest.mark.parametrize(
    ("world", "rest", "message"),
    [
        ("model: ./nowhere", "methods: {b: {}}", "world a: no model folder at ./nowhere"),
        ("model: NOT_A_MODEL", "methods: {b: {}}", "world a: cannot load model"),
        ("recipe: {layers: 2}", "methods: {b: {train: qk@2}}", r"world a: layer 2 \(in 'qk@2'\): .*layers 0 to 1"),
        ("power: 0.5", "methods: {b: {}}\nsplits: [controlled-top]", "world a: no facts of relation"),
        ("power: 1000", "methods: {b: {}}", "world a: popularity .* must add up to a finite number"),
        ("recipe: {steps: 999999999, batch_size: 999}", "methods: {b: {}}", "steps x batch_size must be at most"),
        ("recipe: {layers: 100000000}", "methods: {b: {}}", "layers must be at most 1,000"),
        ("recipe: {vocabulary: 10}", "methods: {b: {}}", "vocabulary needs at least 259"),
        (
            "power: 1",
            "methods: {b: {objective: kl(few-shot), steps: [1, 2], batch_size: 4}}",
            "read different training facts",
        ),
        (
            "power: 1",
            "methods: {b: {objective: recommended, batch_size: [100, 200], curriculum: popular-first}}",
            "method b: its variants read different training facts, or in a different order, and the targets of ce",
        ),
    ],
)
def test_what_no_fit_could_begin_with_is_refused_before_anything_is_written(
    world: str, rest: str, message: str, tmp_path: Path
) -> None:
    path, out = tmp_path / "study.yaml", tmp_path / "out"
    path.write_text(f"worlds: {{a: {WORLD.format(world)}}}\n{rest}")
    with pytest.raises(DataError, match=message):
        study(path, out)
    assert not out.exists()


def test_variants_that_read_the_same_facts_in_the_same_order_are_compared() -> None:
    grids = ["{learning_rate: [0.1, 0.2], steps: 1}", "{steps: [50, 60], batch_size: 4}", "{batch_size: [100, 200]}"]
    for grid in grids:
        method = yaml.safe_load(grid) | {"objective": "recommended"}
        check_grid("b", variants(method), facts=100)
    check_grid("b", variants({"objective": "kl(statement)", "steps": [1, 2]}), facts=100)


def test_the_seed_with_most_training_facts_decides_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    method = "methods: {b: {objective: recommended, steps: [1, 99], batch_size: COUNT}}\nseeds: [0, 1, 2, 3, 4, 5]"
    path.write_text(f"worlds: {{a: {WORLD.format('power: 1')}}}\n{method.replace('COUNT', '1')}")
    with pytest.raises(DataError, match="be at least") as raised:
        study(path, tmp_path / "out")
    named = int(re.search(r"be at least (\d+) in each", str(raised.value))[1])  # pyright: ignore
    counts = set()
    for seed in range(6):
        facts = synthetic_facts(seed, subjects=30, answers=3)
        counts |= {len(split_facts(facts, split, seed=seed).train) for split in ("top", "bottom")}
    assert named == max(counts)


def test_a_table_of_fits_of_two_versions_says_so(config: Path, done: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(done, out)
    path = out / "fits/tiny/seed-0/top/plain" / RESULT
    result = read_json(path)
    write_saved(path, {name: result[name] for name in result if name != HASH} | {"attnbalance_version": "0.0.1"})
    with pytest.warns(UserWarning, match=r"1 of \d+ fits were made by attnbalance 0\.0\.1, and this is"):
        study(config, out)


def test_a_table_of_fits_in_the_precisions_of_several_machines_says_so(
    config: Path, done: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    out = tmp_path / "out"
    shutil.copytree(done, out)
    study(config, out)
    assert not any("mixed precision" in str(warning.message) for warning in recwarn)
    path = out / "fits/tiny/seed-0/top/plain" / RESULT
    result = read_json(path)
    assert result["mixed_precision"] == "no"
    write_saved(path, {name: result[name] for name in result if name != HASH} | {"mixed_precision": "bf16"})
    with pytest.warns(UserWarning, match=r"fits were trained in different mixed precisions, .* \(1 bf16, \d+ no\)"):
        study(config, out)
    for named in ({"mixed_precision": "bf16"}, {"dtype": "float64"}):  # not the machine's choice
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            changed = [{"method_settings": named, "mixed_precision": "bf16"}]
            _warn_of_precisions([*changed, {"method_settings": {}, "mixed_precision": "no"}])


def test_answers_of_a_base_that_another_version_kept_are_said(config: Path, done: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(done, out)
    path = next(out.rglob("*-statement.json"))
    saved = read_json(path)
    assert saved["attnbalance_version"] == metadata.version("attnbalance")
    write_saved(path, {name: saved[name] for name in saved if name != HASH} | {"attnbalance_version": "0.0.1"})
    with pytest.warns(UserWarning, match=r"-statement\.json was made by attnbalance 0\.0\.1, and this is"):
        study(config, out)


def test_a_study_whose_model_could_not_be_loaded_goes_on_once_its_path_is_right(
    llama_folder: Path, tmp_path: Path
) -> None:
    path, out, damaged = tmp_path / "study.yaml", tmp_path / "out", tmp_path / "damaged"
    world = WORLD.format("model: MODEL")
    text = f"worlds: {{a: {world}}}\nsplits: [top]\nmethods: {{b: {{steps: 2}}}}"
    shutil.copytree(llama_folder, damaged)
    (damaged / "model.safetensors").write_bytes(b"no weights")
    path.write_text(text.replace("MODEL", str(damaged)))
    with pytest.raises(ModelError, match="cannot load model"):
        study(path, out)
    path.write_text(text.replace("MODEL", str(llama_folder)))
    assert "| b | top |" in study(path, out)
    path.write_text(text.replace("MODEL", str(shutil.copytree(llama_folder, tmp_path / "other"))))
    with pytest.raises(OutputError, match="with other settings: worlds.a.model is"):  # now there are results
        study(path, out)


def test_facts_or_a_model_that_changed_are_refused(llama_folder: Path, tmp_path: Path) -> None:
    path, out, table = tmp_path / "study.yaml", tmp_path / "out", tmp_path / "facts.jsonl"
    facts = [
        {"subject": f"Ann {i}", "relation": "city", "answers": [("Rome", "Oslo")[i % 2]], "popularity": 40 - i}
        for i in range(40)
    ]
    table.write_text("".join(json.dumps(fact) + "\n" for fact in facts))
    model = shutil.copytree(llama_folder, tmp_path / "model")
    text = f"worlds: {{a: {{facts: '{table}', model: '{model}'}}}}\nsplits: [whole]\nmethods: {{b: {{steps: 2}}}}"
    path.write_text(text)
    study(path, out)
    path.write_text(text.replace("{b:", "{c: {steps: 2, learning_rate: 0.1}, b:"))
    weights = load_file(model / "model.safetensors")
    save_file({name: 0.5 * weight for name, weight in weights.items()}, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(OutputError, match="the model's files of world a have changed"):
        study(path, out)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    table.write_text(table.read_text().replace("Oslo", "Bern"))
    with pytest.raises(OutputError, match="the facts of world a have changed"):
        study(path, out)
    table.write_text(table.read_text().replace("Bern", "Oslo"))
    assert "| c | whole |" in study(path, out)


@pytest.mark.parametrize("seeds", [[0, 1], [0]])
def test_facts_that_change_while_a_study_runs_are_refused(
    seeds: list[int], llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one seed the facts are compared again before the table."""
    path, table = tmp_path / "study.yaml", tmp_path / "facts.jsonl"
    facts = [
        {"subject": f"Ann {i}", "relation": "city", "answers": [("Rome", "Oslo")[i % 2]], "popularity": 40 - i}
        for i in range(40)
    ]
    table.write_text("".join(json.dumps(fact) + "\n" for fact in facts))
    world = f"{{facts: '{table}', model: '{llama_folder}'}}"
    path.write_text(f"worlds: {{a: {world}}}\nseeds: {seeds}\nsplits: [whole]\nmethods: {{b: {{steps: 2}}}}")
    module = sys.modules["attnbalance.studies.study"]
    plain = module.run_fit

    def run_and_edit(*arguments: object) -> None:
        plain(*arguments)
        table.write_text(table.read_text().replace("Oslo", "Bern"))

    monkeypatch.setattr(module, "run_fit", run_and_edit)
    with pytest.raises(OutputError, match="the facts of world a have changed since results were written"):
        study(path, tmp_path / "out")
    assert len(list((tmp_path / "out").rglob(RESULT))) == 1


def test_a_study_that_cannot_be_read_is_named_before_slurms_array_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "two")
    with pytest.raises(DataError, match="cannot read the study"):
        study(tmp_path / "none.yaml", tmp_path / "out")
