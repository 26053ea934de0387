"""What was measured along the steps of a run, and the numbers that its report rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from attnbalance.comparison.comparison import Comparison
from attnbalance.readings.paired_accuracy import PairedAccuracy
from attnbalance.readings.reading import Reading, difference
from attnbalance.statistics.intervals import Interval, mean_intervals


@dataclass(frozen=True)
class Trajectory:
    """The checkpoints of a run measured on the same prompts.

    steps: the step of each checkpoint, increasing.
    comparison: what was measured of each, in the same order; its pair is the last checkpoint and the first.
    """

    steps: tuple[int, ...]
    comparison: Comparison
    _computed: dict[tuple[str, ...], list[Interval]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def labels(self) -> tuple[str, ...]:
        """The label of each checkpoint."""
        return tuple(measured.label for measured in self.comparison.measured)

    @property
    def ends(self) -> Comparison:
        """The comparison of the last checkpoint with the first alone."""
        first, *_, last = self.comparison.measured
        return replace(self.comparison, measured=(last, first), pair=(last.label, first.label))

    def by_layer(self, title: str) -> list[tuple[float, ...]]:
        """A reading's mean over heads and prompts, for each step and layer."""
        curves = self.comparison.curves(title)
        return [curves[label].mean for label in self.labels]

    def means(self, title: str) -> list[Interval]:
        """A reading's mean over layers, heads and prompts at each step, with a 95% interval clustered by subject."""
        readings = [measured.reading(title) for measured in self.comparison.measured]
        return self._means(("mean", title), readings)

    def changes(self, title: str) -> list[Interval]:
        """At each step the paired difference from the first checkpoint in the mean over layers, with its interval."""
        first = self.comparison.measured[0].reading(title)
        readings = [difference(measured.reading(title), first) for measured in self.comparison.measured]
        return self._means(("change", title), readings)

    def accuracies(self) -> list[Interval] | None:
        """The accuracy at each step over all prompts; None if no answers were asked for."""
        recalls = [measured.recall for measured in self.comparison.measured]
        return None if None in recalls else [recall.accuracy() for recall in recalls if recall is not None]

    @cached_property
    def accuracy_change(self) -> PairedAccuracy | None:
        """The paired difference in accuracy, last checkpoint minus first; None if no answers were asked for."""
        return self.comparison.accuracy_difference(self.labels[-1], self.labels[0])

    def _means(self, key: tuple[str, ...], readings: Sequence[Reading]) -> list[Interval]:
        """The mean of each reading over layers, heads and prompts; computed once."""
        if key not in self._computed:
            seed = self.comparison.seed
            self._computed[key] = [
                mean_intervals(reading.values.double().mean(dim=(1, 2)).numpy()[:, None], reading.subjects, seed=seed)[
                    0
                ]
                for reading in readings
            ]
        return self._computed[key]
