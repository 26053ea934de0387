"""Every figure of `reproduce` is in the list of what the papers print, and every entry says what becomes of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attnbalance.papers.coverage import GHOSAL, GOYAL, PRINTED, XU_CHEN
from attnbalance.papers.reproduce import figures

PAPERS = {GHOSAL: (7, {1, 2, 3, 4}), GOYAL: (15, set()), XU_CHEN: (6, {1, 3})}
"""The last figure that each paper numbers, and its numbered tables."""


def numbers(kind: str, paper: str) -> set[int]:
    """The figures or tables of a paper that are listed, ranges written out."""
    found = set[int]()
    for text in (row.number for row in PRINTED if row.paper == paper and row.number.startswith(kind)):
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", text):
            found |= set(range(int(first), int(last or first) + 1))
    return found


@pytest.mark.parametrize("paper", PAPERS)
def test_all_numbered_figures_and_tables_are_listed(paper: str) -> None:
    last_figure, tables = PAPERS[paper]
    assert numbers("Figure", paper) == set(range(1, last_figure + 1))
    assert numbers("Table", paper) == tables


def test_every_figure_is_listed_under_its_paper_and_the_others_say_why() -> None:
    listed = {name: row.paper for row in PRINTED for name in row.figures}
    assert listed == {name: figure.paper for name, figure in figures().items()}
    assert all(row.figures or row.instead for row in PRINTED)


def test_the_papers_numbers_are_those_of_their_text() -> None:
    folder = Path(__file__).parents[2] / "../shared/papers"
    texts = {GHOSAL: "ghosal-2024-understanding-finetuning.txt", GOYAL: "goyal-2024-context-parametric-inversion.txt"}
    if not folder.exists():
        pytest.skip("the papers are not beside this checkout")
    for paper, name in texts.items():
        printed = {int(number) for number in re.findall(r"^Figure (\d+)", (folder / name).read_text(), re.MULTILINE)}
        assert max(printed) == PAPERS[paper][0]
