"""The types of objectives: a weighted sum of terms, each of a kind that says all there is to know about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from attnbalance.data.forms import BEST, FORMS
from attnbalance.finetuning.examples import REPLAYED, Example
from attnbalance.finetuning.objectives.base_model import BaseModel
from attnbalance.finetuning.objectives.forward_pass import ForwardPass

CHOICES = (*FORMS, BEST)
"""The arguments of terms that ask the base model."""

Targets = Mapping[str, Shaped[Tensor, "..."]]
"""The base model's numbers for one example, by name."""


@dataclass(frozen=True)
class Needs:
    """What a term reads, beyond the logits and labels that every forward pass gives."""

    rows: bool = False
    """Attention rows of the prompts' last tokens."""
    states: bool = False
    """The residual stream at the prompts' last tokens."""
    spans: frozenset[str] = frozenset()
    """Roles whose tokens every example must mark."""
    initial_weights: bool = False
    """The weights with which training began."""

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            rows=self.rows or other.rows,
            states=self.states or other.states,
            spans=self.spans | other.spans,
            initial_weights=self.initial_weights or other.initial_weights,
        )


SUBJECT_ROWS = Needs(rows=True, spans=frozenset({"subject"}))
"""Attention rows with the subject's tokens marked."""


@dataclass(frozen=True)
class TermKind:
    """A kind of term. The argument in its brackets is one of `choices`, or a share, or there is none."""

    name: str
    """The name in expressions."""
    loss: Callable[[ForwardPass, Term], Float[Tensor, " item"]] | None
    """The loss of each labelled token (`by_token`) or example, before the weight; None: the kind changes gradients."""
    needs: Needs = Needs()
    """What the loss, or the rule for gradients, reads."""
    make_targets: Callable[[Term, Sequence[Example], BaseModel], Iterable[tuple[int, Targets]]] | None = None
    """Yields the base model's numbers for each example, with its index, batch by batch; None: the kind compares with no
    base model."""
    choices: tuple[str, ...] = ()
    """Possible arguments; the first is the default."""
    default_share: float | None = None
    """The default of an argument that is a share, 0 < share < 1; None: the argument is no share."""
    by_token: bool = False
    """Whether the loss is one number for each labelled token; else for each example."""
    learns_answers: bool = False
    """Whether the term learns the examples' answers, whatever the base model says."""
    keeps_answers: bool = False
    """Whether the term teaches what the base model answers."""

    @property
    def usage(self) -> str:
        """How the term is written, for messages."""
        if self.default_share is not None:
            return f"{self.name}(SHARE between 0 and 1, by default {self.default_share:g})"
        return f"{self.name}({'|'.join(self.choices)})" if self.choices else self.name

    def read_argument(self, text: str | None) -> str | float | None:
        """The argument of a text, or the default; raises `ValueError` for an argument that the kind does not take."""
        if self.default_share is not None:
            share = self.default_share if text is None else float(text)
            if not 0 < share < 1:
                raise ValueError(text)
            return share
        if text is None:
            return self.choices[0] if self.choices else None
        if text not in self.choices:
            raise ValueError(text)
        return text


@dataclass(frozen=True)
class Term:
    """One part of an objective: weight x kind(argument)."""

    kind: TermKind
    """What the term computes."""
    argument: str | float | None
    """The argument in brackets; None: the kind takes none."""
    weight: float
    """The factor of the loss, > 0."""

    @property
    def name(self) -> str:
        """The name of its kind."""
        return self.kind.name

    @property
    def key(self) -> str:
        """The term without its weight, e.g. "kl(statement)"; the names of its targets begin with it."""
        shown = f"{self.argument:g}" if isinstance(self.argument, float) else self.argument
        return self.name if shown is None else f"{self.name}({shown})"

    @property
    def text(self) -> str:
        """The term as it is written, e.g. "0.3*kl(statement)"."""
        return f"{self.weight:g}*{self.key}" if self.weight != 1 else self.key

    def losses(self, forward: ForwardPass) -> Float[Tensor, " item"]:
        """The weighted loss of each labelled token or example; 0 for a term that changes gradients.

        Of an example about no fact, only terms that learn answers have a loss. Where facts are replayed, see
        `Objective.losses`.
        """
        if self.kind.loss is None:
            return forward.logits.new_zeros(forward.examples)
        losses = self.weight * self.kind.loss(forward, self)
        if self.kind.learns_answers or forward.has_fact is None:
            return losses
        return torch.where(forward.has_fact[forward.example] if self.kind.by_token else forward.has_fact, losses, 0.0)


@dataclass(frozen=True)
class Objective:
    """A weighted sum of terms."""

    text: str
    """The expression, with `recommended` and defaults written out."""
    terms: tuple[Term, ...]
    """The terms, in order."""

    @property
    def needs(self) -> Needs:
        """What all terms together need."""
        merged = Needs()
        for term in self.terms:
            merged |= term.kind.needs
        return merged

    @property
    def needs_base(self) -> bool:
        """Whether a term compares with numbers of the base model."""
        return any(term.kind.make_targets is not None for term in self.terms)

    @property
    def changes_gradients(self) -> bool:
        """Whether a term changes gradients."""
        return any(term.kind.loss is None for term in self.terms)

    @property
    def plain(self) -> bool:
        """Whether this is cross-entropy alone, which a trainer computes by itself."""
        return [(term.name, term.weight) for term in self.terms] == [("ce", 1.0)]

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms in which the base model is asked what the objective then teaches."""
        taught = (str(term.argument) for term in self.terms if term.kind.make_targets and term.argument in CHOICES)
        return tuple(dict.fromkeys(taught))

    @property
    def asks_of_all(self) -> bool:
        """Whether the base's number for a fact depends on the other training facts: on few shots, forms or ranks."""
        return any(term.kind.make_targets and term.argument not in FORMS[:2] for term in self.terms)

    @property
    def learns_answers(self) -> bool:
        """Whether the examples' answers are learned; else only what the base model says."""
        return any(term.kind.learns_answers for term in self.terms)

    @property
    def keeps_answers(self) -> bool:
        """Whether a term teaches what the base model answers; then replayed facts need not be known."""
        return any(term.kind.keeps_answers for term in self.terms)

    def losses(self, term: Term, forward: ForwardPass) -> Float[Tensor, " item"]:
        """The losses of one of the terms (see `Term.losses`), 0 for the examples that it does not teach.

        Where facts are replayed, a term that compares with the base model teaches these alone: the others are new to
        the base. If a term keeps the base's answers, each fact has one teacher: the terms that learn answers teach the
        new facts alone.
        """
        losses, counted = term.losses(forward), self._teaches(term, forward.targets.get(REPLAYED))
        if counted is None:
            return losses
        return torch.where(counted[forward.example] if term.kind.by_token else counted, losses, 0.0)

    def taught(
        self, tokens: Float[Tensor, " example"], replayed: Bool[Tensor, " example"] | None
    ) -> Float[Tensor, "example term"]:
        """How much of each example a term teaches: its labelled tokens, or 1, and 0 if `losses` leaves the example out.

        In training and evaluation, the loss of a term is a mean over the sum of this. Rows about no fact count like
        others.

        Args:
            tokens: The number of labelled tokens of each example.
            replayed: Which examples are replayed facts; None: no run with replay.
        """
        columns = list[Tensor]()
        for term in self.terms:
            amount, counted = tokens if term.kind.by_token else torch.ones_like(tokens), self._teaches(term, replayed)
            columns.append(amount if counted is None else amount * counted)
        return torch.stack(columns, dim=-1)

    def _teaches(self, term: Term, replayed: Bool[Tensor, " example"] | None) -> Bool[Tensor, " example"] | None:
        """The examples that a term teaches, where facts are replayed; None: all."""
        if replayed is None:
            return None
        if term.kind.learns_answers:
            return ~replayed if self.keeps_answers else None
        return replayed if term.kind.make_targets is not None else None

    def weight(self, kind: TermKind) -> float:
        """The sum of the weights of all terms of a kind; 0 if there is none."""
        return sum((term.weight for term in self.terms if term.kind is kind), start=0.0)
