"""The page of reproduced figures: each paper's claims, with their verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnbalance.files.outputs import provenance, replacing, write_json, write_text
from attnbalance.papers.coverage import PRINTED
from attnbalance.papers.figure import VERDICTS, CellResult, Claim, Condition, Panel, PaperFigure
from attnbalance.report.figures import label_style, legend, make_axes, save
from attnbalance.report.page import render, svg
from attnbalance.report.wording import listed
from attnbalance.statistics.intervals import Interval, finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

COLUMNS = 3
"""Panels per row; four panels form a square, and multiples of four form rows of four."""
FEW = 6
"""A logarithmic axis with at most this many values has a tick at each value."""


@dataclass(frozen=True)
class Done:
    """A figure's panels and claims, computed from all results."""

    panels: Sequence[Panel]
    claims: Sequence[Claim]


def write_figure(figure: PaperFigure, results: Sequence[CellResult], out: Path, scale: str, seconds: float) -> Done:
    """Compute a figure from its results and write NAME.json (every number drawn or judged) and NAME.png.

    `seconds`: the work of its cells, over all processes. At the tiny scale, no claim is in its paper's setting.
    """
    unmet = (Condition("a scale at which numbers mean something", scale, False),) if scale == "tiny" else ()
    claims = [replace(claim, setting=(*claim.setting, *unmet)) for claim in figure.claims(results)]
    done = Done(figure.panels(results), claims)
    about = {"name": figure.name, "source": figure.source, "about": figure.about, "scale": scale}
    content = {
        "seconds": round(seconds, 1),
        "answer": "\n".join(lines(done.claims)),
        "claims": [claim_as_dict(claim) for claim in done.claims],
        "panels": [panel_as_dict(panel) for panel in done.panels],
    }
    write_json(out / f"{figure.name}.json", about | content | provenance())
    with replacing(out / f"{figure.name}.png") as path:
        save(draw_panels(done.panels), path, format="png", dpi=150)
    return done


def write_page(
    figures: Sequence[PaperFigure],
    done: Mapping[str, Done],
    refused: Mapping[str, str],
    out: Path,
    about: Mapping[str, Any],
) -> None:
    """Write report.html: the claims of all figures, each figure, and how the figures were made.

    figures: the figures of the folder.
    done: panels and claims by name.
    refused: why a figure was not run, by name.
    out: the folder.
    about: scale, seeds, seconds, model and command.
    """
    sections = [
        {
            "name": figure.name,
            "source": figure.source,
            "about": figure.about,
            "refused": refused.get(figure.name),
            "drawing": svg(draw_panels(done[figure.name].panels), figure.source) if figure.name in done else None,
            "claims": [_row(claim) for claim in done[figure.name].claims] if figure.name in done else [],
        }
        for figure in figures
    ]
    content: dict[str, Any] = {
        "title": "Three papers, reproduced",
        "headline": headline(figures, done, refused),
        "scores": [{"paper": paper, **score} for paper, score in scores(figures, done).items()],
        "verdicts": VERDICTS,
        "sections": sections,
        "printed": PRINTED,
        "shown": {section["name"] for section in sections},
    }
    write_text(out / "report.html", render("papers/page.html", content | dict(about) | provenance()))


def scores(figures: Sequence[PaperFigure], done: Mapping[str, Done]) -> dict[str, dict[str, Any]]:
    """By paper: how often each verdict is given on its own statements in its own setting (see `Claim.scored`).

    "outside" counts its statements whose setting the runs do not meet, and "extensions" claims of ours.
    """
    papers: dict[str, list[Claim]] = {}
    for figure in figures:
        if figure.name in done:
            papers.setdefault(figure.paper, []).extend(done[figure.name].claims)
    return {
        paper: {
            "counts": {
                verdict: sum(claim.scored and claim.verdict == verdict for claim in claims) for verdict in VERDICTS
            },
            "outside": sum(bool(claim.unmet) and bool(claim.place) for claim in claims),
            "extensions": sum(not claim.place for claim in claims),
        }
        for paper, claims in papers.items()
    }


def headline(figures: Sequence[PaperFigure], done: Mapping[str, Done], refused: Mapping[str, str]) -> str:
    """How the papers' own statements came out in their own settings, by paper, and the figures that were not run."""
    sentences = []
    for paper, score in scores(figures, done).items():
        counts = score["counts"]
        verdicts, n = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS), sum(counts.values())
        sentences.append(
            f"{paper}: of {n} statement{'s' if n > 1 else ''} in the paper's setting {verdicts}"
            if n
            else f"{paper}: no statement was tested in the paper's setting"
        )
    text = "; ".join(sentences) + "." if sentences else "No figure was run."
    return text + (f" Not run: {listed(sorted(refused))}." if refused else "")


def answer_of(figures: Sequence[PaperFigure], done: Mapping[str, Done], refused: Mapping[str, str]) -> str:
    """The verdict on each claim of the given figures, one line per claim."""
    text = [headline(figures, done, refused)]
    for figure in figures:
        text.append(f"\n{figure.name} ({figure.source})")
        text += lines(done[figure.name].claims) if figure.name in done else [f"  not run: {refused[figure.name]}"]
    return "\n".join(text)


def lines(claims: Sequence[Claim]) -> list[str]:
    """One line for each claim: its verdict, where the paper states it, and the number that decides it."""
    return [f"  {claim.verdict:11}  {claim.says} ({standing(claim)}): {number(claim)}" for claim in claims]


def standing(claim: Claim) -> str:
    """Where a paper states a claim, and what of its setting is missing; if nothing is, what its setting is."""
    if not claim.place:
        return "an extension"
    conditions = "; ".join(f"{condition.says}: {condition.measured}" for condition in claim.unmet or claim.setting)
    if claim.unmet:
        return f"{claim.place}, outside its setting: {conditions}"
    return f"{claim.place}, in its setting: {conditions}" if conditions else claim.place


def number(claim: Claim) -> str:
    """The number that decides a claim, with its interval, its threshold and the paper's own number."""
    threshold = f", counts above {claim.least:g}" if claim.least else ""
    printed = f"; the paper: {claim.printed}" if claim.printed else ""
    return f"{claim.measured} {interval(claim.interval)}{threshold}{printed}"


def interval(mean: Interval) -> str:
    """A mean with its interval, to three digits."""
    bounds = "" if math.isnan(mean.low) else f" [{mean.low:+.3g}, {mean.high:+.3g}]"
    return f"{mean.mean:+.3g}{bounds}"


def claim_as_dict(claim: Claim) -> dict[str, Any]:
    """A claim as JSON."""
    content = {
        name: getattr(claim, name) for name in ("says", "measured", "verdict", "place", "scored", "least", "printed")
    }
    content["setting"] = [asdict(condition) for condition in claim.setting]
    return content | {"interval": claim.interval.as_dict(), "by seed": [finite(value) for value in claim.values]}


def panel_as_dict(panel: Panel) -> dict[str, Any]:
    """A panel as JSON: x values and intervals of each line."""
    lines = [{"label": s.label, "x": list(s.x), "y": [y.as_dict() for y in s.y]} for s in panel.series]
    return {"title": panel.title, "x": panel.x_label, "y": panel.y_label, "log": panel.log, "series": lines}


def draw_panels(panels: Sequence[Panel]) -> Drawing:
    """Draw panels in rows of up to four: lines with bands for numeric x values, points with bars for words."""
    columns = 2 if len(panels) == 4 else 4 if len(panels) % 4 == 0 else min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    labels = list(dict.fromkeys(series.label for panel in panels for series in panel.series))
    fullest = max(panels, key=lambda panel: len(panel.series))
    with make_axes(columns, 3.2 * rows + 0.4, rows=rows, share=False) as (drawing, axes):
        for ax, panel in zip(axes, panels, strict=False):
            _draw(ax, panel, labels)
        for ax in axes[len(panels) :]:
            ax.set_visible(False)
        _level(axes, panels, columns)
        if len(fullest.series) == len(labels) > 1:
            legend(drawing, axes[panels.index(fullest)].get_legend_handles_labels()[0])
        elif len(labels) > 1:
            for ax, panel in zip(axes, panels, strict=False):
                if len(panel.series) > 1:
                    ax.legend(fontsize=7.5)
    return drawing


def _level(axes: Sequence[Axes], panels: Sequence[Panel], columns: int) -> None:
    """Give the panels of a row the same limits if their y labels are equal."""
    for first in range(0, len(panels), columns):
        row = range(first, min(first + columns, len(panels)))
        if len({panels[i].y_label for i in row}) == 1:
            limits = [axes[i].get_ylim() for i in row]
            for i in row:
                axes[i].set_ylim(min(low for low, _ in limits), max(high for _, high in limits))


def _draw(ax: Axes, panel: Panel, labels: Sequence[str]) -> None:
    """Draw one panel; a label has the same style in all panels of a figure."""
    words = any(isinstance(x, str) for s in panel.series for x in s.x)
    names = list(dict.fromkeys(str(x) for s in panel.series for x in s.x))
    for i, series in enumerate(panel.series):
        colour, marker = label_style(labels.index(series.label))
        mean, low, high = (np.array([getattr(y, end) for y in series.y]) for end in ("mean", "low", "high"))
        if words:
            shift = 0.5 * ((i + 0.5) / len(panel.series) - 0.5)
            x = np.array([names.index(str(name)) for name in series.x]) + shift
            bars = np.nan_to_num(np.abs(np.stack([mean - low, high - mean])))
            ax.errorbar(
                x, mean, yerr=bars, color=colour, marker=marker, linestyle="none", capsize=2, label=series.label
            )
        else:
            x = np.array(series.x, dtype=float)
            ax.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
            few = marker if len(x) <= 12 else None
            ax.plot(x, mean, color=colour, marker=few, markersize=4, label=series.label)
    if words:
        turned = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if max(map(len, names)) > 8 else {}
        ax.set_xticks(range(len(names)), names, fontsize=8, **turned)
        ax.set_xlim(-0.5, len(names) - 0.5)
    elif panel.log:
        _log_axis(ax, [float(name) for name in names])
    ax.set_title(panel.title, fontsize=9)
    ax.set_xlabel(panel.x_label, fontsize=8.5)
    ax.set_ylabel(panel.y_label, fontsize=8.5)
    ax.tick_params(labelsize=8)


def _log_axis(ax: Axes, values: Sequence[float]) -> None:
    """A logarithmic x axis, linear from 0 to 1 if 0 is among its values, with a tick per value if there are few."""
    if min(values) > 0:
        ax.set_xscale("log")
    else:
        ax.set_xscale("symlog", linthresh=1)
        ax.set_xlim(left=0)
    if len(values) <= FEW:
        ax.set_xticks(values)
    ax.set_xticks([], minor=True)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _row(claim: Claim) -> dict[str, Any]:
    threshold = f" (counts above {claim.least:g})" if claim.least else ""
    return {
        "says": claim.says,
        "verdict": claim.verdict,
        "scored": claim.scored,
        "standing": standing(claim),
        "printed": claim.printed,
        "measured": claim.measured + threshold,
        "interval": interval(claim.interval),
    }
