"""Statements of Xu & Chen (2025) on random worlds: trained models draw their world, their start and the length of c."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbalance.theory.acquisition import Acquired, Setting, Stages, acquire, extract
from attnbalance.theory.attention_mlp import make_attention_mlp
from attnbalance.theory.outcome import Outcome
from attnbalance.theory.sentences import make_sentences
from attnbalance.theory.xu_chen import (
    lemma_1,
    proposition_1,
    proposition_2,
    proposition_3,
    rank_one_matches,
    theorem_2_1,
    theorem_2_2,
    theorem_2_3,
)

SMALL = Setting(pairs=10, universe=8, neurons=16, scale=1.5, dtype=torch.float32)
SMALL = replace(SMALL, stages=Stages((0.3, 0.6, 0.3), (150, 100, 50)))
SHAPES = (
    SMALL,
    replace(SMALL, pairs=12, universe=10),
    replace(SMALL, pairs=8, frequent=1.0, universe=8),
    replace(SMALL, universe=6),
)
"""Each is trained for 50 seeds, 200 instances in all."""
EACH = 50

WIDE = Setting(pairs=24, frequent=1.0, universe=4, neurons=16, scale=1.5, dtype=torch.float32)
WIDE = replace(WIDE, stages=Stages((0.6, 1.0, 0.5), (80, 80, 20)))
"""Many more pairs than phrases: n = 24 is at least 4 M."""

TREND = Setting(pairs=24, frequent=1.0, universe=16, share=0.5, rate=0.03, steps=100, dtype=torch.float32)
TREND = replace(TREND, stages=Stages((0.3, 0.3, 0.15), (50, 150, 50)))
SEEDS = tuple(range(8))

instance = st.tuples(st.integers(0, len(SHAPES) - 1), st.integers(0, EACH - 1))
every = settings(max_examples=200, deadline=None, derandomize=True)


@functools.cache
def trained(shape: int) -> Acquired:
    lengths = 2.5 + 0.5 * torch.rand(EACH, generator=torch.Generator().manual_seed(shape))
    setting = replace(SHAPES[shape], context_norm=tuple(lengths.tolist()))
    return acquire(setting, range(EACH * shape, EACH * (shape + 1)))


@functools.cache
def alone(setting: Setting, seed: int = 0) -> Acquired:
    return acquire(setting, [seed])


@functools.cache
def wide() -> Acquired:
    return acquire(WIDE, range(25))


def drops(outcome: Outcome, assumption: str) -> None:
    """The conclusion is false, and the assumption named is the one that is not met."""
    assert not outcome.holds
    assert [name for name, met in outcome.assumptions.items() if not met] == [assumption]
    assert not outcome.refuted


@every
@given(st.data())
def test_lemma_1_holds_away_from_kinks(data: st.DataObject) -> None:
    sentences = make_sentences(
        [data.draw(st.integers(0, 10**6))],
        pairs=data.draw(st.integers(1, 4)),
        frequent=data.draw(st.sampled_from((0.0, 0.5, 1.0))),
        multiplicity=2,
        universe=data.draw(st.integers(2, 5)),
        context=data.draw(st.booleans()),
    )
    seed, scale = data.draw(st.integers(0, 10**6)), data.draw(st.floats(0.5, 3))
    length, neurons = data.draw(st.floats(0.5, 3)), data.draw(st.integers(1, 3))
    model = make_attention_mlp([seed], sentences.tokens, neurons=neurons, scale=scale, context_norm=length, spread=1.0)
    # so short a step that none of the few thousand readings, which are about 1, changes sign on the way
    outcome = lemma_1(model, sentences.pretraining(), size=1e-6)
    assert outcome.applies
    assert outcome.holds


def test_lemma_1_fails_at_a_kink() -> None:
    sentences = make_sentences([0], pairs=3)
    model = make_attention_mlp([0], sentences.tokens, neurons=2, spread=0.0)
    drops(lemma_1(model, sentences.pretraining()), "no neuron at its kink")


@every
@given(instance)
def test_theorem_2_1_holds_of_trained_models(index: tuple[int, int]) -> None:
    outcome = theorem_2_1(trained(index[0]).run(index[1]))
    assert outcome.applies
    assert outcome.holds


def test_theorem_2_1_fails_with_uniform_attention() -> None:
    drops(theorem_2_1(alone(replace(SMALL, uniform=True))), "attention is trained, or no context")


def test_theorem_2_1_fails_where_a_target_is_silent() -> None:
    outcome = theorem_2_1(alone(replace(SMALL, neurons=1)))
    drops(outcome, "every target has an active neuron")
    assert outcome.measured["largest gap"] > 0.5


@every
@given(instance)
def test_proposition_1_holds_of_trained_models(index: tuple[int, int]) -> None:
    outcome = proposition_1(trained(index[0]).run(index[1]))
    assert outcome.applies
    assert outcome.holds


def test_proposition_1_fails_with_uniform_attention() -> None:
    drops(proposition_1(alone(replace(SMALL, uniform=True, context_norm=2.5))), "attention is trained")


def test_proposition_1_fails_where_the_context_is_short() -> None:
    drops(proposition_1(alone(replace(SMALL, context_norm=0.3))), "context is longer")


@every
@given(instance)
def test_proposition_2_holds_of_trained_models(index: tuple[int, int]) -> None:
    outcome = proposition_2(trained(index[0]).run(index[1]))
    assert outcome.applies
    assert outcome.holds


def test_proposition_2_fails_with_uniform_attention() -> None:
    drops(proposition_2(alone(replace(SMALL, uniform=True))), "attention is trained, or no context")


def test_proposition_2_fails_where_a_target_is_silent() -> None:
    drops(proposition_2(alone(replace(SMALL, neurons=1))), "every target has an active neuron")


@every
@given(st.integers(0, 24), st.integers(16, 24))
def test_proposition_3_holds_of_trained_models(run: int, pairs: int) -> None:
    outcome = proposition_3(wide().run(run), share=pairs / 24)
    assert outcome.applies
    assert outcome.holds


def test_proposition_3_fails_where_few_pairs_are_finetuned() -> None:
    drops(proposition_3(wide(), share=0.05), "many more finetuned pairs than phrases")


def test_proposition_3_fails_of_three_tokens() -> None:
    drops(proposition_3(acquire(replace(WIDE, context=False), range(5))), "context is written")


@pytest.mark.parametrize(
    "low",
    [replace(TREND, multiplicity=1), replace(TREND, share=0.05, universe=32), replace(TREND, universe=32)],
    ids=["K", "beta", "M"],
)
def test_theorem_2_2_holds_over_seeds(low: Setting) -> None:
    setting = replace(TREND, universe=32) if low.share < TREND.share else TREND
    outcome = theorem_2_2(setting, SEEDS, low=low)
    assert outcome.applies
    assert outcome.holds, outcome


def test_theorem_2_2_trends_need_no_trained_attention() -> None:
    setting = replace(TREND, uniform=True)
    outcome = theorem_2_2(setting, SEEDS, low=replace(setting, universe=32))
    assert outcome.holds
    assert outcome.measured["accuracy"] < theorem_2_2(TREND, SEEDS, low=TREND).measured["accuracy"]


def test_theorem_2_2_fails_where_no_more_phrases_are_covered() -> None:
    drops(theorem_2_2(TREND, SEEDS, low=TREND), "more phrases covered")


def test_theorem_2_3_holds_over_seeds() -> None:
    outcome = theorem_2_3(replace(TREND, multiplicity=1, universe=32, share=0.1), SEEDS)
    assert outcome.applies
    assert outcome.holds, outcome


def test_theorem_2_3_fails_with_high_coverage() -> None:
    drops(theorem_2_3(replace(TREND, multiplicity=1, universe=3, share=0.75), SEEDS), "low coverage")


def test_theorem_2_3_fails_with_several_phrases_a_pair() -> None:
    drops(theorem_2_3(replace(TREND, multiplicity=3, universe=24, share=0.05), SEEDS), "K = 1")


def test_rank_one_finetuning_matches_full_finetuning() -> None:
    outcome = rank_one_matches(TREND, SEEDS)
    assert outcome.applies
    assert outcome.holds, outcome


def test_rare_pairs_are_extracted_only_if_their_phrases_are_universal() -> None:
    setting = replace(TREND, frequent=0.5, universe=4)
    best = {}
    for kind in ("universal", "own"):
        acquired = acquire(replace(setting, rare_phrase=kind), SEEDS)
        best[kind] = extract(acquired, setting, range(setting.steps + 1)).values["rare"].amax(0)
    assert best["own"].max() < 0.1
    assert best["universal"].mean() > 0.5
