"""The tables and the figure of a study: every method on every split, with intervals over seeds and facts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from attnbalance.files.outputs import MARKER, read_json, replacing, write_json, write_text
from attnbalance.report.figures import save
from attnbalance.report.wording import percent_interval, percent_share, points
from attnbalance.statistics.intervals import Interval
from attnbalance.studies.figures import draw_extraction
from attnbalance.studies.summary import FitResult, StudyRow, study_rows

CAPTION = """Extraction ratio: right answers to held-out questions over right completions of the same facts' statements
by the base; lucky guesses count, so it may exceed 1. Kept: of the facts that the base completes, the share that is
still answered. Gap closed: the part of FT-Top minus FT-Bottom (plain finetuning) that the method makes up for ("?": no
interval). New facts: of the training facts that the base does not complete, the share that is answered. Drift:
KL(base || model) on statements of the world, nats per token. Controls: "no training" asks the base itself, with a
statement, with the question, or with the question after four answered ones; "constant answer" gives every question its
relation's most frequent training answer (or, without training facts, the questions' own most frequent answer), which
looks up nothing. Shortcut rate: the share of wrong answers that are the relation's most frequent training answer, where
there is one. A method that replays generated facts may train on held-out questions, with the base's own answers
(`replayed_heldout` in result.json); one that replays known facts does not. Intervals: 95%, Student's for the mean over
seeds; with one seed over facts, by subject, if possible. A simulation on small models, unless the study names a
model."""

HEAD = (
    "method",
    "trained on",
    "extraction ratio",
    "kept",
    "accuracy",
    "most popular fifth",
    "against plain, points",
    "gap closed",
    "shortcut rate",
    "subject attention",
    "new facts",
    "drift",
)


def write_tables(results: Sequence[FitResult], out: Path) -> str:
    """Write `study.json`, `table.md`, `study.png` and the answer in attnbalance.json; returns the table."""
    rows = study_rows(results)
    write_json(out / "study.json", {"rows": [row.as_dict() for row in rows]})
    panels = {
        world: {
            method: {row.split: row.extraction for row in method_rows}
            for method, method_rows in _by(world_rows, "method")
        }
        for world, world_rows in _by(rows, "world")
    }
    with replacing(out / "study.png") as path:
        save(draw_extraction(panels), path, format="png", dpi=150)
    table = table_of(rows)
    write_text(out / "table.md", f"{table}\n\n{CAPTION}\n")
    write_json(out / MARKER, read_json(out / MARKER) | {"answer": table})
    return table


def table_of(rows: Sequence[StudyRow]) -> str:
    """The rows as Markdown, a table for each world."""
    parts = []
    for world, world_rows in _by(rows, "world"):
        seeds = max(row.seeds for row in world_rows)
        lines = [
            f"**{world}**, {seeds} seed{'s' * (seeds != 1)}",
            "",
            f"| {' | '.join(HEAD)} |",
            "|---" * len(HEAD) + "|",
        ]
        lines += [f"| {' | '.join(_cells(row))} |" for row in world_rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cells(row: StudyRow) -> list[str]:
    return [
        row.method,
        row.split,
        _number(row.extraction),
        "?" if math.isnan(row.kept.mean) else percent_interval(row.kept),
        percent_interval(row.accuracy),
        percent_interval(row.quintiles[0]) if row.quintiles else "",
        "" if row.gain is None else points(row.gain, unit=""),
        "" if row.gap is None else percent_share(row.gap),
        "" if row.shortcut_rate is None else percent_interval(row.shortcut_rate),
        "" if row.attention is None else _number(row.attention),
        "" if row.new_facts is None else percent_interval(row.new_facts),
        "" if row.drift is None else _number(row.drift),
    ]


def _number(interval: Interval) -> str:
    if math.isnan(interval.mean):
        return "? (the base completes none in a seed)"
    ends = "" if math.isnan(interval.low) else f" [{interval.low:.3f}, {interval.high:.3f}]"
    return f"{interval.mean:.3f}{ends}"


def _by(rows: Sequence[StudyRow], field: str) -> list[tuple[str, list[StudyRow]]]:
    """The rows by one of their fields, in order of first occurrence."""
    names = dict.fromkeys(getattr(row, field) for row in rows)
    return [(name, [row for row in rows if getattr(row, field) == name]) for name in names]
