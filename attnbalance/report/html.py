"""The report: one HTML page that needs neither network nor scripts."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from attnbalance.outputs import provenance, write_text
from attnbalance.readings.compare import Comparison, ExampleRow, Measured
from attnbalance.readings.intervals import MIN_CLUSTERS, RESAMPLES
from attnbalance.report import sentence, wording
from attnbalance.report.figures import draw_accuracy, draw_curves, draw_difference, draw_head_map, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_report(
    comparison: Comparison, path: Path, *, title: str = "Attention to the subject", command: str | None = None
) -> None:
    """Write the report of a comparison as one HTML file, whole or not at all.

    The answer comes first (see `sentence.headline`), then what it rests on: curves, differences, accuracy by
    popularity, heads, rows of some prompts, and how all of it was made. `command` is the command line that made it,
    where there is one. Everything that comes from facts, tokens and labels is escaped.
    """
    content = _answer(comparison) | accuracy(comparison) | _examples(comparison) | making(comparison)
    write_text(path, render("comparison.html", content | {"title": title, "command": command}))


def render(name: str, content: Mapping[str, object]) -> str:
    """One of the templates filled in; what is not marked as HTML is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("attnbalance.report")
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, loader=loader
    )
    names = ("share", "percent_interval", "points", "popularity", "logits", "percent_share", "stacked")
    environment.filters.update({name: getattr(wording, name) for name in names})
    return environment.get_template(name).render(content)


def _answer(comparison: Comparison) -> dict[str, object]:
    """The headline, and the sections on attention."""
    measured, pair = comparison.measured, comparison.pair
    content: dict[str, object] = {
        "headline": sentence.headline(comparison),
        "labels": [one.label for one in measured],
        "pair": pair,
        "reduce": comparison.reduce,
        "curves": svg(draw_curves(comparison), "Subject attention by layer"),
        "curves_sentence": sentence.curves_sentence(comparison),
        "difference_sentence": sentence.difference_sentence(comparison),
    }
    if pair is None or not sentence.comparable(comparison):
        heads = [svg(draw_head_map(one.attention, title=one.label), f"Heads of {one.label}") for one in measured]
        return content | {"difference": None, "differences": [], "heads": heads}
    a, b = (comparison[label].attention for label in pair)
    heads = draw_head_map(a, b, title=" minus ".join(pair))
    return content | {
        "difference": svg(draw_difference(comparison), "Difference in subject attention by layer"),
        "differences": list(_differences(comparison, *pair)),
        "heads": [svg(heads, "Difference in subject attention by layer and head")],
    }


def _differences(comparison: Comparison, a: str, b: str) -> Iterator[dict[str, object]]:
    """One row of the table for each layer."""
    curves, found = comparison.curves(), comparison.attention_difference(a, b)
    for i, (low, high) in enumerate(zip(found.low, found.high, strict=True)):
        yield {
            "layer": found.layers[i],
            "a": curves[a].mean[i],
            "b": curves[b].mean[i],
            "difference": found.mean[i],
            "bounds": wording.bounds(low, high, "+"),
            "sure": low > 0 or high < 0,
        }


def accuracy(comparison: Comparison) -> dict[str, object]:
    """The section on accuracy; its table has a row for all questions and one for each fifth by popularity."""
    known = [(one.label, one.recall) for one in comparison.measured if one.recall is not None]
    if not known:
        return {"accuracy": None}
    seed, pair = comparison.seed, comparison.pair
    by_fifth = [recall.by_quintile(seed) for _, recall in known]
    paired = [
        comparison.accuracy_difference(*pair, fifth) if pair else None for fifth in (None, *range(len(by_fifth[0])))
    ]
    ranges = [(f"fifth {i + 1}", low, high) for i, ((low, high), _) in enumerate(by_fifth[0])]
    fifths = [[fifth[i][1] for fifth in by_fifth] for i in range(len(ranges))]
    return {
        "accuracy": svg(draw_accuracy(comparison), "Accuracy by popularity"),
        "accuracy_sentence": sentence.accuracy_sentence(comparison),
        "accuracy_labels": [label for label, _ in known],
        "accuracy_rows": list(
            zip(
                [("all questions", None, None), *ranges],
                [[recall.accuracy(seed) for _, recall in known], *fifths],
                paired,
                strict=True,
            )
        ),
        "shortcuts": [recall.shortcut_rate(seed) for _, recall in known],
        "shortcuts_from": comparison.measured[0].source.get("shortcuts_from") or "the training facts",
        "paired": paired[0] is not None,
    }


def _examples(comparison: Comparison) -> dict[str, object]:
    """The rows of some prompts, for each label at one layer (see `sentence.shown_layers`)."""
    layers, facts = sentence.shown_layers(comparison), {prompt.prompt_id: prompt.fact for prompt in comparison.prompts}
    names = [row.prompt_id for row in comparison.measured[0].examples]
    examples = []
    for name in names:
        found = [(one, row) for one in comparison.measured for row in one.examples if row.prompt_id == name]
        shown = [(one, row, _weights(one, row, layers[one.label])) for one, row in found]
        full = max(max(weights[1:], default=0.0) for _, _, weights in shown) or 1.0
        rows = [
            {
                "label": one.label,
                "layer": layers[one.label],
                "tokens": _tokens(row, weights, full),
                "answer": _answered(one, name),
            }
            for one, row, weights in shown
        ]
        examples.append({"fact": facts[name], "full": full, "rows": rows})
    return {"examples": examples}


def _weights(one: Measured, row: ExampleRow, layer: int) -> tuple[float, ...]:
    return row.weights[one.attention.layers.index(layer)]


def _tokens(row: ExampleRow, weights: tuple[float, ...], full: float) -> list[dict[str, object]]:
    """Tokens with their share of attention and a shade in [0, 1], which is 1 from a share of `full` on."""
    return [
        {"text": token.replace("\n", "⏎") or "∅", "share": weight, "shade": min(1.0, weight / full), "subject": inside}
        for token, weight, inside in zip(row.tokens, weights, row.in_subject, strict=True)
    ]


def _answered(one: Measured, prompt_id: str) -> tuple[str, bool] | None:
    """What the model said to a prompt, and whether it is right; None where it was not asked."""
    if one.recall is None or prompt_id not in one.recall.prompt_ids:
        return None
    place = one.recall.prompt_ids.index(prompt_id)
    return one.recall.outputs[place].strip(), one.recall.correct[place]


def making(comparison: Comparison) -> dict[str, object]:
    """How everything was made: data, models, statistics, versions."""
    prompts, first = comparison.prompts, comparison.prompts[0]
    start, end = first.spans["subject"]
    flat = [dict(_flat(one.source)) for one in comparison.measured]
    keys = dict.fromkeys(key for source in flat for key in source)
    made = provenance()
    return {
        "n": len(prompts),
        "n_subjects": len({prompt.fact.subject for prompt in prompts}),
        "relations": sorted({prompt.fact.relation for prompt in prompts}),
        "first": (first.text[:start], first.text[start:end], first.text[end:]),
        "dropped": dict(comparison.dropped),
        "seed": comparison.seed,
        "resamples": RESAMPLES,
        "min_subjects": MIN_CLUSTERS,
        "sources": [(key, [source.get(key, "") for source in flat]) for key in keys],
        "versions": {"python": made["python"], "machine": made["machine"]} | dict(_flat(made["versions"])),
    }


def _flat(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Nested mappings as lines of (dotted key, text); anything that is no mapping as JSON."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def svg(figure: Figure, description: str) -> Markup:
    """A figure as SVG to stand inside a page: with its text as text, and ids that no other figure has."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": description}):
        save(figure, buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    drawn = buffer.getvalue()
    drawn = re.sub(r'<g id="[^"]*"', "<g", drawn[drawn.index("<svg") :])  # group ids repeat from figure to figure
    return Markup('<svg role="img" aria-label="{}"').format(description) + Markup(drawn.removeprefix("<svg"))  # noqa: S704 - matplotlib escapes the text that it writes
