"""What is concluded of one model's salience: curves, correlations with popularity, and shares of readout ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attnbalance.data.prompts import Prompt
from attnbalance.readings.curves import Curve, layer_curve
from attnbalance.readings.reading import Reading
from attnbalance.readings.salience import ReadoutRanks
from attnbalance.statistics.intervals import Interval, rank_correlations
from attnbalance.statistics.shares import share_interval

TOP = (1, 3)
"""Readout ranks that are counted: the share of answers with at most this rank."""


@dataclass(frozen=True)
class TopShare:
    """The share of answers with at most a certain readout rank.

    Attributes:
        share: At the fact's own subject.
        control: For the same answers at other subjects.
        chance: For random orders of each relation's candidates.
    """

    share: Interval
    control: Interval
    chance: float


@dataclass(frozen=True)
class Salience:
    """What was read of one model, with its conclusions.

    Attributes:
        label: The model's label.
        readings: The readings, value salience in context first.
        curves: Each reading's mean along layers.
        popularity: For each reading, Spearman's correlation of each layer's sum over heads with popularity, over
            prompts with known popularity. The intervals hold for all layers together. None if no popularity is known.
        top: The share of answers for each of `TOP`.
        ambiguous: Number of prompts whose answer has the same token as a wrong answer (see `AnswerTokens`).
        read_only: Why its rows can be read but not edited, so that relevance is left out (see
            `HookedModel.read_only`); None if they can be edited.
    """

    label: str
    readings: tuple[Reading, ...]
    curves: tuple[Curve, ...]
    popularity: tuple[Curve, ...] | None
    top: Mapping[int, TopShare]
    ambiguous: int
    read_only: str | None


def conclude(
    label: str,
    readings: Sequence[Reading],
    ranks: ReadoutRanks,
    prompts: Sequence[Prompt],
    ambiguous: int,
    read_only: str | None,
    seed: int,
) -> Salience:
    """Compute everything that is said of one model's salience.

    label: the model's label.
    readings: its readings, value salience in context first.
    ranks: its readout ranks.
    prompts: the prompts that were read.
    ambiguous: number of prompts whose answer has the same token as a wrong answer.
    read_only: see `Salience`.
    seed: of the intervals.
    """
    subjects = [prompt.fact.composed_subject for prompt in prompts]
    top = {}
    for k in TOP:
        share, control = (share_interval((rank <= k).tolist(), subjects) for rank in (ranks.rank, ranks.control))
        top[k] = TopShare(share, control, float(ranks.chance(k).mean()))
    known = [i for i, prompt in enumerate(prompts) if prompt.fact.popularity is not None]
    return Salience(
        label,
        tuple(readings),
        tuple(layer_curve(reading, seed=seed) for reading in readings),
        tuple(_with_popularity(reading, prompts, known, seed) for reading in readings) if known else None,
        top,
        ambiguous,
        read_only,
    )


def _with_popularity(reading: Reading, prompts: Sequence[Prompt], known: Sequence[int], seed: int) -> Curve:
    """The correlation of a reading with popularity along layers, over the `known` prompts."""
    values = reading.values[list(known)].double().sum(-1).numpy()
    popularity = np.asarray([prompts[i].fact.popularity for i in known], float)
    subjects = [prompts[i].fact.composed_subject for i in known]
    intervals = rank_correlations(values, popularity, subjects, simultaneous=True, seed=seed)
    mean, low, high = (tuple(getattr(interval, end) for interval in intervals) for end in ("mean", "low", "high"))
    return Curve(reading.name, "Spearman, popularity", reading.layers, mean, low, high, len(known))
