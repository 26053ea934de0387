"""Prompt sets, against prompts that are tokenized anew."""

from __future__ import annotations

import pytest
from tiny import count_texts, tiny_prompts, tiny_tokenizer

from attnbalance import Fact
from attnbalance.data.prompt_sets import PromptSet, is_same
from attnbalance.data.prompts import make_prompts
from attnbalance.data.tokens import as_chat, encode, encode_answers
from attnbalance.errors import ArgumentError


def test_a_set_is_its_prompts_with_their_tokens_and_so_is_a_part_of_it() -> None:
    prompts, tokenizer = tiny_prompts(), tiny_tokenizer()
    made = PromptSet.of(prompts, tokenizer)
    assert (len(made), tuple(made), made[-1]) == (len(prompts), prompts, prompts[-1])
    assert made.prompt_ids == tuple(prompt.prompt_id for prompt in prompts)
    assert list(made.encodings) == encode(prompts, tokenizer)
    assert tuple(made[1:6:2]) == prompts[1:6:2]
    assert all(part is whole for part, whole in zip(made[1:6:2].encodings, made.encodings[1:6:2], strict=True))
    assert tuple(made.at([3, 0])) == (prompts[3], prompts[0])


@pytest.mark.parametrize("kind", ["plain", "bos", "chat", "metaspace"])
def test_a_set_of_the_same_tokenizer_is_not_tokenized_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, loaded_again = tiny_tokenizer(kind), tiny_tokenizer(kind)
    made = PromptSet.of(tiny_prompts(), tokenizer)
    counts = count_texts(monkeypatch)
    assert PromptSet.of(made, tokenizer) is made
    twin = PromptSet.of(made, loaded_again)
    assert not counts
    assert twin.encodings is made.encodings
    assert twin.tokenizer is loaded_again
    assert twin.answers.ids is made.answers.ids
    assert twin.answers.lengths is made.answers.lengths
    assert set(counts.values()) == {1}


@pytest.mark.parametrize("kind", ["bos", "eos", "ignore_merges", "zero_width", "lower", "metaspace"])
def test_a_set_of_another_tokenizer_is_tokenized_again(kind: str) -> None:
    other = tiny_tokenizer(kind)
    made = PromptSet.of(PromptSet.of(tiny_prompts(), tiny_tokenizer()), other)
    assert list(made.encodings) == encode(tiny_prompts(), other)
    assert list(made.answers.ids) == encode_answers(encode(tiny_prompts(), other), other)


def test_tokenizers_that_differ_in_an_added_token_or_in_the_unknown_one_are_not_the_same() -> None:
    more, unknown = tiny_tokenizer(), tiny_tokenizer()
    more.add_tokens(["Ada Lovelace"])
    unknown.unk_token = "</s>"
    assert is_same(tiny_tokenizer(), tiny_tokenizer())
    assert not is_same(tiny_tokenizer(), more)
    assert not is_same(tiny_tokenizer(), unknown)
    made = PromptSet.of(PromptSet.of(tiny_prompts(), tiny_tokenizer()), more)
    assert list(made.encodings) == encode(tiny_prompts(), more)


def test_a_tokenizer_that_was_asked_to_pad_and_cut_is_still_the_same() -> None:
    asked = tiny_tokenizer()
    asked(["a", "a b"], padding=True, truncation=True, max_length=1)
    assert is_same(asked, tiny_tokenizer())


def test_answers_are_those_of_the_prompts_and_are_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer("chat")
    for prompts in (tiny_prompts(), as_chat(tiny_prompts(), tokenizer)):
        made = PromptSet.of(prompts, tokenizer)
        expected = encode_answers(made.encodings, tokenizer)
        behind = [p.with_answer.removeprefix(p.text) for p in prompts]
        sizes = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in behind]
        with monkeypatch.context() as patch:
            counts = count_texts(patch)
            for _ in range(2):
                assert list(made.answers.ids) == expected
                assert list(made.answers.lengths) == sizes
        assert set(counts.values()) == {1}


def test_what_is_not_prompts_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="prompts must be a collection of Prompt"):
        PromptSet.of("Paris", tiny_tokenizer())  # pyright: ignore[reportArgumentType]


def test_an_answer_behind_a_line_break_is_measured_without_a_space() -> None:
    """Byte-level tokenizers have a token for " Paris" and several for "Paris"."""
    facts = [Fact("France", "capital", ("Paris",)), Fact("Peru", "capital", ("Lima", "Paris"))]
    tokenizer = tiny_tokenizer()
    for template in ("qa", "alpaca"):
        prompts = make_prompts(facts, template)
        lengths = PromptSet.of(prompts, tokenizer).answers.lengths
        for prompt, length in zip(prompts, lengths, strict=True):
            before = tokenizer(prompt.text)["input_ids"]
            space = "" if template == "alpaca" else " "
            wholes = [tokenizer(f"{prompt.text}{space}{answer}")["input_ids"] for answer in prompt.fact.answers]
            assert length == max(len(whole) - len(before) for whole in wholes)
