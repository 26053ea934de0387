"""Links and anchors between README.md and the pages of docs/ lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_pages import DOCS, PAGES, ROOT, prose

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
ADDED_LATER = {DOCS / "demo.png"}


def anchors(path: Path) -> set[str]:
    """The anchors that a code host and MyST give a page's headings."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", heading) for heading in HEADING.findall(text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


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


def test_a_missing_heading_is_noticed() -> None:
    assert "how-far-to-trust" not in anchors(DOCS / "concepts.md")
    assert "what-is-measured-and-how-far-to-trust-it" in anchors(DOCS / "concepts.md")
