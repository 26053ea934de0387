"""The language of objectives: reads an expression such as "ce + 0.3*kl(statement)", without torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from attnbalance.arguments import expects
from attnbalance.errors import DataError

LONGEST = 2000
"""Characters of an expression; all terms together take a tenth."""

SMALLEST_WEIGHT, LARGEST_WEIGHT = 1e-6, 1e6
"""Limits of a term's weight: far beyond them, gradients in float32 become 0 or infinite, and nothing is trained."""

RECOMMENDED = "ce + kl(best)"
"""What the name `recommended` stands for: learn the answers, and keep what the base says in the form it knows best."""

TERM = re.compile(r"\s*(?:([0-9.eE+-]+)\s*\*\s*)?([a-z][a-z-]*)\s*(?:\(\s*([^()]*?)\s*\))?\s*")
"""An optional weight and "*", a name, an optional argument in brackets."""

BETWEEN_TERMS = re.compile(r"(?<![0-9.][eE])\+(?![^()]*\))")
"""A "+" outside brackets and outside a number such as 1e+3."""


@dataclass(frozen=True)
class WrittenTerm:
    """One term as it is written."""

    name: str
    """The name before the brackets."""
    argument: str | None
    """The text in the brackets; None without one."""
    weight: float
    """The number before the "*"; 1 without one."""
    text: str
    """The whole term, for messages."""


@dataclass(frozen=True)
class Expression:
    """An objective as it is written, with `recommended` replaced by its terms."""

    text: str
    """The text that was read."""
    terms: tuple[WrittenTerm, ...]
    """The terms, in order."""

    @property
    def written_out(self) -> str:
        """The terms as one text, in which `recommended` is replaced by what it stands for.

        >>> parse_expression("recommended + floor").written_out
        'ce + kl(best) + floor'
        """
        return " + ".join(term.text for term in self.terms)


@expects(text=str)
def parse_expression(text: str) -> Expression:
    """Read an expression: terms joined by "+", each with an optional weight and an optional argument in brackets.

    Weights lie between `SMALLEST_WEIGHT` and `LARGEST_WEIGHT`. Which names and arguments there are is left to
    `parse_objective`. Raises `DataError` for any other text.

    >>> parse_expression("ce + 0.3*row-anchor(question)").terms[1].weight
    0.3
    >>> [term.name for term in parse_expression("recommended").terms]
    ['ce', 'kl']
    """
    if len(text) > LONGEST:  # splitting takes time quadratic in the length
        raise DataError(f"an objective may have {LONGEST:,} characters, got {len(text):,}: {text}")
    terms = list[WrittenTerm]()
    for part in BETWEEN_TERMS.split(text):
        term = _read(part, text)
        if term.name == "recommended":
            terms += [_read(each, RECOMMENDED) for each in BETWEEN_TERMS.split(RECOMMENDED)]
        else:
            terms.append(term)
    return Expression(text, tuple(terms))


def _read(part: str, text: str) -> WrittenTerm:
    match = TERM.fullmatch(part)
    if match is None:
        raise unknown_term(part, text)
    weight, name, argument = match.groups()
    if name == "recommended" and (weight is not None or argument is not None):
        raise DataError(
            f"objective {text!r}: recommended takes no weight and no argument; write out {RECOMMENDED} with weights"
        )
    try:
        value = 1.0 if weight is None else float(weight)
    except ValueError:
        value = math.nan
    if not SMALLEST_WEIGHT <= value <= LARGEST_WEIGHT:
        raise DataError(
            f"objective {text!r}: the weight of {name} must be between {SMALLEST_WEIGHT:f} and {LARGEST_WEIGHT:,.0f}, "
            f"got {weight!r}"
        )
    return WrittenTerm(name, argument or None, value, part.strip())


def unknown_term(part: str, text: str) -> DataError:
    """The error for a part of an expression that is not a term, with the list of terms."""
    from attnbalance.finetuning.objectives.registry import TERMS

    return DataError(
        f"objective {text!r} has {part.strip()!r}; expected terms like 'ce' or '0.3*kl(statement)' joined by '+'. "
        f"There are {'; '.join(kind.usage for kind in TERMS.values())}; recommended = {RECOMMENDED}"
    )
