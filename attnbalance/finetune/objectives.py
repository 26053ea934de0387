"""What finetuning aims at: terms that are pure functions of a forward pass, added up with weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from attnbalance.errors import DataError, ModelError
from attnbalance.finetune.examples import POSITIONS, TOKENS

FORMS = ("statement", "question", "few-shot")
"""Prompts on which the base model is asked what it knows: a statement of the fact up to its answer, the question
itself, or the question behind a few answered ones of its relation."""

WEIGHINGS = ("relevance", "salience")

DOWNWEIGHT = 0.1
"""The weight that `weighted-ce(relevance)` gives facts whose training would take attention off their subject."""

TOP = 1024
"""Tokens whose probability in the base `kl` holds one by one."""

RECOMMENDED = "kl(statement) + state-anchor(statement)"
"""What the objective `recommended` stands for."""


@dataclass(frozen=True)
class ForwardPass:
    """What one forward pass gave for a batch of examples, as far as the objective asked for it.

    `logits` are the predictions of the labelled tokens, one behind the other; `labels` those tokens; `example` the
    example that each belongs to, of `examples`. `rows` are the attention rows of the prompts' last tokens, float32,
    with gradients; `states` the residual stream there after each layer (after the last one normalised, as transformers
    gives it). `spans` marks the tokens of each role. `targets` are the base model's numbers, as `collate` joins
    them.
    """

    logits: Float[Tensor, "token vocab"]
    labels: Int[Tensor, " token"]
    example: Int[Tensor, " token"]
    examples: int
    rows: Float[Tensor, "example layer head position"] | None
    states: Float[Tensor, "example layer d_model"] | None
    spans: Mapping[str, Bool[Tensor, "example position"]]
    targets: Mapping[str, Shaped[Tensor, "item ..."]]

    @property
    def needed_rows(self) -> Float[Tensor, "example layer head position"]:
        """The rows; raises `ModelError` where the forward pass was not asked for them."""
        if self.rows is None:
            raise ModelError("the objective looks at attention rows, and the forward pass gave none")
        return self.rows

    def target(self, name: str) -> Shaped[Tensor, "item ..."]:
        """Some numbers of the base model; raises `DataError` for examples that came without them."""
        if name not in self.targets:
            raise DataError(
                f"these examples hold no {name!r} of the base model, which is computed for the data that a trainer is "
                "made with; use add_targets"
            )
        return self.targets[name]

    def share(self, role: str) -> Float[Tensor, "example layer head"]:
        """The share of each row that lies on the tokens of a role, 0..1."""
        return self.needed_rows.masked_fill(~self.spans[role][:, None, None, :], 0.0).sum(-1)

    def losses(self) -> Float[Tensor, " token"]:
        """Negative log-likelihood of each labelled token, in nats."""
        return torch.nn.functional.cross_entropy(self.logits.float(), self.labels, reduction="none")


@dataclass(frozen=True)
class Term:
    """One part of an objective: `weight` x `name`(`argument`).

    `needs` says what it reads beside logits and labels: "rows", "states", "span ROLE", "base" (numbers of the base
    model), "gradients" (it changes the gradient, not the loss).
    """

    name: str
    argument: str | float | None
    weight: float
    needs: frozenset[str]

    @property
    def key(self) -> str:
        """The term without its weight, e.g. "kl(statement)"; its targets' names begin with it."""
        shown = f"{self.argument:g}" if isinstance(self.argument, float) else self.argument
        return self.name if shown is None else f"{self.name}({shown})"

    @property
    def by_token(self) -> bool:
        """Whether the loss is one number for each labelled token; else for each example."""
        return TERMS[self.name].by_token

    def losses(self, found: ForwardPass) -> Float[Tensor, " item"]:
        """The term's loss for each labelled token or example, times its weight; 0 for what only acts on gradients."""
        made = TERMS[self.name].losses
        return found.logits.new_zeros(found.examples) if made is None else self.weight * made(found, self)


@dataclass(frozen=True)
class Objective:
    """A weighted sum of terms; `text` is the expression that it was made from, with `recommended` written out."""

    text: str
    terms: tuple[Term, ...]

    @property
    def needs(self) -> frozenset[str]:
        """What any of the terms needs."""
        return frozenset().union(*(term.needs for term in self.terms))

    @property
    def plain(self) -> bool:
        """Whether this is cross-entropy and nothing else, which needs none of our code."""
        return [(term.name, term.weight) for term in self.terms] == [("ce", 1.0)]

    def weight(self, name: str) -> float:
        """The weight of a term that is named once at most, 0 where the objective lacks it."""
        return sum((term.weight for term in self.terms if term.name == name), start=0.0)


def parse_objective(text: str) -> Objective:
    """The objective of an expression such as "ce + 0.3*row-anchor(question) + 3*kl(statement)".

    Terms are joined by "+", each with an optional weight above 0 and "*", and an optional argument in brackets.
    "recommended" stands for `RECOMMENDED`. Raises `DataError` for what cannot be read, with the list of names.
    """
    if re.search(r"\*\s*recommended\b", text):
        raise DataError(f"objective {text!r}: recommended takes no weight; write out {RECOMMENDED} with weights")
    written = re.sub(r"\brecommended\b", RECOMMENDED, text)
    terms = tuple(_term(part, text) for part in re.split(r"\+(?![^()]*\))", written))
    keys = [term.key for term in terms]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice:
        raise DataError(f"objective {text!r} names {twice} twice; give it one weight")
    if all("gradients" in term.needs for term in terms):
        raise DataError(f"objective {text!r} has no loss, only {keys[0]}, which changes gradients; add e.g. ce")
    return Objective(" + ".join(f"{t.weight:g}*{t.key}" if t.weight != 1 else t.key for t in terms), terms)


def _term(part: str, text: str) -> Term:
    match = re.fullmatch(r"\s*(?:([0-9.eE+-]+)\s*\*\s*)?([a-z][a-z-]*)\s*(?:\(\s*([^()]*?)\s*\))?\s*", part)
    if match is None or match[2] not in TERMS:
        raise DataError(
            f"objective {text!r} has {part.strip()!r}; expected terms like 'ce' or '0.3*kl(statement)' joined by '+'. "
            f"There are {'; '.join(kind.shown(name) for name, kind in TERMS.items())}; recommended = {RECOMMENDED}"
        )
    name, kind = match[2], TERMS[match[2]]
    try:
        weight = 1.0 if match[1] is None else float(match[1])
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise DataError(f"objective {text!r}: the weight of {name} must be a number above 0, got {match[1]!r}")
    argument = kind.read(match[3] or None)
    if argument is kind:
        raise DataError(f"objective {text!r}: expected {kind.shown(name)}, got {name}({match[3] or ''})")
    return Term(name, argument, weight, frozenset(kind.needs))  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class _Kind:
    """A kind of term: its loss for each labelled token or example (None: it acts on gradients), and what it needs.

    In its brackets stands one of `choices`, of which the first is the default, or a share between 0 and 1.
    """

    losses: Callable[[ForwardPass, Term], Float[Tensor, " item"]] | None
    needs: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    share: float | None = None
    by_token: bool = False

    def shown(self, name: str) -> str:
        """The term as it is written."""
        if self.share is not None:
            return f"{name}(SHARE between 0 and 1, by default {self.share:g})"
        return f"{name}({'|'.join(self.choices)})" if self.choices else name

    def read(self, argument: str | None) -> object:
        """The argument, or its default; this kind itself for one that it does not take."""
        if self.share is not None:
            try:
                value = self.share if argument is None else float(argument)
            except ValueError:
                return self
            return value if 0 < value < 1 else self
        if argument is None:
            return self.choices[0] if self.choices else None
        return argument if argument in self.choices else self


def cross_entropy(found: ForwardPass, term: Term) -> Float[Tensor, " token"]:
    """`ce`: negative log-likelihood of the answer, nats a token; ordinary finetuning.

    It cannot tell a fact that the model knows from one that it does not, and teaches both: on the second kind attention
    to the subject does not pay, and is unlearned (Ghosal et al. 2024, section 4).
    """
    return found.losses()


def weighted_cross_entropy(found: ForwardPass, term: Term) -> Float[Tensor, " token"]:
    """`weighted-ce`: cross-entropy, each fact weighted by what the base model shows of it.

    relevance: `DOWNWEIGHT` for facts whose training would take attention off the subject in the base (push below 0, the
    counterpart of s_rel < p_rel in Theorem 4.5 of Ghosal et al. 2024), 1 for the others. salience: the fact's rank by
    value salience in context, 0 to 1. Taken once, from the base: as training goes on, the signs may change. A fact that
    gets no weight is not learned.
    """
    return found.losses() * found.target(term.key)[found.example]


def floor(found: ForwardPass, term: Term) -> Float[Tensor, " example"]:
    """`floor(SHARE)`: how far each layer's mean subject share of the row lies below SHARE (hinge), mean over layers.

    The regulariser that Ghosal et al. (2024, section 7) leave to future work, at its bluntest: it moves attention and
    says nothing of what is read there; layers that never looked at the subject are made to.
    """
    return (float(term.argument or 0.0) - found.share("subject").mean(-1)).clamp(min=0).mean(-1)


def barrier(found: ForwardPass, term: Term) -> Float[Tensor, " example"]:
    """`barrier`: minus the log of each layer's mean subject share, mean over layers: a log-barrier against 0.

    Never satisfied: it goes on pulling where attention is high already, which costs the answers something.
    """
    return -found.share("subject").mean(-1).clamp(min=1e-6).log().mean(-1)


def balance(found: ForwardPass, term: Term) -> Float[Tensor, " example"]:
    """`balance`: how far the share of the relation's tokens exceeds the subject's, by layer (hinge), mean over layers.

    Attention imbalance as Ghosal et al. (2024, Figure 6) draw it: subject against relation tokens. It needs the
    relation's place in the prompt, and does not see attention that goes to other tokens.
    """
    return (found.share("relation") - found.share("subject")).mean(-1).clamp(min=0).mean(-1)


def row_anchor(found: ForwardPass, term: Term) -> Float[Tensor, " example"]:
    """`row-anchor(FORM)`: each head's row held to the base model's, squared distance, mean over layers and heads.

    question: the whole row, on the same prompt. statement, few-shot: the subject's share of the row, which is what can
    be compared between prompts, held to its value for the same fact in that form. Holds where the model looks, not what
    it finds there: with changed values the same row gives other answers.
    """
    if term.argument == "question":
        base = found.target(f"{term.key}{POSITIONS}")
        return (found.needed_rows - base).square().sum(-1).mean((-1, -2))
    return (found.share("subject") - found.target(term.key)).square().mean((-1, -2))


def state_anchor(found: ForwardPass, term: Term) -> Float[Tensor, " example"]:
    """`state-anchor(FORM)`: the last prompt token's residual stream held to the base's at the last token of FORM.

    Squared distance relative to the base's squared length, mean over layers: hint-based distillation (Romero et al.
    2015), from another prompt instead of another model. What is read at the last token has passed through attention, so
    this asks that attention bring there, layer by layer, what it brings in the form that the base knows. It says far
    more of each fact than the answer does. Like `kl` it teaches what the base holds to be true, and nothing new.
    """
    base = found.target(term.key).float()
    if found.states is None:
        raise ModelError("the objective looks at the residual stream, and the forward pass gave none")
    distance = (found.states.float() - base).square().sum(-1)
    return (distance / base.square().sum(-1).clamp(min=1e-6)).mean(-1)


def divergence(found: ForwardPass, term: Term) -> Float[Tensor, " token"]:
    """`kl(FORM)`: KL divergence of the answer's tokens from the base model's prediction of them behind FORM, nats.

    Self-distillation in the sense of learning without forgetting (Li & Hoiem 2016), from the form in which the base
    answers from its knowledge. Over the base's `TOP` most probable tokens and all others as one, which is at most the
    whole divergence. The end of the answer, which a statement does not have, is learned by cross-entropy. Holds the
    model to what the base says, mistakes included: facts that the base does not know are not learned.
    """
    ids, base = found.target(f"{term.key} ids{TOKENS}").long(), found.target(f"{term.key}{TOKENS}").float()
    own = found.logits.float().log_softmax(-1).gather(-1, ids)
    inside = torch.where(base.isfinite(), base.exp() * (base - own), 0.0).sum(-1)
    rest = (1 - base.exp().sum(-1)).clamp(min=0)
    own_rest = (1 - own.exp().sum(-1)).clamp(min=1e-6)
    return inside + torch.where(rest > 1e-6, rest * (rest.clamp(min=1e-6) / own_rest).log(), 0.0)


TERMS: dict[str, _Kind] = {
    "ce": _Kind(cross_entropy, by_token=True),
    "kl": _Kind(divergence, ("base",), FORMS, by_token=True),
    "state-anchor": _Kind(state_anchor, ("states", "base"), FORMS),
    "row-anchor": _Kind(row_anchor, ("rows", "span subject", "base"), FORMS),
    "floor": _Kind(floor, ("rows", "span subject"), share=0.5),
    "barrier": _Kind(barrier, ("rows", "span subject")),
    "balance": _Kind(balance, ("rows", "span subject", "span relation")),
    "weighted-ce": _Kind(weighted_cross_entropy, ("span subject", "base"), WEIGHINGS, by_token=True),
    "weight-anchor": _Kind(None, ("gradients",)),
    "project": _Kind(None, ("rows", "span subject", "gradients")),
}
