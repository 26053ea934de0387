"""The report of a trajectory: one HTML page that needs neither network nor scripts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attnbalance.comparison.figures import draw_difference
from attnbalance.comparison.known_readings import READINGS
from attnbalance.comparison.page import making
from attnbalance.comparison.sentences import difference_sentence
from attnbalance.files.outputs import write_text
from attnbalance.report import wording
from attnbalance.report.page import render, svg
from attnbalance.trajectory.figures import draw_map, draw_means
from attnbalance.trajectory.sentences import headline
from attnbalance.trajectory.trajectory import Trajectory


def write_page(trajectory: Trajectory, path: Path, *, command: str = "") -> None:
    """Write the report as one HTML file, whole or not at all: the answer, then what it rests on. Text is escaped."""
    content = {
        "title": "Attention to the subject along a run",
        "headline": headline(trajectory),
        "numbers": list(_numbers(trajectory)),
        "labels": trajectory.ends.pair,
        "steps": trajectory.steps,
        "recall": trajectory.accuracies() is not None,
        "readings": [_reading(trajectory, title) for title in trajectory.comparison.titles],
        "rows": list(_rows(trajectory)),
        "command": command,
    }
    write_text(path, render("trajectory/page.html", making(trajectory.ends) | content))


def _numbers(trajectory: Trajectory) -> Iterator[tuple[str, str, str]]:
    """The numbers of the first screen, each with its interval and what it is."""
    (first, *_, last), title = trajectory.steps, trajectory.comparison.titles[0]
    change = trajectory.changes(title)[-1]
    bounds = wording.bounds(change.low, change.high, "+")
    yield wording.share(change.mean, "+"), bounds, f"{title}, mean over layers, step {last} minus step {first}"
    if trajectory.accuracy_change is not None:
        value, _, bounds = wording.points(trajectory.accuracy_change.interval).partition(" points ")
        yield f"{value} points", bounds, f"accuracy on all questions, step {last} minus step {first}"
    yield (
        f"{len(trajectory.steps):,}",
        "",
        f"checkpoints, each asked {wording.questions(len(trajectory.comparison.prompts))}",
    )


def _reading(trajectory: Trajectory, title: str) -> dict[str, object]:
    """The section on one reading."""
    heading, ends, entry = title[:1].upper() + title[1:], trajectory.ends, READINGS.get(title)
    return {
        "heading": heading,
        "about": entry.about(trajectory.comparison.reduce) if entry else "",
        "means": svg(draw_means(trajectory, title), f"{heading} along steps"),
        "map": svg(draw_map(trajectory, title), f"{heading} by layer and step"),
        "difference": svg(draw_difference(ends, title), f"Difference in {title} by layer, last minus first"),
        "difference_sentence": difference_sentence(ends, title),
    }


def _rows(trajectory: Trajectory) -> Iterator[dict[str, object]]:
    """A row of the table for each checkpoint, about the first reading."""
    title, rates = trajectory.comparison.titles[0], trajectory.accuracies()
    means, changes = trajectory.means(title), trajectory.changes(title)
    for i, (step, measured) in enumerate(zip(trajectory.steps, trajectory.comparison.measured, strict=True)):
        yield {
            "step": step,
            "mean": f"{wording.share(means[i].mean)} {wording.bounds(means[i].low, means[i].high)}",
            "change": f"{wording.share(changes[i].mean, '+')} {wording.bounds(changes[i].low, changes[i].high, '+')}",
            "sure": changes[i].excludes_zero,
            "accuracy": wording.percent_interval(rates[i]) if rates else "",
            "path": measured.source["adapter"] or measured.source["model"],
        }
