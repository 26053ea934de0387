"""What a model stores, in a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attnbalance.readings.curves import Curve
from attnbalance.report import wording
from attnbalance.statistics.intervals import MIN_RANKED
from attnbalance.storage.conclusions import TOP, Salience


def answer(salience: Salience) -> str:
    """The share of answers with a low readout rank, and how value salience in context varies with popularity.

    Answers that begin with the same token as a wrong answer are counted, for that token is what is read. What is left
    out where rows cannot be edited ends the answer.
    """
    alike, n = salience.ambiguous, salience.top[TOP[-1]].share.n
    note = f" {alike:,} of {n:,} answers begin with the same token as a wrong answer, and are not told from it."
    missing = left_out(salience)
    return _stored(salience) + (note if alike else "") + (f" {missing}" if missing else "")


def left_out(salience: Salience) -> str | None:
    """What is left out because rows cannot be edited, and why; None if they can be."""
    if salience.read_only is None:
        return None
    return (
        f"Relevance (the push towards the subject) is left out for {salience.label}, whose family "
        f"{salience.read_only}, so that rows can be read but not edited."
    )


def _stored(salience: Salience) -> str:
    k = TOP[-1]
    top = salience.top[k]
    text = (
        f"{salience.label}: {wording.percent_interval(top.share)} of answers are among the first {k} of their relation "
        "in what the heads could read out at the subject (the same answers at other subjects: "
        f"{wording.percent_interval(top.control)}; random orders would give {wording.percent(top.chance)})"
    )
    if salience.popularity is None:
        return f"{text}."
    curve = salience.popularity[0]
    if all(map(math.isnan, curve.low)):
        return (
            f"{text}; no interval for a correlation with popularity: it needs at least {MIN_RANKED} subjects of known "
            "popularity, none of which has half of the questions, and values that differ."
        )
    rises = [i for i, low in enumerate(curve.low) if low > 0]
    falls = [i for i, high in enumerate(curve.high) if high < 0]
    if not rises and not falls:
        most = _largest(curve, range(len(curve.layers)))
        return f"{text}; value salience in context varies measurably with popularity at no layer (most: {most})."
    directions = sorted((("rises", rises), ("falls", falls)), key=lambda direction: -len(direction[1]))
    parts = [f"{verb} with popularity {_where(curve, indices)}" for verb, indices in directions if indices]
    return f"{text}; value salience in context {', but '.join(parts)}."


def _where(curve: Curve, indices: Sequence[int]) -> str:
    """The layers at these indices of a curve of correlations, and the largest correlation among them."""
    total = len(curve.layers)
    named = wording.layers([curve.layers[i] for i in indices])
    return f"at {len(indices)} of {total} layer{'s' * (total > 1)} ({named}; most: {_largest(curve, indices)})"


def _largest(curve: Curve, indices: Sequence[int]) -> str:
    i = max(indices, key=lambda index: -1.0 if math.isnan(curve.low[index]) else abs(curve.mean[index]))
    return f"Spearman {curve.mean[i]:+.2f} [{curve.low[i]:+.2f}, {curve.high[i]:+.2f}] at layer {curve.layers[i]}"
