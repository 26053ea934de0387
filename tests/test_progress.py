"""Progress: bars where they can be drawn, and elsewhere whole lines, seldom."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest

from attnbalance import progress
from attnbalance.progress import EVERY, progress_bar


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tqdm.std.time", clock)
    monkeypatch.setattr(progress.time, "monotonic", clock)
    monkeypatch.setattr(progress, "_LINES", progress._Lines())
    return clock


def count(clock: Clock, title: str, total: int, seconds: float) -> None:
    """Count to a total, one item every so many seconds."""
    with progress_bar(title, total=total, unit="prompt", shown=True) as bar:
        for _ in range(total):
            clock.now += seconds
            bar.update()


def test_a_line_comes_every_thirty_seconds_with_what_is_done_and_how_long_it_takes(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    count(clock, "answers", 100, 1.0)
    assert EVERY == 30
    assert capsys.readouterr().err.splitlines() == [
        "answers: 30 of 100, 00:30 elapsed, about 01:10 left",
        "answers: 60 of 100, 01:00 elapsed, about 00:40 left",
        "answers: 90 of 100, 01:30 elapsed, about 00:10 left",
    ]


def test_what_takes_less_than_that_is_silent(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    count(clock, "answers", 29, 1.0)
    assert capsys.readouterr() == ("", "")


def test_several_bars_share_the_lines(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in progress_bar("fits", items=range(3), shown=True):
        count(clock, "attention", 20, 1.0)
        count(clock, "answers", 2, 0.5)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["attention", "attention"]  # after 30 and 60 of 63 seconds
    assert lines[0].startswith("attention: 9 of 20, 00:09 elapsed")


def test_items_that_take_long_each_have_a_line_each(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in progress_bar("fits", items=range(4), shown=True):
        clock.now += 300
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        "fits: 1 of 4",
        "fits: 2 of 4",
        "fits: 3 of 4",
        "fits: 4 of 4",
    ]
    assert lines[1] == "fits: 2 of 4, 10:00 elapsed, about 10:00 left"


def test_nothing_is_shown_that_is_not_to_be(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress_bar("fits", items=[1, 2], shown=False)) == [1, 2]
    with progress_bar("fits", total=2, shown=False) as bar:
        clock.now += 100
        bar.update()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("where", ["terminal", "notebook"])
def test_on_a_terminal_and_in_a_notebook_there_is_a_bar(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if where == "terminal":
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    else:
        monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    with progress_bar("answers", total=2, unit="prompt", shown=True, leave=True) as bar:
        bar.update(2)
    drawn = capsys.readouterr().err
    assert "\ranswers: 100%" in drawn
    assert "2/2" in drawn


@pytest.mark.parametrize(("setting", "off"), [("1", "True"), ("", "False")])
def test_the_environment_turns_it_off(setting: str, off: str) -> None:
    code = "from attnbalance.progress import progress_bar; print(bool(progress_bar('a', total=1, shown=True).disable))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TQDM_DISABLE": setting}, capture_output=True, text=True
    )
    assert done.stdout.strip() == off
