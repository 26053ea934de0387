"""Terms that only read attention: how much of the row lies on the subject."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from attnbalance.finetuning.objectives.forward_pass import ForwardPass
from attnbalance.finetuning.objectives.objective import SUBJECT_ROWS, Needs, Term, TermKind


def floor(forward: ForwardPass, term: Term) -> Float[Tensor, " example"]:
    """`floor(SHARE)`: how far each layer's mean subject share of the row lies below SHARE (hinge), mean over layers.

    The regulariser that Ghosal et al. (2024, section 7) leave to future work, in its bluntest form. It moves attention
    without regard to what is read at the subject, and forces it on layers that never looked there.
    """
    return (float(term.argument or 0.0) - forward.share("subject").mean(-1)).clamp(min=0).mean(-1)


def barrier(forward: ForwardPass, term: Term) -> Float[Tensor, " example"]:
    """`barrier`: minus the log of each layer's mean subject share, mean over layers: a log-barrier against 0.

    It is never satisfied: it keeps pulling where attention is high already, at some cost to the answers.
    """
    return -forward.share("subject").mean(-1).clamp(min=1e-6).log().mean(-1)


def balance(forward: ForwardPass, term: Term) -> Float[Tensor, " example"]:
    """`balance`: how far the relation's share of the row exceeds the subject's, by layer (hinge), mean over layers.

    Attention imbalance as Ghosal et al. (2024, Figure 6) draw it: subject against relation tokens. The template must
    name the relation. Attention to any other token goes unnoticed.
    """
    return (forward.share("relation") - forward.share("subject")).mean(-1).clamp(min=0).mean(-1)


FLOOR = TermKind("floor", floor, SUBJECT_ROWS, default_share=0.5)
BARRIER = TermKind("barrier", barrier, SUBJECT_ROWS)
BALANCE = TermKind("balance", balance, Needs(rows=True, spans=frozenset({"subject", "relation"})))
