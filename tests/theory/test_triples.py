"""Worlds of facts (s, r, a): impossible sizes, popularity, and the splits of the subjects."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnbalance.errors import DataError
from attnbalance.theory.triples import Triples, make_triples, split_subjects

SEEDS = (0, 1, 2)


@pytest.fixture
def world() -> Triples:
    return make_triples(SEEDS, subjects=12, relations=3, answers=9)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"alpha": 0.0}, "alpha must be finite and > 0"),
        ({"alpha": -1.0}, "alpha must be finite and > 0"),
        ({"alpha": float("nan")}, "alpha must be finite and > 0"),
        ({"alpha": [1.0, 2.0]}, "one alpha or one per seed"),
        ({"answer_alpha": -0.5}, "answer_alpha must be finite and >= 0, got -0.5"),
        ({"answer_alpha": float("nan")}, "answer_alpha must be finite and >= 0, got nan"),
        ({"relations": 10}, "10 relations need at least as many answers, got 9"),
        ({"subjects": 1}, "at least 2 subjects"),
        ({"relations": 0}, "1 relation"),
    ],
)
def test_impossible_worlds_are_refused_with_the_reason(wrong: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_triples(SEEDS, **({"subjects": 12, "relations": 3, "answers": 9} | wrong))


def test_facts_and_prompts_of_a_world_by_hand() -> None:
    # subjects 0 to 2, relations 3 and 4, prompt tokens 5 and 6, answers 7 to 10
    world = make_triples([0], subjects=3, relations=2, answers=4)
    world = replace(world, answer=torch.tensor([[[7, 9], [8, 10], [7, 10]]]))
    facts, prompts = world.examples(), world.examples(asked=True)
    assert facts.subject.tolist() == prompts.subject.tolist() == [[0, 0, 1, 1, 2, 2]]
    assert facts.query.tolist() == [[3, 4, 3, 4, 3, 4]]
    assert prompts.query.tolist() == [[5, 6, 5, 6, 5, 6]]
    assert facts.answer.tolist() == prompts.answer.tolist() == [[7, 9, 8, 10, 7, 10]]
    assert facts.weight.tolist() == [pytest.approx([1 / 6] * 6)]
    assert world.tokens == 11
    last = world.of(torch.tensor([[False, False, True]]))
    assert (last.subject.tolist(), last.query.tolist(), last.answer.tolist()) == ([[2, 2]], [[5, 6]], [[7, 10]])
    assert last.weight.tolist() == [[0.5, 0.5]]
    first = world.examples().take(torch.tensor([[3, 3, 0]]))
    assert (first.subject.tolist(), first.answer.tolist()) == ([[1, 1, 0]], [[10, 10, 7]])


def test_runs_must_choose_equally_many_subjects(world: Triples) -> None:
    chosen = torch.zeros(len(SEEDS), 12, dtype=torch.bool)
    with pytest.raises(DataError, match="at least one"):
        world.of(chosen)
    chosen[:, 0] = chosen[1, 1] = True
    with pytest.raises(DataError, match=r"\[1, 2, 1\]"):
        world.of(chosen)


def test_answers_of_different_relations_are_different_tokens(world: Triples) -> None:
    for run in range(len(SEEDS)):
        groups = [set(world.answer[run, :, relation].tolist()) for relation in range(3)]
        assert all(group <= set(range(12 + 6 + 3 * k, 12 + 6 + 3 * k + 3)) for k, group in enumerate(groups))


def test_subjects_are_drawn_by_popularity_and_relations_evenly() -> None:
    world = make_triples([0], subjects=50, relations=4, answers=8, alpha=1.5)
    drawn = world.drawn(200_000, [torch.Generator().manual_seed(0)])
    shares = torch.bincount(drawn.subject[0], minlength=50) / 200_000
    expected = torch.arange(1, 51).double() ** -1.5
    # 5 standard errors of a share of at most 0.45 among 200,000 draws
    assert float((shares - expected / expected.sum()).abs().max()) < 5 * (0.25 / 200_000) ** 0.5
    assert torch.equal(drawn.answer[0], world.answer[0, drawn.subject[0], drawn.query[0] - 50])


def test_answers_are_drawn_with_zipf_frequencies_within_each_relation() -> None:
    world = make_triples([0], subjects=50_000, relations=2, answers=8, answer_alpha=2.0)
    expected = torch.arange(1, 5).double() ** -2.0
    for column, first in zip(world.answer[0].T, (50_004, 50_008), strict=True):
        shares = torch.bincount(column - first, minlength=4) / 50_000
        # 5 standard errors of a share among 50,000 draws
        assert float((shares - expected / expected.sum()).abs().max()) < 5 * (0.25 / 50_000) ** 0.5


def test_splits_share_the_heldout_subjects_and_take_the_more_or_the_less_popular_of_the_others(world: Triples) -> None:
    splits = {name: split_subjects(world, name, SEEDS) for name in ("top", "bottom", "random", "whole")}
    for split in splits.values():
        assert torch.equal(split.heldout, splits["top"].heldout)
        assert not bool((split.heldout & split.trained).any())
    top, bottom, whole = (splits[name].trained for name in ("top", "bottom", "whole"))
    assert torch.equal(top | bottom, whole)
    assert torch.equal(whole, ~splits["top"].heldout)
    for run in range(len(SEEDS)):
        assert int(top[run].nonzero().max()) < int(bottom[run].nonzero().min())
    asked = world.of(top)
    assert asked.subject.shape == (3, 3 * 3)
    assert bool((asked.query >= 12 + 3).all())
    assert bool(top.gather(1, asked.subject).all())
    with pytest.raises(DataError, match="no split 'best'"):
        split_subjects(world, "best", SEEDS)
