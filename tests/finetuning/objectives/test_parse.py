"""Objectives from expressions: names, arguments, defaults, and what is refused."""

from __future__ import annotations

import pytest

from attnbalance.data.forms import FORMS
from attnbalance.errors import DataError
from attnbalance.finetuning.objectives.expression import RECOMMENDED
from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.finetuning.objectives.registry import TERMS


def test_terms_are_read_with_their_weights_arguments_and_defaults() -> None:
    terms = parse_objective(" ce+0.3 * row-anchor( question ) +1e-2*kl + floor(.25)+weighted-ce(salience) ").terms
    assert [(term.name, term.argument, term.weight) for term in terms] == [
        ("ce", None, 1.0),
        ("row-anchor", "question", 0.3),
        ("kl", "statement", 0.01),
        ("floor", 0.25, 1.0),
        ("weighted-ce", "salience", 1.0),
    ]
    assert [term.key for term in terms] == [
        "ce",
        "row-anchor(question)",
        "kl(statement)",
        "floor(0.25)",
        "weighted-ce(salience)",
    ]
    assert parse_objective("floor").terms[0].argument == 0.5
    assert parse_objective("weighted-ce()").terms[0].argument == "relevance"


def test_the_text_of_an_objective_reads_as_the_same_objective() -> None:
    weights = "1e-6*ce + 1e6*floor(0.1) + 1.5*kl(few-shot)"
    for text in ("ce", "recommended", weights, "recommended + project"):
        objective = parse_objective(text)
        assert parse_objective(objective.text) == objective
        assert "recommended" not in objective.text
    assert parse_objective("recommended").text == RECOMMENDED


@pytest.mark.parametrize("text", ["cross-entropy", "ce + fame", "ce +", "", "kl(statement", "ce ce", "x*ce", "CE"])
def test_what_cannot_be_read_is_refused_with_the_list_of_names(text: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_objective(text)
    for name in TERMS:
        assert name in str(caught.value)
    assert f"recommended = {RECOMMENDED}" in str(caught.value)
    assert "kl(statement|question|few-shot|few-shot-statement|best)" in str(caught.value)


@pytest.mark.parametrize("share", ["0", "1", "1.5", "-0.1", "half", "nan"])
def test_a_share_lies_between_0_and_1(share: str) -> None:
    with pytest.raises(DataError, match=rf"expected floor\(SHARE between 0 and 1.*got floor\({share}\)"):
        parse_objective(f"ce + floor({share})")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kl(fame)", r"expected kl\(statement\|question\|few-shot\|few-shot-statement\|best\), got kl\(fame\)"),
        ("row-anchor(0.5)", r"expected row-anchor\(statement\|question\|few-shot\|few-shot-statement\|best\), got"),
        ("ce(statement)", r"expected ce, got ce\(statement\)"),
        ("weighted-ce(loss)", r"expected weighted-ce\(relevance\|salience\), got"),
        ("ce + 2*ce", "names ce twice"),
        ("floor + floor(0.5)", r"names floor\(0.5\) twice"),
        ("recommended + kl(best)", r"names kl\(best\) twice"),
        ("project", "has no loss, only project"),
        ("project + 2*weight-anchor", "no loss, only project, which changes gradients; add e.g. ce"),
        ("ce + 0.001*project", "project removes a direction from gradients, and takes no weight"),
        ("floor + 2*recommended", "recommended takes no weight and no argument; write out"),
    ],
)
def test_terms_that_do_not_go_are_refused(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_objective(text)


def test_one_name_may_stand_with_several_arguments() -> None:
    assert len(parse_objective(" + ".join(f"kl({form})" for form in FORMS)).terms) == len(FORMS)
