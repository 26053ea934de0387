"""The page of an explanation escapes what comes from facts, needs no network, and holds the answer."""

from __future__ import annotations

import re
from dataclasses import replace

from attnbalance.explanation.page import write_page
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


def test_the_page_says_which_weights_each_share_is(tmp_path):
    write_page(an_explanation(a_change(-2.0, -0.5)), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for name in ("QK: W_Q, W_K", "OV and MLPs: W_V, W_O, MLPs", "carried by last token's rows"):
        assert f"<th>{name}</th>".replace("'", "&#39;") in page


def test_a_family_whose_rows_cannot_be_edited_has_neither_their_share_nor_boosts(tmp_path):
    explanation = an_explanation(replace(a_change(-2.0, -0.5), rows=None), checked=False)
    write_page(explanation, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "carried by" not in page
    assert "attention could not be raised" in page
