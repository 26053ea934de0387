"""Imports point one way, as docs/architecture.md draws them: a room imports only rooms above it in its picture."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PICTURE = (ROOT / "docs/architecture.md").read_text().split("```")[1]
ROOMS = [name for name in re.findall(r"\b([a-z]+)(?:\.py|/)", PICTURE) if name not in ("attnbalance", "sources")]
WINGS = ("comparison", "trajectory", "survey", "context", "storage", "explanation", "studies", "papers")
"""The wings below `finetuning`: none imports another, but for those in `BUILT_ON`."""
BUILT_ON = {wing: {"comparison"} for wing in ("trajectory", "survey", "context", "storage", "explanation")}
LIGHT = {"theory": {"errors", "statistics", "theory"}}
FILES = sorted((ROOT / "attnbalance").rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The rooms that a file imports from."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attnbalance"):
            parts = (node.module or "").split(".")
            names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return names & set(ROOMS)


def test_the_picture_names_every_room() -> None:
    there = {path.relative_to(ROOT / "attnbalance").parts[0].removesuffix(".py") for path in FILES}
    assert there - {"__init__"} == set(ROOMS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_rooms_above_its_own(path: Path) -> None:
    room = path.relative_to(ROOT / "attnbalance").parts[0].removesuffix(".py")
    if room == "__init__":
        return
    others = set(WINGS) - {room} - BUILT_ON.get(room, set()) if room in WINGS else set[str]()
    assert imported(path) <= LIGHT.get(room, set(ROOMS[: ROOMS.index(room) + 1]) - others)


def test_no_file_is_longer_than_300_lines() -> None:
    assert [str(path) for path in FILES if len(path.read_text().splitlines()) > 300] == []


def test_every_module_has_a_test_file_of_its_name() -> None:
    modules = [path.relative_to(ROOT / "attnbalance") for path in FILES if not path.name.startswith("_")]
    tests = [module.with_name(f"test_{module.name}") for module in modules]
    assert [str(test) for test in tests if not (ROOT / "tests" / test).exists()] == []
