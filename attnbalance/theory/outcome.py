"""The result of checking a statement of a paper on one instance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """One statement of a paper, checked on one instance.

    `statement` cites it ("Ghosal et al. 2024, Theorem A.11"); `claim` is its content, with the paper's errors
    corrected. `assumptions` maps each condition of the statement to whether the instance meets it. `measured` holds the
    numbers that were compared. `holds` says whether the conclusion is true, regardless of the assumptions.
    """

    statement: str
    claim: str
    assumptions: Mapping[str, bool]
    measured: Mapping[str, float]
    holds: bool

    @property
    def applies(self) -> bool:
        """Whether the instance meets every assumption."""
        return all(self.assumptions.values())

    @property
    def refuted(self) -> bool:
        """Whether the instance meets every assumption but the conclusion is false."""
        return self.applies and not self.holds
