"""The report of an explanation: one HTML page."""

from __future__ import annotations

from pathlib import Path

from attnbalance.comparison import sentences as comparison_sentences
from attnbalance.comparison.page import accuracy, making
from attnbalance.explanation.conclusions import Explanation
from attnbalance.explanation.figures import draw_causes, draw_steering
from attnbalance.explanation.sentences import (
    cause_sentence,
    count_of,
    group_name,
    headline,
    headline_group,
    hidden_sentence,
    left_out,
    rescue_sentence,
)
from attnbalance.explanation.tables import example_json
from attnbalance.files.outputs import write_text
from attnbalance.readings.steering import STRENGTH
from attnbalance.report import wording
from attnbalance.report.figures import draw_curves
from attnbalance.report.page import render, svg

NAMES = {
    "qk": "QK: W_Q, W_K",
    "ov+mlp": "OV and MLPs: W_V, W_O, MLPs",
    "ov": "of that, W_V, W_O",
    "mlp": "of that, MLPs",
    "rest": "embeddings, norms, configuration",
    "rows": "carried by last token's rows",
}
"""The causes of a change, as the table names them."""


def write_page(explanation: Explanation, path: Path, *, command: str | None = None) -> None:
    """Write the report as one HTML file, whole or not at all; text from facts, tokens and labels is escaped."""
    comparison, (before, after) = explanation.comparison, explanation.labels
    content: dict[str, object] = {
        "title": f"What became of the facts from {before} to {after}",
        "command": command,
        "headline": headline(explanation),
        "numbers": numbers(explanation),
        "labels": list(explanation.labels),
        "pair": comparison.pair,
        "before": before,
        "after": after,
        "curves": svg(draw_curves(comparison.curves()), "Subject attention by layer"),
        "curves_sentence": comparison_sentences.curves_sentence(comparison),
        "difference_sentence": comparison_sentences.difference_sentence(comparison),
    }
    sections = _causes(explanation) | _rescues(explanation)
    write_text(path, render("explanation/page.html", accuracy(comparison) | making(comparison) | content | sections))


def numbers(explanation: Explanation) -> list[tuple[str, str, str]]:
    """The numbers of the first screen, each with its interval and with what it is: lost answers, the margin, QK."""
    before, after = explanation.labels
    lost, gained = (count_of(explanation, group) for group in ("lost", "gained"))
    group, n = headline_group(explanation), wording.questions(len(explanation.facts))
    change, where = explanation.groups[group], group_name(group)
    margin, _, bounds = wording.nats(change.total).partition(" ")
    share, _, ends = wording.percent_share(change.shares["qk"]).partition(" ")
    shown = [
        (f"{lost:,}", f"of {n}", f"right in {before} and wrong in {after}; {gained:,} the other way"),
        (f"{margin} nats", bounds, f"change of the right answer's margin on {where}"),
    ]
    return shown + [(share, ends, "of that is caused by QK, the weights that direct attention")] * bool(ends)


def _causes(explanation: Explanation) -> dict[str, object]:
    """What caused the change, and where it shows."""
    return {
        "causes": svg(draw_causes(explanation), "Change of the margin by cause"),
        "cause_sentence": cause_sentence(explanation),
        "names": {key: name for key, name in NAMES.items() if key in explanation.groups["all"].causes},
        "groups": {group_name(name): change for name, change in explanation.groups.items()},
        "edges": explanation.edges,
        "ambiguous": explanation.ambiguous,
    }


def _rescues(explanation: Explanation) -> dict[str, object]:
    """What comes back, hidden answers, and examples."""
    before, after = explanation.labels
    raised = any(explanation.check(label, "boost") for label in explanation.labels)
    title = "Accuracy as attention to the subject is raised"
    return {
        "checks": {label: explanation.checks[label] for label in (after, before)},
        "rescues": [rescue_sentence(explanation, label) for label in (after, before)],
        "steering": svg(draw_steering(explanation), title) if raised else None,
        "left_out": left_out(explanation),
        "hidden": [hidden_sentence(explanation, label) for label in explanation.labels],
        "examples": [example_json(explanation.facts[i], explanation.labels) for i in explanation.examples],
        "strength": STRENGTH,
    }
