"""Recall asked of a model: what it said decides what is right."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tiny import argmax_loop, eager, tiny_model, tiny_prompts, tiny_tokenizer
from transformers import AutoTokenizer

from attnbalance import Fact, load_model, make_prompts, recall
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.tokens import as_chat
from attnbalance.errors import DataError
from attnbalance.models.generate import generate
from attnbalance.readings.recall import NEW_TOKENS, answer_budgets


def longest_line(text: str) -> str:
    """A part of what a random model said that can be an answer."""
    return max((line.strip() for line in text.splitlines()), key=len)


def test_recall_scores_the_models_own_answers_in_the_order_of_the_prompts() -> None:
    model = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    said = generate(model, tiny_prompts(), max_new_tokens=10, batch_size=9)
    prompts = list(tiny_prompts())
    for i in (1, 4):  # two facts whose answer is what the model says
        prompts[i] = dataclasses.replace(
            prompts[i], fact=dataclasses.replace(prompts[i].fact, answers=("no", longest_line(said[i])))
        )
    shortcuts = {prompts[7].fact.relation: (said[7].upper(),)}
    found = recall(model, prompts, shortcuts, scoring="containment", max_new_tokens=10, batch_size=2)
    assert found.outputs == tuple(said)
    assert [found.correct[i] for i in (1, 4)] == [True, True]
    assert sum(found.correct) < len(prompts)
    assert found.shortcut[7]
    assert found.shortcut.count(True) == 1
    assert found.prompt_ids == tuple(prompt.prompt_id for prompt in prompts)
    assert found.popularity == tuple(prompt.fact.popularity for prompt in prompts)


def test_by_default_the_shortcut_is_the_most_frequent_answer_of_the_prompts_themselves() -> None:
    model = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    said = generate(model, tiny_prompts()[:1], max_new_tokens=10, batch_size=1)[0]
    wrong = tiny_prompts()[0].fact
    usual = dataclasses.replace(wrong, answers=(longest_line(said),))
    prompts = [
        dataclasses.replace(tiny_prompts()[0], prompt_id=str(i), fact=fact)
        for i, fact in enumerate([wrong, usual, usual])
    ]
    found = recall(model, prompts, scoring="containment", max_new_tokens=10)
    assert found.correct == (False, True, True)
    assert found.shortcut == (True, False, False)


@pytest.mark.parametrize("template", ["alpaca", "{question}\nA:\n"])
def test_an_answer_after_a_line_break_gets_the_tokens_that_it_takes_there(stories: Path, template: str) -> None:
    """SentencePiece: "the" alone is one token with the space before it, and after a line break two."""
    tokenizer = AutoTokenizer.from_pretrained(stories)
    names = ("the little red ball of the park", "said the very big and happy bear", "Ada Lovelace of the old town hall")
    facts = [Fact(f"Lily {i}", "toy", (name, "no")) for i, name in enumerate(names)]
    prompts = PromptSet.of(make_prompts(facts, template), tokenizer)
    sizes = [len(tokenizer(p.text + p.fact.answer)["input_ids"]) - len(tokenizer(p.text)["input_ids"]) for p in prompts]
    assert max(sizes) > NEW_TOKENS
    assert any(size > len(tokenizer.tokenize(name)) for size, name in zip(sizes, names, strict=True))
    assert all(map(int.__ge__, answer_budgets(prompts), sizes))


def test_an_answer_longer_than_usual_gets_the_tokens_that_it_takes() -> None:
    tokenizer = tiny_tokenizer()
    model = load_model(tiny_model("llama"), tokenizer=tokenizer)
    prompt = tiny_prompts()[0]
    said = longest_line(generate(model, [prompt], max_new_tokens=25, batch_size=1)[0])
    size = len(tokenizer(f" {said}", add_special_tokens=False)["input_ids"])
    assert size > NEW_TOKENS
    long = dataclasses.replace(prompt, fact=dataclasses.replace(prompt.fact, answers=("no", said)))
    prompts = [*tiny_prompts()[1:], long]
    assert answer_budgets(PromptSet.of(prompts, tokenizer)) == [NEW_TOKENS] * (len(prompts) - 1) + [size]
    found = recall(model, prompts, scoring="containment")
    assert found.correct[-1]
    assert list(found.outputs[:-1]) == generate(model, prompts[:-1], max_new_tokens=NEW_TOKENS, batch_size=3)
    with pytest.warns(UserWarning, match=f"1 of {len(prompts)} prompts accept an answer of more than 10 tokens"):
        assert not recall(model, prompts, scoring="containment", max_new_tokens=10).correct[-1]


def test_fewer_tokens_than_an_answer_takes_are_warned_of() -> None:
    tokenizer = tiny_tokenizer()
    prompts = list(tiny_prompts())
    sizes = [
        max(len(tokenizer(f" {a}", add_special_tokens=False)["input_ids"]) for a in p.fact.answers) for p in prompts
    ]
    longer = sum(size > 2 for size in sizes)
    assert longer > 0
    with pytest.warns(UserWarning, match=f"{longer} of {len(prompts)} prompts accept an answer of more than 2 tokens"):
        recall(load_model(tiny_model("llama"), tokenizer=tokenizer), prompts, max_new_tokens=2)


def test_a_long_answer_of_one_fact_takes_no_room_from_the_prompts_of_others() -> None:
    tokenizer, model = tiny_tokenizer(), load_model(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    prompts = sorted(tiny_prompts(), key=lambda prompt: len(tokenizer(prompt.text)["input_ids"]))
    room = int(model.max_positions or 0) - len(tokenizer(prompts[0].text)["input_ids"])
    texts = [" ".join(["no"] * words) for words in range(1, room)]
    answer = max(
        (text for text in texts if len(tokenizer(f" {text}", add_special_tokens=False)["input_ids"]) <= room), key=len
    )
    long = dataclasses.replace(prompts[0], fact=dataclasses.replace(prompts[0].fact, answers=(answer,)))
    budget = answer_budgets(PromptSet.of([long], tokenizer))[0]
    assert len(tokenizer(prompts[-1].text)["input_ids"]) + budget > int(model.max_positions or 0)
    found = recall(model, [long, *prompts[1:]], batch_size=9)
    assert list(found.outputs[1:]) == generate(model, prompts[1:], max_new_tokens=NEW_TOKENS, batch_size=3)


def test_recall_of_no_prompts_is_refused() -> None:
    with pytest.raises(DataError, match="at least one prompt"):
        recall(load_model(tiny_model("gpt2"), tokenizer=tiny_tokenizer()), [])


def test_an_answer_in_a_chat_may_be_a_sentence() -> None:
    """What a plain loop says within 32 tokens is the answer to a chat; other prompts get 10."""
    tokenizer = tiny_tokenizer("chat")
    model = load_model(tiny_model("llama"), tokenizer=tokenizer)
    chats = PromptSet.of(as_chat(tiny_prompts()[:3], tokenizer), tokenizer)
    said = [argmax_loop(eager(tiny_model("llama")), of.ids, 32) for of in chats.encodings]
    assert max(map(len, said)) > 10
    assert list(recall(model, chats).outputs) == [tokenizer.decode(ids, skip_special_tokens=True) for ids in said]
    assert answer_budgets(chats) == [32, 32, 32]
    assert answer_budgets(PromptSet.of(tiny_prompts()[:3], tokenizer)) == [10, 10, 10]
