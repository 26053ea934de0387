"""Multiple-choice questions: their text against lm-evaluation-harness' template, and what is refused."""

from __future__ import annotations

import pytest
from jinja2 import Template

from attnbalance.data.choices import Choice
from attnbalance.data.instructions import InstructionSet
from attnbalance.errors import DataError

HARNESS = (
    "The following are multiple choice questions (with answers) about {{topic}}.\n\n"
    "{{question.strip()}}\nA. {{choices[0]}}\nB. {{choices[1]}}\nC. {{choices[2]}}\nD. {{choices[3]}}\nAnswer:"
)
"""The description and `doc_to_text` of its mmlu tasks."""


def test_the_text_is_that_of_lm_evaluation_harness() -> None:
    question, choices = " Why did they leave?\nThink. ", ("disease", "war, and fire", "drought", "all of the above")
    row = Choice(question, " C", choices=choices, topic="prehistory")
    assert row.prompt == Template(HARNESS).render(topic="prehistory", question=question, choices=choices)
    assert (row.answer, row.outputs) == (2, (" A", " B", " C", " D"))


@pytest.mark.parametrize(
    ("output", "choices", "message"),
    [
        (" A", ("x",), "2 to 10 choices, got 1"),
        (" A", tuple(map(str, range(11))), "2 to 10 choices, got 11"),
        (" A", ("x", " "), "a choice must not be empty"),
        (" A", ("x", "x"), "choices must differ"),
        (" C", ("x", "y"), "the letter of a choice, got ' C'"),
        ("A", ("x", "y"), "a space and the letter"),
    ],
)
def test_questions_that_cannot_be_asked_are_refused(output: str, choices: tuple[str, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Choice("Which?", output, choices=choices, topic="places")
    with pytest.raises(DataError, match="topic must not be empty"):
        Choice("Which?", " A", choices=("x", "y"))
    with pytest.raises(DataError, match="a question with choices has no input, got 'a text'"):
        Choice("Which?", " A", "a text", choices=("x", "y"), topic="places")


def test_a_question_that_names_something_in_a_choice_or_its_topic_is_left_out() -> None:
    choices = [("Rome", "Oslo"), ("red", "blue"), ("red", "green")]
    topics = ["places", "France", "colours"]
    pairs = zip(choices, topics, strict=True)
    questions = InstructionSet(tuple(Choice("Which?", " A", choices=c, topic=topic) for c, topic in pairs), "mine")
    assert [row.prompt.count("green") for row in questions.not_naming(["Rome", "France"]).rows] == [1]
