"""Ranking facts by a reading of a model, for facts whose popularity is unknown or not to be trusted."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import NoneType

import torch
from torch.nn.functional import cross_entropy

from attnbalance.arguments import expects
from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.prompts import Prompt, Template, make_prompts
from attnbalance.errors import DataError
from attnbalance.finetuning.examples import IGNORED, examples_of
from attnbalance.finetuning.labelled_logits import answer_logits
from attnbalance.models.bridge import bridge_of
from attnbalance.models.hooked import HookedModel
from attnbalance.readings.answer_checks import check_tokens
from attnbalance.readings.answer_tokens import make_answer_tokens
from attnbalance.readings.direct_attribution import read_direct_attribution
from attnbalance.readings.knowledge import knowledge
from attnbalance.readings.relevance import read_relevance

RANKINGS = ("popularity", "loss", "slick", "salience", "relevance")


@expects(facts=[Fact], model=(HookedModel, NoneType))
def rank_facts(
    facts: FactSet,
    by: str,
    model: HookedModel | None = None,
    *,
    template: str | Template = "qa",
    batch_size: int = 32,
    seed: int = 0,
) -> list[float]:
    """One score for each fact, in order, for `split_facts(..., scores=)`.

    - "popularity": the facts' own.
    - "loss": minus the model's loss on the answer after the prompt, nats a token (as Ghosal et al. 2024 rank MMLU).
    - "slick": how surely the model gives the answer (`Knowledge.scores`); many facts share a score.
    - "salience": in-context value salience, summed over layers and heads (`DirectAttribution.value_salience`).
    - "relevance": the push towards the subject, summed over layers and heads (`read_relevance`).

    The first four are meant to be higher for facts that are known better. Relevance is not: "top" holds the facts
    whose answer gains when all heads look more at the subject, "bottom" those whose answer loses; facts that are known
    well gain and lose little. Raises `DataError` for another ranking, for facts without popularity and for a missing
    model, and what the readings raise.

    Args:
        facts: The facts to rank.
        by: One of `RANKINGS`.
        model: The model to read; "popularity" needs none.
        template: How the facts are asked.
        batch_size: Prompts of one forward pass.
        seed: Seed of the examples and samples of "slick".

    >>> rank_facts(FactSet((Fact("Oslo", "country", ("Norway",), 3.0),)), "popularity")
    [3.0]
    """
    if by not in RANKINGS:
        raise DataError(f"no ranking {by!r}; there are {', '.join(RANKINGS)}")
    if by == "popularity":
        unknown = [fact.subject for fact in facts if fact.popularity is None]
        if unknown:
            raise DataError(f"{len(unknown)} of {len(facts)} facts have no popularity (first: {unknown[0]!r})")
        return [float(fact.popularity or 0.0) for fact in facts]
    if model is None:
        raise DataError(f"a ranking by {by} reads a model; pass `model`")
    prompts = make_prompts(facts, template)
    if by == "slick":
        return list(knowledge(model, prompts, forms=(), batch_size=batch_size, seed=seed).scores)
    return score_prompts(prompts, by, model, batch_size)


def score_prompts(
    prompts: Sequence[Prompt], by: str, model: HookedModel, batch_size: int = 32, among: Sequence[Prompt] = ()
) -> list[float]:
    """The scores of `rank_facts` that a model gives, one for each prompt.

    Args:
        prompts: The prompts to score.
        by: "loss", "salience" or "relevance".
        model: The model to read.
        batch_size: Prompts of one forward pass.
        among: The prompts whose answers salience and relevance compare each answer with; by default, and for a relation
            that none of them has, `prompts`.
    """
    if by == "loss":
        examples = examples_of(prompts, model.tokenizer, end=False)
        answers = [torch.tensor([i for i in example.labels if i != IGNORED]) for example in examples]
        scores = {
            i: -float(cross_entropy(logits, answers[i].to(logits.device)))
            for batch in answer_logits(model, examples, batch_size)
            for i, logits in batch
        }
        return [scores[i] for i in range(len(examples))]
    if by == "relevance":
        values = read_relevance(model, prompts, among=among, batch_size=batch_size).push.values
    else:
        answer_tokens = make_answer_tokens(prompts, model.tokenizer, among=among)
        if answer_tokens.ambiguous:
            warnings.warn(
                f"salience compares one token of each answer: {answer_tokens.ambiguous} of {len(answer_tokens)} "
                "facts have a right answer that begins with the same token as a wrong one, and is not told from it",
                stacklevel=2,
            )
        check_tokens(answer_tokens, model.model, model.name)
        values = read_direct_attribution(bridge_of(model), answer_tokens, batch_size=batch_size).value_salience().values
    return values.double().sum((1, 2)).tolist()
