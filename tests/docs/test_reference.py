"""Every public name, error and term of an objective has its place in the documentation."""

from __future__ import annotations

import re

import pytest
from doc_pages import DOCS

import attnbalance
from attnbalance import errors

ENTRY = re.compile(r"^\.\. auto(?:class|function):: (\w+)$", re.MULTILINE)
ENTRIES = [name for page in sorted((DOCS / "api").glob("*.md")) for name in ENTRY.findall(page.read_text())]


def test_every_public_name_has_one_entry_in_the_reference() -> None:
    assert sorted(set(attnbalance.__all__) - set(ENTRIES)) == []
    assert len(ENTRIES) == len(set(ENTRIES))


def test_every_entry_of_the_reference_is_a_name_of_the_package_with_a_docstring() -> None:
    for name in ENTRIES:
        where = attnbalance if name in attnbalance.__all__ else errors
        assert getattr(where, name).__doc__, name


@pytest.mark.parametrize(
    "kind", [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
)
def test_every_kind_of_error_is_explained(kind: type[Exception]) -> None:
    page = (DOCS / "errors.md").read_text()
    assert f"## {kind.__name__}\n" in page or kind is errors.AttnBalanceError
