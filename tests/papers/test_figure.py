"""Claims are judged from their intervals, and numbers are taken seed by seed."""

from __future__ import annotations

import pytest
from scipy import stats

from attnbalance.papers.figure import NOT_SEEN, REVERSED, SEEN, CellResult, Claim, by_seed, over_seeds


@pytest.mark.parametrize(
    ("values", "margin", "verdict"),
    [
        ((0.1, 0.12, 0.11), 0.0, SEEN),
        ((-0.1, -0.12, -0.11), 0.0, REVERSED),
        ((0.1, -0.12, 0.11), 0.0, NOT_SEEN),
        ((-0.001, 0.001, 0.0), 0.01, SEEN),  # no worse than by the margin
        ((-0.011, -0.009, -0.01), 0.01, NOT_SEEN),
        ((-0.05, -0.051, -0.052), 0.01, REVERSED),
        ((0.0, 0.0, 0.0), 0.0, NOT_SEEN),  # no difference at all is none
    ],
)
def test_a_claim_is_judged_by_where_its_interval_lies(values: tuple[float, ...], margin: float, verdict: str) -> None:
    claim = Claim("a is above b", "a minus b", values, margin)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95) if len(set(values)) > 1 else None
    if expected:
        assert (claim.interval.low, claim.interval.high) == pytest.approx((expected.low, expected.high))
    assert claim.verdict == verdict


def test_numbers_are_taken_seed_by_seed_whatever_the_order_of_results() -> None:
    results = [CellResult({"seed": seed, "k": k}, {"x": 10 * k + seed}) for k in (1, 2) for seed in (2, 0, 1)]
    assert by_seed(results, lambda result: result.values["x"], k=2) == (20, 21, 22)


def test_intervals_of_shares_stay_within_0_and_1() -> None:
    table = [[0.1, 0.9], [0.0, 1.0], [0.5, 0.7]]
    low, high = over_seeds(table)
    assert (low.low, high.high) == (0.0, 1.0)
    assert over_seeds(table, shares=False)[0].low < 0
    assert low.mean == pytest.approx(0.2)
