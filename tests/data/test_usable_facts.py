"""Facts of which no prompt can be made are dropped and counted, or refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.prompts import Prompt, make_prompts
from attnbalance.data.usable_facts import without_bad
from attnbalance.errors import BadRowsError, DataError

FACTS = FactSet(tuple(Fact(f"Town {i}", "country", ("Chad",)) for i in range(6)))


def make(facts: FactSet) -> Sequence[Prompt]:
    """Prompts of the facts; refuses odd towns, and once they are gone Town 4."""
    odd = [(i, "odd") for i, fact in enumerate(facts) if int(fact.subject[-1]) % 2]
    late = [(i, "late") for i, fact in enumerate(facts) if fact.subject == "Town 4"]
    if odd or late:
        raise BadRowsError("facts are odd" if odd else "facts are late", odd or late, len(facts), "drop them")
    return make_prompts(facts)


def test_each_reason_is_counted_until_prompts_can_be_made() -> None:
    prompts, dropped = without_bad(FACTS, make, skip_bad=True)
    assert [prompt.fact for prompt in prompts] == [FACTS.facts[0], FACTS.facts[2]]
    assert dropped == {"facts are odd": 3, "facts are late": 1}


def test_the_first_reason_is_raised_unless_facts_may_be_dropped() -> None:
    with pytest.raises(BadRowsError, match="3 of 6 facts are odd"):
        without_bad(FACTS, make, skip_bad=False)
    with pytest.raises(DataError, match="no usable facts are left: {'facts are odd': 1}"):
        without_bad(FactSet(FACTS.facts[1:2]), make, skip_bad=True)
