"""Rows of a study, by hand: ratios, gains and gaps over seeds, and intervals of a single seed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from attnbalance.studies.summary import split_contrasts, study_rows
from tests.fakes import a_fit


def test_ratios_gains_and_gaps_by_hand() -> None:
    stated = [1, 1, 1, 1, 0, 0, 1, 1]
    results = [
        a_fit("plain", "top", 0, [1, 1, 1, 0, 0, 0, 1, 0], stated),
        a_fit("plain", "top", 1, [1, 1, 1, 1, 0, 0, 0, 0], stated),
        a_fit("plain", "bottom", 0, [1, 0, 0, 0, 0, 0, 0, 0], stated),
        a_fit("plain", "bottom", 1, [0, 0, 1, 0, 0, 0, 0, 0], stated),
        a_fit("new", "bottom", 0, [1, 1, 1, 0, 0, 0, 0, 0], stated),
        a_fit("new", "bottom", 1, [1, 1, 1, 1, 0, 0, 0, 1], stated),
    ]
    row = next(row for row in study_rows(results) if row.method == "new")
    assert row.extraction.mean == pytest.approx((3 / 6 + 5 / 6) / 2)
    assert row.accuracy.mean == pytest.approx(0.5)
    gains = [2 / 8, 4 / 8]
    low, high = stats.t.interval(0.95, 1, np.mean(gains), stats.sem(gains))
    assert row.gain is not None
    assert low < -1 < 1 < high  # impossible: two seeds say little
    assert (row.gain.low, row.gain.high) == (-1.0, 1.0)
    assert row.gain.mean == pytest.approx(np.mean(gains))
    three = study_rows(
        [*results, a_fit("plain", "bottom", 2, [0] * 8, stated), a_fit("new", "bottom", 2, [1, 1, 1] + [0] * 5, stated)]
    )
    gains.append(3 / 8)
    low, high = stats.t.interval(0.95, 2, np.mean(gains), stats.sem(gains))
    (row,) = [row for row in three if row.method == "new"]
    assert row.gain is not None
    assert (row.gain.low, row.gain.high) == pytest.approx((low, high))
    (row,) = [row for row in study_rows(results) if row.method == "new"]
    assert row.gap is not None
    assert row.gap.mean == pytest.approx((2 + 4) / (3 + 3))
    assert row.kept.mean == pytest.approx((3 / 6 + 5 / 6) / 2)
    assert row.shortcut_rate is None
    assert row.attention is not None
    assert row.attention.mean == pytest.approx(0.3)


def test_a_gap_is_joined_by_seed_and_left_out_where_a_seed_is_missing() -> None:
    rng = np.random.default_rng(1)
    many = {(half, seed): rng.integers(0, 2, 40).tolist() for half in ("top", "bottom", "new") for seed in (0, 1, 2)}
    stated = [1] * 40
    results = [a_fit("plain", "top", seed, many["top", seed], stated) for seed in (2, 1)]
    results += [a_fit("plain", "bottom", seed, many["bottom", seed], stated) for seed in (0, 1, 2)]
    results += [a_fit("new", "bottom", seed, many["new", seed], stated) for seed in (0, 1, 2)]
    row = next(row for row in study_rows(results) if row.method == "new")
    total = {half: sum(many[half, 1]) + sum(many[half, 2]) for half in ("top", "bottom", "new")}
    share = (total["new"] - total["bottom"]) / (total["top"] - total["bottom"])
    assert row.gap is not None
    assert row.gap.n == 2
    assert row.gap.mean == pytest.approx(share)
    assert math.isnan(row.gap.low)  # two seeds are too few


def test_a_single_seed_has_intervals_over_facts() -> None:
    rng = np.random.default_rng(0)
    correct = rng.integers(0, 2, 200).tolist()
    (row,) = study_rows([a_fit("plain", "top", 0, correct, [1] * 200)])
    width = 1.96 * math.sqrt(0.25 / 200)
    assert row.accuracy.high - row.accuracy.low == pytest.approx(2 * width, rel=0.15)
    assert row.extraction.mean == pytest.approx(np.mean(correct))
    assert math.isnan(row.extraction.low)  # how a ratio of two counts varies over facts isn't known


def test_a_single_seed_that_loses_nothing_has_no_ratio_of_zero_width() -> None:
    everything = [1] * 24
    (row,) = study_rows([a_fit("plain", "top", 0, everything, everything)])
    assert row.extraction.mean == row.kept.mean == 1
    assert math.isnan(row.extraction.low)
    assert row.kept.low == pytest.approx(24 / (24 + 1.96**2), abs=1e-3)  # Wilson's end of 24 of 24
    halves = [a_fit("plain", split, 0, right, everything) for split, right in (("top", [1] * 24), ("bottom", [0] * 24))]
    rows = study_rows([*halves, a_fit("new", "bottom", 0, [0, 1] * 12, everything)])
    gap = next(row.gap for row in rows if row.method == "new")
    assert gap is not None
    assert gap.mean == 0.5
    assert math.isnan(gap.low)


def test_a_seed_whose_base_completes_none_leaves_the_ratio_unknown() -> None:
    stated = [1, 1, 1, 1, 0, 0, 1, 1]
    results = [a_fit("plain", "top", 0, [1] * 8, stated), a_fit("plain", "top", 1, [1] * 8, [0] * 8)]
    [row] = study_rows(results)
    assert math.isnan(row.extraction.mean)
    assert math.isnan(row.kept.mean)
    [alone] = study_rows(results[1:])
    assert math.isnan(alone.extraction.mean)


def test_top_minus_bottom_is_paired_by_seed() -> None:
    fifths = {("top", 0): [1.0, 0.8, 0.6, 0.4, 0.2], ("bottom", 0): [0.5, 0.8, 0.7, 0.4, 0.2]}
    fifths |= {("top", 1): [0.9, 0.8, 0.6, 0.4, 0.2], ("bottom", 1): [0.2, 0.8, 0.5, 0.4, 0.2]}
    right = {
        ("top", 0): [1, 1, 1, 0],
        ("bottom", 0): [1, 0, 0, 0],
        ("top", 1): [0, 1, 1, 0],
        ("bottom", 1): [1, 1, 1, 1],
    }
    attention = {("top", 0): [0.5, 0.3], ("bottom", 0): [0.1, 0.2], ("top", 1): [0.4, 0.4], ("bottom", 1): [0.3, 0.3]}
    fits = [
        a_fit("lr-1", split, seed, right[split, seed], [1] * 4)
        | {"accuracy_by_quintile": fifths[split, seed], "subject_attention": attention[split, seed]}
        for split, seed in right
    ]
    alone = a_fit("lr-1", "top", 2, [1, 1, 1, 1], [1] * 4)  # its other half is missing
    control = {"subject_attention": None, "method": "no training: statement"}
    controls = [a_fit("", split, seed, [1, 0, 0, 1], [1] * 4) | control for split, seed in right]
    constant = [fit | {"method": "constant answer", "subject_attention": None} for fit in fits]
    row, other = split_contrasts([*controls, *constant, *fits, alone])[::-1]
    assert (row.world, row.method, row.seeds) == ("w", "lr-1", 2)
    assert row.accuracy.mean == pytest.approx((2 / 4 - 2 / 4) / 2)
    assert [fifth.mean for fifth in row.quintiles] == pytest.approx([(0.5 + 0.7) / 2, 0, (-0.1 + 0.1) / 2, 0, 0])
    low, high = stats.t.interval(0.95, 1, 0.6, stats.sem([0.5, 0.7]))
    assert (row.quintiles[0].low, row.quintiles[0].high) == pytest.approx((max(low, -1), min(high, 1)))
    assert row.attention is not None
    assert row.attention.mean == pytest.approx((0.25 + 0.1) / 2)
    assert (other.method, other.attention) == ("constant answer", None)
    assert other.as_dict()["accuracy"]["mean"] == row.accuracy.mean


def test_top_minus_bottom_of_one_seed_has_an_interval_over_facts() -> None:
    rng = np.random.default_rng(3)
    top, bottom = rng.integers(0, 2, 200), rng.integers(0, 2, 200)
    fits = [a_fit("lr-1", split, 0, right.tolist(), [1] * 200) for split, right in (("top", top), ("bottom", bottom))]
    [contrast] = split_contrasts(fits)
    assert contrast.accuracy.mean == pytest.approx((top - bottom).mean())
    # of a mean of independent differences, whose variance is known
    width = 2 * 1.96 * (top - bottom).std() / 200**0.5
    assert contrast.accuracy.high - contrast.accuracy.low == pytest.approx(width, rel=0.15)
    assert contrast.quintiles == ()  # of fewer than five fifths
    assert split_contrasts(fits[:1]) == []
