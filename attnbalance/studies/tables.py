"""The tables and the figure of a study: every method on every split, with intervals over seeds and facts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from attnbalance.files.outputs import MARKER, read_json, replacing, write_json, write_text
from attnbalance.report.figures import save
from attnbalance.report.wording import bounds, markdown, percent_interval, percent_share, points, share
from attnbalance.statistics.intervals import Interval
from attnbalance.studies.controls import untrained
from attnbalance.studies.figures import draw_extraction
from attnbalance.studies.summary import FitResult, SplitContrast, StudyRow, fits_by_row, split_contrasts, study_rows

CAPTION = """Extraction ratio: right answers to held-out questions over right completions of the same facts' statements
by the base; lucky guesses count, so it may exceed 1. Kept: of the facts that the base completes, the share that is
still answered. Gap closed: the part of FT-Top minus FT-Bottom (plain finetuning) that the method makes up for ("?": no
interval). New facts: of the training facts that the base does not complete, the share that is answered. Drift:
KL(base || model) on statements of the world, nats per token. Controls: "no training" asks the base itself, with a
statement, with the question, or with the question after four answered ones; "constant answer" gives every question its
relation's most frequent training answer (or, without training facts, the questions' own most frequent answer), which
looks up nothing. Shortcut rate: the share of wrong answers that are the relation's most frequent training answer (of
the row's own labels; of equally frequent ones, the first in the alphabet), where there is one. "(1 of 2 seeds)": in
the other, there is none to count. A method that replays generated facts may train on held-out questions, with the
base's own answers (`replayed_heldout` in result.json); one that replays known facts does not. FT-Top minus FT-Bottom:
what training on the popular instead of the obscure half is worth, the fits of each seed paired; accuracy on all
held-out facts, and on each fifth. Intervals: 95%, Student's for the mean over seeds; with one seed over facts, by
subject, if possible (the extraction ratio and the gap closed have none). A simulation on small models, unless the study
names a model."""

AGREED = (
    "An interval of zero width says that the seeds agreed, not that the mean is known: on shares of few facts, few "
    "seeds often agree by chance."
)
"""What a table with such an interval says below."""

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
    rows, contrasts = study_rows(results), split_contrasts(results)
    as_json = {"rows": rows, "top_minus_bottom": contrasts}
    write_json(out / "study.json", {name: [row.as_dict() for row in part] for name, part in as_json.items()})
    panels = {
        world: {
            method: {row.split: row.extraction for row in method_rows}
            for method, method_rows in _by(world_rows, "method")
        }
        for world, world_rows in _by(rows, "world")
    }
    with replacing(out / "study.png") as path:
        save(draw_extraction(panels), path, format="png", dpi=150)
    table = "\n\n".join([table_of(rows, contrasts), *_replayed_less(results)])
    write_text(out / "table.md", f"{table}\n\n{CAPTION}\n")
    write_json(out / MARKER, read_json(out / MARKER) | {"answer": table})
    return table


def table_of(rows: Sequence[StudyRow], contrasts: Sequence[SplitContrast] = ()) -> str:
    """The rows and contrasts as Markdown, tables for each world, and a note where seeds agreed."""
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
        if own := [contrast for contrast in contrasts if contrast.world == world]:
            parts.append(f"**{world}**, FT-Top minus FT-Bottom, points\n\n" + _contrast_table(own))
    if any(map(_agree, rows)) or any(map(_contrasts_agree, contrasts)):
        parts.append(AGREED)
    return "\n\n".join(parts)


def _replayed_less(results: Sequence[FitResult]) -> list[str]:
    """A sentence for each world, split and method whose fits replayed fewer facts than their share asks for."""
    sentences = list[str]()
    for (world, split, method), fits in fits_by_row(results).items():
        counts = [(fit["replayed"], fit["replay_wanted"]) for fit in fits if "replay_wanted" in fit]
        if fewer := [f"{replayed} of {wanted}" for replayed, wanted in dict.fromkeys(counts) if replayed < wanted]:
            which = f"{method} on {split} ({world})"
            sentences.append(f"{which} replays fewer facts than its share asks for: {', '.join(fewer)}.")
    return sentences


def _contrast_table(contrasts: Sequence[SplitContrast]) -> str:
    most = max(len(contrast.quintiles) for contrast in contrasts)
    fifths = ["most popular fifth", "second", "third", "fourth", "least popular"][:most]
    lines = [["method", "seeds", "accuracy", *fifths, "subject attention"]]
    for contrast in contrasts:
        by_fifth = [points(interval, unit="") for interval in contrast.quintiles] or [""] * most
        attention = "" if contrast.attention is None else _signed(contrast.attention)
        lines.append([contrast.method, str(contrast.seeds), points(contrast.accuracy, unit=""), *by_fifth, attention])
    return markdown(lines)


def _signed(interval: Interval) -> str:
    """A difference of attention shares with its interval."""
    return f"{share(interval.mean, '+')} {bounds(interval.low, interval.high, '+')}".strip()


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
        _of_seeds(row.shortcut_rate, row, percent_interval),
        _of_seeds(row.attention, row, _number),
        _of_seeds(row.new_facts, row, percent_interval),
        _of_seeds(row.drift, row, _number),
    ]


def _of_seeds(interval: Interval | None, row: StudyRow, text: Callable[[Interval], str]) -> str:
    """An interval over the seeds that have a value; names their number where others have none."""
    if interval is None:
        return ""
    return text(interval) + (f" ({interval.n} of {row.seeds} seeds)" if interval.n < row.seeds else "")


def _agree(row: StudyRow) -> bool:
    """Whether some interval of the row over several seeds has no width, other than by definition."""
    defined = row.method == untrained("statement")  # its first two are 1
    shown: list[Interval | None] = [] if defined else [row.extraction, row.kept]
    shown += [row.accuracy, *row.quintiles[:1], row.gain, row.gap]
    shown += [row.shortcut_rate, row.attention, row.new_facts, row.drift]
    return row.seeds > 1 and _any_without_width(shown)


def _contrasts_agree(contrast: SplitContrast) -> bool:
    """Whether some interval of the contrast over several seeds has no width."""
    return contrast.seeds > 1 and _any_without_width([contrast.accuracy, *contrast.quintiles, contrast.attention])


def _any_without_width(intervals: Sequence[Interval | None]) -> bool:
    return any(interval is not None and interval.high - interval.low < 1e-9 for interval in intervals)


def _number(interval: Interval) -> str:
    if math.isnan(interval.mean):
        return "? (the base completes none in a seed)"
    ends = "" if math.isnan(interval.low) else f" [{interval.low:.3f}, {interval.high:.3f}]"
    return f"{interval.mean:.3f}{ends}"


def _by(rows: Sequence[StudyRow], field: str) -> list[tuple[str, list[StudyRow]]]:
    """The rows by one of their fields, in order of first occurrence."""
    names = dict.fromkeys(getattr(row, field) for row in rows)
    return [(name, [row for row in rows if getattr(row, field) == name]) for name in names]
