"""What a theorem says of one instance, and what was seen there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """One statement of a paper, tried on one instance.

    `statement` is its place ("Ghosal et al. 2024, Theorem A.11") and `claim` what it says, with the paper's slips put
    right. `assumptions` holds each condition of the statement and whether the instance meets it, `measured` the numbers
    that were compared, and `holds` whether the conclusion is true of them, whatever the assumptions.
    """

    statement: str
    claim: str
    assumptions: Mapping[str, bool]
    measured: Mapping[str, float]
    holds: bool

    @property
    def applies(self) -> bool:
        """Whether the instance meets every assumption, so that the statement says something of it."""
        return all(self.assumptions.values())

    @property
    def refuted(self) -> bool:
        """Whether the instance meets every assumption and yet the conclusion is false."""
        return self.applies and not self.holds
