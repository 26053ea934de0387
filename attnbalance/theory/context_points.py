"""The facts, points and stored values of the context model: Goyal et al. (2024), section 4.1 and appendix C.1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnbalance.errors import DataError

CRITICAL, OVERLAPPING, RECALL = "C", "C+S", "S"
"""Points of the paper: [c, s, r] -> c with s unknown, [c, s, r] -> c with s -> c memorised, [s, r] -> a memorised."""
COUNTERFACTUAL, CONFLICT = "counterfactual", "conflict"
"""[c, s, r] -> c to train on, and [c, s, r] to test on, where s -> a is memorised and a is not c."""


@dataclass(frozen=True)
class Vocabulary:
    """K_S subjects (tokens 0 to K_S - 1), K_A answers, which are also the contexts, and last the relation r.

    Raises `DataError` for no subject, or for not more answers than subjects, which appendix C.1.2 asks for.
    """

    subjects: int
    answers: int

    def __post_init__(self) -> None:
        if not 0 < self.subjects < self.answers:
            raise DataError(
                f"expected subjects, and more answers than subjects (K_A > K_S), got K_S = {self.subjects} and "
                f"K_A = {self.answers}: add answers"
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
    """Points [c, s, r] or [s, r], by token; all runs share them.

    `context` is c, -1 in a point without one; `answer` is what the loss asks for; `stored` is the answer that the
    pretrained model holds for s, -1 where it holds none.
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
        """Whether a subject or an asked answer occurs twice, against Assumption 1."""
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
    """So many points of each kind, every one with a subject and answers of its own, as Assumption 1 asks.

    The subject and both answers of a conflict are thus in no other point. Raises `DataError` where the vocabulary has
    too few subjects or answers, or a count is below 0.
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
            f"expected counts from 0 that fit {vocabulary.subjects} subjects and {vocabulary.answers} answers, got "
            f"{counts}, which take {subjects} subjects and {answers} answers: ask for fewer points, or add tokens"
        )


@dataclass(frozen=True)
class Scalars:
    """What the pretrained values hold, in probability and nats; one number for all points is the paper's case.

    `delta_memory` is the probability of a memorised answer under its subject (delta_M), `delta_context` that of a
    context under itself (delta_C), `o_c` the value of every other answer and `o_r` that of r.
    """

    delta_memory: Float[Tensor, "run point_or_1"]
    delta_context: Float[Tensor, "run answer_or_1"]
    o_c: Float[Tensor, " run"]
    o_r: Float[Tensor, " run"]

    @staticmethod
    def same(delta_memory: float, delta_context: float, o_c: float, o_r: float) -> Scalars:
        """One run in which all points are alike, as Assumption 6 has them."""
        one = torch.tensor([delta_memory, delta_context, o_c, o_r], dtype=torch.float64)
        return Scalars(one[None, None, 0], one[None, None, 1], one[2:3], one[3:4])


def stored_values(
    vocabulary: Vocabulary, points: Points, scalars: Scalars, *, ordered: bool = True
) -> Float[Tensor, "run token token"]:
    """v_0(i, y), the logit of token i in the value of token y (eq. 16), as Assumption 6 and Lemma 3 have it.

    Subjects have 0 everywhere, r has o_r, answers o_c, but for v_0(c, c) of each answer, whose softmax is delta_C, and
    v_0(a, s) of each memorised fact, whose softmax is delta_M. Raises `DataError` for a delta outside (0, 1), and for
    delta_M <= delta_C unless `ordered` is False, which is for seeing what becomes of the theorems then.
    """
    memory, context = scalars.delta_memory, scalars.delta_context
    for name, delta in (("delta_memory", memory), ("delta_context", context)):
        if not bool(((delta > 0) & (delta < 1)).all()):
            raise DataError(f"expected {name} between 0 and 1, got {float(delta.min())} to {float(delta.max())}")
    if ordered and float(memory.min()) <= float(context.max()):
        raise DataError(
            f"expected delta_memory above delta_context (Definition 3), got {float(memory.min())} and "
            f"{float(context.max())}: raise the one or lower the other"
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
