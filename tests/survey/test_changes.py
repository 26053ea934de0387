"""What was kept and gained, from what was made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from known_facts import made

from attnbalance.errors import DataError
from attnbalance.survey.changes import as_json, sentences, table

AFTER = replace(
    made(),
    right={"statement": (False,) * 6, "question": (True, True, False, True, False, True)},
)
"""It answers the fact that is surely known (of 1), and 2 of the 4 without a right greedy answer."""


def test_kept_and_gained_are_counted_against_the_first_model() -> None:
    saved = as_json("base", made(), AFTER)
    assert saved["model"] == "base"
    assert saved["kept"]["question"]["mean"] == 1.0  # pyright: ignore
    assert saved["kept"]["statement"]["mean"] == 0.0  # pyright: ignore
    assert (saved["gained"]["question"]["mean"], saved["gained"]["question"]["n"]) == (0.5, 4)  # pyright: ignore


def test_the_table_has_a_row_for_each_model_and_for_a_constant_answer() -> None:
    """Of the facts never answered (2 towns, of Oslo and Rome, and both sports), "Oslo" and "golf" are right twice."""
    rows = [line.strip("|").split(" | ") for line in table({"base": made(), "tuned": AFTER}).splitlines()[:5]]
    head, base, tuned, constant = ([cell.strip() for cell in rows[i]] for i in (0, 2, 3, 4))
    kept, gained = head.index("kept, question (n = 1)"), head.index("gained, question (n = 4)")
    assert (base[0], tuned[0], constant[0]) == ("base", "tuned", "constant answer")
    assert [row[kept][:6] for row in (base, tuned)] == ["100.0%", "100.0%"]
    assert [row[gained].split(" ")[0] for row in (base, tuned, constant)] == ["0.0%", "50.0%", "50.0%"]
    assert constant[kept] == "100.0%"


def test_a_share_of_no_facts_is_empty() -> None:
    """Without HighlyKnown facts nothing can be kept."""
    before, after = (replace(known, greedy=(0.5,) * 6) for known in (made(), AFTER))
    assert as_json("base", before, after)["kept"] == {"statement": None, "question": None}
    assert sentences({"base": before, "tuned": after}) == [
        "Asked as question, tuned answers none of the facts that base knows surely (0), and none of those without a "
        "right greedy answer of base (0)."
    ]


def test_the_sentence_says_it_for_each_further_model() -> None:
    assert sentences({"base": made()}) == []
    assert sentences({"base": made(), "tuned": AFTER}) == [
        "Asked as question, tuned answers 100.0% of the facts that base knows surely (1), and 50.0% of those without a "
        "right greedy answer of base (4)."
    ]


def test_a_form_of_one_model_alone_is_empty_for_the_other() -> None:
    chatty = replace(AFTER, right={**AFTER.right, "chat": AFTER.right["question"]})
    head, _, base, *_ = table({"base": made(), "tuned": chatty}).splitlines()
    column = head.split(" | ").index("kept, chat (n = 1)")
    assert base.split(" | ")[column].strip() == ""


def test_kept_and_gained_are_shares_of_the_same_facts() -> None:
    before, after = made(), replace(made(), right={"statement": (False, True, False, True, True, False)})
    assert (before.highly_known, before.unanswered) == ((0,), (2, 3, 4, 5))
    kept, gained = before.kept(after, "statement"), before.gained(after, "statement")
    assert kept is not None
    assert gained is not None
    assert (kept.mean, kept.n, gained.mean, gained.n) == (0.0, 1, 0.5, 4)
    with pytest.raises(DataError, match="asked as statement, not as 'question'"):
        before.kept(after, "question")
    with pytest.raises(DataError, match=r"of the same facts, .* got 6 facts \(whole-words\) and 5"):
        before.kept(after.at(range(5)), "statement")
    with pytest.raises(DataError, match=r"\(whole-words\) and 6 \(containment\)"):
        before.gained(replace(after, scoring="containment"), "statement")
