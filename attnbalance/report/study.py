"""The tables and the figure of a study: every method on every split, with intervals over seeds and facts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnbalance.outputs import MARKER, read_json, replacing, write_json, write_text
from attnbalance.readings.intervals import Interval, ratio_intervals, seed_interval, share_interval
from attnbalance.report.figures import draw_extraction, save
from attnbalance.report.wording import percent_interval, points

PLAIN, GAP = "plain", ("top", "bottom")
"""The method that the others are compared with, and the two splits whose difference under it is the gap."""

Result = Mapping[str, Any]
"""One fit's `result.json`."""

CAPTION = """Extraction ratio: right answers to held-out questions over right completions of the same facts' statements
by the base. Gap closed: the part of FT-Top minus FT-Bottom (plain finetuning) that the method makes up for. New facts:
of the training facts that the base does not complete, the share that is answered. Drift: KL(base || model) on
statements of the world, nats a token. Intervals: 95%, Student's over seeds; for one seed, and for the gap, over facts,
by subject. A simulation on small models, unless the study names a model of its own."""

HEAD = (
    "method",
    "trained on",
    "extraction ratio",
    "accuracy",
    "most popular fifth",
    "against plain, points",
    "gap closed",
    "shortcut rate",
    "subject attention",
    "new facts",
    "drift",
    "seconds",
)


@dataclass(frozen=True)
class Row:
    """One method on one split of one world; None where there is nothing to compare with, or no wrong answer.

    `gap` is the share of the gap closed, `gain` the accuracy minus plain's on the same split and seeds; `attention` is
    the mean over layers, `quintiles` the accuracy from the most to the least popular fifth.
    """

    world: str
    method: str
    split: str
    seeds: int
    extraction: Interval
    accuracy: Interval
    quintiles: tuple[Interval, ...]
    gain: Interval | None
    gap: Interval | None
    shortcut_rate: Interval | None
    attention: Interval
    new_facts: Interval | None
    kept_facts: Interval | None
    drift: Interval
    seconds: Interval

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON."""

        def shown(value: Any) -> Any:
            if isinstance(value, tuple):
                return [shown(one) for one in value]
            return value.as_dict() if isinstance(value, Interval) else value

        return {name: shown(value) for name, value in vars(self).items()}


def rows_of(results: Sequence[Result]) -> list[Row]:
    """One row for each world, split and method, in the order of the results; the same whatever worker made them."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for one in results:
        groups.setdefault((one["world"], one["split"], one["method"]), []).append(one)
    return [_row(found, groups) for found in groups.values()]


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
        percent_interval(row.accuracy),
        percent_interval(row.quintiles[0]) if row.quintiles else "",
        "" if row.gain is None else points(row.gain, unit=""),
        "" if row.gap is None else percent_interval(row.gap),
        "" if row.shortcut_rate is None else percent_interval(row.shortcut_rate),
        _number(row.attention),
        "" if row.new_facts is None else percent_interval(row.new_facts),
        _number(row.drift),
        f"{row.seconds.mean:.0f}",
    ]


def _number(found: Interval) -> str:
    ends = "" if math.isnan(found.low) else f" [{found.low:.3f}, {found.high:.3f}]"
    return f"{found.mean:.3f}{ends}"


def _by(rows: Sequence[Row], field: str) -> list[tuple[str, list[Row]]]:
    names = dict.fromkeys(getattr(row, field) for row in rows)
    return [(name, [row for row in rows if getattr(row, field) == name]) for name in names]


def _row(found: Sequence[Result], groups: Mapping[tuple[str, str, str], Sequence[Result]]) -> Row:
    world, split, method = (found[0][name] for name in ("world", "split", "method"))
    plain = groups.get((world, split, PLAIN), [])
    gain = None
    if method != PLAIN and (pairs := _paired(found, plain)):
        gain = seed_interval([_accuracy(a) - _accuracy(b) for a, b in pairs])
    return Row(
        world,
        method,
        split,
        len(found),
        _over(found, lambda one: _ratio(one).mean, _ratio),
        _over(found, _accuracy, _share),
        tuple(
            seed_interval([one["accuracy_by_quintile"][i] for one in found])
            for i in range(len(found[0]["accuracy_by_quintile"]))
        ),
        gain,
        _gap(found, groups.get((world, GAP[0], PLAIN), []), groups.get((world, GAP[1], PLAIN), [])),
        _optional(found, "shortcut_rate"),
        seed_interval([float(np.mean(one["subject_attention"])) for one in found]),
        _optional(found, "new_facts"),
        _optional(found, "kept_facts"),
        seed_interval([one["drift"] for one in found]),
        seed_interval([one["seconds"] for one in found]),
    )


def _over(found: Sequence[Result], number: Callable[[Result], float], alone: Callable[[Result], Interval]) -> Interval:
    """Over seeds; over the facts of the only seed."""
    return alone(found[0]) if len(found) == 1 else seed_interval([number(one) for one in found])


def _optional(found: Sequence[Result], name: str) -> Interval | None:
    values = [one[name] for one in found if one[name] is not None]
    return seed_interval(values) if values else None


def _accuracy(one: Result) -> float:
    return float(np.mean(one["correct"]))


def _share(one: Result) -> Interval:
    return share_interval(one["correct"], one["subjects"])


def _column(one: Result, name: str) -> np.ndarray:
    return np.asarray(one[name], dtype=float)[:, None]


def _ratio(one: Result) -> Interval:
    """The extraction ratio of one fit, with its interval over facts."""
    return ratio_intervals(_column(one, "correct"), _column(one, "stated")[:, 0], one["subjects"])[0]


def _paired(a: Sequence[Result], b: Sequence[Result]) -> list[tuple[Result, Result]]:
    """Fits of the same seed, on the same questions."""
    seeds = {one["seed"]: one for one in b}
    pairs = [(one, seeds[one["seed"]]) for one in a if one["seed"] in seeds]
    return [(one, other) for one, other in pairs if one["prompt_ids"] == other["prompt_ids"]]


def _gap(found: Sequence[Result], top: Sequence[Result], bottom: Sequence[Result]) -> Interval | None:
    """The share of the accuracy between plain finetuning on the bottom and on the top half that is made up for."""
    made_up, gap, subjects = list[np.ndarray](), list[np.ndarray](), list[str]()
    for (one, low), (_, high) in zip(_paired(found, bottom), _paired(found, top), strict=False):
        made_up.append(_column(one, "correct") - _column(low, "correct"))
        gap.append((_column(high, "correct") - _column(low, "correct"))[:, 0])
        subjects += [f"{one['seed']}/{subject}" for subject in one["subjects"]]
    if not gap or found[0]["method"] == PLAIN:
        return None
    share = ratio_intervals(np.concatenate(made_up), np.concatenate(gap), subjects)[0]
    return None if math.isnan(share.low) else share
