"""What was measured of several models on the same prompts, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from attnbalance.errors import DataError
from attnbalance.prompts import Prompt
from attnbalance.readings.curves import Curve, layer_curve
from attnbalance.readings.reading import Reading, difference
from attnbalance.readings.recall import PairedAccuracy, Recall, compare_accuracy


@dataclass(frozen=True)
class ExampleRow:
    """The attention row of one prompt over its tokens, averaged over heads: `weights[layer][position]`, sums of 1."""

    prompt_id: str
    tokens: tuple[str, ...]
    in_subject: tuple[bool, ...]
    weights: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Measured:
    """One model's subject attention, its recall where that was asked for, and its rows on the example prompts.

    `source` says what was measured and how it was made, as JSON: model and adapter paths, dtype, attention path, and
    the run's own `attnbalance.json` where there is one.
    """

    label: str
    attention: Reading
    recall: Recall | None
    examples: tuple[ExampleRow, ...]
    source: Mapping[str, object]


@dataclass(frozen=True)
class Comparison:
    """Models measured on the same prompts; `pair` names the two labels whose difference is the question, if any.

    `reduce` is the reduction over subject tokens. `dropped` counts rows that were not used, by reason.
    `caveat` is what the headline must add, such as that this is one seed of a small world.
    """

    measured: tuple[Measured, ...]
    prompts: tuple[Prompt, ...]
    reduce: str
    pair: tuple[str, str] | None
    dropped: Mapping[str, int]
    seed: int
    caveat: str = ""

    def __getitem__(self, label: str) -> Measured:
        """What was measured under one label."""
        for one in self.measured:
            if one.label == label:
                return one
        raise DataError(f"nothing measured under {label!r}; labels are {', '.join(one.label for one in self.measured)}")

    def curves(self) -> dict[str, Curve]:
        """The subject-attention curve of each label."""
        return dict(self._curves)

    @cached_property
    def _curves(self) -> dict[str, Curve]:
        """Kept, because every table, figure and sentence asks for them again."""
        return {one.label: layer_curve(one.attention, seed=self.seed) for one in self.measured}

    def attention_difference(self, a: str, b: str) -> Curve:
        """The paired difference a - b of subject attention along layers.

        The intervals hold for all layers together (Bonferroni: each has confidence 1 - 0.05 / number of layers), so
        that "some layer differs" may be read off them. Raises `DataError` for models of different depth or heads.
        """
        if (a, b) not in self._differences:
            paired = difference(self[a].attention, self[b].attention)
            confidence = 1 - 0.05 / len(paired.layers)
            self._differences[a, b] = layer_curve(paired, confidence=confidence, seed=self.seed)
        return self._differences[a, b]

    @cached_property
    def _differences(self) -> dict[tuple[str, str], Curve]:
        """Kept, as the curves are."""
        return {}

    def accuracy_difference(self, a: str, b: str, quintile: int | None = None) -> PairedAccuracy | None:
        """The paired difference a - b in accuracy, over all prompts or on one fifth by popularity (0: most popular).

        None where recall was not measured, or no prompt's popularity is known.
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
        return compare_accuracy(first, second, seed=self.seed)
