"""What evaluations watch, by hand; the trainer's tests compare it with a naive loop over plain transformers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from objective_oracle import hand_rows, made
from transformers import EvalPrediction

from attnbalance.finetuning.evaluation import NUMBERS, Watched, WatchedMeans, watch
from attnbalance.finetuning.objectives.forward_pass import ForwardPass
from attnbalance.finetuning.objectives.parse import parse_objective

NAN = float("nan")


def watched(count: int, **columns: list[float]) -> Watched:
    """Examples with some columns given, all other numbers 1, under two terms in a model of one layer."""
    numbers = {name: torch.tensor(columns.get(name, [1.0] * count)) for name in NUMBERS}
    ones = torch.ones(count, 2)
    return Watched(**numbers, terms=ones, taught=ones, subject_attention=torch.full((count, 1), 0.5))


def means(values: Watched) -> dict[str, float]:
    return WatchedMeans(2, (0,))(EvalPrediction(predictions=values.pack().numpy(), label_ids=None))


def test_the_shortcut_is_what_is_predicted_where_it_differs_from_the_answer() -> None:
    logits = torch.full((5, 10), -5.0)
    predicted = [3, 7, 2, 3, 5]  # the first example is wrong after a token that both share, the second right
    logits[torch.arange(5), torch.tensor(predicted)] = 5.0
    labels, example = torch.tensor([3, 5, 2, 3, 5]), torch.tensor([0, 0, 0, 1, 1])
    targets = {"shortcut": torch.tensor([[1, 7], [-1, -1]])}
    watched = watch(ForwardPass(logits, labels, example, 2, None, None, {}, targets), parse_objective("ce"))
    assert watched.tokens.tolist() == [3.0, 2.0]
    assert watched.right.tolist() == [0.0, 1.0]
    assert watched.shortcut[0] == 1.0
    assert watched.shortcut[1].isnan()
    assert watched.subject_attention.shape == (2, 0)


def test_terms_are_watched_by_token_and_by_example() -> None:
    forward = made(hand_rows())
    watched = watch(forward, parse_objective("2*ce + 3*barrier"))
    nats = math.log(4)  # logits are all 0
    assert watched.answer_loss.tolist() == pytest.approx([2 * nats, nats])
    assert watched.terms[:, 0].tolist() == pytest.approx([4 * nats, 2 * nats])
    (barrier,) = parse_objective("3*barrier").terms
    assert watched.terms[:, 1].tolist() == pytest.approx(barrier.losses(forward).tolist())
    assert watched.taught.tolist() == [[2.0, 1.0], [1.0, 1.0]]
    assert watched.shortcut.isnan().all()


def test_subject_attention_is_the_largest_of_the_subjects_tokens_mean_over_heads() -> None:
    watched = watch(made(hand_rows()), parse_objective("ce")).subject_attention
    expected = [[(0.1 + 0.3) / 2, (0.8 + 0.6) / 2], [(0.1 + 0.2) / 2, (0.3 + 0.2) / 2]]
    torch.testing.assert_close(watched, torch.tensor(expected))


def test_what_is_packed_is_unpacked_under_the_same_names() -> None:
    terms = torch.arange(12.0).reshape(2, 2, 3)
    values = Watched(*torch.arange(8.0).reshape(4, 2).unbind(), *terms, subject_attention=torch.rand(2, 5))
    back = Watched.unpack(values.pack(), 3)
    for name in (*NUMBERS, "terms", "taught", "subject_attention"):
        assert torch.equal(getattr(back, name), getattr(values, name))


def test_means_by_hand() -> None:
    values = watched(2, answer_loss=[3.0, 1.0], tokens=[3.0, 1.0], right=[0.0, 1.0])
    of_terms = {"terms": torch.tensor([[6.0, 0.0], [2.0, 1.5]]), "taught": torch.tensor([[3.0, 0.0], [1.0, 1.0]])}
    assert means(replace(values, **of_terms)) == {
        "objective": 8 / 4 + 1.5,
        "answer_loss": 1.0,
        "accuracy": 0.5,
        "shortcut_rate": 1.0,
        "subject_attention/0": 0.5,
    }


def test_a_shortcut_that_is_unknown_gives_no_rate() -> None:
    def rates(*pairs: tuple[float, float]) -> dict[str, float]:
        right, shortcut = zip(*pairs, strict=True)
        return means(watched(len(pairs), right=list(right), shortcut=list(shortcut)))

    assert "shortcut_rate" not in rates((1.0, 0.0), (0.0, NAN))
    assert "shortcut_rate" not in rates((1.0, 0.0))
    assert rates((0.0, 1.0), (0.0, 0.0), (0.0, NAN), (1.0, 0.0))["shortcut_rate"] == 0.5


def test_attention_is_named_by_the_layers_that_have_it() -> None:
    values = Watched(
        **{name: torch.ones(2) for name in NUMBERS},
        terms=torch.ones(2, 1),
        taught=torch.ones(2, 1),
        subject_attention=torch.tensor([[0.1, 0.3], [0.3, 0.5]]),
    )
    named = WatchedMeans(1, (2, 4))(EvalPrediction(predictions=values.pack().numpy(), label_ids=None))
    attention = {name: share for name, share in named.items() if "attention" in name}
    assert attention == {"subject_attention/2": pytest.approx(0.2), "subject_attention/4": pytest.approx(0.4)}
