"""The registry of terms."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.finetuning.objectives.registry import TERMS

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "finetune-without-forgetting.md"


@pytest.mark.parametrize("name", TERMS)
def test_each_kind_is_written_by_its_name_and_stands_in_the_documentation(name: str) -> None:
    kind, objective = TERMS[name], parse_objective("ce" if name == "ce" else f"ce + {name}")
    assert objective.terms[-1].kind is kind
    assert objective.changes_gradients == (kind.loss is None)
    assert objective.needs_base == (kind.make_targets is not None)
    assert f"`{name}" in PAGE.read_text()


@pytest.mark.parametrize("name", TERMS)
def test_a_kind_that_changes_gradients_has_no_items_and_learns_no_answers(name: str) -> None:
    kind = TERMS[name]
    assert kind.loss is not None or not (kind.by_token or kind.learns_answers)
