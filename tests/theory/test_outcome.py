"""What an outcome says: it applies if all assumptions are met, and is refuted if it then does not hold."""

from __future__ import annotations

import pytest

from attnbalance.theory.outcome import Outcome


@pytest.mark.parametrize(
    ("assumptions", "holds", "applies", "refuted"),
    [
        ({}, True, True, False),
        ({}, False, True, True),
        ({"a": True, "b": True}, True, True, False),
        ({"a": True, "b": True}, False, True, True),
        ({"a": True, "b": False}, True, False, False),
        ({"a": False, "b": True}, False, False, False),
    ],
)
def test_a_statement_is_refuted_only_where_all_its_assumptions_are_met(
    assumptions: dict[str, bool], holds: bool, applies: bool, refuted: bool
) -> None:
    outcome = Outcome("Someone 2024, Theorem 1", "x > 0", assumptions, {"x": 1.0}, holds)
    assert (outcome.applies, outcome.refuted) == (applies, refuted)
