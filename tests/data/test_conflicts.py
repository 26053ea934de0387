"""Knowledge conflicts, and what is none."""

from __future__ import annotations

from typing import Any

import pytest

from attnbalance.data.conflicts import Conflict, NoConflictError, overlap, says
from attnbalance.data.prompts import make_prompts
from attnbalance.data.scoring import is_match
from attnbalance.errors import DataError


def conflict(**changes: Any) -> Conflict:
    fields: dict[str, Any] = {
        "subject": "France",
        "relation": "capital",
        "answers": ("Lyon",),
        "question": "What is the capital of France?",
        "context": "In 2031 Paris was flooded, and Lyon became the capital. Lyon has two rivers.",
        "memory_answers": ("Paris", "Lutetia"),
    }
    return Conflict(**fields | changes)


def test_the_remembered_answers_are_those_of_a_plain_fact() -> None:
    fact = conflict().remembered
    assert (fact.answers, fact.question) == (("Paris", "Lutetia"), "What is the capital of France?")
    assert not isinstance(fact, Conflict)


def test_the_line_of_a_conflict_holds_its_context() -> None:
    line = conflict().as_dict()
    assert line["memory_answers"] == ["Paris", "Lutetia"]
    assert Conflict(**line) == conflict()  # pyright: ignore


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"answers": ("New Paris",)}, "the two answers contain each other"),
        ({"answers": ("paris",)}, "the two answers contain each other"),
        ({"memory_answers": ("Grand Lyon",)}, "the two answers contain each other"),
        ({"answers": ("Nice",)}, "the context holds no accepted answer"),
        ({"memory_answers": ("France",)}, "the question holds an answer"),
        ({"answers": ("Rome",), "context": "Romeo lives here."}, "the context holds no accepted answer"),
    ],
)
def test_what_is_no_conflict_is_refused_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(NoConflictError, match=reason) as error:
        conflict(**changes)
    assert error.value.reason == reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_answers": ()}, "answers must be a tuple of one or more texts"),
        ({"question": None}, "a conflict needs a question"),
        ({"context": None}, "context must be text"),
    ],
)
def test_fields_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        conflict(**changes)


def test_a_text_of_several_lines_says_whole_words_as_answers_are_scored() -> None:
    assert says("The answer is:\nLyon", ("Lyon",))
    assert not says("Parisian", ("Paris",))
    assert not says("I am not sure about it.", ("Italy", "IT"))
    assert says("它叫巴黎。", ("巴黎",))


def test_overlapping_answers_are_named() -> None:
    assert overlap(("Rome", "Cairo"), ("Oslo", "New Cairo")) == ("Cairo", "New Cairo")
    assert overlap(("Rome",), ("Oslo",)) is None


@pytest.mark.parametrize(("answer", "other"), [("5000", "15,000"), ("1,000", "1000000"), ("\u00ae", "Paris")])
def test_answers_that_scoring_tells_apart_do_not_overlap(answer: str, other: str) -> None:
    assert not is_match(answer, [other])
    assert not is_match(other, [answer])
    assert overlap((answer,), (other,)) is None


@pytest.mark.parametrize(
    ("answer", "other"),
    [("Bogotá", "Bogota\u0301"), ("1,000", "1000"), ("O\u2019Brien", "O'Brien"), ("New  York", "new york city")],
)
def test_answers_that_scoring_equates_overlap(answer: str, other: str) -> None:
    assert overlap((answer,), (other,)) == (answer, other)
    with pytest.raises(NoConflictError, match="contain each other"):
        conflict(answers=(answer,), context=f"It is {answer}.", memory_answers=(other,))


def test_a_prompt_records_the_context() -> None:
    [prompt] = make_prompts([conflict()], "context")
    assert prompt.text == f"Context: {conflict().context} Question: {conflict().question} Answer:"
    assert [prompt.part(role) for role in ("context", "subject")] == [conflict().context, "France"]


def test_a_fact_has_no_context_to_be_asked_with() -> None:
    with pytest.raises(DataError, match="names a context, but 'France' has none"):
        make_prompts([conflict().remembered], "context")
