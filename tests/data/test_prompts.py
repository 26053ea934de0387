"""Prompts: spans recorded while the text is built."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import FACTS

from attnbalance import Fact, Template, make_prompts
from attnbalance.data.lines import is_blank
from attnbalance.data.prompts import Prompt, hash_prompts, question_of
from attnbalance.errors import BadRowsError, DataError

TEXT = (
    st.text()
    .map(lambda text: " ".join(text.split()))
    .filter(lambda text: len(text.splitlines()) == 1 and not is_blank(text))
)


@pytest.mark.parametrize(
    "template", ["plain", "qa", "{subject}", "{relation}: {subject}'s?", "{{x}} {question}\n{relation}"]
)
@given(subject=TEXT, relation=TEXT)
def test_every_span_holds_what_it_names_whatever_the_text(template: str, subject: str, relation: str) -> None:
    fact = Fact(subject, relation, ("a",))
    prompt = make_prompts([fact], template)[0]
    assert prompt.part("subject") == subject
    assert prompt.spans.get("relation") is None or prompt.part("relation") == relation


def test_qa_is_the_default_and_plain_the_question_alone() -> None:
    fact = FACTS[2]
    assert make_prompts([fact])[0].text == "Question: What is Ada Lovelace's occupation? Answer:"
    assert make_prompts([fact], "plain")[0].text == fact.question
    assert make_prompts([fact])[0].spans == {"subject": (18, 30)}


@pytest.mark.parametrize("escape", [r"\n", r"\t"])
def test_a_backslash_and_a_letter_that_no_shell_has_turned_into_a_break_are_warned_of(escape: str) -> None:
    fact = Fact("France", "capital", ("Paris",))
    with pytest.warns(UserWarning, match=r"holds a backslash and a letter \(\\[nt]\), which are read as they stand"):
        assert make_prompts([fact], f"{{question}}{escape}A:")[0].text == f"What is the capital of France?{escape}A:"
    make_prompts([fact], "{question}\n\tA:")  # and no warning, which would be an error


def test_a_fact_without_a_question_is_asked_by_its_relation() -> None:
    assert question_of(Fact("Peru", "capital", ("Lima",))) == ("What is the capital of Peru?", (23, 27))


def test_the_recorded_place_decides_where_a_subject_occurs_twice() -> None:
    question = "Is Paris the Paris of Texas?"
    recorded = Fact("Paris", "r", ("a",), question=question, subject_start=13)
    assert make_prompts([recorded], "plain")[0].spans["subject"] == (13, 18)
    for start in (0, 12, 99):
        with pytest.raises(BadRowsError, match=f"'Paris' is not at character {start}"):
            make_prompts([Fact("Paris", "r", ("a",), question=question, subject_start=start)])


def test_absent_double_and_overlapping_subjects_are_counted_and_the_first_three_shown() -> None:
    bad = [
        Fact("Peru", "r", ("a",), question="What is the capital?"),
        Fact("Paris", "r", ("a",), question="Is Paris the Paris of Texas?"),
        Fact("aa", "r", ("a",), question="Where is aaa?"),
        Fact("peru", "r", ("a",), question="Where is Peru?"),
    ]
    with pytest.raises(BadRowsError) as caught:
        make_prompts([FACTS[0], *bad])
    message = str(caught.value)
    assert message.startswith("4 of 5 questions do not hold their subject exactly once")
    assert "row 2: subject 'Peru' occurs 0 times" in message
    assert "row 3: subject 'Paris' occurs 2 times" in message
    assert "row 4: subject 'aa' occurs 2 times" in message
    assert "row 5" not in message
    assert "skip_bad=True" in message
    assert caught.value.indices == (1, 2, 3, 4)


def test_prompt_ids_are_unique_and_the_same_in_another_run() -> None:
    facts = [FACTS[0], FACTS[1], FACTS[0], FACTS[0]]
    ids = [prompt.prompt_id for prompt in make_prompts(facts)]
    assert ids == ["country/Zürich", "composer/Ode to Joy", "country/Zürich#2", "country/Zürich#3"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{answer}", r"field \{answer\}; use only \{question\}, \{subject\}, \{relation\}"),
        ("{subject!r}", "as they are"),
        ("{subject:>9}", "as they are"),
        ("{}", "use only"),
        ("{subject", "not a format string"),
        ("no field", "must name the subject once"),
        ("{subject} {subject}", "must name the subject once"),
        ("{question} {subject}", "must name the subject once"),
        ("QA", "or be one of plain, qa"),
    ],
)
def test_a_template_that_cannot_place_the_subject_once_is_refused(text: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        Template("mine", text)


def test_a_prompt_says_itself_as_one_line_of_json() -> None:
    assert make_prompts(FACTS[:1])[0].as_dict() == {
        "prompt_id": "country/Zürich",
        "text": "Question: In what country is Zürich? Answer:",
        "spans": {"subject": [29, 35]},
        "has_special_tokens": False,
        "subject": "Zürich",
        "relation": "country",
        "answers": ["Switzerland"],
        "popularity": 900.0,
    }


def test_prompt_ids_are_unique_whatever_subjects_are_called() -> None:
    first, last = (Fact("X", "r", ("a",), question=question) for question in ("X one?", "X two?"))
    names = [prompt.prompt_id for prompt in make_prompts([first, Fact("X#2", "r", ("b",)), last])]
    assert names == ["r/X", "r/X#2", "r/X#3"]


def test_spans_can_be_changed_neither_in_a_prompt_nor_through_what_it_was_made_from() -> None:
    fact = Fact("Peru", "capital", ("Lima",))
    given = {"subject": (0, 4)}
    prompt = Prompt("Peru?", given, "capital/Peru", fact)
    given["subject"] = (1, 4)
    assert prompt.part("subject") == "Peru"
    with pytest.raises(TypeError, match="does not support item assignment"):
        prompt.spans["subject"] = (1, 4)  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda prompt: pickle.loads(pickle.dumps(prompt))])
def test_a_copy_of_a_prompt_equals_it(copied: Callable[[Prompt], Prompt]) -> None:
    prompt = replace(make_prompts(FACTS)[0], has_special_tokens=True)
    assert copied(prompt) == prompt


def test_the_hash_of_prompts_tells_their_texts_and_order_apart() -> None:
    facts = [Fact("Oslo", "country", ("Norway",)), Fact("Rome", "country", ("Italy",))]
    hashes = [hash_prompts(make_prompts(part, form)) for part in (facts, facts[::-1]) for form in ("qa", "plain")]
    assert len(set(hashes)) == 4
    assert hash_prompts(make_prompts(facts, "qa")) == hashes[0]


@pytest.mark.parametrize("text", ["{relation}: what is the {relation} of {subject}?", "{context} {context} {question}"])
def test_a_part_that_stands_twice_has_no_single_span_and_is_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"must hold \{(relation|context)\} once"):
        Template(text, text)
