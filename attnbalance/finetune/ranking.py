"""Ranking facts by what a model shows of them, where popularity is unknown or not to be trusted."""

from __future__ import annotations

import torch

from attnbalance.errors import DataError
from attnbalance.facts import FactSet
from attnbalance.finetune.examples import answer_losses, collate, make_examples
from attnbalance.models.bridge import bridge_of
from attnbalance.models.forward import evaluating
from attnbalance.models.hooked import HookedModel
from attnbalance.prompts import Template, make_prompts
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
    if by == "loss":
        return _losses(facts, model, template, batch_size)
    prompts = make_prompts(facts, template)
    if by == "relevance":
        values = read_relevance(model, prompts, batch_size=batch_size).push.values
    else:
        contrasts = make_contrasts(prompts, model.tokenizer)
        values = read_ledger(bridge_of(model), contrasts, batch_size=batch_size).readout().values
    return values.double().sum((1, 2)).tolist()


@torch.no_grad()
def _losses(facts: FactSet, model: HookedModel, template: str | Template, batch_size: int) -> list[float]:
    """Minus the mean loss of each fact's answer tokens, the end-of-sequence token left out."""
    examples = make_examples(facts.facts, model.tokenizer, template, end=False)
    scores: list[float] = []
    with evaluating(model.model):
        for start in range(0, len(examples), batch_size):
            batch = {
                name: part.to(model.device)
                for name, part in collate(examples[start : start + batch_size], model.pad_id).items()
            }
            labels = batch.pop("labels")
            total, count = answer_losses(model.model(**batch, use_cache=False).logits, labels).unbind(-1)
            scores += (-total / count).tolist()
    return scores
