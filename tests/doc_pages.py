"""The pages of the documentation, and what is in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MADE = (DOCS / "_build", DOCS / "_made")

PAGES = [ROOT / "README.md", *sorted(page for page in DOCS.rglob("*.md") if not set(page.parents) & set(MADE))]


def blocks(page: Path, *languages: str) -> list[str]:
    """The contents of a page's code blocks in these languages."""
    found = re.findall(r"^```(\S*)[^\n]*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


def prose(page: Path) -> str:
    """A page without its code, in blocks or in a line."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)


def inline(page: Path) -> list[str]:
    """The code between single backticks, its line breaks as spaces."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]
