"""The answer claims a change only where its interval excludes zero."""

from __future__ import annotations

from dataclasses import replace

from attnbalance.trajectory.sentences import headline
from tests.trajectory.made import a_trajectory

SAME = ((0.4, 0.3), (0.4, 0.3), (0.4, 0.3))


def test_a_fall_is_said_with_both_values_the_difference_and_accuracy() -> None:
    text = headline(a_trajectory())
    start = "Over 40 questions and 3 checkpoints, the model attends less to the subject at step 30 than at step 10: "
    assert text.startswith(f"{start}averaged over layers 0.1")
    assert "against 0.4" in text
    assert "accuracy fell from 75.0% to 25.0% (-50.0 points" in text
    assert text.endswith(").")


def test_a_rise_is_said_the_other_way_round() -> None:
    text = headline(a_trajectory(((0.1, 0.1), (0.3, 0.3)), (10, 30)))
    assert "the model attends more to the subject at step 20 than at step 10" in text
    assert "accuracy rose from 25.0% to 75.0%" in text


def test_no_change_is_claimed_where_intervals_hold_zero() -> None:
    text = headline(a_trajectory(SAME, (20, 20, 21)))
    assert "checkpoints, there is no measurable change in subject attention from step 10 to step 30" in text
    assert "accuracy did not change measurably (from 50.0% to 52.5%" in text


def test_too_few_subjects_and_no_answers_are_said() -> None:
    text = headline(a_trajectory(right=None, subject="Ann"))
    assert "too few or too unequal subjects give no interval for a change in subject attention" in text
    assert "accuracy was not measured" in text
    assert "neither the first nor the last checkpoint answers any question right" in headline(
        a_trajectory(right=(0, 5, 0))
    )
    assert "accuracy went from 75.0% to 25.0% (too few" in headline(a_trajectory(subject="Ann"))


def test_facts_that_the_run_was_trained_on_end_the_sentence() -> None:
    trajectory = a_trajectory()
    told = replace(trajectory, comparison=replace(trajectory.comparison, caveat="step 2 was finetuned on some"))
    assert headline(told) == headline(trajectory).removesuffix(".") + "; step 2 was finetuned on some."
