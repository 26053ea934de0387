"""Tables in Markdown for the made pages."""

from __future__ import annotations

import re
from collections.abc import Sequence


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first row is its head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(escaped(cell) for cell in line) + " |" for line in lines) + "\n"


def escaped(cell: str) -> str:
    """A cell's text outside code, with the characters that Markdown would read kept as they are."""
    pieces = re.split(r"(`[^`]*`)", cell)
    return "".join(piece if i % 2 else re.sub(r"([|*_<>\\])", r"\\\1", piece) for i, piece in enumerate(pieces))
