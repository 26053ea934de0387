"""Scores of facts, each against its own oracle, and what splits make of them."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from attnbalance import Fact, FactSet, load_model
from attnbalance.data.prompts import make_prompts
from attnbalance.errors import DataError
from attnbalance.finetuning.ranking import rank_facts, score_prompts
from attnbalance.finetuning.splits import split_facts
from attnbalance.models.bridge import bridge_of
from attnbalance.readings import knowledge as knowledge_module
from attnbalance.readings.answer_tokens import make_answer_tokens
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
    answer_tokens = make_answer_tokens(make_prompts(FACTS, "qa"), model.tokenizer)
    static = read_value_salience(bridge_of(model), answer_tokens, at="embedding").values.sum((1, 2)).tolist()
    assert salience != pytest.approx(static)  # in context, not from the embedding


def test_answers_that_salience_does_not_tell_apart_are_warned_of(model):
    answers = ("New York", "New Orleans", "Paris")
    facts = FactSet(tuple(Fact(f"Subject {i}", "city", (answer,)) for i, answer in enumerate(answers)))
    with pytest.warns(
        UserWarning, match="2 of 3 facts have a right answer that begins with the same token as a wrong one"
    ):
        rank_facts(facts, "salience", model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        rank_facts(FactSet(facts.facts[1:]), "salience", model)


def test_relevance_of_one_fact_is_that_among_the_others_it_is_told_from(model):
    prompts = make_prompts(
        [Fact("Ann", "city", (answer,), 1.0, "Where is Ann?") for answer in ("New York", "New Orleans", "Paris")]
    )
    for others in (prompts[1:2], prompts[1:]):  # the first token tells them apart in the second case alone
        together = score_prompts([prompts[0], *others], "relevance", model)[0]
        alone = score_prompts(prompts[:1], "relevance", model, among=others)
        assert alone == [pytest.approx(together, rel=1e-4)]  # float32, another batch
    assert together != pytest.approx(score_prompts([*prompts[:2]], "relevance", model)[0], rel=1e-2)


def test_slick_puts_what_the_model_answers_before_what_it_does_not(model, monkeypatch):
    known = {fact.subject for fact in FACTS.facts[::2]}

    def answer(hooked, prompts, *, sampling, **how):
        """Every second fact is answered; of the rest, one is sampled."""
        sampled = {"Subject 1"} if sampling else set()
        return [p.fact.answer if p.fact.subject in known | sampled else "" for p in prompts]

    monkeypatch.setattr(knowledge_module, "generate", answer)
    scores = rank_facts(FACTS, "slick", model)
    assert scores == [1.0 if i % 2 == 0 else 0.05 if i == 1 else 0.0 for i in range(12)]
    top = split_facts(FACTS, "top", scores=scores)
    assert {fact.subject for fact in (*top.train, *top.validation)} <= known


def test_slick_draws_by_its_seed_and_not_by_the_batch(model):
    ask = partial(rank_facts, FACTS, "slick", model, template="{subject}:")
    scores = [ask(batch_size=size, seed=seed) for size, seed in ((2, 0), (64, 0), (2, 1))]
    prompts = make_prompts(FACTS, "{subject}:")
    for own, seed in zip(scores[1:], (0, 1), strict=True):
        assert own == list(knowledge_module.knowledge(model, prompts, forms=(), seed=seed).scores)
    assert scores[0] == scores[1]


def test_a_split_by_scores_takes_the_half_with_the_higher_ones():
    scores = [float(i % 7) + i / 100 for i in range(12)]
    of = dict(zip((fact.subject for fact in FACTS), scores, strict=True))
    top, bottom = (split_facts(FACTS, name, scores=scores) for name in ("top", "bottom"))
    high = [of[fact.subject] for fact in (*top.train, *top.validation)]
    low = [of[fact.subject] for fact in (*bottom.train, *bottom.validation)]
    assert min(high) > max(low)
    assert top.heldout == bottom.heldout == split_facts(FACTS, "top").heldout


@pytest.mark.parametrize(
    ("by", "message"),
    [("fame", "no ranking 'fame'"), ("loss", "reads a model; pass `model`"), ("popularity", "1 of 1")],
)
def test_rankings_that_cannot_be_made_are_refused(by, message):
    with pytest.raises(DataError, match=message):
        rank_facts(FactSet((Fact("S", "city", ("Paris",)),)), by)


@pytest.mark.parametrize("scores", [[1.0], [float("nan")] * 12])
def test_scores_must_be_one_finite_number_a_fact(scores):
    with pytest.raises(DataError, match="one finite number for each fact"):
        split_facts(FACTS, "top", scores=scores)


@pytest.mark.parametrize("name", ["whole", "random"])
def test_a_split_that_ranks_nothing_is_the_same_with_any_scores(name):
    assert split_facts(FACTS, name, scores=[float(-i) for i in range(len(FACTS))]) == split_facts(FACTS, name)
