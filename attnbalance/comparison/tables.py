"""A comparison's curves and recall as JSON."""

from __future__ import annotations

from typing import Any

from attnbalance.comparison.comparison import Comparison
from attnbalance.data.scoring import SCORINGS
from attnbalance.errors import DataError
from attnbalance.readings.recall import Recall
from attnbalance.statistics.intervals import Interval, finite

FIFTHS = 5


def curves_json(comparison: Comparison) -> dict[str, Any]:
    """The content of `curves.json`: each label's curve with its 95% interval; a bound that is not known is null.

    Further readings are listed under "further", if there are any.
    """
    first, *further = (_curves(comparison, title) for title in comparison.titles)
    main = {"name": first["name"], "reduce": comparison.reduce, "curves": first["curves"]}
    return main | ({"further": further} if further else {})


def _curves(comparison: Comparison, title: str) -> dict[str, Any]:
    curves = [{"label": label} | curve.as_dict() for label, curve in comparison.curves(title).items()]
    return {"name": comparison.measured[0].reading(title).name, "curves": curves}


def recall_json(comparison: Comparison) -> list[dict[str, Any]]:
    """The content of `recall.json`: accuracy of each label whose recall was measured, overall and by popularity.

    `by_popularity` holds one entry for each fifth of the prompts with known popularity, most popular first (quintile
    0), and `top_percentiles` the accuracy on the x% most popular ones; `tied` counts the prompts of a fifth, or of the
    x%, whose popularity occurs outside it too. `scoring` is what counts as right; `by_scoring` gives the accuracy by
    each of `SCORINGS`. `f1` is the mean of SQuAD's F1. `shortcut_rate` is over `shortcut_n` wrong answers: those about
    relations whose most frequent training answer is known. Accuracies and rates lie in [0, 1].
    """
    return [
        {"label": measured.label} | _recall(measured.recall, comparison.seed)
        for measured in comparison.measured
        if measured.recall is not None
    ]


def differences_json(comparison: Comparison) -> dict[str, Any]:
    """The content of `differences.json`: the pair's paired differences, the first label minus the second.

    `readings` holds the difference of each reading by layer, with 95% intervals that hold for all layers together; none
    for models of different shapes. `accuracy` holds that over all questions (group "all") and in each fifth by
    popularity ("fifth 1": the most popular), with McNemar's exact p; none if answers were not asked for. Raises
    `DataError` without a pair.
    """
    if comparison.pair is None:
        raise DataError("differences need a pair of labels; this comparison has none")
    groups = {"all": None} | {f"fifth {fifth + 1}": fifth for fifth in range(FIFTHS)}
    paired = {name: comparison.accuracy_difference(*comparison.pair, fifth) for name, fifth in groups.items()}
    return {
        "pair": list(comparison.pair),
        "readings": [
            {"name": comparison.measured[0].reading(title).name}
            | comparison.difference(*comparison.pair, title).as_dict()
            for title in comparison.titles
            if comparison.comparable(title)
        ],
        "accuracy": [
            {"group": name} | change.interval.as_dict() | {"p_value": change.p_value}
            for name, change in paired.items()
            if change is not None
        ],
    }


def _accuracy(rate: Interval) -> dict[str, Any]:
    return {"accuracy": rate.mean, "low": finite(rate.low), "high": finite(rate.high), "n": rate.n}


def _recall(recall: Recall, seed: int) -> dict[str, Any]:
    rate = recall.shortcut_rate()
    return _accuracy(recall.accuracy()) | {
        "scoring": recall.scoring,
        "by_scoring": {scoring: _accuracy(recall.by(scoring).accuracy()) for scoring in SCORINGS},
        "f1": recall.mean_f1(seed).as_dict(),
        "shortcut_rate": None if rate is None else rate.mean,
        "shortcut_low": None if rate is None else finite(rate.low),
        "shortcut_high": None if rate is None else finite(rate.high),
        "shortcut_n": 0 if rate is None else rate.n,
        "wrong": recall.correct.count(False),
        "by_popularity": [
            {"quintile": fifth, "popularity_low": low, "popularity_high": high, "tied": tied} | _accuracy(rate)
            for fifth, (((low, high), rate), tied) in enumerate(zip(recall.by_quintile(), recall.tied(), strict=True))
        ],
        "top_percentiles": [
            {"percent": x, "tied": tied} | _accuracy(rate)
            for (x, rate), tied in zip(recall.by_top_percentile(), recall.tied_tops(), strict=True)
        ],
    }
