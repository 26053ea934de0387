"""Each numbered statement is a function of that name with a docstring and a test of its name."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import attnbalance.theory

NUMBERED = re.compile(r"(theorem|lemma|proposition)_[0-9a-z_]+")
MODULES = ("ghosal", "goyal", "goyal_lemmas", "xu_chen")
"""The modules with numbered statements."""


def statements(module: str) -> list[str]:
    """The names of the numbered statements that a module defines."""
    loaded = importlib.import_module(f"attnbalance.theory.{module}")
    own = [name for name, value in vars(loaded).items() if getattr(value, "__module__", None) == loaded.__name__]
    return [name for name in own if NUMBERED.fullmatch(name)]


@pytest.mark.parametrize("module", MODULES)
def test_every_statement_has_a_test_that_begins_with_its_name_and_a_docstring(module: str) -> None:
    tests = (Path(__file__).parent / f"test_{module}.py").read_text()
    loaded = importlib.import_module(f"attnbalance.theory.{module}")
    assert statements(module)
    for name in statements(module):
        assert re.search(rf"def test_{name}_[a-z]", tests), f"{name} has no test of its name"
        assert (getattr(loaded, name).__doc__ or "").strip(), f"{name} has no docstring"


def test_all_numbered_statements_of_the_papers_are_defined() -> None:
    assert set(statements("ghosal")) == {
        f"theorem_{number}" for number in ("a1", "4_2", "a5", "4_5", "a11", "a6", "4_6", "a9", "a10")
    }
    lemmas = {f"lemma_{k}" for k in range(1, 8)}
    assert set(statements("goyal") + statements("goyal_lemmas")) >= lemmas | {"theorem_1"} | {
        f"proposition_{k}" for k in (1, 2, 3)
    }
    assert set(statements("xu_chen")) >= {f"theorem_2_{k}" for k in (1, 2, 3)} | {f"proposition_{k}" for k in (1, 2, 3)}


def test_no_other_module_of_the_lab_holds_a_numbered_statement() -> None:
    for path in Path(attnbalance.theory.__file__).parent.glob("*.py"):
        if path.stem not in MODULES:
            assert not re.search(rf"def {NUMBERED.pattern}\(", path.read_text()), path.name
