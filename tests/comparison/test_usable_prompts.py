"""Facts that some model cannot be asked about are refused, or dropped and counted."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import FACTS, POSITIONS

from attnbalance import Fact, FactSet
from attnbalance.comparison.specs import MeasureSettings, ModelSpec
from attnbalance.comparison.usable_prompts import usable_prompts
from attnbalance.errors import BadRowsError, DataError

LONG = Fact("Otto", "country", ("Chad",), 1.0, "In what country is " + "very " * POSITIONS + "old Otto?")
TWICE = Fact("Anna", "mother", ("Eve",), 1.0, "Is Anna the mother of Anna?")
SETTINGS = MeasureSettings(recall=True, batch_size=4)


def test_bad_facts_are_refused_with_the_count_and_the_first_rows(llama_folder: Path) -> None:
    facts = FactSet((*FACTS, TWICE, TWICE))
    with pytest.raises(BadRowsError, match=r"2 of 11 questions(.|\n)*row 10: subject 'Anna' occurs 2 times"):
        usable_prompts(facts, [ModelSpec("a", str(llama_folder))], SETTINGS, skip_bad=False)


def test_bad_facts_are_dropped_and_counted_by_reason_when_asked(llama_folder: Path) -> None:
    facts = FactSet((TWICE, *FACTS, LONG))
    prompts, dropped = usable_prompts(facts, [ModelSpec("a", str(llama_folder))], SETTINGS, skip_bad=True)
    assert [prompt.fact for prompt in prompts] == list(FACTS)
    assert sorted(dropped.values()) == [1, 1]
    assert any("positions" in reason for reason in dropped)


def test_a_set_of_which_nothing_is_left_is_refused(llama_folder: Path) -> None:
    with pytest.raises(DataError, match="no usable facts are left"):
        usable_prompts(FactSet((TWICE,)), [ModelSpec("a", str(llama_folder))], SETTINGS, skip_bad=True)
