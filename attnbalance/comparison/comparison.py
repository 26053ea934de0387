"""What was measured of several models on the same prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from attnbalance.data.prompts import Prompt
from attnbalance.errors import DataError
from attnbalance.readings.curves import Curve, layer_curve
from attnbalance.readings.paired_accuracy import PairedAccuracy, compare_accuracy
from attnbalance.readings.reading import Reading, difference
from attnbalance.readings.recall import Recall


@dataclass(frozen=True)
class ExampleRow:
    """The attention row of one prompt over its tokens, averaged over heads.

    prompt_id: the prompt.
    tokens: the texts of its tokens.
    in_subject: for each token whether it belongs to the subject.
    weights: attention by layer and position, `weights[layer][position]`; each layer sums to 1.
    """

    prompt_id: str
    tokens: tuple[str, ...]
    in_subject: tuple[bool, ...]
    weights: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Measured:
    """What was measured of one model.

    label: the model's name in the comparison.
    readings: one reading for each title, the same titles and order in all models of a comparison.
    recall: its answers; None if they were not asked for.
    examples: its attention rows on the example prompts.
    source: what was measured and how it was made, as JSON: model and adapter paths, dtype, attention implementation,
        a hash of the prompts' tokens, the mean number of tokens of a subject, and the `attnbalance.json` of the run
        that made it, if any.
    """

    label: str
    readings: tuple[Reading, ...]
    recall: Recall | None
    examples: tuple[ExampleRow, ...]
    source: Mapping[str, object]

    def reading(self, title: str | None = None) -> Reading:
        """The reading of one title, by default the first; raises `DataError` for a title that was not measured."""
        titles = [reading.title for reading in self.readings]
        if title is not None and title not in titles:
            raise DataError(f"{self.label} has no reading {title!r}; it has {', '.join(titles)}")
        return self.readings[0 if title is None else titles.index(title)]


@dataclass(frozen=True)
class Comparison:
    """Models measured on the same prompts. Methods take a reading's `title`, by default that of the first.

    measured: the models.
    prompts: what they were asked.
    reduce: the reduction of attention over the subject's tokens.
    pair: the two labels whose difference, the first minus the second, the report is about, if any.
    dropped: number of facts that were not used, by reason.
    seed: of the intervals.
    caveat: a warning in the headline, such as that a model was finetuned on some of the questions.
    """

    measured: tuple[Measured, ...]
    prompts: tuple[Prompt, ...]
    reduce: str
    pair: tuple[str, str] | None
    dropped: Mapping[str, int]
    seed: int
    caveat: str = ""
    _computed: dict[tuple[str, ...], Curve] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse models with different readings."""
        for other in self.measured:
            if [reading.title for reading in other.readings] != list(self.titles):
                raise DataError(
                    f"all models need the same readings: {self.measured[0].label} has {', '.join(self.titles)}, "
                    f"{other.label} has {', '.join(reading.title for reading in other.readings)}"
                )

    def __getitem__(self, label: str) -> Measured:
        """What was measured under one label."""
        for measured in self.measured:
            if measured.label == label:
                return measured
        labels = ", ".join(measured.label for measured in self.measured)
        raise DataError(f"nothing measured under {label!r}; labels are {labels}")

    @property
    def titles(self) -> tuple[str, ...]:
        """The titles of the readings, in order."""
        return tuple(reading.title for reading in self.measured[0].readings)

    def curves(self, title: str | None = None) -> dict[str, Curve]:
        """The curve of each label; computed once, because every table, figure and sentence asks for it."""
        title = title or self.titles[0]
        for measured in self.measured:
            key = (title, measured.label)
            if key not in self._computed:
                self._computed[key] = layer_curve(measured.reading(title), seed=self.seed)
        return {measured.label: self._computed[title, measured.label] for measured in self.measured}

    def all_curves(self) -> dict[str, list[Curve]]:
        """The curves of each label, one for each reading."""
        return {
            measured.label: [self.curves(title)[measured.label] for title in self.titles] for measured in self.measured
        }

    def difference(self, a: str, b: str, title: str | None = None) -> Curve:
        """The paired difference a - b of a reading along layers; computed once.

        The intervals hold for all layers together (`simultaneous` in `layer_curve`), so that they answer whether some
        layer differs. Raises `DataError` for models of different depth or number of heads.
        """
        title = title or self.titles[0]
        if (title, a, b) not in self._computed:
            paired = difference(self[a].reading(title), self[b].reading(title))
            self._computed[title, a, b] = layer_curve(paired, simultaneous=True, seed=self.seed)
        return self._computed[title, a, b]

    def comparable(self, title: str | None = None) -> bool:
        """Whether there is a pair whose readings have the same layers and heads, so that they can be subtracted."""
        if self.pair is None:
            return False
        a, b = (self[label].reading(title) for label in self.pair)
        return a.layers == b.layers and a.values.shape == b.values.shape

    def accuracy_difference(self, a: str, b: str, quintile: int | None = None) -> PairedAccuracy | None:
        """The paired difference a - b in accuracy, over all prompts or on one fifth by popularity (0: most popular).

        None if recall was not measured, or if no prompt's popularity is known.
        """
        first, second = self[a].recall, self[b].recall
        if first is None or second is None:
            return None
        if quintile is not None:
            parts = first.quintiles()
            if quintile >= len(parts):
                return None
            names = [first.prompt_ids[i] for i in parts[quintile]]
            first, second = first.at(names), second.at(names)
        return compare_accuracy(first, second)
