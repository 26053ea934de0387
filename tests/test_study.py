"""The study: the same table however it is run, killed or divided, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from attnbalance import study as module
from attnbalance.errors import DataError, OutputError
from attnbalance.readings.fits import rows_of
from attnbalance.study import RESULT, parse_study, study, variants

RECIPE = "{steps: 60, batch_size: 32, layers: 1, d_model: 32, heads: 2, vocabulary: 500, learning_rate: 0.01}"
CONFIG = f"""
worlds:
  tiny: {{facts: synthetic, subjects: 30, answers: 3, recipe: {RECIPE}}}
seeds: [0, 1]
splits: [top, bottom]
methods:
  plain: {{learning_rate: [0.001, 0.01]}}
  recommended: {{objective: recommended}}
defaults: {{steps: 4, batch_size: 16, checkpoint_every: 2}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("study") / "study.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def done(config: Path) -> Path:
    """A study that ran in one go."""
    out = config.parent / "one"
    study(config, out)
    return out


def numbers(out: Path) -> list[dict]:
    return [
        {k: v for k, v in row.items() if k != "seconds"} for row in json.loads((out / "study.json").read_text())["rows"]
    ]


def test_every_method_split_and_world_has_its_row(done: Path) -> None:
    rows = numbers(done)
    assert [(r["method"], r["split"], r["seeds"]) for r in rows] == [
        ("plain", "top", 2),
        ("recommended", "top", 2),
        ("plain", "bottom", 2),
        ("recommended", "bottom", 2),
    ]
    text = (done / "table.md").read_text()
    assert "| recommended | bottom |" in text
    assert "Extraction ratio:" in text
    assert (done / "study.png").stat().st_size > 10_000


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

    out, measured, left = config.parent / "killed", module._measured, [0, 2]

    def dying(*arguments: object) -> object:
        if left and not left[0]:
            left.pop(0)
            raise Killed
        if left:
            left[0] -= 1
        return measured(*arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(module, "_measured", dying)
    for _ in range(2):
        with pytest.raises(Killed):
            study(config, out)
    study(config, out)
    assert numbers(out) == numbers(done)


def test_a_method_may_be_added_and_none_changed(config: Path, done: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(done, out)
    more, other = tmp_path / "more.yaml", tmp_path / "other.yaml"
    more.write_text(CONFIG.replace("methods:", "methods:\n  qk: {train: qk}"))
    other.write_text(CONFIG.replace("objective: recommended", "objective: ce"))
    before = (out / "fits/tiny/seed-0/top/plain" / RESULT).stat().st_mtime_ns
    assert "| qk | top |" in study(more, out)
    assert (out / "fits/tiny/seed-0/top/plain" / RESULT).stat().st_mtime_ns == before
    with pytest.raises(OutputError, match="fit with other settings"):
        study(other, out)


def test_a_grid_is_chosen_on_validation_facts_alone(done: Path) -> None:
    for path in done.glob("fits/tiny/*/*/plain"):
        losses = {}
        for run in sorted(path.glob("run-*")):
            marker = json.loads((run / "attnbalance.json").read_text())
            losses[marker["config"]["learning_rate"]] = min(loss for _, loss in marker["validation_loss"])
        assert len(losses) == 2
        chosen = json.loads((path / RESULT).read_text())["settings"]["learning_rate"]
        assert chosen == min(losses, key=lambda rate: losses[rate])


def test_variants_are_all_combinations() -> None:
    assert variants({"steps": [1, 2], "train": "qk", "lora_rank": [0, 4]}) == [
        {"steps": 1, "train": "qk", "lora_rank": 0},
        {"steps": 1, "train": "qk", "lora_rank": 4},
        {"steps": 2, "train": "qk", "lora_rank": 0},
        {"steps": 2, "train": "qk", "lora_rank": 4},
    ]


def fit(method: str, split: str, seed: int, correct: list[int], stated: list[int]) -> dict:
    ids = [f"r/{i}" for i in range(len(correct))]
    return {
        "world": "w",
        "seed": seed,
        "split": split,
        "method": method,
        "prompt_ids": ids,
        "subjects": ids,
        "correct": list(map(bool, correct)),
        "stated": list(map(bool, stated)),
        "accuracy_by_quintile": [1.0, 0.5],
        "shortcut_rate": None,
        "subject_attention": [0.2, 0.4],
        "new_facts": 0.5,
        "kept_facts": 1.0,
        "drift": 0.1,
        "seconds": 3.0,
    }


def test_ratios_gains_and_gaps_by_hand() -> None:
    stated = [1, 1, 1, 1, 0, 0, 1, 1]
    results = [
        fit("plain", "top", 0, [1, 1, 1, 0, 0, 0, 1, 0], stated),
        fit("plain", "top", 1, [1, 1, 1, 1, 0, 0, 0, 0], stated),
        fit("plain", "bottom", 0, [1, 0, 0, 0, 0, 0, 0, 0], stated),
        fit("plain", "bottom", 1, [0, 0, 1, 0, 0, 0, 0, 0], stated),
        fit("new", "bottom", 0, [1, 1, 1, 0, 0, 0, 0, 0], stated),
        fit("new", "bottom", 1, [1, 1, 1, 1, 0, 0, 0, 1], stated),
    ]
    row = next(row for row in rows_of(results) if row.method == "new")
    assert row.extraction.mean == pytest.approx((3 / 6 + 5 / 6) / 2)
    assert row.accuracy.mean == pytest.approx(0.5)
    gains = [2 / 8, 4 / 8]
    low, high = stats.t.interval(0.95, 1, np.mean(gains), stats.sem(gains))
    assert row.gain is not None
    assert low < -1 < 1 < high  # impossible: two seeds say little
    assert (row.gain.low, row.gain.high) == (-1.0, 1.0)
    assert row.gain.mean == pytest.approx(np.mean(gains))
    three = rows_of(
        [*results, fit("plain", "bottom", 2, [0] * 8, stated), fit("new", "bottom", 2, [1, 1, 1] + [0] * 5, stated)]
    )
    gains.append(3 / 8)
    low, high = stats.t.interval(0.95, 2, np.mean(gains), stats.sem(gains))
    (row,) = [row for row in three if row.method == "new"]
    assert row.gain is not None
    assert (row.gain.low, row.gain.high) == pytest.approx((low, high))
    (row,) = [row for row in rows_of(results) if row.method == "new"]
    assert row.gap is not None
    assert row.gap.mean == pytest.approx((2 + 4) / (3 + 3))
    assert row.stored.mean == pytest.approx((3 / 6 + 5 / 6) / 2)
    assert row.shortcut_rate is None
    assert row.attention.mean == pytest.approx(0.3)


def test_a_gap_is_joined_by_seed_and_left_out_where_a_seed_is_missing() -> None:
    rng = np.random.default_rng(1)
    many = {(half, seed): rng.integers(0, 2, 40).tolist() for half in ("top", "bottom", "new") for seed in (0, 1, 2)}
    stated = [1] * 40
    results = [fit("plain", "top", seed, many["top", seed], stated) for seed in (2, 1)]
    results += [fit("plain", "bottom", seed, many["bottom", seed], stated) for seed in (0, 1, 2)]
    results += [fit("new", "bottom", seed, many["new", seed], stated) for seed in (0, 1, 2)]
    row = next(row for row in rows_of(results) if row.method == "new")
    total = {half: sum(many[half, 1]) + sum(many[half, 2]) for half in ("top", "bottom", "new")}
    share = (total["new"] - total["bottom"]) / (total["top"] - total["bottom"])
    assert row.gap is not None
    assert row.gap.n == 2
    assert row.gap.mean == pytest.approx(share)
    assert math.isnan(row.gap.low)  # two seeds are too few


def test_a_single_seed_has_intervals_over_facts() -> None:
    rng = np.random.default_rng(0)
    correct = rng.integers(0, 2, 200).tolist()
    (row,) = rows_of([fit("plain", "top", 0, correct, [1] * 200)])
    width = 1.96 * math.sqrt(0.25 / 200)
    assert row.accuracy.high - row.accuracy.low == pytest.approx(2 * width, rel=0.15)
    assert row.extraction.mean == pytest.approx(np.mean(correct))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("worlds: {a: {facts: synthetic}}", "needs methods"),
        ("worlds: {a: {}}\nmethods: {b: {}}", "world a names no facts"),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {stepz: 3}}", "no setting 'stepz'; there are"),
        ("worlds: {a: {facts: synthetic, recipe: {depth: 3}}}\nmethods: {b: {}}", "no depth in a recipe"),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {objective: cee}}", "There are ce"),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {train: kq}}", "no part 'kq'"),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {curriculum: easy}}", "no curriculum 'easy'"),
        ("worlds: {a: {facts: synthetic}}\nmethods: {../b: {}}", "becomes a folder's name"),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {}}\nseeds: 3", "list of different whole numbers"),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {objective: [ce, barrier]}}", "one objective"),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {learning_rate: 1e-3}}", "1.0e-3"),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {lora_rank: -1}}", "at least 0"),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {train: []}}", "empty list"),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {}}\nsplits: [top, botom]", "no split 'botom'"),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {}}\nseeds: [0, 0]", "different whole numbers"),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {}}\nseeds: []", "different whole numbers"),
        ("worlds: [", "is no YAML"),
        ("- a", "must be a mapping"),
    ],
)
def test_a_study_that_cannot_be_run_is_refused_before_anything_is_made(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        parse_study(path)


@pytest.mark.parametrize("worker", ["2/2", "x", "-1/2", "1"])
def test_a_worker_is_one_of_their_number(config: Path, tmp_path: Path, worker: str) -> None:
    with pytest.raises(DataError, match="I/N"):
        study(config, tmp_path / "out", worker=worker)


def test_slurms_array_index_names_the_worker(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ID", "8"), ("MIN", "4"), ("STEP", "2"), ("COUNT", "3")):  # 4, 6 and 8
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    assert module._worker(None) == (2, 3)
    with pytest.raises(DataError, match="cannot read the study"):
        study(tmp_path / "none.yaml", tmp_path / "out")
