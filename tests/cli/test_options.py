"""What every command does around its library call."""

from __future__ import annotations

import io
import logging
import re
import shlex
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from commands import run_command
from transformers.utils import logging as transformers_logging

from attnbalance.cli import GROUPS
from attnbalance.cli.options import FurtherReadings, as_names, command_line, noting_reuse, say, show_progress
from attnbalance.comparison.known_readings import READINGS, SUBJECT_ATTENTION
from attnbalance.files.outputs import write_json


@pytest.mark.parametrize(
    ("text", "names"),
    [(None, None), ("", []), ("city", ["city"]), (" city, place of birth ,,", ["city", "place of birth"])],
)
def test_names_are_separated_by_commas(text: str | None, names: list[str] | None) -> None:
    assert as_names(text) == names


def test_help_names_every_further_reading() -> None:
    option = FurtherReadings.__metadata__[0]  # pyright: ignore
    assert re.findall("'(.*?)'", option.help) == [title for title in READINGS if title != SUBJECT_ATTENTION]


def test_help_names_every_command_once_below_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    code, text = run_command("--help")
    assert code == 0
    names = [command.__name__.replace("_", "-") for commands in GROUPS.values() for command in commands]
    assert len(set(names)) == len(names) == 16
    lines = [next(i for i, shown in enumerate(text.splitlines()) if shown.startswith(f"│ {name} ")) for name in names]
    heads = [next(i for i, shown in enumerate(text.splitlines()) if f"─ {group} ─" in shown) for group in GROUPS]
    assert lines == sorted(lines)
    sizes = [sum(head < line < after for line in lines) for head, after in pairwise([*heads, 10**6])]
    assert sizes == [len(commands) for commands in GROUPS.values()]


def test_the_command_line_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["curve", "a=my model", "--template", "Who's {subject}? $1"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/attnbalance", *typed])
    assert shlex.split(command_line()) == ["attnbalance", *typed]


def test_an_answer_is_followed_by_where_its_report_is(capsys: pytest.CaptureFixture[str]) -> None:
    say("No clear difference.", "out")
    assert capsys.readouterr().out == "No clear difference.\n\nReport: out/report.html\n"


def test_a_folder_that_was_finished_before_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, marker = tmp_path / "out", tmp_path / "out" / "attnbalance.json"
    for _ in range(2):  # made, and made anew
        with noting_reuse(str(out)):
            write_json(marker, {})
    assert capsys.readouterr() == ("", "")
    with noting_reuse(str(out)):
        pass
    assert capsys.readouterr() == (
        "",
        f"{out} is already finished with these settings; nothing was computed again\n",
    )


@pytest.fixture
def messages_as_before() -> Iterator[None]:
    """Puts the settings of transformers' messages back."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.enable_progress_bar()
    yield
    transformers_logging.set_verbosity(verbosity)
    (transformers_logging.enable_progress_bar if bars else transformers_logging.disable_progress_bar)()


@pytest.mark.usefixtures("messages_as_before")
@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_everywhere_and_transformers_bars_on_a_terminal_alone_and_its_remarks_nowhere(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    assert show_progress()
    assert transformers_logging.is_progress_bar_enabled() == terminal
    assert transformers_logging.get_verbosity() == logging.ERROR


@pytest.mark.usefixtures("messages_as_before")
@pytest.mark.parametrize(("setting", "shown"), [("1", False), ("0", True), ("", True)])
def test_the_environment_turns_progress_off(setting: str, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_DISABLE", setting)
    assert show_progress() == shown
