"""What a model stores, in a sentence."""

from __future__ import annotations

import math

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
    columns = list(zip(curve.layers, curve.mean, curve.low, curve.high, strict=True))
    sure = [column for column in columns if column[2] > 0 or column[3] < 0]
    layer, mean, low, high = max(sure or columns, key=lambda column: abs(column[1]))
    if math.isnan(low):
        return (
            f"{text}; no interval for a correlation with popularity: it needs at least {MIN_RANKED} subjects of known "
            "popularity, and values that differ."
        )
    numbers = f"Spearman {mean:+.2f} [{low:+.2f}, {high:+.2f}] at layer {layer}"
    if not sure:
        return f"{text}; value salience in context varies measurably with popularity at no layer (most: {numbers})."
    return f"{text}; value salience in context {'rises' if mean > 0 else 'falls'} with popularity ({numbers})."
