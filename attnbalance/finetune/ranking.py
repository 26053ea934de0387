"""Ranking facts by what a model shows of them, where popularity is unknown or not to be trusted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy

from attnbalance.errors import DataError
from attnbalance.facts import FactSet
from attnbalance.finetune.examples import IGNORED, answer_logits, examples_of
from attnbalance.models.bridge import bridge_of
from attnbalance.models.hooked import HookedModel
from attnbalance.prompts import Prompt, Template, make_prompts
from attnbalance.readings.contrast import make_contrasts
from attnbalance.readings.ledger import read_ledger
from attnbalance.readings.relevance import read_relevance

RANKINGS = ("popularity", "loss", "salience", "relevance")


def rank_facts(
    facts: FactSet, by: str, model: HookedModel | None = None, *, template: str | Template = "qa", batch_size: int = 32
) -> list[float]:
    """One score a fact, in order, for `split_facts(..., scores=)`.

    "popularity": the facts' own. "loss": minus the model's loss on the answer behind the prompt, nats a token (as
    Ghosal et al. 2024 rank MMLU). "salience": in-context value salience, summed over layers and heads
    (`Ledger.readout`). These three are meant to be higher for facts that are known better. "relevance" is not: it is
    the push that training on the fact gives to subject attention, summed over layers and heads (`read_relevance`), so
    that "top" holds the facts that pull attention to the subject and "bottom" those that push it off; facts that are
    known well give little of either. Raises `DataError` for another ranking, for facts without popularity and where a
    model is needed and not given, and what the readings raise.
    """
    if by not in RANKINGS:
        raise DataError(f"no ranking {by!r}; there are {', '.join(RANKINGS)}")
    if by == "popularity":
        unknown = [fact.subject for fact in facts if fact.popularity is None]
        if unknown:
            raise DataError(f"{len(unknown)} of {len(facts)} facts have no popularity (first: {unknown[0]!r})")
        return [float(fact.popularity or 0.0) for fact in facts]
    if model is None:
        raise DataError(f"a ranking by {by} reads a model; pass one")
    return score_prompts(make_prompts(facts, template), by, model, batch_size)


def score_prompts(prompts: Sequence[Prompt], by: str, model: HookedModel, batch_size: int = 32) -> list[float]:
    """The scores of `rank_facts` that a model gives: "loss", "salience" or "relevance", one for each prompt."""
    if by == "loss":
        examples = examples_of(prompts, model.tokenizer, end=False)
        found = [one for batch in answer_logits(model, examples, batch_size) for one in batch]
        answers = [torch.tensor([i for i in one.labels if i != IGNORED]) for one in examples]
        return [-float(cross_entropy(one, ids.to(one.device))) for one, ids in zip(found, answers, strict=True)]
    if by == "relevance":
        values = read_relevance(model, prompts, batch_size=batch_size).push.values
    else:
        contrasts = make_contrasts(prompts, model.tokenizer)
        values = read_ledger(bridge_of(model), contrasts, batch_size=batch_size).readout().values
    return values.double().sum((1, 2)).tolist()
