"""A figure to reproduce: independent cells, panels with intervals over seeds, and claims judged from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnbalance.papers.sources import Sources
from attnbalance.statistics.intervals import Interval, seed_interval

OURS = "measured"
"""The label of our numbers beside those that a paper prints."""

SEEN, OPPOSITE, ABSENT, UNCLEAR = VERDICTS = ("seen", "opposite", "absent", "cannot tell")


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
class Workload:
    """What a cell makes a language model read, for a forecast of its cost.

    steps: optimizer steps at most; 0 for an untrained model.
    batch_size: texts of one step.
    trained: the texts that are trained on, with their answers.
    read: (texts, tokens that are generated after each, how often) of what is read without training.
    """

    steps: int
    batch_size: int
    trained: Sequence[str]
    read: Sequence[tuple[Sequence[str], int, int]]


@dataclass(frozen=True)
class Condition:
    """A condition of the setting in which a paper states a claim.

    says: the condition.
    measured: what the runs have, in words.
    met: whether the runs meet it.
    """

    says: str
    measured: str
    met: bool


@dataclass(frozen=True)
class Claim:
    """A statement, as one number per seed that is positive if the statement holds.

    The interval over seeds decides. The claim is `SEEN` if the interval lies above `least`, and `OPPOSITE` if it lies
    below minus the size of `least`. It is `ABSENT` if it lies between the two: what there is, is too small to count.
    Otherwise it is `UNCLEAR`: more seeds are needed.

    says: the statement.
    measured: the number's definition, with its unit.
    values: the number for each seed.
    place: where the paper states it, such as "Section 3.2"; empty for an extension of ours.
    least: the smallest value that counts. Below 0, it is the tolerance of a claim that something is not worse.
    level: whether `least` is a level that is reached or not: below it the claim is `ABSENT`, and nothing is opposite.
    printed: the paper's own number, if it prints one.
    setting: the conditions under which the paper states it.
    """

    says: str
    measured: str
    values: tuple[float, ...]
    place: str = ""
    least: float = 0.0
    level: bool = False
    printed: str = ""
    setting: tuple[Condition, ...] = ()

    @property
    def interval(self) -> Interval:
        """The mean over seeds with Student's 95% interval."""
        return seed_interval(self.values)

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        interval = self.interval
        if interval.low > self.least:
            return SEEN
        if interval.high < -abs(self.least) and not self.level:
            return OPPOSITE
        small = interval.high <= self.least and (self.level or interval.low >= -abs(self.least))
        return ABSENT if small else UNCLEAR

    @property
    def unmet(self) -> tuple[Condition, ...]:
        """The conditions of the paper's setting that the runs do not meet."""
        return tuple(condition for condition in self.setting if not condition.met)

    @property
    def scored(self) -> bool:
        """Whether the verdict is about the paper's own statement in the paper's own setting."""
        return bool(self.place) and not self.unmet


@dataclass(frozen=True)
class Series:
    """One line of a panel: at each x, a value with its interval over seeds."""

    label: str
    x: tuple[int | float, ...] | tuple[str, ...]
    y: tuple[Interval, ...]

    @classmethod
    def printed(cls, model: str, percent: Mapping[str, float]) -> Series:
        """A paper's own numbers, printed without intervals: the percent by x value, drawn as shares."""
        shares = (Interval(number / 100, math.nan, math.nan, 0) for number in percent.values())
        return cls(f"the paper, {model}", tuple(percent), tuple(shares))


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
    paper: the paper, as "Ghosal et al. 2024".
    number: the figure's number, as "Figure 2(a)".
    about: what is run, and the differences from the paper.
    cells: `cells(scale, seeds, sources)` lists the work for a scale ("tiny", "small" or "paper") and seeds.
    run: `run(settings)` does the work of one cell; it may be called in another process.
    panels: what to draw, from all results.
    claims: what the paper says, judged from all results.
    needs: the fields of `Sources` that must be given.
    workload: `workload(settings)` says what a cell of a language model reads; None for a simulation.
    """

    name: str
    paper: str
    number: str
    about: str
    cells: Callable[[str, Sequence[int], Sources], list[Cell]]
    run: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    panels: Callable[[Sequence[CellResult]], list[Panel]]
    claims: Callable[[Sequence[CellResult]], list[Claim]]
    needs: tuple[str, ...] = ()
    workload: Callable[[Mapping[str, Any]], Workload] | None = None

    @property
    def source(self) -> str:
        """The paper and the figure's number."""
        return f"{self.paper}, {self.number}"


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
