"""The registry of terms: everything that an objective can be made of."""

from __future__ import annotations

from attnbalance.finetuning.objectives.anchors import ROW_ANCHOR, STATE_ANCHOR
from attnbalance.finetuning.objectives.cross_entropy import CE, WEIGHTED_CE
from attnbalance.finetuning.objectives.divergence import KL
from attnbalance.finetuning.objectives.gradients import PROJECT, WEIGHT_ANCHOR
from attnbalance.finetuning.objectives.objective import TermKind
from attnbalance.finetuning.objectives.subject_share import BALANCE, BARRIER, FLOOR

TERMS: dict[str, TermKind] = {
    kind.name: kind
    for kind in (
        CE,
        KL,
        STATE_ANCHOR,
        ROW_ANCHOR,
        FLOOR,
        BARRIER,
        BALANCE,
        WEIGHTED_CE,
        WEIGHT_ANCHOR,
        PROJECT,
    )
}
"""All kinds of terms, by name. A new one needs an entry here, and a file that says what it computes."""
