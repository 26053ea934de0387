"""A figure to reproduce: independent pieces of work, panels with intervals over seeds, and claims judged from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnbalance.readings.intervals import Interval, seed_interval

SEEN, NOT_SEEN, REVERSED = "seen", "not seen", "reversed"


@dataclass(frozen=True)
class Cell:
    """One piece of work that stands alone: a name that no other piece has, and its settings, which JSON can hold.

    Cells with one name are one piece of work, whichever figures use it.
    """

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """A cell's settings and what came out, as JSON holds it."""

    settings: Mapping[str, Any]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """Something a paper says, as a number for each seed that is above 0 where it is so.

    `says` is the claim, `measured` names the number with its unit. Seen: the interval over seeds lies above
    -`margin`; reversed: below it; else not seen. A `margin` above 0 is for what is claimed to be no worse.
    """

    says: str
    measured: str
    values: tuple[float, ...]
    margin: float = 0.0

    @property
    def interval(self) -> Interval:
        """The mean over seeds with Student's 95% interval."""
        return seed_interval(self.values)

    @property
    def verdict(self) -> str:
        """`SEEN`, `NOT_SEEN` or `REVERSED`."""
        found = self.interval
        return SEEN if found.low > -self.margin else REVERSED if found.high < -self.margin else NOT_SEEN


@dataclass(frozen=True)
class Series:
    """One line of a panel: a value with its interval over seeds at each place of the x axis."""

    label: str
    x: tuple[int | float, ...] | tuple[str, ...]
    y: tuple[Interval, ...]


@dataclass(frozen=True)
class Panel:
    """One set of axes. Places that are words are drawn as bars, numbers as lines; `log` is for the x axis."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log: bool = False


@dataclass(frozen=True)
class Figure:
    """A figure or table of a paper.

    `cells(scale, seeds, facts)` lists the work for a scale ("small" or "paper"), seeds and, where the figure is about
    real facts, their source; `run(settings)` does one cell's and may be called in another process; `panels` and
    `claims` say what all results come to.
    """

    name: str
    source: str
    about: str
    cells: Callable[[str, Sequence[int], str], list[Cell]]
    run: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    panels: Callable[[Sequence[Result]], list[Panel]]
    claims: Callable[[Sequence[Result]], list[Claim]]


def by_seed(results: Sequence[Result], value: Callable[[Result], float], **settings: object) -> tuple[float, ...]:
    """One number a seed, in the order of seeds, of the results that have these settings."""
    chosen = [one for one in results if all(one.settings[name] == wanted for name, wanted in settings.items())]
    return tuple(value(one) for one in sorted(chosen, key=lambda one: one.settings["seed"]))


def minus(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
    """The difference seed by seed."""
    return tuple(x - y for x, y in zip(a, b, strict=True))


def best_elsewhere(rows: Sequence[Sequence[float]]) -> list[int]:
    """For each seed's row of values, the place at which the other seeds' sum is highest.

    A row's own highest value can never lie below its first and last, whatever happens: a difference from it would be
    positive by chance alone.
    """
    places = []
    for i in range(len(rows)):
        sums = [sum(column) for column in zip(*(row for j, row in enumerate(rows) if j != i), strict=True)]
        places.append(sums.index(max(sums)))
    return places


def over_seeds(table: Sequence[Sequence[float]], *, shares: bool = True) -> tuple[Interval, ...]:
    """An interval over seeds for each column of a table [seed, column]; within 0 and 1 where these are shares."""
    found = tuple(seed_interval(column) for column in zip(*table, strict=True))
    return tuple(one.within(0.0, 1.0) for one in found) if shares else found
