"""The report of a comparison: one HTML page that needs neither network nor scripts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from attnbalance.comparison import sentences as sentence
from attnbalance.comparison.comparison import Comparison, ExampleRow, Measured
from attnbalance.comparison.figures import draw_accuracy, draw_difference
from attnbalance.comparison.known_readings import READINGS, reading_words
from attnbalance.data.scoring import SCORINGS
from attnbalance.files.outputs import provenance, write_text
from attnbalance.readings.reading import Reading
from attnbalance.report import wording
from attnbalance.report.figures import draw_curves, draw_head_map
from attnbalance.report.page import render, svg
from attnbalance.statistics.bootstrap import MIN_CLUSTERS, MIN_EFFECTIVE, RESAMPLES

LEFT_OUT = (
    "base_fingerprint",
    "base_settings",
    "config",
    "facts_sha256",
    "files_sha256",
    "kind",
    "machine",
    "model_files",
)
LEFT_OUT += ("python", "sha256", "versions")
"""What attnbalance.json records of a training beside its settings and results: hashes, versions, the base's own
configuration. The settings are in "config", and are shown."""


def write_report(
    comparison: Comparison,
    path: Path,
    *,
    title: str = "Attention to the subject",
    about: str = "",
    command: str | None = None,
) -> None:
    """Write the report of a comparison as one HTML file, whole or not at all.

    The answer comes first (see `sentences.headline`), then what it rests on: for each reading its curves and
    differences, accuracy by popularity, heads, attention rows of some prompts, and how all of it was made. `about`
    says what the models are; `command` is the command line that made it, if any. Text from facts, tokens and labels is
    escaped.
    """
    content = _answer(comparison) | accuracy(comparison) | _examples(comparison) | making(comparison)
    write_text(path, render("comparison/page.html", content | {"title": title, "about": about, "command": command}))


def _answer(comparison: Comparison) -> dict[str, object]:
    """The headline, and the sections on readings."""
    return {
        "headline": sentence.headline(comparison),
        "numbers": list(_numbers(comparison)),
        "labels": [measured.label for measured in comparison.measured],
        "pair": comparison.pair,
        "readings": [_reading(comparison, title) for title in comparison.titles],
    }


def _numbers(comparison: Comparison) -> Iterator[tuple[str, str, str]]:
    """The numbers of the first screen, each with its interval and with what it is: attention, accuracy, questions."""
    yield _attention_number(comparison)
    yield from _accuracy_number(comparison)
    subjects = len({prompt.fact.composed_subject for prompt in comparison.prompts})
    yield f"{len(comparison.prompts):,}", "", f"questions about {subjects:,} subject{'s' * (subjects != 1)}"


def _attention_number(comparison: Comparison) -> tuple[str, str, str]:
    """The pair's largest difference by layer, of those whose interval excludes zero if there are any; else a peak."""
    title, pair = comparison.titles[0], comparison.pair
    if pair is None or not comparison.comparable(title):
        label, curve = next(iter(comparison.curves(title).items()))
        i = max(range(len(curve.layers)), key=curve.mean.__getitem__)
        what = f"{title} of {label} at layer {curve.layers[i]}, its highest"
        return wording.share(curve.mean[i]), wording.bounds(curve.low[i], curve.high[i]), what
    curve = comparison.difference(*pair, title)
    sure = [i for i, (low, high) in enumerate(zip(curve.low, curve.high, strict=True)) if low > 0 or high < 0]
    i = max(sure or range(len(curve.layers)), key=lambda index: abs(curve.mean[index]))
    largest = f"its largest {'clear ' if sure else ''}difference"
    what = f"{title}, {' minus '.join(pair)}, at layer {curve.layers[i]}, {largest}"
    return wording.share(curve.mean[i], "+"), wording.bounds(curve.low[i], curve.high[i], "+"), what


def _accuracy_number(comparison: Comparison) -> Iterator[tuple[str, str, str]]:
    """The pair's difference in accuracy, on the most popular fifth if there is one; else the first model's accuracy."""
    pair = comparison.pair
    first = comparison[pair[0]] if pair else comparison.measured[0]
    popular = first.recall is not None and first.recall.has_popular_fifth
    group = "the most popular fifth" if popular else "all questions"
    paired = comparison.accuracy_difference(*pair, 0 if popular else None) if pair else None
    if pair and paired is not None:
        value, _, bounds = wording.points(paired.interval).partition(" points ")
        yield f"{value} points", bounds, f"accuracy on {group}, {' minus '.join(pair)}"
    elif first.recall is not None:
        interval = first.recall.by_quintile()[0][1] if popular else first.recall.accuracy()
        value, _, bounds = wording.percent_interval(interval).partition(" ")
        yield value, bounds, f"accuracy of {first.label} on {group}"


def _reading(comparison: Comparison, title: str) -> dict[str, object]:
    """The sections on one reading: what it is, its curves, the pair's difference, and heads."""
    heading, (verb, complement), entry = title[:1].upper() + title[1:], reading_words(title), READINGS.get(title)
    content: dict[str, object] = {
        "title": title,
        "heading": heading,
        "more": f"{verb} more {complement}",
        "about": entry.about(comparison.reduce) if entry else "",
        "curves": svg(draw_curves(comparison.curves(title)), f"{heading} by layer"),
        "curves_sentence": sentence.curves_sentence(comparison, title),
        "difference_sentence": sentence.difference_sentence(comparison, title),
    }
    if comparison.pair is None or not comparison.comparable(title):
        readings = [(measured.label, measured.reading(title)) for measured in comparison.measured]
        heads = [
            svg(draw_head_map(reading, title=label), f"Heads of {label}")
            for label, reading in readings
            if _has_heads(reading)
        ]
        return content | {"difference": None, "differences": [], "heads": heads}
    a, b = (comparison[label].reading(title) for label in comparison.pair)
    heads = [draw_head_map(a, b, title=" minus ".join(comparison.pair))] if _has_heads(a) else []
    return content | {
        "difference": svg(draw_difference(comparison, title), f"Difference in {title} by layer"),
        "differences": list(_differences(comparison, title, *comparison.pair)),
        "heads": [svg(figure, f"Difference in {title} by layer and head") for figure in heads],
    }


def _has_heads(reading: Reading) -> bool:
    """Whether a reading has several numbers for each layer; "max-of-mean" has one."""
    return reading.values.shape[2] > 1


def _differences(comparison: Comparison, title: str, a: str, b: str) -> Iterator[dict[str, object]]:
    """One row of the table for each layer."""
    curves, difference = comparison.curves(title), comparison.difference(a, b, title)
    for i, (low, high) in enumerate(zip(difference.low, difference.high, strict=True)):
        yield {
            "layer": difference.layers[i],
            "a": curves[a].mean[i],
            "b": curves[b].mean[i],
            "difference": difference.mean[i],
            "bounds": wording.bounds(low, high, "+"),
            "sure": low > 0 or high < 0,
        }


def accuracy(comparison: Comparison) -> dict[str, object]:
    """The section on accuracy; its table has a row for all questions and one for each fifth by popularity."""
    known = [(measured.label, measured.recall) for measured in comparison.measured if measured.recall is not None]
    if not known:
        return {"accuracy": None}
    pair = comparison.pair
    by_fifth = [recall.by_quintile() for _, recall in known]
    fifths = range(len(by_fifth[0]))
    paired = [comparison.accuracy_difference(*pair, fifth) if pair else None for fifth in (None, *fifths)]
    names = [("all questions", None, None), *((f"fifth {i + 1}", *by_fifth[0][i][0]) for i in fifths)]
    rates = [[recall.accuracy() for _, recall in known], *([fifth[i][1] for fifth in by_fifth] for i in fifths)]
    return {
        "accuracy": svg(draw_accuracy(comparison), "Accuracy by popularity"),
        "accuracy_sentence": sentence.accuracy_sentence(comparison),
        "accuracy_labels": [label for label, _ in known],
        "accuracy_rows": list(zip(names, rates, paired, strict=True)),
        "shortcuts": [recall.shortcut_rate() for _, recall in known],
        "without_shortcut": known[0][1].shortcut.count(None),
        "scoring": known[0][1].scoring,
        "otherwise": [(scoring, [recall.by(scoring).accuracy() for _, recall in known]) for scoring in SCORINGS],
        "f1": [recall.mean_f1(comparison.seed) for _, recall in known],
        "tied": sum(known[0][1].tied()),
        "shortcuts_from": comparison.measured[0].source.get("shortcuts_from") or "the training facts",
        "paired": paired[0] is not None,
    }


def _examples(comparison: Comparison) -> dict[str, object]:
    """The attention rows of some prompts, for each label at one layer (see `sentences.shown_layers`)."""
    facts = {prompt.prompt_id: prompt.fact for prompt in comparison.prompts}
    prompt_ids = [row.prompt_id for row in comparison.measured[0].examples]
    return {"examples": [{"fact": facts[name]} | _example(comparison, name) for name in prompt_ids]}


def _example(comparison: Comparison, prompt_id: str) -> dict[str, object]:
    """One prompt's row for each label, and the share of attention that has the full shade in all of them."""
    layers, shown = sentence.shown_layers(comparison), list[tuple[Measured, ExampleRow, tuple[float, ...]]]()
    for measured in comparison.measured:
        index = measured.reading().layers.index(layers[measured.label])
        rows = [row for row in measured.examples if row.prompt_id == prompt_id]
        shown += [(measured, row, row.weights[index]) for row in rows]
    full = max(max(weights[1:], default=0.0) for _, _, weights in shown) or 1.0
    return {
        "full": full,
        "rows": [
            {
                "label": measured.label,
                "layer": layers[measured.label],
                "tokens": _tokens(row, weights, full),
                "answer": _answered(measured, prompt_id),
            }
            for measured, row, weights in shown
        ],
    }


def _tokens(row: ExampleRow, weights: tuple[float, ...], full: float) -> list[dict[str, object]]:
    """Tokens with their share of attention and a shade in [0, 1], which is 1 from a share of `full` on."""
    return [
        {"text": token.replace("\n", "⏎") or "∅", "share": weight, "shade": min(1.0, weight / full), "subject": inside}
        for token, weight, inside in zip(row.tokens, weights, row.in_subject, strict=True)
    ]


def _answered(measured: Measured, prompt_id: str) -> tuple[str, bool] | None:
    """The model's answer to a prompt, and whether it is right; None if it was not asked."""
    recall = measured.recall
    if recall is None or prompt_id not in recall.prompt_ids:
        return None
    index = recall.prompt_ids.index(prompt_id)
    return recall.outputs[index].strip(), recall.correct[index]


def making(comparison: Comparison) -> dict[str, object]:
    """How everything was made: data, models, statistics, versions."""
    prompts, first = comparison.prompts, comparison.prompts[0]
    start, end = first.spans["subject"]
    made = provenance()
    return {
        "n": len(prompts),
        "n_subjects": len({prompt.fact.composed_subject for prompt in prompts}),
        "relations": sorted({prompt.fact.relation for prompt in prompts}),
        "first": (first.text[:start], first.text[start:end], first.text[end:]),
        "dropped": dict(comparison.dropped),
        "seed": comparison.seed,
        "resamples": RESAMPLES,
        "min_subjects": MIN_CLUSTERS,
        "min_effective": f"{MIN_EFFECTIVE:g}",
        "sources": _sources(comparison),
        "versions": {"python": made["python"], "machine": made["machine"]} | dict(_flat(made["versions"])),
    }


def _sources(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """What each model is and how it was trained: (name in words, value of each label), without rows of no value."""
    columns = [dict(_flat(_readable(measured.source))) for measured in comparison.measured]
    rows = [(key, [column.get(key, "") for column in columns]) for key in dict.fromkeys(itertools.chain(*columns))]
    return [(key.replace("_", " "), values) for key, values in rows if any(values)]


def _readable(source: Mapping[str, object]) -> dict[str, object]:
    """A model's source without what only machines read in the record of its training (see `LEFT_OUT`)."""
    made_by = source.get("made_by")
    if not isinstance(made_by, Mapping):
        return {name: value for name, value in source.items() if name != "made_by"}
    settings = made_by.get("config")
    training = {**(settings if isinstance(settings, Mapping) else {}), **made_by}
    kept = {name: value for name, value in training.items() if name not in LEFT_OUT}
    return {**source, "made_by": None, "training": kept}


def _flat(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Nested mappings as pairs of (names joined by ": ", text); None as no text, other values as JSON."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(inner, f"{key}: {name}" if key else str(name))
    elif value is None or isinstance(value, str):
        yield key, value or ""
    else:
        yield key, json.dumps(value, ensure_ascii=False, default=str)
