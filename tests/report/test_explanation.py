"""What an explanation says: shares, verdicts and rescue, each combination in a true sentence."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

from attnbalance.readings.causal import Arm
from attnbalance.readings.change import Change
from attnbalance.readings.explanation import Explanation, make_check
from attnbalance.readings.salience import StoredAnswers
from attnbalance.report.explanation import (
    cause_sentence,
    examples,
    explanation_json,
    headline,
    hidden_sentence,
    rescue_sentence,
    write_changes,
    write_page,
)
from attnbalance.report.wording import percent_share
from tests.report.fakes import a_comparison, a_reading, a_recall

N = 40
BEFORE, AFTER = [True] * 20 + [False] * 20, [False] * 12 + [True] * 8 + [True] * 4 + [False] * 16
ATTENTION = {"old": [0.5, 0.6], "new": [0.3, 0.2]}


def a_change(attention: float, storage: float, rest: float = 0.0) -> Change:
    """The same causes in every prompt, with a little scatter in each."""
    scatter = 0.01 * torch.randn(N, generator=torch.Generator().manual_seed(0))
    parts = {
        "attention": attention + scatter,
        "values": torch.full((N,), storage / 2),
        "mlp": torch.full((N,), storage / 2),
        "rest": torch.full((N,), rest),
    }
    before = torch.full((N,), 3.0)
    prompts = a_comparison(ATTENTION).prompts
    places = {part: {"subject": torch.zeros(N, 2, 2), "rest": torch.zeros(N, 1, 1)} for part in parts}
    looked, read = a_reading(prompts, [0.1, -0.2], 2, 1), a_reading(prompts, [0.0, 0.3], 2, 2)
    rows = torch.full((N,), attention / 2)
    return Change(before, before + sum(parts.values()), parts, places, rows, looked, read)


def an_explanation(change: Change, subject: str = "Ann {}", popular: bool = True, checked: bool = True) -> Explanation:
    made = a_comparison(ATTENTION, {"old": BEFORE, "new": AFTER}, pair=("old", "new"), subject=subject, popular=popular)
    ranks = torch.arange(N) % 6 + 1
    stored = StoredAnswers(ranks, torch.full((N,), 5), torch.full((N,), 6))
    checks = {}
    for label, other in (("new", "old"), ("old", "new")):
        plain, known = made[label].recall, made[other].recall
        assert plain is not None
        assert known is not None
        found = []
        tokens, subject = "attention to other tokens x4", "attention to the subject x4"
        for name, kind, alpha, control, right in (
            (tokens, "control", 4.0, None, plain.correct),
            (subject, "boost", 4.0, tokens, [True] * 6 + list(plain.correct[6:])),
            ("rows of all layers", "rows", None, None, known.correct),
            ("W_Q and W_K", "weights", None, None, known.correct),
        ):
            answers = a_recall(made.prompts, right)
            arm = Arm(name, kind, alpha, lambda answers=answers: answers, control)
            found.append(make_check(arm, arm.ask(), plain, known, found))
        checks[label] = found if checked else []
    return Explanation(made, change, checks, {"old": stored, "new": stored}, 0)


def test_the_headline_counts_what_is_lost_and_names_the_cause_and_what_comes_back():
    text = headline(an_explanation(a_change(-2.0, -0.5)))
    assert text.startswith(
        "new gets 12 of 40 questions wrong that old gets right, and 4 right that old gets wrong "
        "(50.0% right before, 30.0% after"
    )
    assert "On the most popular fifth the right answer's lead over other answers falls by 2.5" in text
    assert "mostly because of the weights that direct attention: 80% [" in text
    assert "Of the 12 that new gets wrong and old right, these come back: 50.0% [" in text
    assert "exact McNemar p = 0.031" in text  # 2 / 2 ** 6: six return under the boost, none under the control
    assert "100.0% [75.8, 100.0] with old's W_Q and W_K" in text  # Wilson: 1 / (1 + 1.96^2 / 12) = 0.758


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (a_change(-0.1, -2.0), "falls by 2.10 [2.10, 2.11] nats, mostly because of the weights that store and read"),
        (a_change(0.1, 2.0), "rises by 2.10 [2.09, 2.10] nats, mostly because of the weights that store and read"),
        (a_change(-0.5, -0.5, -0.5), "and neither the weights of attention nor those of storage cause more than half"),
        (a_change(-1.0, -1.0, 0.5), "because of both the weights of attention and those of storage, against"),
        (a_change(0.0, 0.0), "does not change measurably"),
    ],
)
def test_the_cause_is_named_only_where_it_is_sure(change, said):
    assert said in cause_sentence(an_explanation(change))


def test_without_popularity_the_change_is_that_of_all_questions():
    assert cause_sentence(an_explanation(a_change(-1.0, 0.0), popular=False)).startswith("On all questions the right")


def test_shares_of_a_change_that_is_not_sure_are_not_given():
    split = an_explanation(a_change(0.0, 0.0)).splits["all"]
    assert percent_share(split.shares["attention"]) == "?"


def test_groups_are_those_lost_and_gained_and_causes_add_up():
    found = an_explanation(a_change(-1.0, -0.5, 0.25))
    assert found.groups["lost"] == list(range(12))
    assert found.groups["gained"] == list(range(20, 24))
    for split in found.splits.values():
        total = sum(split.causes[name].mean for name in ("attention", "storage", "rest"))
        assert total == pytest.approx(split.total.mean, abs=1e-6)
        assert split.causes["storage"].mean == pytest.approx(split.causes["values"].mean + split.causes["mlp"].mean)


def test_a_model_without_checks_or_losses_is_told_so():
    assert rescue_sentence(an_explanation(a_change(-1, 0), checked=False), "new") == "No check could be made."


def test_hidden_answers_are_counted_among_the_wrong_ones_with_their_control():
    text = hidden_sentence(an_explanation(a_change(-1, 0)), "new")
    wrong = [i for i, right in enumerate(AFTER) if not right]
    share = sum(i % 6 < 3 for i in wrong) / len(wrong)
    assert text.startswith(f"Of the {len(wrong)} facts that new gets wrong, {100 * share:.1f}% [")
    assert "more than chance" in text


def test_ten_examples_begin_with_what_was_lost_and_say_what_brings_them_back():
    found = examples(an_explanation(a_change(-1, 0)))
    assert len(found) == 10
    assert all(one["wrong_in"] == "new" for one in found)
    assert all("W_Q and W_K" in one["comes_back"] for one in found)
    assert all("attention to other tokens x4" not in one["comes_back"] for one in found)


def test_the_page_escapes_what_comes_from_facts_and_holds_the_headline(tmp_path):
    made = an_explanation(a_change(-2.0, -0.5), subject="<script>x{}</script>")
    write_page(made, tmp_path / "report.html", command="attnbalance explain <a> b")
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "explain &lt;a&gt; b" in page
    assert "new gets 12 of 40 questions wrong that old gets right" in page
    assert not re.search(r"(src|href)=.?http|url\(.?http|@import", page)  # nothing from the network


def test_json_is_finite_and_the_table_has_a_row_a_question(tmp_path):
    import pyarrow.parquet as pq

    made = an_explanation(a_change(-2.0, -0.5))
    found = explanation_json(made)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["groups"]["all"]["shares"]["attention"]["mean"] == pytest.approx(0.8, abs=0.01)
    write_changes(made, tmp_path / "changes.parquet")
    table = pq.read_table(tmp_path / "changes.parquet")
    assert len(table) == N
    assert table["right_after"].to_pylist() == AFTER


def test_rows_stand_beside_the_causes_and_are_left_out_where_they_cannot_be_edited(tmp_path):
    change = a_change(-2.0, -0.5)
    assert "The attention rows of the last token carry 40% [" in headline(an_explanation(change))  # 1 of 2.5
    without = an_explanation(replace(change, rows=None))
    assert "attention rows of the last" not in cause_sentence(without)
    write_page(without, tmp_path / "report.html")
    assert "carried by" not in (tmp_path / "report.html").read_text()


def test_fewer_stored_answers_than_by_chance_are_called_so():
    made = an_explanation(a_change(-1, 0))
    swapped = StoredAnswers(torch.full((N,), 5), torch.arange(N) % 6 + 1, torch.full((N,), 6))
    assert "less than chance" in hidden_sentence(replace(made, stored={"old": swapped, "new": swapped}), "new")


def test_an_unsure_popular_fifth_is_followed_by_the_questions_lost_and_how_they_were_chosen():
    change = a_change(0.0, 0.0)
    places = torch.arange(N)
    values = -2.0 * (places < 12) + 4 * (places < 8) * (-1.0) ** places
    change = replace(change, after=change.before + values, parts={**change.parts, "mlp": values})
    text = cause_sentence(an_explanation(change))
    assert text.startswith("On the most popular fifth the right answer's lead over other answers does not change")
    assert "On the questions lost (chosen for that) the right answer's lead over other answers falls" in text
