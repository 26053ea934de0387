"""The site's figures that are drawn from committed results when it is built."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from real_model_scores import figure_of, over_seeds, unbeaten  # of benchmarks/, which conf.py puts on the path

from attnbalance.papers.figure import Panel, Series
from attnbalance.papers.page import draw_panels
from attnbalance.report.figures import save
from attnbalance.statistics.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def kept_and_learned(scores: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[str, str]:
    """Kept against learned of each row as SVG, and which rows no other beats, in a sentence.

    `scores`: the scores of each row, for each seed.
    """
    rows = {name: over_seeds([{"scores": seed} for seed in seeds]) for name, seeds in scores.items()}
    sentence = f"No other row both keeps and learns as much as these: {'; '.join(unbeaten(rows))}."
    return as_svg(figure_of(rows), "kept and learned"), sentence


def reproduced(figure: Mapping[str, Any]) -> str:
    """The panels of a reproduced figure as SVG, from its JSON."""
    return as_svg(draw_panels([panel_of(panel) for panel in figure["panels"]]), figure["name"])


def panel_of(saved: Mapping[str, Any]) -> Panel:
    """A panel from its JSON (see `attnbalance.papers.page.panel_as_dict`)."""
    series = tuple(
        Series(line["label"], tuple(line["x"]), tuple(interval_of(value) for value in line["y"]))
        for line in saved["series"]
    )
    return Panel(saved["title"], saved["x"], saved["y"], series, saved["log"])


def interval_of(saved: Mapping[str, Any]) -> Interval:
    """An interval from its JSON, in which None stands for a number that does not exist."""
    mean, low, high = (math.nan if saved[end] is None else saved[end] for end in ("mean", "low", "high"))
    return Interval(mean, low, high, saved["n"])


def as_svg(drawing: Figure, name: str) -> str:
    """A drawing as SVG; the same drawing is the same text."""
    drawn = io.StringIO()
    with rc_context({"svg.hashsalt": name}):
        save(drawing, drawn, format="svg", metadata={"Date": None, "Creator": None})
    return drawn.getvalue()
