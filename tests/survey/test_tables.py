"""The table, the JSON and the sentence, from what was made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from known_facts import made

from attnbalance.data.prompts import make_prompts
from attnbalance.survey.tables import answer, as_json, table


def test_the_sentence_says_how_much_is_known_and_what_a_constant_answer_gets() -> None:
    text = answer("base", made())
    assert text.startswith("Of these 6 facts base knows 33.3% [")
    assert "] (HighlyKnown 16.7%, MaybeKnown 16.7%, WeaklyKnown 16.7%, Unknown 50.0%); held against" in text
    assert "the same answers would make 16.7% [" in text
    assert "Asked once it answers best as statement, 33.3% [" in text
    assert "right (as question 16.7% [" in text
    assert text.endswith("; a constant answer gets 66.7%.")


def test_the_scoring_is_named() -> None:
    for known in (made(), replace(made(), scoring="containment")):
        assert f"Right answers ({known.scoring}; 95% intervals" in table({"base": known})
        assert as_json(known)["scoring"] == known.scoring


def test_a_relation_called_all_stands_beside_all_relations() -> None:
    facts = [replace(prompt.fact, relation="all") for prompt in made().prompts]
    saved: Any = as_json(replace(made(), prompts=make_prompts(facts)))
    assert (saved["all"]["facts"], saved["relations"]["all"]["facts"]) == (6, 6)


def test_the_table_has_a_row_for_each_relation() -> None:
    head, line, *rows = table({"base": made()}).split("\n\n")[0].splitlines()
    columns = [cell.strip() for cell in head.strip("|").split(" | ")]
    assert columns[:6] == ["model", "relation", "facts", "constant", "statement", "question"]
    assert columns[-7:] == ["best form", "known", "by chance", "HighlyKnown", "MaybeKnown", "WeaklyKnown", "Unknown"]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    assert [row[1:4] for row in cells] == [
        ["all", "6", "66.7%"],
        ["city\\|state", "4", "75.0%"],
        ["sport", "2", "50.0%"],
    ]
    assert [cells[1][i] for i in (-7, -4, -3, -2, -1)] == ["statement", "25.0%", "25.0%", "25.0%", "25.0%"]
    assert cells[2][-4:] == ["0.0%", "0.0%", "0.0%", "100.0%"]
    assert all(len(row) == len(columns) for row in cells)
    assert set(line) <= set("|- ")


def test_a_form_that_only_one_model_has_is_empty_for_the_other() -> None:
    known = made()
    chatty = type(known)(
        known.prompts, {**known.outputs, "chat": known.outputs["question"]},
        {**known.right, "chat": known.right["question"]}, known.greedy, known.sampled, known.chance,
    )  # fmt: skip
    rows = table({"base": known, "chat model": chatty}).split("\n\n")[0].splitlines()
    assert rows[0].split(" | ")[6] == "chat"
    assert [rows[i].split(" | ")[6].strip() == "" for i in (2, 5)] == [True, False]


def test_json_counts_the_categories_over_all_facts_and_by_relation() -> None:
    saved: Any = as_json(made())
    assert saved["all"]["categories"] == {"HighlyKnown": 1, "MaybeKnown": 1, "WeaklyKnown": 1, "Unknown": 3}
    assert saved["all"]["known"]["mean"] == 2 / 6
    assert saved["all"]["forms"]["statement"]["n"] == 6
    assert list(saved["relations"]) == ["city|state", "sport"]
    assert saved["relations"]["city|state"]["best_form"] == "statement"


def test_a_model_that_answers_nothing_has_no_best_form() -> None:
    known = made()
    nothing = replace(known, right={form: (False,) * len(hits) for form, hits in known.right.items()})
    assert "Asked once it answers none, in any form; a constant answer gets 66.7%." in answer("base", nothing)
    assert " | none " in table({"base": nothing}).splitlines()[2]
    saved: Any = as_json(nothing)
    assert saved["relations"]["sport"]["best_form"] is None
