"""Each theorem of Ghosal et al. on random instances, at the edges of its assumptions, and failing without them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attnbalance.errors import DataError, DivergenceError
from attnbalance.theory.attention_only import AttentionOnly, attention_only
from attnbalance.theory.ghosal import (
    hiding_attention,
    memorising_model,
    theorem_4_2,
    theorem_4_5,
    theorem_4_6,
    theorem_a1,
    theorem_a5,
    theorem_a6,
    theorem_a9,
    theorem_a10,
    theorem_a11,
)
from attnbalance.theory.outcome import Outcome
from attnbalance.theory.triples import Examples, Triples, make_triples

ON_200 = settings(max_examples=200, deadline=None, derandomize=True)
seeds = st.integers(0, 10_000)


@st.composite
def worlds(draw: st.DrawFn) -> Triples:
    relations = draw(st.integers(1, 4))
    answers = draw(st.integers(2 * relations, 14))
    sizes = {"subjects": draw(st.integers(2, 12)), "relations": relations, "answers": answers}
    return make_triples([draw(seeds)], **sizes, alpha=draw(st.floats(0.1, 3)))


def sharing_answers(seed: int) -> Triples:
    """A world in which relations share answers, as the statement of A.1 allows."""
    world = make_triples([seed], subjects=8, relations=3, answers=4)
    drawn = torch.randint(4, (1, 8, 3), generator=torch.Generator().manual_seed(seed))
    return replace(world, answer=8 + 2 * 3 + drawn)


@ON_200
@given(worlds())
def test_theorem_a1_one_layer_memorises_every_fact(world: Triples) -> None:
    outcome = theorem_a1(world)
    assert outcome.applies
    assert outcome.holds
    # A.2's Z: the answer gets 1/2 from each side, any other at most 1/2 in all
    assert outcome.measured["least margin in logits"] in (0.5, 1.0)


def test_theorem_a1_fails_where_relations_share_answers() -> None:
    outcomes = [theorem_a1(sharing_answers(seed)) for seed in range(20)]
    assert not any(outcome.applies for outcome in outcomes)
    assert sum(not outcome.holds for outcome in outcomes) > 10


def test_theorem_a1_itself_needs_no_such_condition() -> None:
    """If relations share answers, another model memorises all facts, with separate attention for each fact."""
    for seed in range(20):
        world = sharing_answers(seed)
        facts, x = world.examples(), torch.linspace(0.5, 2, 4, dtype=torch.float64)
        answers = torch.arange(world.tokens - 4, world.tokens)
        W_V = torch.full((1, world.tokens, world.tokens), -100.0, dtype=torch.float64)
        W_V[0, answers, :8] = -(x**2)[:, None]  # at a subject
        W_V[0, answers, 8:11] = x[:, None]  # at a relation: the mix is largest at x = (1 - Att) / (2 Att)
        W_KQ = torch.zeros_like(W_V)
        W_KQ[0, facts.subject[0], facts.query[0]] = torch.logit(1 / (1 + 2 * x[facts.answer[0] - answers[0]]))
        assert bool(AttentionOnly(W_V, W_KQ).correct(facts).all())


def test_theorem_a1_as_printed_fails_where_one_answer_is_frequent() -> None:
    # three subjects have answer x, the fourth y: the printed sum gives W_V[x, r] = 3, so that for the fourth x scores
    # 3/2 against y's (1 + 1)/2
    world = make_triples([0], subjects=4, relations=1, answers=2)
    x, y = world.tokens - 2, world.tokens - 1
    world = replace(world, answer=torch.tensor([[[x], [x], [x], [y]]]))
    facts, values = world.examples(), torch.zeros(world.tokens, world.tokens, dtype=torch.float64)
    for s, r, a in zip(facts.subject[0], facts.query[0], facts.answer[0], strict=True):
        values[a, s] += 1
        values[a, r] += 1
    printed = AttentionOnly(values[None], torch.zeros_like(values)[None])
    assert printed.correct(facts).tolist() == [[True, True, True, False]]
    assert theorem_a1(world).holds


@st.composite
def memorised(draw: st.DrawFn) -> tuple[AttentionOnly, Examples]:
    """Random values of at least 0 on top of a memorising construction, with popular and rare answers."""
    world = draw(worlds())
    generator = torch.Generator().manual_seed(draw(seeds))
    strength = 1 + 4 * torch.rand(world.tokens, generator=generator, dtype=torch.float64)
    noise = torch.rand(1, world.tokens, world.tokens, generator=generator, dtype=torch.float64)
    W_V = memorising_model(world).W_V * strength + 0.4 * noise
    return AttentionOnly(W_V, torch.zeros_like(W_V)), world.examples()


@ON_200
@given(memorised())
def test_theorem_a5_attention_hides_facts_that_are_stored(instance: tuple[AttentionOnly, Examples]) -> None:
    model, asked = instance
    outcome = theorem_a5(model, asked)
    assume(outcome.applies)
    assert outcome.holds
    assert outcome.measured["hidden"] > 0
    assert outcome.measured["least room below the exact threshold"] > -1e-9


@ON_200
@given(memorised())
def test_theorem_4_2_the_exact_threshold_is_where_the_answer_turns(instance: tuple[AttentionOnly, Examples]) -> None:
    assert theorem_4_2 is theorem_a5
    model, asked = instance
    threshold = hiding_attention(model, asked)
    hideable = threshold > 1e-6
    below, above = (model.correct(asked, threshold * scale) for scale in (1 - 1e-6, 1 + 1e-6))
    assert not bool((below & hideable).any())
    stored = model.correct(asked, torch.full_like(threshold, 0.5))
    assert bool(above[hideable & stored].all())
    assert bool((threshold[stored] <= 0.5).all())


def test_theorem_4_2_as_printed_is_too_weak() -> None:
    # S = 4, d = 2: printed threshold d / S = 1/2, right one d / (S + d) = 1/3; at 0.4 the fact is still right
    W_V = torch.zeros(1, 4, 4, dtype=torch.float64)
    W_V[0, 2, 0], W_V[0, 3, 1] = 4.0, 2.0
    model, asked = AttentionOnly(W_V, torch.zeros_like(W_V)), example(0, 1, 2)
    assert hiding_attention(model, asked).item() == pytest.approx(1 / 3)
    assert bool(model.correct(asked, torch.tensor([[0.4]], dtype=torch.float64)))
    assert not bool(model.correct(asked, torch.tensor([[0.33]], dtype=torch.float64)))
    assert theorem_a5(model, asked).measured["largest d / (S + d)"] == pytest.approx(1 / 3)


def test_theorem_a5_fails_without_each_of_its_assumptions() -> None:
    zeros = torch.zeros(1, 5, 5, dtype=torch.float64)
    two = Examples(*(torch.tensor([row]) for row in ([0, 1], [2, 2], [3, 4])), torch.full((1, 2), 0.5).double())

    def outcome(own: float, other: float, at_query: tuple[float, float]) -> Outcome:
        """Two facts of one query; each subject holds `own` for its answer and `other` for the other's."""
        W_V = zeros.clone()
        W_V[0, 3, 0] = W_V[0, 4, 1] = own
        W_V[0, 4, 0] = W_V[0, 3, 1] = other
        W_V[0, 3, 2], W_V[0, 4, 2] = at_query
        return theorem_a5(AttentionOnly(W_V, zeros.clone()), two)

    def fails(outcome: Outcome, assumption: str) -> None:
        assert [name for name, met in outcome.assumptions.items() if not met] == [assumption]
        assert not outcome.holds

    met = outcome(4.0, 0.0, (1.0, 2.0))
    assert met.applies
    assert met.holds
    fails(outcome(4.0, 0.0, (2.0, 2.0)), "A.2: no query's values are alike for all of its answers")
    # at d / (S + d) = 1/5 a negative entry at the subject pulls the query's favourite down: still right
    fails(outcome(4.0, -6.0, (1.0, 2.0)), "entries of W_V are at least 0")
    # A.4 is met (S >= max_a' V[a', r] - V[a, r]: 3 >= 1), and yet the other answer wins
    fails(outcome(3.0, 4.0, (1.0, 2.0)), "with W_KQ = 0 all facts are right")


def example(subject: int, query: int, answer: int) -> Examples:
    return Examples(*(torch.tensor([[token]]) for token in (subject, query, answer)), torch.ones(1, 1).double())


@ON_200
@given(seeds, st.floats(0.05, 10.0), st.floats(1e-3, 10.0))
def test_theorem_a11_a_step_on_one_fact_moves_attention_on_all_subjects(seed: int, scale: float, rate: float) -> None:
    model = attention_only(10, [seed], scale=scale)
    outcome = theorem_a11(model, example(0, 8, 9), rate=rate)
    assert outcome.applies
    assert outcome.holds


def test_theorem_4_5_holds_for_both_signs() -> None:
    assert theorem_4_5 is theorem_a11
    outcomes = [theorem_a11(attention_only(10, [seed], scale=1.0), example(0, 8, 9)) for seed in range(50)]
    raised = [outcome for outcome in outcomes if outcome.measured["s_rel - p_rel"] > 0]
    assert 5 < len(raised) < 45
    assert all(outcome.measured["least change"] > 0 for outcome in raised)
    assert all(outcome.measured["largest change"] < 0 for outcome in outcomes if outcome not in raised)


def test_theorem_a11_holds_where_attention_is_too_near_1_to_show_it() -> None:
    outcomes = [theorem_a11(attention_only(10, [seed], scale=10.0), example(0, 8, 9)) for seed in range(100)]
    assert not any(outcome.refuted for outcome in outcomes)
    unmoved = [
        outcome
        for outcome in outcomes
        if outcome.applies and 0 in (outcome.measured["least change"], outcome.measured["largest change"])
    ]
    assert len(unmoved) > 5
    lost = theorem_a11(attention_only(10, [0], scale=1e4), example(0, 8, 9))
    assert not lost.assumptions["neither token has all attention, to a float"]
    assert not lost.holds


def test_theorem_a11_the_step_is_autograd_s_for_the_scores_alone() -> None:
    model, fact = attention_only(10, [3], scale=1.0), example(0, 8, 9)
    W_KQ = model.W_KQ.clone().requires_grad_()
    (slope,) = torch.autograd.grad(AttentionOnly(model.W_V, W_KQ).loss(fact).sum(), W_KQ)
    after = AttentionOnly(model.W_V, model.W_KQ - slope)
    others = torch.tensor([[t for t in range(10) if t != 8]])
    asked = Examples(others, torch.full_like(others, 8), others, torch.ones(1, 9).double())
    change = after.attention(asked) - model.attention(asked)
    outcome = theorem_a11(model, fact)
    assert outcome.measured["least change"] == pytest.approx(float(change.min()), abs=1e-12)
    assert outcome.measured["largest change"] == pytest.approx(float(change.max()), abs=1e-12)
    odds = torch.logit(after.attention(asked)) - torch.logit(model.attention(asked))
    assert outcome.measured["least change of log-odds"] == pytest.approx(float(odds.min()), abs=1e-10)
    assert outcome.measured["largest change of log-odds"] == pytest.approx(float(odds.max()), abs=1e-10)
    relevance, share = model.relevance(fact), model.attention(fact)
    expected = float(share * (1 - share) * (relevance.subject - relevance.prompt))  # with the factor A.5 leaves out
    assert float((-slope)[0, 0, 8]) == pytest.approx(expected, abs=1e-12)
    assert float((-slope)[0, 8, 8]) == pytest.approx(-expected, abs=1e-12)


def test_theorem_a11_fails_with_another_prompt_token_and_for_steps_uphill() -> None:
    model = attention_only(10, [0], scale=1.0)
    other = theorem_a11(model, example(0, 8, 9), prompt=7)
    assert not other.assumptions["the others are asked with the fact's own prompt token"]
    assert not other.holds
    assert other.measured["largest change"] == other.measured["least change"] == 0
    uphill = theorem_a11(model, example(0, 8, 9), rate=-1.0)
    assert not uphill.applies
    assert not uphill.holds
    still = theorem_a11(AttentionOnly(torch.zeros_like(model.W_V), model.W_KQ), example(0, 8, 9))
    assert not still.assumptions["s_rel and p_rel differ"]
    assert not still.holds
    for fact, prompt in ((example(0, 8, 10), None), (example(0, 8, 9), 10)):
        with pytest.raises(DataError, match="the model has tokens 0 to 9"):
            theorem_a11(model, fact, prompt=prompt)
    with pytest.raises(DataError, match="expected one fact of one run"):
        theorem_a11(model, example(0, 8, 9).take(torch.tensor([[0, 0]])))


@ON_200
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=30))
def test_theorem_a6_softmax_of_bounded_entries_is_bounded(entries: list[float]) -> None:
    x = torch.tensor(entries, dtype=torch.float64)
    outcome = theorem_a6(x, max(1e-9, float(x.abs().max()) * (1 + 1e-12)))
    assert outcome.applies
    assert outcome.holds


def test_theorem_a6_fails_for_entries_beyond_the_bound_and_with_e_to_the_c() -> None:
    outcome = theorem_a6(torch.tensor([3.0, -3.0, -3.0]).double(), 0.5)
    assert not outcome.applies
    assert not outcome.holds
    x = torch.tensor([2.0, -2.0, -2.0, -2.0]).double()
    assert theorem_a6(x, 2.0).holds
    assert float(x.softmax(0).max()) < math.exp(2 * 2) / 3
    assert float(x.softmax(0).min()) < math.exp(-2) / 4  # e^-C for e^-2C would not do
    with pytest.raises(DataError, match="at least 2 entries"):
        theorem_a6(torch.ones(1).double(), 1.0)


@st.composite
def streams(draw: st.DrawFn) -> tuple[Triples, Examples, float]:
    world = make_triples(
        [draw(seeds)],
        subjects=draw(st.integers(2, 8)),
        relations=draw(st.integers(1, 3)),
        answers=draw(st.integers(3, 60)),
    )
    generator = torch.Generator().manual_seed(draw(seeds))
    return world, world.drawn(draw(st.integers(5, 40)), [generator]), draw(st.floats(1e-3, 0.5))


@ON_200
@given(streams(), st.booleans())
def test_theorem_a9_a_token_s_values_grow_with_its_answers(instance: tuple, of_relation: bool) -> None:
    world, stream, rate = instance
    token = int((stream.query if of_relation else stream.subject)[0, 0])
    outcome = theorem_a9(stream, token, world.tokens, rate)
    assert outcome.applies
    assert outcome.holds


def unmet(outcome: Outcome) -> list[str]:
    return [name for name, met in outcome.assumptions.items() if not met]


def test_theorem_a9_fails_where_training_starts_elsewhere_or_entries_exceed_both_bounds() -> None:
    world = make_triples([0], subjects=3, relations=2, answers=6)
    stream, rate = world.drawn(60, [torch.Generator().manual_seed(0)]), 2.0
    token = int(stream.subject[0].mode().values)
    assert theorem_a9(stream, token, world.tokens, rate).holds
    # neither bound is sharp: with one of them too small the statement still holds here, with both it does not
    for bounds in ({"C_KQ": 0.0}, {"C_V": 0.0}):
        loose = theorem_a9(stream, token, world.tokens, rate, **bounds)
        assert len(unmet(loose)) == 1
        assert loose.holds
    both = theorem_a9(stream, token, world.tokens, rate, C_KQ=0.0, C_V=0.0)
    assert len(unmet(both)) == 2
    assert not both.holds
    below = torch.full((1, world.tokens, world.tokens), -1.0, dtype=torch.float64)
    start = AttentionOnly(below, torch.zeros_like(below))
    elsewhere = theorem_a9(stream, token, world.tokens, 1e-3, C_V=2.2, start=start)
    assert unmet(elsewhere) == ["training starts at 0"]
    assert not elsewhere.holds
    with pytest.raises(DataError, match="no example with token 99"):
        theorem_a9(stream, 99, world.tokens, rate)
    with pytest.raises(DivergenceError, match=r"learning rate 1e\+06 takes entries to"):
        theorem_a9(stream, token, world.tokens, 1e6)


def test_theorem_a9_one_step_is_worked_by_hand() -> None:
    # from zeros attention is 1/2 and f is even over 5 tokens: phi(a)^T W_V phi(s) = rate (1 - 1/5) / 2
    outcome = theorem_a9(example(0, 1, 2), 0, 5, 0.1)
    model_value = 0.1 * 0.8 / 2
    C_V = 2 * model_value
    bound = 0.1 * (0.5 - math.exp(C_V) / 4)
    assert outcome.measured["C_V"] == pytest.approx(C_V)
    assert outcome.measured["C_KQ"] == 0
    assert outcome.measured["least slack"] == pytest.approx(model_value - bound)
    for rate in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(DataError, match="learning rate must be finite and > 0"):
            theorem_a9(example(0, 1, 2), 0, 5, rate)


@ON_200
@given(streams())
def test_theorem_a10_salience_grows_with_how_often_a_fact_is_seen(instance: tuple) -> None:
    world, stream, rate = instance
    outcome = theorem_a10(stream, int(stream.subject[0, 0]), int(stream.query[0, 0]), world.tokens, rate)
    assume(outcome.applies)
    assert outcome.holds


def test_theorem_4_6_applies_to_rare_tokens_and_fails_for_a_subject_seen_too_often() -> None:
    assert theorem_4_6 is theorem_a10
    world = make_triples([1], subjects=4, relations=4, answers=60)
    facts = world.examples()
    for times in (1, 3, 9):
        stream = facts.take(torch.tensor([[0] * times + list(range(16))]))
        outcome = theorem_a10(stream, 0, int(facts.query[0, 0]), world.tokens, 0.2)
        assert outcome.applies
        assert outcome.holds
        assert outcome.measured["n"] == times + 1
    # the same subject with one other answer 60 times: its salience for the fact seen once is driven below 0
    stream = facts.take(torch.tensor([[0] + [1] * 60]))
    outcome = theorem_a10(stream, 0, int(facts.query[0, 0]), 8 + 4 + 60, 1.0)
    assert not outcome.assumptions["the subject is seen seldom enough that c_1 > 0"]
    assert not outcome.holds
    with pytest.raises(DataError, match="no example of subject 3 with query 99"):
        theorem_a10(stream, 3, 99, 72, 1.0)


def test_theorem_a10_fails_for_a_pair_with_two_answers_and_where_training_starts_elsewhere() -> None:
    answers = torch.tensor([[9] * 2 + [10] * 10])
    stream = Examples(*(torch.full((1, 12), token) for token in (0, 8)), answers, torch.full((1, 12), 1 / 12).double())
    two = theorem_a10(stream, 0, 8, 60, 0.2)
    assert unmet(two) == ["the pair has one answer"]
    assert not two.holds
    single = Examples(stream.subject, stream.query, torch.full_like(answers, 9), stream.weight)
    assert theorem_a10(single, 0, 8, 60, 0.2).holds
    below = torch.full((1, 60, 60), -0.5, dtype=torch.float64)
    elsewhere = theorem_a10(single, 0, 8, 60, 0.02, C_V=1.1, start=AttentionOnly(below, torch.zeros_like(below)))
    assert unmet(elsewhere) == ["training starts at 0"]
    assert not elsewhere.holds


def test_theorem_4_6_is_a_lower_bound_alone() -> None:
    """Measured, not claimed: among facts seen equally often the one whose subject is busier is stored less."""
    facts = make_triples([2], subjects=4, relations=4, answers=60).examples()
    alone = theorem_a10(facts.take(torch.tensor([[0] * 4])), 0, int(facts.query[0, 0]), 72, 0.5)
    busy = theorem_a10(facts.take(torch.tensor([[0, 1, 2, 3] * 4])), 0, int(facts.query[0, 0]), 72, 0.5)
    assert alone.measured["n"] == busy.measured["n"] == 4
    assert busy.measured["salience"] < alone.measured["salience"]
