"""The conclusions of an explanation: plain numbers with intervals, which page, JSON and sentences only report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attnbalance.comparison.comparison import Comparison
from attnbalance.data.prompts import Prompt
from attnbalance.readings.paired_accuracy import PairedAccuracy
from attnbalance.readings.steering import STRENGTH, Rescue
from attnbalance.statistics.intervals import Interval

TOP = 3
"""An answer counts as hidden at the subject if its readout rank is at most this."""


@dataclass(frozen=True)
class ChangeByCause:
    """The mean change of the margin over some prompts, and what each cause contributes to it.

    Attributes:
        indices: The prompts.
        total: The mean change in nats.
        causes: Contributions in nats. "qk", "ov", "mlp" and "rest" are parts of the weights and sum to `total`;
            "ov+mlp" is the sum of two of them. "rows", if rows can be edited, is what the last token's attention rows
            carry of the change, whichever weights changed them.
        shares: Each contribution's share of the total, without an interval if the total's own contains zero.
    """

    indices: tuple[int, ...]
    total: Interval
    causes: Mapping[str, Interval]
    shares: Mapping[str, Interval]

    @property
    def n(self) -> int:
        """Number of prompts."""
        return len(self.indices)


@dataclass(frozen=True)
class Edge:
    """The mean change that a layer's heads carry straight from the subject's tokens, in nats (see `split_edges`).

    Attributes:
        layer: Layer number.
        by_attention: The part due to the change of attention to the subject.
        by_readout: The part due to the change of what heads read out there.
    """

    layer: int
    by_attention: Interval
    by_readout: Interval


@dataclass(frozen=True)
class CausalCheck:
    """The result of one `Treatment`: accuracy under it, and the answers that it brings back and breaks.

    Attributes:
        name: The treatment's name, in words.
        kind: What it does (see `Treatment`).
        alpha: By what it multiplies attention; None for a treatment that does not.
        accuracy: The share of right answers under it.
        rescue: What it brings back and breaks (see `Rescue`).
    """

    name: str
    kind: str
    alpha: float | None
    accuracy: Interval
    rescue: Rescue


@dataclass(frozen=True)
class HiddenAnswers:
    """Of the facts that a model gets wrong: how many have the right answer among the `TOP` readout ranks.

    Attributes:
        wrong: Number of facts that the model gets wrong.
        share: The share with a readout rank of at most `TOP` at their subject.
        control: The same share for the same answers at other subjects.
        difference: The paired difference of the two.
        chance: The share for random orders of the candidates; 1 if no relation has more than `TOP`.
    """

    wrong: int
    share: Interval
    control: Interval
    difference: Interval
    chance: float


@dataclass(frozen=True)
class FactChange:
    """What became of one fact. Pairs hold the value before and the value after.

    Attributes:
        prompt: The question.
        outputs: The models' answers.
        right: Whether they are right.
        margin: The margins in nats.
        causes: What each part of the weights, and "ov+mlp", contributes to the margin's change.
        readout_rank: The answer's readout ranks.
        candidates: Number of answers that are ranked.
        wrong_in: The label of the model that gets the fact wrong: the first one if both do.
        comes_back: The checks under which that model gets it right (boosts at `STRENGTH` only).
    """

    prompt: Prompt
    outputs: tuple[str, str]
    right: tuple[bool, bool]
    margin: tuple[float, float]
    causes: Mapping[str, float]
    readout_rank: tuple[int, int]
    candidates: int
    wrong_in: str | None
    comes_back: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """All that is known of the change from one checkpoint (before) to another (after), as plain numbers.

    Attributes:
        comparison: Attention and answers of the two models.
        accuracy: Each model's share of right answers.
        accuracy_change: Accuracy after minus accuracy before.
        groups: The change by cause for "all" prompts, "fifth 1" (most popular) to "fifth 5", where popularity tells
            them apart, "lost" and "gained"; without empty groups.
        components: For each part of the weights and component of `Change.components`, the mean over prompts as nested
            lists [layer][column].
        edges: The change carried straight from subject to last token, for each layer; the intervals hold for both
            columns of all layers together.
        settings: Settings that differ between the configurations, with both values.
        checks: Each model's causal checks against the other one.
        hidden: Each model's hidden answers; None if it gets nothing wrong.
        facts: What became of each fact, in the comparison's order.
        examples: Indices of ten facts drawn at random: lost ones first, then gained ones, then others.
        ambiguous: Number of prompts with a wrong answer whose token a right one has too (see `AnswerTokens`).
        read_only: Why the rows of a model can be read but not edited (see `HookedModel.read_only`), by its label;
            without models whose rows can be edited.
    """

    comparison: Comparison
    accuracy: Mapping[str, Interval]
    accuracy_change: PairedAccuracy
    groups: Mapping[str, ChangeByCause]
    components: Mapping[str, Mapping[str, list[list[float]]]]
    edges: tuple[Edge, ...]
    settings: Mapping[str, tuple[object, object]]
    checks: Mapping[str, tuple[CausalCheck, ...]]
    hidden: Mapping[str, HiddenAnswers | None]
    facts: tuple[FactChange, ...]
    examples: tuple[int, ...]
    ambiguous: int
    read_only: Mapping[str, str]

    @property
    def labels(self) -> tuple[str, str]:
        """Before and after."""
        before, after = self.comparison.measured[:2]
        return before.label, after.label

    def other(self, label: str) -> str:
        """The other label."""
        before, after = self.labels
        return after if label == before else before

    def check(self, label: str, kind: str, alpha: float | None = STRENGTH) -> CausalCheck | None:
        """One model's first check of a kind and strength, if it was made."""
        return next((check for check in self.checks[label] if (check.kind, check.alpha) == (kind, alpha)), None)
