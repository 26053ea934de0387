"""Forms in which a model is asked for a fact."""

from __future__ import annotations

import unicodedata
from dataclasses import replace

import pytest
from base_oracle import NAMES, SPORTS, TOWNS

from attnbalance import Fact
from attnbalance.data.forms import SHOTS, in_form
from attnbalance.data.prompts import make_prompts
from attnbalance.errors import DataError


def test_shots_are_never_about_the_same_subject_typed_otherwise() -> None:
    names = [unicodedata.normalize(form, f"Orléans {i}") for i in range(4) for form in ("NFC", "NFD")]
    facts = [Fact(name, "city", (f"Answer {name[-1]}",)) for name in (*names, "Bonn", "Rome")]
    for form in ("few-shot", "few-shot-statement"):
        for seed in range(20):
            for prompt in in_form(form, make_prompts(facts), seed):
                assert f"{prompt.fact.answer}\n" not in prompt.text


def test_questions_are_the_prompts_and_statements_end_before_the_answer() -> None:
    prompts = make_prompts(TOWNS)
    assert in_form("question", prompts) == list(prompts)
    stated = in_form("statement", prompts)
    assert [prompt.text for prompt in stated] == [f"The city of {name} is" for name in NAMES]
    assert [prompt.part("subject") for prompt in stated] == list(NAMES)


def test_few_shot_puts_four_answered_questions_of_the_relation_before_the_own_one() -> None:
    prompts = make_prompts([*TOWNS, *SPORTS])
    few_shot = in_form("few-shot", prompts, seed=1)
    for prompt, asked in zip(prompts, few_shot, strict=True):
        *shots, last = asked.text.split("\n\n")
        assert last == prompt.text
        assert len(shots) == len(set(shots)) == SHOTS == 4
        own = f"{prompt.text} {prompt.fact.answer}"
        assert own not in shots
        relation = TOWNS if prompt.fact.relation == "city" else SPORTS
        assert set(shots) <= {f"Question: {fact.question} Answer: {fact.answer}" for fact in relation}
        assert asked.part("subject") == prompt.fact.subject
        assert asked.spans["subject"][0] > asked.text.rindex("\n\n")  # in the last question, not in a shot
        assert (asked.fact, asked.prompt_id) == (prompt.fact, prompt.prompt_id)


def test_the_shots_are_drawn_once_a_relation_by_the_seed() -> None:
    prompts = make_prompts(TOWNS)
    drawn = {seed: in_form("few-shot", prompts, seed) for seed in range(8)}
    assert drawn[0] == in_form("few-shot", prompts, 0)
    assert len({few_shot[0].text for few_shot in drawn.values()}) > 1
    for few_shot in drawn.values():
        # Five are drawn, of which those that are not asked themselves all have the same first four before them.
        leads = [prompt.text.rpartition("\n\n")[0] for prompt in few_shot]
        assert max(leads.count(lead) for lead in leads) >= len(TOWNS) - SHOTS


@pytest.mark.parametrize(
    ("seed", "cities", "sports"),
    [
        (0, "Gus Dee Fay Bo", "Dee Bo Cyd Ann"),
        (1, "Bo Eve Cyd Fay", "Dee Bo Cyd Ann"),
        (2, "Gus Fay Eve Bo", "Bo Cyd Ann Dee"),
    ],
)
def test_facts_of_one_wording_each_keep_the_shots_of_published_results(seed: int, cities: str, sports: str) -> None:
    prompts = in_form("few-shot", make_prompts([*TOWNS, *SPORTS]), seed)
    for prompt, names in ((prompts[0], cities), (prompts[-1], sports)):
        shots = prompt.text.split("\n\n")[:-1]
        assert [name for shot in shots for name in NAMES if {name, f"{name}?"} & set(shot.split())] == names.split()


def test_no_shot_is_about_the_subject_asked_about_in_any_wording() -> None:
    other_words = [replace(fact, question=f"In which city is {fact.subject}?") for fact in TOWNS]
    prompts = make_prompts([*TOWNS, *other_words])
    for seed in range(20):
        for few_shot in (in_form("few-shot", prompts, seed), in_form("few-shot", prompts[:7], seed, prompts[7:])):
            for prompt in few_shot:
                *shots, last = prompt.text.split("\n\n")
                subjects = [name for shot in shots for name in NAMES if f" {name}?" in shot]
                assert len(set(subjects)) == len(shots) == SHOTS
                assert prompt.fact.subject not in subjects
                assert prompt.fact.question is not None
                assert prompt.fact.question in last


def test_few_shot_needs_more_subjects_than_shots() -> None:
    with pytest.raises(DataError, match="few-shot needs more than 4 subjects of each relation; 'sport' has 4"):
        in_form("few-shot", make_prompts([*TOWNS, *SPORTS[:4]]))
    assert len(in_form("few-shot", make_prompts(SPORTS))) == 5
    twice = [*SPORTS[:4], *(replace(fact, question=f"Which sport does {fact.subject} play?") for fact in SPORTS[:4])]
    with pytest.raises(DataError, match="'sport' has 4"):
        in_form("few-shot", make_prompts(twice))


def test_few_shot_statements_have_the_shots_of_few_shot_questions() -> None:
    prompts = make_prompts(TOWNS)
    asked, stated = (in_form(form, prompts, seed=3) for form in ("few-shot", "few-shot-statement"))
    for question, statement in zip(asked, stated, strict=True):
        *shots, last = statement.text.split("\n\n")
        assert last == f"The city of {question.fact.subject} is"
        assert statement.part("subject") == question.fact.subject
        subjects = [name for shot in question.text.split("\n\n")[:-1] for name in NAMES if f" {name}?" in shot]
        answers = {fact.subject: fact.answer for fact in TOWNS}
        assert shots == [f"The city of {name} is {answers[name]}" for name in subjects]
