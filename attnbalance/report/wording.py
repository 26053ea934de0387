"""How numbers, layers and lists are put into words, the same everywhere in a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from attnbalance.statistics.intervals import Interval

FEW = "too few or too unequal subjects"
"""Why there is no interval: see `are_enough`."""


def percent(value: float) -> str:
    """A share in [0, 1] as a percentage, with a point for the decimal and one digit after it."""
    return f"{100 * value:z.1f}%"


def percent_interval(interval: Interval) -> str:
    """A share as a percentage with its interval, where it has one."""
    return percent(interval.mean) + (
        "" if math.isnan(interval.low) else f" [{100 * interval.low:z.1f}, {100 * interval.high:z.1f}]"
    )


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first row is its head."""
    head, *others = rows
    lines = [head, ["---"] * len(head), *others]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def points(interval: Interval, sign: int = 1, unit: str = " points") -> str:
    """A difference of accuracies in percentage points with its interval; `sign` -1 turns it round."""
    low, high = sorted((sign * interval.low, sign * interval.high))
    bounds = "(no interval)" if math.isnan(interval.low) else f"[{100 * low:+z.1f}, {100 * high:+z.1f}]"
    return f"{100 * sign * interval.mean:+z.1f}{unit} {bounds}"


def share(value: float, sign: str = "") -> str:
    """A share of attention to three decimals, or two digits where it is small; `sign` "+" always shows the sign."""
    return f"{value:{sign}z.3f}" if abs(value) >= 0.01 or value == 0 else f"{value:{sign}.2g}"


def bounds(low: float, high: float, sign: str = "") -> str:
    """The two ends of an interval of attention shares; empty where there is none."""
    return "" if math.isnan(low) else f"[{share(low, sign)}, {share(high, sign)}]"


def layers(numbers: Sequence[int]) -> str:
    """Layer numbers in order with runs drawn together: "layer 3", "layers 3, 7 to 9 and 12"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ("layer " if len(numbers) == 1 else "layers ") + listed(", ".join(parts).split(", "))


def listed(parts: Sequence[str]) -> str:
    """Words as a list: "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def left_out(dropped: Mapping[str, int]) -> str:
    """How many rows were left out, by reason, as a sentence; empty if none were.

    >>> left_out({"no output": 15})
    'Left out: 15 (no output).'
    """
    reasons = ", ".join(f"{count:,} ({reason})" for reason, count in dropped.items() if count)
    return f"Left out: {reasons}." if reasons else ""


def popularity(value: float) -> str:
    """A popularity: whole from 100 on, three digits below."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:z.3g}"


def questions(n: int) -> str:
    """A number of questions."""
    return f"{n:,} question{'' if n == 1 else 's'}"


def nats(interval: Interval, digits: int = 2) -> str:
    """A number of nats with its interval, signs shown."""
    ends = "" if math.isnan(interval.low) else f" [{interval.low:+z.{digits}f}, {interval.high:+z.{digits}f}]"
    return f"{interval.mean:+z.{digits}f}{ends}"


def stacked(text: str) -> Markup:
    """A number with its interval below it, for narrow columns."""
    return Markup("<br>").join(part if i == 0 else f"[{part}" for i, part in enumerate(text.split(" [")))


def percent_share(interval: Interval) -> str:
    """A cause's share in a change as a whole percentage with its interval; "?" where the change is not sure."""
    return (
        "?"
        if math.isnan(interval.low)
        else f"{100 * interval.mean:z.0f}% [{100 * interval.low:z.0f}, {100 * interval.high:z.0f}]"
    )
