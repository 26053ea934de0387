"""What an explanation says: shares, verdicts and rescue, each combination in a true sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnbalance.explanation.sentences import cause_sentence, group_name, headline, hidden_sentence, rescue_sentence
from attnbalance.readings.salience import ReadoutRanks
from attnbalance.report.wording import percent_share
from tests.explanation.made import AFTER, N, a_change, an_explanation


def test_the_headline_counts_what_is_lost_and_names_the_cause_and_what_comes_back():
    text = headline(an_explanation(a_change(-2.0, -0.5)))
    assert text.startswith(
        "new gets 12 of 40 questions wrong that old gets right, and 4 right that old gets wrong "
        "(50.0% right before, 30.0% after"
    )
    assert "On the most popular fifth the right answer's margin over the others falls by 2.5" in text
    assert "mostly because of QK, the weights that direct attention (QK 80% [" in text
    assert ", all else 0% [" in text  # the three shares add up to the change
    assert "Of the 12 lost, these come back: 50.0% [" in text
    assert "100.0% [75.8, 100.0] with old's W_Q and W_K" in text  # Wilson: 1 / (1 + 1.96^2 / 12) = 0.758
    assert len(text) < 600
    assert text.count(". ") == 2  # three sentences


def test_the_whole_sentences_give_every_share_and_the_test():
    explanation = an_explanation(a_change(-2.0, -0.5))
    causes = cause_sentence(explanation)
    assert "the weights that direct attention: QK (W_Q, W_K) causes 80% [" in causes
    assert "and embeddings, norms and configuration 0% [" in causes
    rescues = rescue_sentence(explanation, "new")
    assert rescues.startswith("Of the 12 that new gets wrong and old right, these come back: 50.0% [")
    assert "exact McNemar p = 0.031" in rescues  # 2 / 2 ** 6: six return under the boost, none under the control


def test_settings_that_differ_are_named_with_both_values():
    text = cause_sentence(an_explanation(a_change(-2.0, -0.5, 0.0, {"rope_theta": (10000.0, 50.0), "b": (None, 1)})))
    assert text.endswith(
        "counts as configuration: rope_theta (10000.0 in old, 50.0 in new), b (None in old, 1 in new)."
    )
    assert "configurations differ" not in cause_sentence(an_explanation(a_change(-2.0, -0.5)))
    text = cause_sentence(an_explanation(a_change(-2.0, -0.5, 0.0, {"final_logit_softcapping": (30.0, 1.0)})))
    assert text.endswith("as margins are those before it: final_logit_softcapping (30.0 in old, 1.0 in new).")
    assert "counts as configuration" not in text


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            a_change(-0.1, -2.0),
            "falls by 2.10 [2.10, 2.11] nats, mostly because of OV and MLPs, the weights that store and read out, "
            "and partly because of QK, which",
        ),
        (a_change(0.1, -2.0), "read out, while QK, which directs attention, works against it"),
        (a_change(0.0, -2.0), "read out, and not measurably because of QK, which directs attention"),
        (a_change(0.1, 2.0), "rises by 2.10 [2.09, 2.10] nats, mostly because of OV and MLPs, the weights that store"),
        (a_change(-0.5, -0.5, -0.5), "and neither QK, nor OV and MLPs, measurably cause more than half"),
        (a_change(-1.0, -1.0, 0.5), "because of both QK, and OV and MLPs, while the other weights work against it"),
        (a_change(0.0, 0.0), "does not change measurably"),
    ],
)
def test_the_cause_is_named_only_where_it_is_sure(change, expected):
    assert expected in cause_sentence(an_explanation(change))


def test_without_popularity_the_change_is_that_of_all_questions():
    assert cause_sentence(an_explanation(a_change(-1.0, 0.0), popular=False)).startswith("On all questions the right")


def test_a_change_of_all_questions_that_is_opposite_to_that_of_the_most_popular_fifth_is_said():
    change = a_change(2.0, 0.5)
    parts = {name: torch.where(torch.arange(N) < N // 5, -part, part) for name, part in change.parts.items()}
    text = cause_sentence(an_explanation(replace(change, parts=parts, after=change.before + sum(parts.values()))))
    assert text.startswith("On the most popular fifth the right answer's margin over the others falls by 2.5")
    assert " On all questions the right answer's margin over the others rises by 1.5" in text  # 0.8 * 2.5 - 0.2 * 2.5
    assert "On all questions" not in cause_sentence(an_explanation(change))


def test_shares_of_a_change_that_is_not_sure_are_not_given():
    assert percent_share(an_explanation(a_change(0.0, 0.0)).groups["all"].shares["qk"]) == "?"


def test_a_model_without_checks_or_losses_is_said_to_have_none():
    explanation = an_explanation(a_change(-1, 0), checked=False)
    assert rescue_sentence(explanation, "new") == "No check could be made."
    without = {name: change for name, change in explanation.groups.items() if name != "lost"}
    assert "nothing to bring back" in rescue_sentence(replace(explanation, groups=without), "new")


def test_hidden_answers_are_given_with_chance_and_control():
    text = hidden_sentence(an_explanation(a_change(-1, 0)), "new")
    wrong = [i for i, right in enumerate(AFTER) if not right]
    share = sum(i % 6 < 3 for i in wrong) / len(wrong)
    assert text.startswith(f"Of the {len(wrong)} facts that new gets wrong, {100 * share:.1f}% [")
    assert "(random orders would give 50.0%)" in text  # 3 of 6 candidates
    assert "more than chance" in text


def test_fewer_hidden_answers_than_by_chance_are_called_so():
    ranks = ReadoutRanks(torch.full((N,), 5), torch.arange(N) % 6 + 1, torch.full((N,), 6))
    assert "less than chance" in hidden_sentence(an_explanation(a_change(-1, 0), ranks=ranks), "new")


def test_chance_is_all_where_no_relation_has_more_candidates():
    ones = torch.ones(N, dtype=torch.long)
    few = ReadoutRanks(ones, ones, torch.tensor([2, 3] * (N // 2)))
    assert "(random orders would give 100.0%)" in hidden_sentence(an_explanation(a_change(-1, 0), ranks=few), "new")


def test_what_rows_carry_follows_the_causes_and_is_left_out_where_rows_cannot_be_edited():
    change = a_change(-2.0, -0.5)
    assert "The attention rows of the last token carry 40% [" in cause_sentence(an_explanation(change))  # 1 of 2.5
    assert "attention rows of the last" not in cause_sentence(an_explanation(replace(change, rows=None)))


def test_an_unsure_popular_fifth_is_followed_by_the_questions_lost_and_how_they_were_chosen():
    change = a_change(0.0, 0.0)
    index = torch.arange(N)
    turn = (-1.0) ** index
    values = torch.where(index < 8, 3 * turn - 2, torch.where(index < 12, -4.0, 6 * turn))
    change = replace(change, after=change.before + values, parts={**change.parts, "mlp": values})
    text = cause_sentence(an_explanation(change))
    assert text.startswith(
        "On the most popular fifth the right answer's margin over the others does not change measurably"
    )
    assert "On the questions lost (chosen for that) the right answer's margin over the others falls" in text


def test_every_group_has_a_name_of_its_own():
    groups = an_explanation(a_change(-1, 0)).groups
    assert len({group_name(name) for name in groups}) == len(groups) == 8


def test_what_is_left_out_where_rows_cannot_be_edited_ends_the_headline():
    change = a_change(-1, 0)
    told = headline(an_explanation(change, read_only={"old": "is outside X", "new": "is outside X"}))
    assert told == (
        f"{headline(an_explanation(change))} Left out for old and new, whose family is outside X, so that rows can be "
        "read but not edited: the checks that raise attention or put in the other model's rows, their controls, and "
        "what rows carry of the change."
    )
