"""Numbers, layers and lists in words."""

from __future__ import annotations

import math

from attnbalance.report.wording import (
    bounds,
    layers,
    listed,
    nats,
    percent_interval,
    percent_share,
    points,
    popularity,
    questions,
    share,
)
from attnbalance.statistics.intervals import Interval


def test_numbers_are_written_with_their_intervals():
    assert percent_interval(Interval(0.625, 0.5, 0.75, 8)) == "62.5% [50.0, 75.0]"
    assert points(Interval(0.25, 0.1, 0.4, 8)) == "+25.0 points [+10.0, +40.0]"
    assert points(Interval(0.25, 0.1, 0.4, 8), sign=-1) == "-25.0 points [-40.0, -10.0]"
    assert bounds(-0.25, 0.004, "+") == "[-0.250, +0.004]"


def test_a_missing_interval_is_left_out():
    alone = Interval(0.5, math.nan, math.nan, 2)
    assert percent_interval(alone) == "50.0%"
    assert points(alone) == "+50.0 points (no interval)"
    assert bounds(math.nan, math.nan) == ""


def test_a_rounded_zero_has_no_minus_sign():
    near = Interval(-0.0004, -0.004, 0.0001, 8)
    assert percent_share(near) == "0% [0, 0]"
    assert percent_interval(Interval(-0.0004, -0.12, -0.0001, 8)) == "0.0% [-12.0, 0.0]"
    assert points(near) == "+0.0 points [-0.4, +0.0]"
    assert nats(near) == "+0.00 [+0.00, +0.00]"
    assert [share(-0.0), share(-0.0, "+")] == ["0.000", "+0.000"]


def test_small_shares_keep_two_digits():
    assert [share(x) for x in (0.5, 0.01, 0.00123, 0.0)] == ["0.500", "0.010", "0.0012", "0.000"]


def test_runs_of_layers_are_drawn_together():
    assert layers([3]) == "layer 3"
    assert layers([3, 4]) == "layers 3 and 4"
    assert layers([3, 7, 8, 9, 12]) == "layers 3, 7 to 9 and 12"


def test_lists_and_counts_read_as_english():
    assert [listed(list(x)) for x in ("", "a", "ab", "abc")] == ["", "a", "a and b", "a, b and c"]
    assert [questions(1), questions(14000)] == ["1 question", "14,000 questions"]
    assert [popularity(12345.6), popularity(0.01234)] == ["12,346", "0.0123"]
