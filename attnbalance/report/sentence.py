"""What a comparison says, in sentences that claim no more than its intervals do."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attnbalance.readings.compare import Comparison, Measured
from attnbalance.readings.curves import Curve, layer_curve
from attnbalance.readings.intervals import MIN_CLUSTERS
from attnbalance.report.wording import bounds, layers, listed, percent, percent_interval, points, questions, share

FEW = f"fewer than {MIN_CLUSTERS} subjects"
LINKS = {
    ("apart", "less"): ", and, as the theory predicts, ",
    ("apart", "more"): ", but, against what the theory predicts, ",
    ("apart", "both"): ", while subject attention goes both ways: ",
    ("apart", "level"): ", but the lower attention that the theory predicts is not seen: ",
    ("level", "less"): ", although ",
    ("level", "more"): ", although ",
    ("level", "both"): ", although ",
    ("level", "level"): ", and ",
}
"""Words between what is said of accuracy and of attention; "; " for what is not here, where either is unknown."""


def headline(comparison: Comparison) -> str:
    """The answer in one sentence: who is more accurate, who attends more to the subject and where, and do they agree?

    Accuracy is that on the most popular fifth of questions, or on all where popularity is not known. A difference is
    claimed only where its interval excludes zero; one in accuracy only where the exact McNemar test, too, has p < 0.05
    (see `PairedAccuracy.differs`). The theory (Ghosal et al. 2024, Section 4) predicts that the less
    accurate model of a pair also attends less to the subject; the sentence says whether it does, does not, or does the
    opposite. Without a pair it says where each model attends most, and how accurate it is. Brackets hold 95% intervals.
    """
    n = questions(len(comparison.measured[0].attention.prompt_ids))
    if comparison.pair is None:
        text = "; ".join(_alone(comparison, one) for one in comparison.measured) + f" ({n} in all)"
    else:
        accuracy = _accuracy_clause(comparison, *comparison.pair)
        attention = _attention_clause(comparison, accuracy.lower, accuracy.higher)
        if accuracy.kind == "unmeasured":
            text = f"Over {n}, {attention.text}; accuracy was not measured"
        else:
            text = f"{accuracy.text}{LINKS.get((accuracy.kind, attention.kind), '; ')}{attention.text} ({n} in all)"
    return f"{text}{f'; {comparison.caveat}' if comparison.caveat else ''}."


def curves_sentence(comparison: Comparison) -> str:
    """Where each model attends most to the subject."""
    peaks = [f"{label} at layer {_peak(curve)[0]} ({_peak(curve)[1]})" for label, curve in comparison.curves().items()]
    return f"Subject attention is highest in {listed(peaks)}."


def difference_sentence(comparison: Comparison) -> str:
    """At which layers the pair's subject attention differs, or why that cannot be said; empty without a pair."""
    if comparison.pair is None:
        return ""
    text = _attention_clause(comparison, *comparison.pair[::-1]).text
    return f"{text if text.startswith(comparison.pair) else text[:1].upper() + text[1:]}."


def accuracy_sentence(comparison: Comparison) -> str:
    """The accuracy of each model over all questions, and the pair's difference: claimed as in `headline`."""
    known = [(one.label, one.recall) for one in comparison.measured if one.recall is not None]
    shares = [f"{label} {percent_interval(recall.accuracy(comparison.seed))}" for label, recall in known]
    text = f"Of all questions, answered right: {listed(shares)}"
    paired = comparison.accuracy_difference(*comparison.pair) if comparison.pair else None
    if paired is None or comparison.pair is None:
        return text + "."
    a, b = comparison.pair
    alone = f"{a} alone is right on {paired.a_only:,}, {b} alone on {paired.b_only:,}"
    told = "so the two differ" if paired.differs else "so the two are not told apart"
    change = f"{a} minus {b}: {points(paired.interval)}, {told}"
    return f"{text}; {change}. {alone} (exact McNemar p = {paired.p_value:.2g})."


def comparable(comparison: Comparison) -> bool:
    """Whether there is a pair whose two models have the same layers and heads, so that readings can be subtracted."""
    if comparison.pair is None:
        return False
    a, b = (comparison[label].attention for label in comparison.pair)
    return a.layers == b.layers and a.values.shape == b.values.shape


def shown_layers(comparison: Comparison) -> dict[str, int]:
    """For each label the layer at which to show its rows.

    That is the layer of the pair's largest difference, or, where there is none, the one of most subject attention.
    """
    curves = comparison.curves()
    peaks = {label: _peak(curve)[0] for label, curve in curves.items()}
    if comparison.pair is None or not comparable(comparison):
        return peaks
    a, b = (curves[label] for label in comparison.pair)
    at = max(range(len(a.layers)), key=lambda i: abs(a.mean[i] - b.mean[i]))
    return {label: a.layers[at] if a.layers[at] in curve.layers else peaks[label] for label, curve in curves.items()}


@dataclass(frozen=True)
class _Clause:
    """Part of a sentence about `lower` against `higher`, and the kind of thing that it says (see `LINKS`)."""

    kind: str
    text: str
    lower: str
    higher: str


def _alone(comparison: Comparison, one: Measured) -> str:
    """Where one model attends most, and how accurate it is."""
    layer, value = _peak(layer_curve(one.attention, seed=comparison.seed))
    text = f"{one.label} attends most to the subject at layer {layer} ({value})"
    if one.recall is None:
        return f"{text}; its accuracy was not measured"
    parts = one.recall.by_quintile(comparison.seed)
    found, of = (
        (parts[0][1], "the most popular fifth") if parts else (one.recall.accuracy(comparison.seed), "all questions")
    )
    return f"{text} and answers {percent_interval(found)} of {of} right"


def _accuracy_clause(comparison: Comparison, a: str, b: str) -> _Clause:
    paired, of = comparison.accuracy_difference(a, b, 0), "the most popular fifth of questions"
    if paired is None:
        paired, of = comparison.accuracy_difference(a, b), "all questions"
    first, second = comparison[a].recall, comparison[b].recall
    if paired is None or first is None or second is None:
        return _Clause("unmeasured", "", b, a)
    parts = first.quintiles()
    names = [first.prompt_ids[i] for i in parts[0]] if parts else first.prompt_ids
    right = {label: percent(sum(r.at(names).correct) / len(names)) for label, r in ((a, first), (b, second))}
    found, both = paired.interval, f"{right[a]} and {right[b]}"
    sure = f"exact McNemar p = {paired.p_value:.2g}, n = {found.n:,})"
    if math.isnan(found.low):
        return _Clause(
            "unknown", f"{a} and {b} answer {both} of {of} right (n = {found.n:,}, {FEW}: no interval)", b, a
        )
    if not any(sum(recall.at(names).correct) for recall in (first, second)):
        return _Clause("level", f"neither {a} nor {b} answers any of {of} right (n = {found.n:,})", b, a)
    if not paired.differs:
        text = f"{a} and {b} do not differ measurably in accuracy on {of} ({both}, "
        return _Clause("level", f"{text}difference {points(found)}, {sure}", b, a)
    higher, lower, sign = (a, b, 1) if found.mean > 0 else (b, a, -1)
    text = f"{higher} answers {right[higher]} of {of} right against {lower}'s {right[lower]}"
    return _Clause("apart", f"{text} (difference {points(found, sign)}, {sure}", lower, higher)


def _attention_clause(comparison: Comparison, lower: str, higher: str) -> _Clause:
    """What can be said of subject attention in `lower` against `higher`, over all layers together."""
    if not comparable(comparison):
        sizes = [comparison[label].attention.values.shape[1:] for label in (lower, higher)]
        shapes = listed(
            [f"{label} {size[0]} layers of {size[1]} heads" for label, size in zip((lower, higher), sizes, strict=True)]
        )
        return _Clause(
            "unknown",
            f"subject attention cannot be subtracted layer by layer, as {shapes} have been read",
            lower,
            higher,
        )
    difference, curves = comparison.attention_difference(lower, higher), comparison.curves()
    if math.isnan(difference.low[0]):
        return _Clause("unknown", f"{FEW} give no interval for a difference in subject attention", lower, higher)
    less = [i for i, high in enumerate(difference.high) if high < 0]
    more = [i for i, low in enumerate(difference.low) if low > 0]
    where = {
        name: _where(difference, curves[lower], curves[higher], places)
        for name, places in sorted((("less", less), ("more", more)), key=lambda way: -len(way[1]))
        if places
    }
    if not where:
        most = _most(difference, curves[lower], curves[higher], list(range(len(difference.layers))))
        text = f"subject attention does not differ measurably at any layer (largest difference at {most})"
        return _Clause("level", text, lower, higher)
    ways = [
        f"{name} to the subject than {higher} {text}" if i == 0 else f"{name} {text}"
        for i, (name, text) in enumerate(where.items())
    ]
    return _Clause(
        "both" if len(where) > 1 else next(iter(where)), f"{lower} attends {', but '.join(ways)}", lower, higher
    )


def _where(difference: Curve, lower: Curve, higher: Curve, places: list[int]) -> str:
    """The layers at some places of the curves, and the one of them where the difference is largest."""
    most, total = _most(difference, lower, higher, places), len(difference.layers)
    if len(places) == 1:
        return f"at 1 of {total} layer{'' if total == 1 else 's'}: {most}"
    return f"at {len(places)} of {total} layers ({layers([difference.layers[i] for i in places])}), most at {most}"


def _most(difference: Curve, lower: Curve, higher: Curve, places: list[int]) -> str:
    """The layer of the largest difference with both values and the difference's interval."""
    i = max(places, key=lambda place: abs(difference.mean[place]))
    values = f"{share(lower.mean[i])} against {share(higher.mean[i])}"
    change = f"{share(difference.mean[i], '+')} {bounds(difference.low[i], difference.high[i], '+')}"
    return f"layer {difference.layers[i]}, {values}, difference {change.strip()}"


def _peak(curve: Curve) -> tuple[int, str]:
    """The layer of the highest mean, and that mean with its interval."""
    i = max(range(len(curve.layers)), key=lambda place: curve.mean[place])
    return curve.layers[i], f"{share(curve.mean[i])} {bounds(curve.low[i], curve.high[i])}".strip()
