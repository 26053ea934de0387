"""A figure to reproduce: independent cells, panels with intervals over seeds, and claims judged from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnbalance.statistics.intervals import Interval, seed_interval

SEEN, NOT_SEEN, REVERSED = "seen", "not seen", "reversed"


@dataclass(frozen=True)
class Cell:
    """One independent piece of work. Figures share cells of the same name.

    name: unique among different cells.
    settings: the values that the work depends on, as JSON.
    """

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class CellResult:
    """A cell's settings and results, as JSON values."""

    settings: Mapping[str, Any]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, as one number per seed that is positive if the statement holds.

    It is seen if the interval over seeds is above -`margin`, reversed if it is below -`margin`, and otherwise not seen.

    says: the statement.
    measured: the number's definition, with its unit.
    values: the number for each seed.
    margin: the tolerance of a claim that something is not worse; otherwise 0.
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
        interval = self.interval
        return SEEN if interval.low > -self.margin else REVERSED if interval.high < -self.margin else NOT_SEEN


@dataclass(frozen=True)
class Series:
    """One line of a panel: at each x, a value with its interval over seeds."""

    label: str
    x: tuple[int | float, ...] | tuple[str, ...]
    y: tuple[Interval, ...]


@dataclass(frozen=True)
class Panel:
    """One set of axes. Numeric x values are drawn as lines, words as points. `log` makes the x axis logarithmic."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log: bool = False


@dataclass(frozen=True)
class PaperFigure:
    """A figure or table of a paper.

    name: its name on the command line and of its files.
    source: the paper and the figure's number.
    about: what is run, and the differences from the paper.
    cells: `cells(scale, seeds, facts)` lists the work for a scale ("small" or "paper"), seeds and a source of facts.
    run: `run(settings)` does the work of one cell; it may be called in another process.
    panels: what to draw, from all results.
    claims: what the paper says, judged from all results.
    """

    name: str
    source: str
    about: str
    cells: Callable[[str, Sequence[int], str], list[Cell]]
    run: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    panels: Callable[[Sequence[CellResult]], list[Panel]]
    claims: Callable[[Sequence[CellResult]], list[Claim]]


def by_seed(
    results: Sequence[CellResult], value: Callable[[CellResult], float], **settings: object
) -> tuple[float, ...]:
    """One number per seed, in order of seeds, from the results with these settings."""
    chosen = [result for result in results if all(result.settings[name] == wanted for name, wanted in settings.items())]
    return tuple(value(result) for result in sorted(chosen, key=lambda result: result.settings["seed"]))


def minus(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
    """The difference seed by seed."""
    return tuple(x - y for x, y in zip(a, b, strict=True))


def best_elsewhere(rows: Sequence[Sequence[float]]) -> list[int]:
    """For each seed's row of values, the index at which the sum over the other seeds is highest.

    A row's own maximum is never below its first and last value, so choosing it would bias differences from it upwards.
    """
    indices = []
    for i in range(len(rows)):
        sums = [sum(column) for column in zip(*(row for j, row in enumerate(rows) if j != i), strict=True)]
        indices.append(sums.index(max(sums)))
    return indices


def over_seeds(table: Sequence[Sequence[float]], *, shares: bool = True) -> tuple[Interval, ...]:
    """An interval over seeds for each column of a table [seed, column], clipped to [0, 1] if the values are shares."""
    intervals = tuple(seed_interval(column) for column in zip(*table, strict=True))
    return tuple(interval.within(0.0, 1.0) for interval in intervals) if shares else intervals
