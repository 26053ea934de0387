"""Links and anchors between README.md and the pages of docs/ lead somewhere, and every text names what to read next."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from doc_pages import DOCS, PAGES, ROOT, prose

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
TUTORIALS = sorted((ROOT / "tutorials").glob("*.ipynb"))
TEXTS = [page for page in PAGES if page.parent != ROOT and page.name not in ("index.md", "changelog.md")]
"""The pages that are read from top to bottom."""
ADDED_LATER = {DOCS / "demo.png"}


def anchors(path: Path) -> set[str]:
    """The anchors that a code host and MyST give a page's headings."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", heading) for heading in HEADING.findall(text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def ending(path: Path) -> str:
    """The last paragraph of a page, or of a notebook's last cell."""
    is_notebook = path.suffix == ".ipynb"
    text = "".join(json.loads(path.read_text())["cells"][-1]["source"]) if is_notebook else path.read_text()
    return text.strip().rpartition("\n\n")[2]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading_in_it(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists() or path in ADDED_LATER, f"{page.name}: no file {target}"
        assert not anchor or anchor in anchors(path), f"{page.name}: no heading {target}"


def test_no_page_is_a_dead_end_and_every_page_is_linked() -> None:
    linked = set()
    for page in PAGES:
        targets = {(page.parent / target.partition("#")[0]).resolve() for target in LINK.findall(page.read_text())}
        linked |= targets
        assert targets or "toctree" in page.read_text() or "{include}" in page.read_text(), f"{page} links nowhere"
    toctrees = {
        (page.parent / f"{name}.md").resolve()
        for page in PAGES
        for tree in re.findall(r"```\{toctree\}(.*?)```", page.read_text(), re.DOTALL)
        for name in tree.split()
    }
    assert set(PAGES) - linked - toctrees == {ROOT / "README.md"}


@pytest.mark.parametrize("page", [*TEXTS, *TUTORIALS], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_page_and_tutorial_ends_with_what_to_read_next(page: Path) -> None:
    targets = LINK.findall(ending(page))
    assert ending(page).startswith("Next: ["), f"{page.name} ends with: {ending(page)}"
    for target in targets:
        assert (page.parent / target.partition("#")[0]).is_file(), f"{page.name}: no file {target}"
        assert target.partition("#")[0] != page.name, f"{page.name} leads to itself"


def test_only_pages_that_list_or_include_others_need_no_ending() -> None:
    others = {str(page.relative_to(ROOT)) for page in set(PAGES) - set(TEXTS)}
    lists = {f"docs/{name}index.md" for name in ("", "api/", "how-to/", "results/", "tutorials/")}
    assert others == {"README.md", "docs/changelog.md"} | lists


def test_an_ending_is_the_last_paragraph_of_a_page_or_of_a_notebooks_last_cell(tmp_path: Path) -> None:
    page, notebook = tmp_path / "page.md", tmp_path / "notebook.ipynb"
    page.write_text("Next: [a](a.md)\n\nThe end,\nin two lines.\n")
    assert ending(page) == "The end,\nin two lines."
    cells = [{"source": ["Next: [a](a.md)"]}, {"source": ["## Exercises\n", "\n", "1. Try."]}]
    notebook.write_text(json.dumps({"cells": cells}))
    assert ending(notebook) == "1. Try."


def test_a_missing_heading_is_noticed() -> None:
    assert "how-far-to-trust" not in anchors(DOCS / "concepts.md")
    assert "what-is-measured-and-how-far-to-trust-it" in anchors(DOCS / "concepts.md")
