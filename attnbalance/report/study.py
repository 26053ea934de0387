"""The tables and the figure of a study: every method on every split, with intervals over seeds and facts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from attnbalance.outputs import MARKER, read_json, replacing, write_json, write_text
from attnbalance.readings.fits import Result, Row, rows_of
from attnbalance.readings.intervals import Interval
from attnbalance.report.figures import draw_extraction, save
from attnbalance.report.wording import percent_interval, percent_share, points

CAPTION = """Extraction ratio: right answers to held-out questions over right completions of the same facts' statements
by the base; guesses that come true count, so that it may pass 1. Stored: of the facts that the base completes, the
share that is answered. Gap closed: the part of FT-Top minus FT-Bottom (plain finetuning) that the method makes up for
("?": no interval). New facts: of the training facts that the base does not complete, the share that is answered. Drift:
KL(base || model) on statements of the world, nats a token. Intervals: 95%, Student's for the mean over seeds; with one
seed over facts, by subject, where there are any. A simulation on small models, unless the study names a model."""

HEAD = (
    "method",
    "trained on",
    "extraction ratio",
    "stored",
    "accuracy",
    "most popular fifth",
    "against plain, points",
    "gap closed",
    "shortcut rate",
    "subject attention",
    "new facts",
    "drift",
)


def write_tables(results: Sequence[Result], out: Path) -> str:
    """Write `study.json`, `table.md`, `study.png` and the answer in attnbalance.json; returns the table."""
    rows = rows_of(results)
    write_json(out / "study.json", {"rows": [row.as_dict() for row in rows]})
    panels = {
        world: {method: {row.split: row.extraction for row in some} for method, some in _by(found, "method")}
        for world, found in _by(rows, "world")
    }
    with replacing(out / "study.png") as path:
        save(draw_extraction(panels), path, format="png", dpi=150)
    table = table_of(rows)
    write_text(out / "table.md", f"{table}\n\n{CAPTION}\n")
    write_json(out / MARKER, read_json(out / MARKER) | {"answer": table})
    return table


def table_of(rows: Sequence[Row]) -> str:
    """The rows as Markdown, a table for each world."""
    parts = []
    for world, found in _by(rows, "world"):
        seeds = max(row.seeds for row in found)
        lines = [
            f"**{world}**, {seeds} seed{'s' * (seeds != 1)}",
            "",
            f"| {' | '.join(HEAD)} |",
            "|---" * len(HEAD) + "|",
        ]
        lines += [f"| {' | '.join(_cells(row))} |" for row in found]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cells(row: Row) -> list[str]:
    return [
        row.method,
        row.split,
        _number(row.extraction),
        "?" if math.isnan(row.stored.mean) else percent_interval(row.stored),
        percent_interval(row.accuracy),
        percent_interval(row.quintiles[0]) if row.quintiles else "",
        "" if row.gain is None else points(row.gain, unit=""),
        "" if row.gap is None else percent_share(row.gap),
        "" if row.shortcut_rate is None else percent_interval(row.shortcut_rate),
        _number(row.attention),
        "" if row.new_facts is None else percent_interval(row.new_facts),
        _number(row.drift),
    ]


def _number(found: Interval) -> str:
    if math.isnan(found.mean):
        return "? (the base completes none)"
    ends = "" if math.isnan(found.low) else f" [{found.low:.3f}, {found.high:.3f}]"
    return f"{found.mean:.3f}{ends}"


def _by(rows: Sequence[Row], field: str) -> list[tuple[str, list[Row]]]:
    names = dict.fromkeys(getattr(row, field) for row in rows)
    return [(name, [row for row in rows if getattr(row, field) == name]) for name in names]
