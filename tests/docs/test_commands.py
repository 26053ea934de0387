"""Commands and Python in README.md and docs/ are spelled as the package has them."""

from __future__ import annotations

import ast
import re
import shlex
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import pytest
import typer
from doc_pages import PAGES, ROOT, blocks, inline

import attnbalance
from attnbalance.cli import app

MAIN: Any = typer.main.get_command(app)
CONTEXT: Any = MAIN.make_context("attnbalance", [], resilient_parsing=True)
COMMANDS = {name: MAIN.get_command(CONTEXT, name) for name in MAIN.list_commands(CONTEXT)}
GLOBAL = {option for parameter in MAIN.params for option in parameter.opts}
OPTIONS = GLOBAL | {
    option for command in COMMANDS.values() for parameter in command.params for option in parameter.opts
}
OF_BENCHMARKS = {"--help", "--rows", "--train-limit", "--heldout-limit"}
"""Options that are no command's own, or those of `benchmarks/real_model.py`."""
SHELL = (">", "|", "||")
"""Words of the shell that end a command."""
LAUNCH = ["accelerate", "launch"]
STARTS = (["attnbalance"], *([*LAUNCH, *how, "-m", "attnbalance.cli"] for how in ([], ["--config_file", "fsdp.yaml"])))


def commands(page: Path) -> list[list[str]]:
    """The arguments after `attnbalance`, and the options before a command, of the commands in a page's shell blocks."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    parts = [part.strip() for line in lines for part in line.split("&&")]
    words = [list(takewhile(lambda word: word not in SHELL, shlex.split(part, comments=True))) for part in parts]
    called = [line[len(start) :] for line in words for start in STARTS if line[: len(start)] == start]
    return [list(dropwhile(GLOBAL.__contains__, arguments)) for arguments in called]


def parse(arguments: list[str]) -> None:
    """Raise the message of a `ValueError` for a command, option or value that there is not."""
    if arguments[0] not in COMMANDS:
        raise ValueError(f"no command {arguments[0]}")
    try:
        COMMANDS[arguments[0]].make_context(arguments[0], list(arguments[1:]))
    except Exception as error:  # click's, of which typer holds a copy
        raise ValueError(getattr(error, "message", error)) from error


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_parses(page: Path) -> None:
    for arguments in commands(page):
        parse(arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_and_option_named_in_a_sentence_exists(page: Path) -> None:
    for code in inline(page):
        words = code.split()
        if words[0] == "attnbalance" and len(words) > 1 and words[1].isalpha():
            assert words[1] in COMMANDS, code
        if words[0].startswith("--") or words[0] in ("attnbalance", *COMMANDS):
            assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", code)) <= OPTIONS | OF_BENCHMARKS, code


def test_a_misspelled_option_is_noticed() -> None:
    with pytest.raises(ValueError, match="No such option"):
        parse(["curve", "a=gpt2", "--facts", "facts.jsonl", "--out", "o", "--recal"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_line_of_python_parses_and_names_what_there_is(page: Path) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ab":
                assert node.attr in attnbalance.__all__, f"{page.name}: no ab.{node.attr}"


def test_the_readme_is_short_and_says_how_to_install_and_to_test() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 158
    assert "pip install -c constraints.txt -e . && attnbalance demo\n" in text
    assert 'pip install -c constraints.txt -e ".[dev]" && pytest\n' in text
