"""Vocabulary, data points and stored values of the context model: Goyal et al. (2024), section 4.1 and appendix C.1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnbalance.errors import DataError

CRITICAL, OVERLAPPING, RECALL = "C", "C+S", "S"
"""The paper's points: [c, s, r] -> c with s unknown; [c, s, r] -> c with s -> c memorised; [s, r] -> a, memorised."""
COUNTERFACTUAL, CONFLICT = "counterfactual", "conflict"
"""[c, s, r] -> c for training, and [c, s, r] for testing, where s -> a is memorised and a differs from c."""


@dataclass(frozen=True)
class Vocabulary:
    """K_S subjects (tokens 0 to K_S - 1), then K_A answers, which are also the contexts, then the relation r.

    Raises `DataError` unless 0 < K_S < K_A (appendix C.1.2).
    """

    subjects: int
    answers: int

    def __post_init__(self) -> None:
        if not 0 < self.subjects < self.answers:
            raise DataError(
                f"expected at least one subject and more answers than subjects (K_A > K_S), got "
                f"K_S = {self.subjects} and K_A = {self.answers}: add answers"
            )

    @property
    def relation(self) -> int:
        """The token r."""
        return self.subjects + self.answers

    @property
    def size(self) -> int:
        """The number of tokens, K_S + K_A + 1."""
        return self.relation + 1


@dataclass(frozen=True)
class Points:
    """Points [c, s, r] or [s, r] as tokens; all runs share them.

    `context` is c, or -1 if the point has none; `answer` is the loss's target; `stored` is the answer that the
    pretrained model stores for s, or -1 if it stores none.
    """

    kinds: tuple[str, ...]
    context: Int[Tensor, " point"]
    subject: Int[Tensor, " point"]
    answer: Int[Tensor, " point"]
    stored: Int[Tensor, " point"]

    def __len__(self) -> int:
        return len(self.kinds)

    def of(self, *kinds: str) -> Points:
        """The points of these kinds, in their order."""
        chosen = [i for i, kind in enumerate(self.kinds) if kind in kinds]
        fields = (self.context, self.subject, self.answer, self.stored)
        return Points(tuple(self.kinds[i] for i in chosen), *(field[chosen] for field in fields))

    @property
    def repeated(self) -> bool:
        """Whether a subject or a target answer occurs twice, which violates Assumption 1."""
        return any(len(field.unique()) < len(field) for field in (self.subject, self.answer))


def lay_out(
    vocabulary: Vocabulary,
    *,
    critical: int,
    overlapping: int,
    recall: int = 0,
    counterfactual: int = 0,
    conflicts: int = 0,
) -> Points:
    """Points of each kind in these numbers; no two points share a subject or an answer (Assumption 1).

    A conflict's subject and its two answers thus occur in no other point. Raises `DataError` if the vocabulary has too
    few subjects or answers, or if a count is negative.
    """
    counts: dict[str, int] = dict(zip(KINDS, (critical, overlapping, recall, counterfactual, conflicts), strict=True))
    kinds = tuple(kind for kind, count in counts.items() for _ in range(count))
    contested = counterfactual + conflicts
    _check_room(vocabulary, counts, len(kinds), len(kinds) + contested)
    subject = torch.arange(len(kinds))
    answer = vocabulary.subjects + subject
    stored = answer.clone()
    stored[:critical] = -1
    stored[len(kinds) - contested :] += contested
    context = torch.where(torch.tensor([kind == RECALL for kind in kinds], dtype=torch.bool), -1, answer)
    return Points(kinds, context, subject, answer, stored)


KINDS: tuple[str, ...] = (CRITICAL, OVERLAPPING, RECALL, COUNTERFACTUAL, CONFLICT)


def _check_room(vocabulary: Vocabulary, counts: dict[str, int], subjects: int, answers: int) -> None:
    if min(counts.values()) < 0 or subjects > vocabulary.subjects or answers > vocabulary.answers:
        raise DataError(
            f"counts must be >= 0 and fit {vocabulary.subjects} subjects and {vocabulary.answers} answers, got "
            f"{counts}, which need {subjects} subjects and {answers} answers: ask for fewer points or add tokens"
        )


@dataclass(frozen=True)
class Scalars:
    """The scalars that define the pretrained values; the paper has one number for all points.

    `delta_memory` is the probability of a memorised answer given its subject (delta_M), `delta_context` that of a
    context given itself (delta_C). `o_c` is the value of every other answer and `o_r` that of r, in nats.
    """

    delta_memory: Float[Tensor, "run point_or_1"]
    delta_context: Float[Tensor, "run answer_or_1"]
    o_c: Float[Tensor, " run"]
    o_r: Float[Tensor, " run"]

    @staticmethod
    def same(delta_memory: float, delta_context: float, o_c: float, o_r: float) -> Scalars:
        """One run in which all points have the same scalars (Assumption 6)."""
        scalars = torch.tensor([delta_memory, delta_context, o_c, o_r], dtype=torch.float64)
        return Scalars(scalars[None, None, 0], scalars[None, None, 1], scalars[2:3], scalars[3:4])


def stored_values(
    vocabulary: Vocabulary, points: Points, scalars: Scalars, *, ordered: bool = True
) -> Float[Tensor, "run token token"]:
    """v_0(i, y), the logit of token i in the value of token y (eq. 16), by Assumption 6 and Lemma 3.

    v_0(i, y) is 0 if i is a subject, o_r if i is r, and o_c if i is an answer. Two kinds of entries differ: v_0(c, c)
    of each answer, whose softmax is delta_C, and v_0(a, s) of each memorised fact, whose softmax is delta_M. Raises
    `DataError` for a delta outside (0, 1), and for delta_M <= delta_C. `ordered=False` allows the latter, to test the
    theorems without that assumption.
    """
    memory, context = scalars.delta_memory, scalars.delta_context
    for name, delta in (("delta_memory", memory), ("delta_context", context)):
        if not bool(((delta > 0) & (delta < 1)).all()):
            raise DataError(f"expected {name} between 0 and 1, got {float(delta.min())} to {float(delta.max())}")
    if ordered and float(memory.min()) <= float(context.max()):
        raise DataError(
            f"expected delta_memory above delta_context (Definition 3), got {float(memory.min())} and "
            f"{float(context.max())}: raise delta_memory or lower delta_context"
        )
    first, last = vocabulary.subjects, vocabulary.relation
    values = torch.zeros(len(scalars.o_c), vocabulary.size, vocabulary.size, dtype=torch.float64)
    values[:, first:last] = scalars.o_c[:, None, None]
    values[:, last] = scalars.o_r[:, None]
    rest = ((vocabulary.answers - 1) * scalars.o_c.exp() + scalars.o_r.exp() + vocabulary.subjects).log()[:, None]
    answers = torch.arange(first, last)
    values[:, answers, answers] = torch.logit(context) + rest
    known = points.stored >= 0
    memory = memory.expand(-1, len(points))[:, known]
    values[:, points.stored[known], points.subject[known]] = torch.logit(memory) + rest
    return values
