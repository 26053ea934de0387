"""Which answers are compared, and at which of their tokens, worked out by hand."""

from __future__ import annotations

import pytest
from tiny import tiny_tokenizer

from attnbalance import Fact
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import make_prompts
from attnbalance.readings.distinguishing_tokens import comparisons, distinguishing_tokens


def asked(answers: tuple[str, ...], relation: str) -> list[Fact]:
    return [Fact(f"Subject {i}", relation, tuple(answer.split("|"))) for i, answer in enumerate(answers)]


def read(facts: list[Fact], count: int) -> tuple[list[tuple[str, ...]], list[str]]:
    """The tokens appended to each prompt, and the token that is read."""
    tokenizer = tiny_tokenizer("metaspace")
    prompts = PromptSet.of(make_prompts(facts, "{subject}:"), tokenizer)
    encodings, tokens = distinguishing_tokens(prompts, count)
    added = [e.tokens[len(p.tokens) :] for e, p in zip(encodings, prompts.encodings[:count], strict=True)]
    return added, [str(tokenizer.decode([token])) for token in tokens]


def test_answers_of_another_relation_are_no_rivals_and_one_that_others_go_on_from_ends() -> None:
    added, tokens = read(asked(("19", "190", "1984"), "a") + asked(("2019", "314"), "b"), 5)
    assert tokens == ["</s>", "0", "8", "2", "3"]
    assert added == [("", "1", "9")] * 3 + [("",)] * 2


def test_each_is_compared_with_the_rest_of_its_relation_whatever_is_read_with_it() -> None:
    facts = asked(("1900", "2019"), "a") + asked(("1984", "1977"), "a")
    added, tokens = read(facts, 2)
    assert (added, tokens) == ([("", "1", "9"), ("",)], ["0", "2"])  # "2019" does not tell "1900" at its first digit
    assert read(facts[:1] + facts[2:], 1) == (added[:1], tokens[:1])
    assert read(facts, 4)[0] == [("",)] * 4  # all with one another


@pytest.mark.parametrize("accepted", ["Paris", "Paris|Lutetia"])
def test_prompts_of_one_answer_are_compared_at_once_and_relations_without_a_rest_among_themselves(
    accepted: str,
) -> None:
    facts = asked(("Paris", "Rome", accepted), "a") + asked(("Oslo", "Bergen"), "b") + asked(("Madrid",), "a")
    prompts = PromptSet.of(make_prompts(facts, "{subject}:"), tiny_tokenizer("metaspace"))
    alike = [([0, 2], [0, 2, 5]), ([1], [1, 5])]
    if accepted != "Paris":
        alike = [([0], [0, 5]), ([1], [1, 5]), ([2], [2, 5])]
    assert list(comparisons(prompts, 5)) == [*alike, ([3, 4], [3, 4])]
    assert list(comparisons(prompts, 6)) == [([0, 1, 2, 5], [0, 1, 2, 5]), ([3, 4], [3, 4])]


def test_two_spellings_of_one_answer_are_compared_apart() -> None:
    added, tokens = read(asked(("New York", "new york", "New Delhi"), "a"), 2)
    assert not "".join(added[1])  # nothing is shared with "New Delhi"
    assert ("".join(added[0]), tokens[0]) == ("New", "Y")
