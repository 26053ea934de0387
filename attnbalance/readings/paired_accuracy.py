"""Two models' accuracy on the same prompts: the difference, its interval, and the exact McNemar test."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from attnbalance.arguments import expects
from attnbalance.errors import DataError
from attnbalance.readings.recall import Recall
from attnbalance.statistics.intervals import Interval
from attnbalance.statistics.shares import gain_interval


@dataclass(frozen=True)
class PairedAccuracy:
    """The accuracy of a model a minus that of b on the same prompts, with the exact McNemar test.

    Attributes:
        interval: The difference with its 95% interval.
        a_only: Number of prompts that only a answers correctly.
        b_only: Number of prompts that only b answers correctly.
        p_value: The p-value of the exact two-sided McNemar test on these two numbers, which treats prompts as
            independent.
    """

    interval: Interval
    a_only: int
    b_only: int
    p_value: float

    @property
    def differs(self) -> bool:
        """Whether one is more accurate: the interval excludes zero and the exact test has p < 0.05.

        With about five prompts that are answered differently, the interval can exclude zero while the exact test has
        p > 0.05. With several prompts for each subject, the test's p is too small, since it treats them as independent.
        """
        return self.interval.excludes_zero and self.p_value < 0.05


@expects(a=Recall, b=Recall)
def compare_accuracy(a: Recall, b: Recall) -> PairedAccuracy:
    """Compare two models' accuracy on the same prompts; raises `DataError` for prompts of other ids, or other scorings.

    A recall does not record the dtype of its model: load both models in one dtype.
    """
    if set(a.prompt_ids) != set(b.prompt_ids):
        raise DataError("a paired comparison needs the same prompts in both recalls")
    if a.scoring != b.scoring:
        raise DataError(
            f"a paired comparison needs one scoring, got {a.scoring} and {b.scoring}; choose one with `Recall.by`"
        )
    gained = np.asarray(a.correct, dtype=int) - np.asarray(b.at(a.prompt_ids).correct, dtype=int)
    a_only, b_only = int((gained > 0).sum()), int((gained < 0).sum())
    p_value = float(stats.binomtest(a_only, a_only + b_only).pvalue) if a_only + b_only else 1.0
    return PairedAccuracy(gain_interval(gained, a.subjects), a_only, b_only, p_value)
