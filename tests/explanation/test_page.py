"""The page of an explanation escapes what comes from facts, needs no network, and holds the answer."""

from __future__ import annotations

import re
from dataclasses import replace

from attnbalance.explanation.page import numbers, write_page
from attnbalance.statistics.intervals import Interval
from tests.explanation.made import a_change, an_explanation


def test_the_page_escapes_what_comes_from_facts_and_holds_the_headline(tmp_path):
    explanation = an_explanation(a_change(-2.0, -0.5), subject="<script>x{}</script>")
    write_page(explanation, tmp_path / "report.html", command="attnbalance explain <a> b")
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "explain &lt;a&gt; b" in page
    assert "right by whole-words" in page
    assert "new gets 12 of 40 questions wrong that old gets right" in page
    assert not re.search(r"(src|href)=.?http|url\(.?http|@import", page)  # nothing from the network


def test_the_numbers_are_about_the_questions_of_the_headline():
    explanation, unknown = an_explanation(a_change(-2.0, -0.5)), float("nan")
    lost, margin, qk = numbers(explanation)
    assert lost == ("12", "of 40 questions", "right in old and wrong in new; 4 the other way")
    assert margin[2] == "change of the right answer's margin on the most popular fifth"
    assert (margin[0], qk[0]) == ("-2.50 nats", "80%")
    every = explanation.groups["all"]
    shares = {cause: replace(share, low=unknown, high=unknown) for cause, share in every.shares.items()}
    unsure = replace(every, total=Interval(-1.0, unknown, unknown, 4), shares=shares)
    without = replace(explanation, groups=dict(explanation.groups) | {"fifth 1": unsure})
    assert numbers(without)[1][2] == "change of the right answer's margin on all questions"
    nothing = replace(explanation, groups={"all": unsure})
    assert [value for value, _, _ in numbers(nothing)] == ["0", "-1.00 nats"]  # no share of a change that is not sure


def test_the_page_says_which_weights_each_share_is(tmp_path):
    write_page(an_explanation(a_change(-2.0, -0.5)), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for name in ("QK: W_Q, W_K", "OV and MLPs: W_V, W_O, MLPs", "carried by last token's rows"):
        assert f"<th>{name}</th>".replace("'", "&#39;") in page


def test_a_family_whose_rows_cannot_be_edited_has_neither_their_share_nor_boosts(tmp_path):
    reasons = dict.fromkeys(("old", "new"), "is outside X")
    explanation = an_explanation(replace(a_change(-2.0, -0.5), rows=None), checked=False, read_only=reasons)
    write_page(explanation, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for absent in ("carried by", "So a last column", "What rows carry", "over control", "Over control", "attention x4"):
        assert absent not in page
    left_out = (
        "Left out for old and new, whose family is outside X, so that rows can be read but not edited: the checks"
    )
    assert page.count(left_out) == 2  # in the answer, and where the checks are


def test_a_page_of_models_whose_rows_can_be_edited_explains_every_column_and_leaves_nothing_out(tmp_path):
    write_page(an_explanation(a_change(-2.0, -0.5)), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for present in ("So a last column", "What rows carry", "<th>over control, p</th>", "“Over control”"):
        assert present in page
    assert "Left out" not in page
