"""Curricula: which facts stand in which batch, by counting."""

from __future__ import annotations

import random
import warnings
from collections import Counter

import pytest

from attnbalance.errors import DataError
from attnbalance.finetuning.curriculum import CURRICULA, FULL, LATE, PATCH, START, check_curriculum, mixed_order, order

RANKS = [float((7 * i) % 40) for i in range(40)]
"""40 facts, none of them at the place of its rank."""

BY_POPULARITY = sorted(range(40), key=lambda i: RANKS[i], reverse=True)
KINDS = ("shuffled", "popular-first", "obscure-first", "popular-last", "popular-share=0.75")


def batches(curriculum: str, steps: int, size: int, seed: int = 0, ranks: list[float] = RANKS) -> list[list[int]]:
    indices = order(ranks, steps, size, seed, curriculum)
    assert len(indices) == steps * size
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def test_shuffled_meets_every_fact_once_a_round() -> None:
    indices = order(RANKS, 30, 8, seed=3)  # 240 = 6 rounds
    rounds = [indices[start : start + 40] for start in range(0, 240, 40)]
    assert all(sorted(part) == list(range(40)) for part in rounds)
    assert len({tuple(part) for part in rounds}) == 6
    assert list(range(40)) not in rounds


def test_a_mixed_order_reads_both_pools_in_rounds_and_a_share_of_every_batch() -> None:
    first, rest = range(100, 110), range(7)
    indices = mixed_order(first, rest, 2 / 3, steps=30, batch_size=4, seed=1)
    counts = [sum(i >= 100 for i in indices[start : start + 4]) for start in range(0, 120, 4)]
    assert [sum(counts[:step]) for step in (1, 2, 3, 30)] == [3, 5, 8, 80]  # 2.67 a step
    olds, news = [i for i in indices if i >= 100], [i for i in indices if i < 100]
    assert {olds.count(i) for i in first} == {8}
    assert {news.count(i) for i in rest} <= {5, 6}
    assert indices != mixed_order(first, rest, 2 / 3, steps=30, batch_size=4, seed=2)


def test_rounds_run_on_over_batches_that_do_not_divide_them() -> None:
    indices = order(RANKS, 17, 7, seed=0)  # 119: two rounds of 40 and 39 of the third
    assert sorted(indices[:40]) == sorted(indices[40:80]) == list(range(40))
    assert len(set(indices[80:])) == 39


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides_and_the_state_of_the_random_module_does_not(kind: str) -> None:
    random.seed(1)
    state = random.getstate()
    first = order(RANKS, 20, 8, 5, kind)
    assert random.getstate() == state
    random.seed(2)
    assert order(RANKS, 20, 8, 5, kind) == first
    assert order(RANKS, 20, 8, 6, kind) != first


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_order_of_ranks_matters(kind: str) -> None:
    assert order([rank**3 - 5 for rank in RANKS], 20, 8, 5, kind) == order(RANKS, 20, 8, 5, kind)


def test_shuffled_does_not_look_at_ranks() -> None:
    assert order([0.0] * 40, 20, 8, 5) == order(RANKS, 20, 8, 5, "shuffled")


@pytest.mark.parametrize(("kind", "ranked"), [("popular-first", BY_POPULARITY), ("obscure-first", BY_POPULARITY[::-1])])
def test_a_growing_pool_begins_with_one_end_and_holds_all_from_the_middle_on(kind: str, ranked: list[int]) -> None:
    assert (START, FULL) == (0.2, 0.5)
    drawn = batches(kind, steps=100, size=8)
    for step, batch in enumerate(drawn):
        # 20% at step 0, all at step 50, on a straight line between; no further than half a fact beyond it
        allowed = int(40 * min(1.0, 0.2 + 0.8 * step / 50) + 0.5)
        assert set(batch) <= set(ranked[:allowed]), step
    assert sorted(drawn[0]) == sorted(ranked[:8])  # the first batch is a round of the first pool
    seen = [max(map(ranked.index, batch)) for batch in drawn]
    assert max(seen[:5]) < 12
    assert max(seen[45:]) == 39
    late = [index for batch in drawn[50:] for index in batch]
    assert sorted(late) == sorted(list(range(40)) * 10)  # 400 places: ten whole rounds of all facts


def test_popular_first_and_obscure_first_mirror_each_other() -> None:
    popular = order(RANKS, 20, 8, 4, "popular-first")
    assert order([-rank for rank in RANKS], 20, 8, 4, "obscure-first") == popular  # without ties


def test_popular_last_is_shuffled_and_then_half_of_every_batch_is_popular() -> None:
    assert (LATE, PATCH) == (0.5, 0.5)
    drawn, popular = batches("popular-last", steps=40, size=8), set(BY_POPULARITY[:20])
    early = [index for batch in drawn[:20] for index in batch]
    assert sorted(early) == sorted(list(range(40)) * 4)
    counts = [sum(index in popular for index in batch) for batch in drawn[20:]]
    assert min(counts) >= 4
    whole = [index for batch in drawn[20:] for index in batch]
    # 80 patched in: four rounds of the 20 popular ones; the other 80: two rounds of all 40
    assert Counter(whole) == Counter([*BY_POPULARITY[:20] * 4, *list(range(40)) * 2])


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_share_that_divides_the_batch_is_kept_in_every_batch(share: float) -> None:
    popular = set(BY_POPULARITY[:20])
    for batch in batches(f"popular-share={share}", steps=30, size=8):
        assert sum(index in popular for index in batch) == 8 * share


@pytest.mark.parametrize(("share", "size"), [(0.8, 4), (0.8, 2), (0.3, 1), (0.9, 1), (0.7, 3), (0.05, 8)])
def test_other_shares_are_kept_over_the_batches(share: float, size: int) -> None:
    popular = set(BY_POPULARITY[:20])
    counts = [sum(p in popular for p in batch) for batch in batches(f"popular-share={share}", 200, size)]
    assert max(counts) - min(counts) == 1  # the two whole numbers around share x size
    for step in range(1, 201):
        assert abs(sum(counts[:step]) - share * size * step) <= 0.5 + 1e-9  # rounded once, and never further off


def test_each_half_of_a_share_comes_in_rounds() -> None:
    drawn = [index for batch in batches("popular-share=0.75", steps=40, size=8) for index in batch]
    counts = Counter(drawn)
    assert [counts[index] for index in BY_POPULARITY] == [12] * 20 + [4] * 20  # 240 / 20 and 80 / 20


def test_popular_facts_do_not_stand_at_the_start_of_mixed_batches() -> None:
    popular = set(BY_POPULARITY[:20])
    drawn = batches("popular-share=0.5", steps=200, size=8)
    firsts = sum(batch[0] in popular for batch in drawn)
    assert 70 <= firsts <= 130  # a fair coin thrown 200 times leaves this with probability 2e-5


def test_small_sets_go() -> None:
    for kind in KINDS:
        assert order([1.0], 3, 2, 0, kind) == [0] * 6
        assert set(order([1.0, 2.0], 20, 2, 0, kind)) == {0, 1}
        indices = order([3.0, 2.0, 1.0], 40, 1, 0, kind)
        assert set(indices) == {0, 1, 2}
    odd = order([3.0, 2.0, 1.0], 40, 2, 0, "popular-share=0.5")  # the popular half of three is two
    assert Counter(odd) == {0: 20, 1: 20, 2: 40}


def test_curricula_are_read() -> None:
    for kind in CURRICULA[:-1]:
        name, share = check_curriculum(kind)
        assert name == kind
        assert share != share  # NaN
    assert check_curriculum("popular-share=0.8") == ("popular-share", 0.8)
    assert check_curriculum("popular-share=.25") == ("popular-share", 0.25)


@pytest.mark.parametrize(
    "text",
    ["fame", "", "popular", "shuffled=0.5", "popular-share", "popular-share=", "popular-share=0", "popular-share=1"],
)
def test_other_curricula_are_refused_with_the_list_of_names(text: str) -> None:
    with pytest.raises(DataError) as caught:
        check_curriculum(text)
    assert f"no curriculum {text!r}" in str(caught.value)
    for kind in CURRICULA:
        assert kind in str(caught.value)
    with pytest.raises(DataError, match="no curriculum"):
        order(RANKS, 1, 1, 0, text)


@pytest.mark.parametrize("share", ["1.5", "-0.5", "half", "0.1.2", "."])
def test_shares_outside_0_to_1_are_refused(share: str) -> None:
    with pytest.raises(DataError, match=f"no curriculum 'popular-share={share}'.*between 0 and 1"):
        check_curriculum(f"popular-share={share}")


@pytest.mark.parametrize(("ranks", "steps", "size"), [([], 1, 1), ([1.0], 0, 1), ([1.0], 1, 0), ([1.0], -1, 2)])
def test_no_facts_and_no_steps_are_refused(ranks: list[float], steps: int, size: int) -> None:
    with pytest.raises(
        DataError, match=f"needs at least 1 fact, step and batch_size, got {len(ranks)}, {steps} and {size}"
    ):
        order(ranks, steps, size, 0)


@pytest.mark.parametrize("kind", ["popular-first", "obscure-first", "popular-last", "popular-share=0.8"])
def test_ties_do_not_follow_the_order_of_the_file(kind: str) -> None:
    """Of 100 equally popular facts, the first 50 come about as often as the others in the first and the last batch."""
    steps, size = 40, 20
    for start in (0, (steps - 1) * size):
        shares = [
            sum(i < 50 for i in order([1.0] * 100, steps, size, seed, kind)[start : start + size]) / size
            for seed in range(40)
        ]
        assert 0.4 < sum(shares) / len(shares) < 0.6  # 0.5 +- 0.1 is 5 standard errors of 40 batches of 20


@pytest.mark.parametrize("curriculum", KINDS)
def test_a_popular_half_of_ties_is_warned_of(curriculum: str) -> None:
    tied = [1.0] * 30 + [0.0] * 10
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        order(RANKS, 2, 4, 0, curriculum)
        assert not caught
        order(tied, 2, 4, 0, curriculum)
    expected = f"20 of the 20 facts of the popular half of curriculum {curriculum} are as popular as facts outside it"
    assert [str(warning.message).startswith(expected) for warning in caught] == [True] * (curriculum != "shuffled")
