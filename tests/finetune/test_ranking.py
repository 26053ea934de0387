"""Scores of facts, each against its own oracle, and what splits make of them."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from attnbalance import Fact, FactSet, load_model
from attnbalance.errors import DataError
from attnbalance.finetune.ranking import rank_facts
from attnbalance.finetune.splits import split_facts
from attnbalance.models.bridge import bridge_of
from attnbalance.prompts import make_prompts
from attnbalance.readings.contrast import make_contrasts
from attnbalance.readings.salience import read_value_salience

FACTS = FactSet(
    tuple(
        Fact(f"Subject {i}", "city", (("Paris", "London", "Rome")[i % 3],), 100.0 - i, f"Where is Subject {i}?")
        for i in range(12)
    )
)


@pytest.fixture(scope="module")
def model():
    return load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())


def test_popularity_is_the_facts_own(model):
    assert rank_facts(FACTS, "popularity") == [100.0 - i for i in range(12)]


def test_loss_is_the_models_mean_loss_on_the_answer_alone(model):
    scores = rank_facts(FACTS, "loss", model, batch_size=5)
    for fact, score in zip(FACTS, scores, strict=True):
        prompt = f"Question: {fact.question} Answer:"
        start = len(model.tokenizer(prompt)["input_ids"])
        ids = torch.tensor([model.tokenizer(f"{prompt} {fact.answer}")["input_ids"]])
        with torch.no_grad():
            logp = model.model(input_ids=ids).logits[0, start - 1 : -1].log_softmax(-1)
        expected = float(logp.gather(1, ids[0, start:, None]).mean())
        assert score == pytest.approx(expected, abs=1e-4)  # float32, another batch


def test_salience_and_relevance_give_one_finite_score_a_fact_and_differ(model):
    salience, relevance = (rank_facts(FACTS, by, model) for by in ("salience", "relevance"))
    assert len(set(salience)) == len(set(relevance)) == len(FACTS)
    contrasts = make_contrasts(make_prompts(FACTS, "qa"), model.tokenizer)
    static = read_value_salience(bridge_of(model), contrasts, at="embedding").values.sum((1, 2)).tolist()
    assert salience != pytest.approx(static)  # in context, not from the embedding


def test_a_split_by_scores_takes_the_half_with_the_higher_ones():
    scores = [float(i % 7) + i / 100 for i in range(12)]
    of = dict(zip((fact.subject for fact in FACTS), scores, strict=True))
    top, bottom = (split_facts(FACTS, name, scores=scores) for name in ("top", "bottom"))
    high = [of[fact.subject] for fact in (*top.train, *top.validation)]
    low = [of[fact.subject] for fact in (*bottom.train, *bottom.validation)]
    assert min(high) > max(low)
    assert top.heldout == bottom.heldout == split_facts(FACTS, "top").heldout


@pytest.mark.parametrize(
    ("by", "message"), [("fame", "no ranking 'fame'"), ("loss", "reads a model; pass one"), ("popularity", "1 of 1")]
)
def test_rankings_that_cannot_be_made_are_refused(by, message):
    with pytest.raises(DataError, match=message):
        rank_facts(FactSet((Fact("S", "city", ("Paris",)),)), by)


@pytest.mark.parametrize("scores", [[1.0], [float("nan")] * 12])
def test_scores_must_be_one_finite_number_a_fact(scores):
    with pytest.raises(DataError, match="one finite number a fact"):
        split_facts(FACTS, "top", scores=scores)
