"""Sentences, their weights, entropy and splits, against hand counts."""

from __future__ import annotations

import math

import pytest
import torch

from attnbalance.errors import DataError
from attnbalance.theory.attention_mlp import make_attention_mlp
from attnbalance.theory.sentences import CONTEXT, FORMAT, Samples, make_sentences

# Both sides add up at most some hundred numbers of size 1 in float64, which loses 1e-13. A wrong sign or factor shows
# as 1e-3.
EXACT = {"atol": 1e-10, "rtol": 0.0}


def test_one_soft_sample_stands_for_the_sentences_that_begin_alike() -> None:
    sentences = make_sentences([3], pairs=2, frequent=1.0, multiplicity=3, universe=4)
    model = make_attention_mlp([0], sentences.tokens, neurons=3, spread=0.5)
    merged = sentences.pretraining()
    tokens, target = [], []
    for pair in range(2):
        for phrase in sentences.frequent[0, pair].tolist():
            s = sentences.subject + pair
            tokens += [[-1, CONTEXT, s], [CONTEXT, s, phrase]]
            target += [phrase, sentences.answer + pair]
    hard = torch.nn.functional.one_hot(torch.tensor([target]), sentences.tokens).double()
    apart = Samples(torch.tensor([tokens]), hard, torch.full((1, 12), 1 / 12, dtype=torch.float64))
    expected = vars(model.gradient(apart))
    for name, gradient in vars(model.gradient(merged)).items():
        torch.testing.assert_close(gradient, expected[name], **EXACT)


def test_weights_by_hand_and_rare_pairs_count_as_much_as_frequent_ones() -> None:
    sentences = make_sentences([0], pairs=2, frequent=0.5, multiplicity=3, universe=3)
    weight = sentences.pretraining().weight[0]  # (c, s) of both pairs, three sentences of one, one of the other
    torch.testing.assert_close(weight, torch.tensor([3, 3, 1, 1, 1, 3], dtype=torch.float64) / 12, **EXACT)


@pytest.mark.parametrize(("frequent", "expected"), [(1.0, math.log(5) / 2), (0.5, math.log(5) / 4), (0.0, 0.0)])
def test_entropy_is_that_of_the_targets(frequent: float, expected: float) -> None:
    sentences = make_sentences([0, 1], pairs=4, frequent=frequent, multiplicity=5, universe=6)
    samples = sentences.pretraining()
    counted = -(samples.weight[..., None] * torch.xlogy(samples.target, samples.target)).sum((1, 2))
    assert sentences.entropy == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(counted, torch.full((2,), expected, dtype=torch.float64), **EXACT)


def test_questions_are_split_by_share_and_nothing_is_in_two_parts() -> None:
    sentences = make_sentences([0, 5], pairs=20, frequent=0.5)
    small, large = sentences.split(0.2), sentences.split(0.6)
    assert (small.train.tokens[..., -1] == FORMAT).all()
    for run in range(2):
        subjects = [set(part.tokens[run, :, 1].tolist()) for part in (large.train, large.frequent, large.rare)]
        assert [len(group) for group in subjects] == [6, 4, 10]
        assert len(set.union(*subjects)) == 20
        assert set(small.train.tokens[run, :, 1].tolist()) < subjects[0]
    spared = sentences.split(0.2, 0.6)
    assert torch.equal(spared.frequent.tokens, large.frequent.tokens)
    assert torch.equal(spared.train.tokens, small.train.tokens)


def test_an_own_phrase_is_nobody_elses() -> None:
    own = make_sentences([0], pairs=10, frequent=0.5, universe=4, rare_phrase="own")
    assert own.rare[0].tolist() == [6, 7, 8, 9, 10]
    assert own.frequent.max() < 6
    assert make_sentences([0], pairs=10, frequent=0.5, universe=4).rare.max() < 6


def test_phrases_are_nested_in_multiplicity_and_differ_from_seed_to_seed() -> None:
    few, many = (make_sentences([0, 1], pairs=6, frequent=1.0, multiplicity=K, universe=9) for K in (2, 4))
    assert torch.equal(few.frequent, many.frequent[..., :2])
    assert all(len(set(row)) == 4 for row in many.frequent[0].tolist())
    assert not torch.equal(many.frequent[0], many.frequent[1])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pairs": 0}, "0 pairs"),
        ({"frequent": 1.5}, "got 1.5"),
        ({"frequent": -0.1}, "got -0.1"),
        ({"multiplicity": 0}, "multiplicity K.*got 0"),
        ({"multiplicity": 4, "universe": 3}, "3 universal phrases, got 4"),
        ({"rare_phrase": "mine"}, "universal, own, got 'mine'"),
    ],
)
def test_impossible_sizes_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_sentences([0], **({"pairs": 4} | wrong))


def test_a_split_needs_frequent_pairs_and_shares_in_order() -> None:
    with pytest.raises(DataError, match="no pair is frequent"):
        make_sentences([0], pairs=2, frequent=0.0).split(0.5)
    sentences = make_sentences([0], pairs=4)
    for share, spared in ((0.0, None), (1.1, None), (0.5, 0.2)):
        with pytest.raises(DataError, match=f"{share}"):
            sentences.split(share, spared)
