"""Why facts were lost between two checkpoints: change by cause and place, causal checks, hidden answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnbalance.models.parts import PARTS
from attnbalance.prompts import Prompt
from attnbalance.readings.causal import STRENGTH, Arm, Rescue, rescue
from attnbalance.readings.change import Change
from attnbalance.readings.compare import Comparison
from attnbalance.readings.intervals import Interval, mean_intervals, ratio_intervals, share_interval
from attnbalance.readings.recall import PairedAccuracy, Recall, gain_interval
from attnbalance.readings.salience import StoredAnswers

TOP = 3
"""An answer counts as stored where it ranks among this many of its relation's candidates."""


@dataclass(frozen=True)
class Split:
    """The mean change of the contrast over some prompts (nats), and what each cause has in it.

    `causes` are means in nats and add up to `total`; `shares` are their shares in it, without intervals where the
    total's own holds zero. Keys: "attention" and "storage" (values and MLPs together), then the parts of the weights
    "values", "mlp" and "rest". Beside these "rows", where rows can be edited: what the last token's attention rows
    carry of the change, whichever weights made them change; the rest goes other ways.
    """

    n: int
    total: Interval
    causes: Mapping[str, Interval]
    shares: Mapping[str, Interval]


@dataclass(frozen=True)
class Check:
    """One causal check of a model (see `causal.Arm`): the answers under it, and what it brings back and breaks."""

    name: str
    kind: str
    alpha: float | None
    recall: Recall
    rescue: Rescue


@dataclass(frozen=True)
class Hidden:
    """Of the facts that a model gets wrong: how many have the right answer among the `TOP` at the subject.

    `control` is the share with the same answers at other subjects, `difference` the paired difference of the two.
    """

    wrong: int
    stored: Interval
    control: Interval
    difference: Interval


@dataclass(frozen=True)
class Explanation:
    """All that is known of the change from a comparison's first label (before) to its second (after).

    `checks` and `stored` hold, for each label, the checks of that model against the other one and the ranks of its
    answers. Prompts are the comparison's, in its order; `ambiguous` counts those whose answer shares its first token
    with another answer of the relation.
    """

    comparison: Comparison
    change: Change
    checks: Mapping[str, Sequence[Check]]
    stored: Mapping[str, StoredAnswers]
    ambiguous: int

    @property
    def labels(self) -> tuple[str, str]:
        """Before and after."""
        before, after = self.comparison.measured[:2]
        return before.label, after.label

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts in order."""
        return self.comparison.prompts

    def recall(self, label: str) -> Recall:
        """What a model answers without any check."""
        found = self.comparison[label].recall
        assert found is not None  # noqa: S101 - an explanation is made of models that were asked
        return found

    def swapped(self, which: str) -> str:
        """The other label."""
        before, after = self.labels
        return after if which == before else before

    @cached_property
    def groups(self) -> dict[str, list[int]]:
        """Places of prompts: "all", "fifth 1" (most popular) to "fifth 5", "lost" and "gained"; none that are empty."""
        before, after = (self.recall(label) for label in self.labels)
        found = {"all": list(range(len(self.prompts)))}
        found |= {f"fifth {i + 1}": part for i, part in enumerate(before.quintiles())}
        pairs = list(zip(before.correct, after.correct, strict=True))
        found["lost"] = [i for i, (was, now) in enumerate(pairs) if was and not now]
        found["gained"] = [i for i, (was, now) in enumerate(pairs) if now and not was]
        return {name: places for name, places in found.items() if places}

    @cached_property
    def splits(self) -> dict[str, Split]:
        """The change by cause, for each group of prompts."""
        return {name: self._split(places) for name, places in self.groups.items()}

    def edges(self, places: Sequence[int]) -> list[dict[str, Interval]]:
        """For each layer the change carried from the subject's tokens (nats, all heads), by attention and by readout.

        Whatever caused it: see `change.split_edges`. Intervals hold for all layers together (Bonferroni).
        """
        readings = {"attention": self.change.looked, "readout": self.change.readout}
        confidence = 1 - 0.05 / (2 * len(self.change.looked.layers))
        tables = {name: one.values[list(places)].double().sum(-1).numpy() for name, one in readings.items()}
        found = {
            name: mean_intervals(table, self._subjects(places), confidence=confidence, seed=self.comparison.seed)
            for name, table in tables.items()
        }
        return [dict(zip(found, one, strict=True)) for one in zip(*found.values(), strict=True)]

    def hidden(self, label: str) -> Hidden | None:
        """The hidden knowledge of one model; None where it gets nothing wrong."""
        ranks, seed = self.stored[label], self.comparison.seed
        wrong = [i for i, right in enumerate(self.recall(label).correct) if not right]
        if not wrong:
            return None
        subjects = self._subjects(wrong)
        stored, control = ((rank[wrong] <= TOP).tolist() for rank in (ranks.rank, ranks.control))
        gained = np.asarray(stored, dtype=int) - np.asarray(control, dtype=int)
        return Hidden(
            len(wrong),
            share_interval(stored, subjects, seed=seed),
            share_interval(control, subjects, seed=seed),
            gain_interval(gained, subjects, seed),
        )

    def check(self, label: str, kind: str, alpha: float | None = STRENGTH) -> Check | None:
        """The first check of a kind (and strength) of one model, if it was made."""
        return next((one for one in self.checks[label] if one.kind == kind and one.alpha == alpha), None)

    def accuracy(self) -> PairedAccuracy | None:
        """The accuracy of the model after minus that before."""
        before, after = self.labels
        return self.comparison.accuracy_difference(after, before)

    def _subjects(self, places: Sequence[int]) -> list[str]:
        return [self.prompts[i].fact.subject for i in places]

    def _split(self, places: Sequence[int]) -> Split:
        change, subjects, seed = self.change, self._subjects(places), self.comparison.seed
        columns = {"attention": change.attention, "storage": change.storage}
        columns |= {part: change.parts[part] for part in PARTS if part not in columns}
        if change.rows is not None:
            columns["rows"] = change.rows
        table = np.stack([column[list(places)].double().numpy() for column in columns.values()], axis=1)
        total = (change.after - change.before)[list(places)].double().numpy()
        means = mean_intervals(np.column_stack([table, total]), subjects, seed=seed)
        shares = ratio_intervals(table, total, subjects, seed=seed)
        return Split(
            len(places),
            means[-1],
            dict(zip(columns, means[:-1], strict=True)),
            dict(zip(columns, shares, strict=True)),
        )


def make_check(
    arm: Arm, answers: Recall, plain: Recall, other: Recall, before: Sequence[Check], seed: int = 0
) -> Check:
    """A check with what it brings back, compared with its control among the checks made `before`."""
    control = next((one.recall for one in before if one.name == arm.control), None)
    return Check(arm.name, arm.kind, arm.alpha, answers, rescue(plain, other, answers, control, seed=seed))
