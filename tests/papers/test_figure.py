"""Claims are judged from their intervals, and numbers are taken seed by seed."""

from __future__ import annotations

import pytest
from scipy import stats

from attnbalance.papers.figure import (
    ABSENT,
    OPPOSITE,
    SEEN,
    UNCLEAR,
    CellResult,
    Claim,
    Condition,
    by_seed,
    over_seeds,
)


@pytest.mark.parametrize(
    ("values", "least", "level", "verdict"),
    [
        ((0.1, 0.12, 0.11), 0.0, False, SEEN),
        ((-0.1, -0.12, -0.11), 0.0, False, OPPOSITE),
        ((0.1, -0.12, 0.11), 0.0, False, UNCLEAR),
        ((0.0, 0.0, 0.0), 0.0, False, ABSENT),  # no difference at all is none
        ((0.05, 0.051, 0.052), 0.01, False, SEEN),
        ((0.001, 0.002, 0.0015), 0.01, False, ABSENT),  # too small to count, whatever its sign
        ((-0.001, -0.002, -0.0015), 0.01, False, ABSENT),
        ((0.009, 0.011, 0.01), 0.01, False, UNCLEAR),
        ((-0.19, -0.08, -0.13), 0.01, False, UNCLEAR),  # from -0.27 to 0.003: it may be large, the other way
        ((-0.05, -0.051, -0.052), 0.01, False, OPPOSITE),
        ((-0.001, 0.001, 0.0), -0.01, False, SEEN),  # no worse than by the tolerance
        ((-0.011, -0.009, -0.01), -0.01, False, UNCLEAR),
        ((-0.05, -0.051, -0.052), -0.01, False, OPPOSITE),
        ((0.95, 0.96, 0.97), 0.9, True, SEEN),
        ((0.45, 0.46, 0.47), 0.9, True, ABSENT),  # a level that is not reached has no opposite
        ((-1.0, -1.0, -1.0), 0.0, True, ABSENT),
        ((0.5, 0.99, 0.99), 0.9, True, UNCLEAR),
    ],
)
def test_a_claim_is_judged_by_where_its_interval_lies(
    values: tuple[float, ...], least: float, level: bool, verdict: str
) -> None:
    claim = Claim("a is above b", "a minus b", values, least=least, level=level)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95) if len(set(values)) > 1 else None
    if expected:
        assert (claim.interval.low, claim.interval.high) == pytest.approx((expected.low, expected.high))
    assert claim.verdict == verdict


def test_only_a_papers_own_statement_in_its_own_setting_is_scored() -> None:
    met, unmet = Condition("W_V is frozen", "frozen", met=True), Condition("one rate", "two rates", met=False)
    for place, setting, scored in (
        ("Figure 1", (), True),
        ("Figure 1", (met,), True),
        ("Figure 1", (met, unmet), False),
        ("", (met,), False),
    ):
        assert Claim("a", "b", (1.0, 1.0), place=place, setting=setting).scored is scored
    assert Claim("a", "b", (1.0, 1.0), setting=(met, unmet)).unmet == (unmet,)


def test_numbers_are_taken_seed_by_seed_whatever_the_order_of_results() -> None:
    results = [CellResult({"seed": seed, "k": k}, {"x": 10 * k + seed}) for k in (1, 2) for seed in (2, 0, 1)]
    assert by_seed(results, lambda result: result.values["x"], k=2) == (20, 21, 22)


def test_intervals_of_shares_stay_within_0_and_1() -> None:
    table = [[0.1, 0.9], [0.0, 1.0], [0.5, 0.7]]
    low, high = over_seeds(table)
    assert (low.low, high.high) == (0.0, 1.0)
    assert over_seeds(table, shares=False)[0].low < 0
    assert low.mean == pytest.approx(0.2)
