"""Terms that learn the answers: cross-entropy, and cross-entropy with a weight for each fact."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attnbalance.finetuning.examples import Example
from attnbalance.finetuning.objectives.base_model import BaseModel, prompts_of
from attnbalance.finetuning.objectives.forward_pass import ForwardPass
from attnbalance.finetuning.objectives.objective import Needs, Targets, Term, TermKind
from attnbalance.finetuning.ranking import score_prompts

DOWNWEIGHT = 0.1
"""The weight that `weighted-ce(relevance)` gives facts whose answer loses when the base looks more at their subject."""

SCORE = " score"
"""The suffix of the target that holds the score whose rank is the weight."""

EQUAL = 1e-5
"""Scores that differ by less, relative to the largest size, share a rank: rounding in float32 moves a score by less."""


def cross_entropy(forward: ForwardPass, term: Term) -> Float[Tensor, " token"]:
    """`ce`: negative log-likelihood of the answer, nats a token; ordinary finetuning.

    It treats all facts alike, whether the model knows them or not (of replayed ones see `Objective.losses`). On unknown
    facts, attention to the subject does not lower the loss and is unlearned (Ghosal et al. 2024, section 4).
    """
    return forward.losses()


def weighted_cross_entropy(forward: ForwardPass, term: Term) -> Float[Tensor, " token"]:
    """`weighted-ce`: cross-entropy, each fact weighted by a reading of the base model.

    relevance: `DOWNWEIGHT` for facts whose answer loses when all heads of the base look more at the subject (push below
    0, see `read_relevance`), 1 for the others. In the one-layer model of Theorem 4.5 of Ghosal et al. 2024 these are
    the facts with s_rel < p_rel, and training on them takes attention off the subject. salience: the fact's rank by
    value salience in context among the training facts, 0 to 1. Either reading compares an answer with those of the
    training facts, also in evaluation. There, facts of a relation without training facts are compared with one another,
    and still ranked among the training facts. Weights are computed once, from the base; signs may change during
    training. A fact of weight 0 is not learned.
    """
    return forward.losses() * forward.target(term.key)[forward.example]


def make_weights(term: Term, examples: Sequence[Example], base: BaseModel) -> Iterable[tuple[int, Targets]]:
    """The weight of each example, and for salience the score whose rank it is."""
    among = prompts_of(base.among)
    scores = score_prompts(prompts_of(examples), str(term.argument), base.hooked, base.batch_size, among)
    if term.argument == "relevance":
        return enumerate(
            {term.key: torch.tensor(DOWNWEIGHT if score < 0 else 1.0, dtype=torch.float32)} for score in scores
        )
    own = torch.tensor(scores, dtype=torch.float32)
    others = torch.stack([example.targets[term.key + SCORE] for example in base.among]) if base.among else own
    ordered = others.sort().values
    margin = EQUAL * ordered.abs().max()
    below, up_to = torch.searchsorted(ordered, own - margin), torch.searchsorted(ordered, own + margin, right=True)
    ranks = (below + up_to) / (2 * len(ordered))  # equal scores count half
    return enumerate({term.key: rank, term.key + SCORE: score} for rank, score in zip(ranks, own, strict=True))


CE = TermKind("ce", cross_entropy, by_token=True, learns_answers=True)
WEIGHTED_CE = TermKind(
    "weighted-ce",
    weighted_cross_entropy,
    Needs(spans=frozenset({"subject"})),
    make_weights,
    choices=("relevance", "salience"),
    by_token=True,
    learns_answers=True,
)
