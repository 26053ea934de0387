"""What a comparison says, in sentences that claim no more than its intervals do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attnbalance.comparison.comparison import Comparison, Measured
from attnbalance.comparison.known_readings import reading_words
from attnbalance.report.wording import (
    FEW,
    bounds,
    layers,
    listed,
    percent,
    percent_interval,
    points,
    questions,
    share,
)

LINKS = {
    ("apart", "less"): ", and ",
    ("apart", "more"): ", but ",
    ("apart", "both"): ", while {title} goes both ways: ",
    ("apart", "level"): ", but ",
    ("level", "less"): ", although ",
    ("level", "more"): ", although ",
    ("level", "both"): ", although ",
    ("level", "level"): ", and ",
}
"""Words between what is said of accuracy and of a reading; "; " for other pairs, where one of the two is unknown."""


def headline(comparison: Comparison) -> str:
    """The answer in one sentence: who is more accurate, who attends more to the subject and where, and do they agree?

    The sentence is about the first reading. Accuracy is that on the most popular fifth of questions, or on all if
    popularity is not known or does not tell that fifth from the others. A difference over all questions that the fifth
    does not show, or in which the other model is ahead, is added. A difference is claimed only if its interval
    excludes zero; one in accuracy only if the exact McNemar test also has p < 0.05 (see `PairedAccuracy.differs`).
    Of models outside the pair, or of all without one, it says where each attends most, and how accurate it is.
    Brackets hold 95% intervals.
    """
    n = questions(len(comparison.prompts))
    if comparison.pair is None:
        text = "; ".join(_single(comparison, measured) for measured in comparison.measured) + f" ({n} in all)"
    else:
        accuracy, title = _accuracy_clause(comparison, *comparison.pair), comparison.titles[0]
        reading = _reading_clause(comparison, title, accuracy.lower, accuracy.higher)
        if accuracy.kind == "unmeasured":
            text = f"Over {n}, {reading.text}; accuracy was not measured"
        else:
            link = LINKS.get((accuracy.kind, reading.kind), "; ").format(title=title)
            text = f"{accuracy.text}{link}{reading.text} ({n} in all){_overall(comparison, accuracy)}"
        text += _tokens_note(comparison, *comparison.pair)
        others = [measured for measured in comparison.measured if measured.label not in comparison.pair]
        text += "".join(f"; {_single(comparison, measured)}" for measured in others)
    return f"{text}{f'; {comparison.caveat}' if comparison.caveat else ''}."


def curves_sentence(comparison: Comparison, title: str | None = None) -> str:
    """The layer at which each model's reading is highest; `title` names the reading, by default the first."""
    title = title or comparison.titles[0]
    peaks = [f"{label} at layer {layer} ({value})" for label, (layer, value) in _peaks(comparison, title).items()]
    return f"{title[:1].upper() + title[1:]} is highest in {listed(peaks)}."


def difference_sentence(comparison: Comparison, title: str | None = None) -> str:
    """At which layers the pair's reading differs, or why that cannot be said; empty without a pair."""
    if comparison.pair is None:
        return ""
    text = _reading_clause(comparison, title or comparison.titles[0], *comparison.pair).text
    text = text if text.startswith(comparison.pair) else text[:1].upper() + text[1:]
    return f"{text}{_tokens_note(comparison, *comparison.pair)}."


def accuracy_sentence(comparison: Comparison) -> str:
    """The accuracy of each model over all questions, and the pair's difference: claimed as in `headline`."""
    known = [(measured.label, measured.recall) for measured in comparison.measured if measured.recall is not None]
    shares = [f"{label} {percent_interval(recall.accuracy())}" for label, recall in known]
    text = f"Of all questions, answered right: {listed(shares)}"
    paired = comparison.accuracy_difference(*comparison.pair) if comparison.pair else None
    if paired is None or comparison.pair is None:
        return text + "."
    a, b = comparison.pair
    alone = f"{a} alone is right on {paired.a_only:,}, {b} alone on {paired.b_only:,}"
    verdict = "so the two differ" if paired.differs else "so there is no clear difference"
    change = f"{a} minus {b}: {points(paired.interval)}, {verdict}"
    return f"{text}; {change}. {alone} (exact McNemar p = {paired.p_value:.2g})."


def shown_layers(comparison: Comparison) -> dict[str, int]:
    """For each label the layer at which to show its attention rows.

    That is the layer of the pair's largest difference in the first reading; without one, that of the highest mean.
    """
    curves = comparison.curves()
    peaks = {label: layer for label, (layer, _) in _peaks(comparison, comparison.titles[0]).items()}
    if comparison.pair is None or not comparison.comparable():
        return peaks
    a, b = (curves[label] for label in comparison.pair)
    largest = max(range(len(a.layers)), key=lambda i: abs(a.mean[i] - b.mean[i]))
    layer = a.layers[largest]
    return {label: layer if layer in curve.layers else peaks[label] for label, curve in curves.items()}


@dataclass(frozen=True)
class _Clause:
    """Part of a sentence.

    kind: what it says of `lower` against `higher` (see `LINKS`).
    text: the words.
    lower: the label that is lower, or was expected to be.
    higher: the other label.
    """

    kind: str
    text: str
    lower: str
    higher: str


def _single(comparison: Comparison, measured: Measured) -> str:
    """Where one model attends most, and how accurate it is."""
    title, recall = comparison.titles[0], measured.recall
    (verb, complement), (layer, value) = reading_words(title), _peaks(comparison, title)[measured.label]
    text = f"{measured.label} {verb} most {complement} at layer {layer} ({value})"
    if recall is None:
        return f"{text}; its accuracy was not measured"
    popular = recall.has_popular_fifth
    rate, group = (
        (recall.by_quintile()[0][1], "the most popular fifth") if popular else (recall.accuracy(), "all questions")
    )
    return f"{text} and answers {percent_interval(rate)} of {group} right"


def _accuracy_clause(comparison: Comparison, a: str, b: str) -> _Clause:
    """What can be said of accuracy on the most popular fifth, or on all questions."""
    first, second = comparison[a].recall, comparison[b].recall
    popular = first is not None and first.has_popular_fifth
    group = "the most popular fifth of questions" if popular else "all questions"
    paired = comparison.accuracy_difference(a, b, 0 if popular else None)
    if paired is None or first is None or second is None:
        return _Clause("unmeasured", "", b, a)
    change = paired.interval
    names = [first.prompt_ids[i] for i in first.quintiles()[0]] if popular else first.prompt_ids
    rates = {label: sum(recall.at(names).correct) / len(names) for label, recall in ((a, first), (b, second))}
    right = {label: percent(rate) for label, rate in rates.items()}
    both, test = f"{right[a]} and {right[b]}", f"exact McNemar p = {paired.p_value:.2g}, n = {change.n:,})"
    if math.isnan(change.low):
        text = f"{a} and {b} answer {both} of {group} right (n = {change.n:,}, {FEW}: no interval)"
        return _Clause("unknown", text, b, a)
    if not any(rates.values()):
        any_of = "any of the most popular fifth of questions" if popular else "any question"
        return _Clause("unknown", f"neither {a} nor {b} answers {any_of} right (n = {change.n:,})", b, a)
    if not paired.differs:
        text = f"{a} and {b} do not differ measurably in accuracy on {group} ({both}, "
        return _Clause("level", f"{text}{a} minus {b}: {points(change)}, {test}", b, a)
    higher, lower = (a, b) if change.mean > 0 else (b, a)
    text = f"{higher} answers {right[higher]} of {group} right against {lower}'s {right[lower]}"
    return _Clause("apart", f"{text} ({a} minus {b}: {points(change)}, {test}", lower, higher)


def _overall(comparison: Comparison, accuracy: _Clause) -> str:
    """A difference over all questions that the most popular fifth does not show, or turned round; empty if none."""
    paired = comparison.accuracy_difference(*comparison.pair) if comparison.pair else None
    if paired is None or not paired.differs or comparison.pair is None:
        return ""
    higher, lower = comparison.pair if paired.interval.mean > 0 else comparison.pair[::-1]
    if accuracy.kind == "apart" and accuracy.higher == higher:
        return ""
    change = f"{' minus '.join(comparison.pair)}: {points(paired.interval)}"
    return f"; over all questions {higher} answers more right than {lower} ({change}, p = {paired.p_value:.2g})"


def _reading_clause(comparison: Comparison, title: str, lower: str, higher: str) -> _Clause:
    """What can be said of a reading in `lower` against `higher`, over all layers together."""
    if not comparison.comparable(title):
        sizes = {label: comparison[label].reading(title).values.shape[1:] for label in (lower, higher)}
        shapes = listed([f"{label} has {size[0]} layers of {size[1]} heads" for label, size in sizes.items()])
        text = f"{title} has no difference by layer, because {shapes}; their curves are drawn together"
        return _Clause("unknown", text, lower, higher)
    a, b = pair = (higher, lower) if comparison.pair == (higher, lower) else (lower, higher)
    difference = comparison.difference(a, b, title)
    if math.isnan(difference.low[0]):
        return _Clause("unknown", f"{FEW} give no interval for a difference in {title}", lower, higher)
    below = [i for i, high in enumerate(difference.high) if high < 0]
    above = [i for i, low in enumerate(difference.low) if low > 0]
    less, more = (below, above) if a == lower else (above, below)
    if not less and not more:
        largest = _largest(comparison, title, pair, range(len(difference.layers)))
        text = f"{title} does not differ measurably at any layer (largest difference at {largest})"
        return _Clause("level", text, lower, higher)
    verb, complement = reading_words(title)
    directions = sorted((("less", less), ("more", more)), key=lambda direction: -len(direction[1]))
    (degree, indices), (opposite, others) = directions
    text = f"{lower} {verb} {degree} {complement} than {higher} {_where(comparison, title, pair, indices)}"
    if not others:
        return _Clause(degree, text, lower, higher)
    return _Clause("both", f"{text}, but {opposite} {_where(comparison, title, pair, others)}", lower, higher)


def _tokens_note(comparison: Comparison, a: str, b: str) -> str:
    """What to keep in mind where the two models' tokenizers split the prompts differently."""
    first, second = (comparison[label].source for label in (a, b))
    if first.get("tokens_sha256") == second.get("tokens_sha256"):
        return ""
    sizes = " and ".join(f"{source.get('subject_tokens', math.nan):.1f}" for source in (first, second))
    return (
        f"; note that {a} and {b} split these prompts into different tokens (a subject into {sizes} on average), which "
        "alone changes attention"
    )


def _where(comparison: Comparison, title: str, pair: tuple[str, str], indices: Sequence[int]) -> str:
    """The layers at these indices of the curves, and the one of them with the largest difference."""
    numbers = comparison.difference(*pair, title).layers
    largest, total = _largest(comparison, title, pair, indices), len(numbers)
    if len(indices) == 1:
        return f"at 1 of {total} layer{'' if total == 1 else 's'}: {largest}"
    return f"at {len(indices)} of {total} layers ({layers([numbers[i] for i in indices])}), most at {largest}"


def _largest(comparison: Comparison, title: str, pair: tuple[str, str], indices: Sequence[int]) -> str:
    """The layer of the pair's largest difference among these, with both values, and the difference's interval."""
    (a, b), curves, difference = pair, comparison.curves(title), comparison.difference(*pair, title)
    first, second = curves[a], curves[b]
    i = max(indices, key=lambda index: abs(difference.mean[index]))
    values = f"{share(first.mean[i])} in {a}, {share(second.mean[i])} in {b}"
    change = f"{share(difference.mean[i], '+')} {bounds(difference.low[i], difference.high[i], '+')}"
    return f"layer {difference.layers[i]}, {values}, {a} minus {b}: {change.strip()}"


def _peaks(comparison: Comparison, title: str) -> dict[str, tuple[int, str]]:
    """For each label the layer of the highest mean, and that mean with its interval."""
    peaks = {}
    for label, curve in comparison.curves(title).items():
        i = max(range(len(curve.layers)), key=curve.mean.__getitem__)
        peaks[label] = curve.layers[i], f"{share(curve.mean[i])} {bounds(curve.low[i], curve.high[i])}".strip()
    return peaks
