"""Recall asked of a model: what it said decides what is right."""

from __future__ import annotations

import dataclasses

import pytest
from tiny import tiny_model, tiny_prompts, tiny_tokenizer

from attnbalance import load_model, recall
from attnbalance.errors import DataError
from attnbalance.models.generate import generate


def test_recall_scores_the_models_own_answers_in_the_order_of_the_prompts() -> None:
    model = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    said = generate(model, tiny_prompts(), max_new_tokens=10, batch_size=9)
    prompts = list(tiny_prompts())
    for i in (1, 4):  # two facts whose answer is what the model says
        prompts[i] = dataclasses.replace(prompts[i], fact=dataclasses.replace(prompts[i].fact, answers=("no", said[i])))
    shortcuts = {prompts[7].fact.relation: (said[7].upper(),)}
    found = recall(model, prompts, shortcuts, batch_size=2)
    assert found.outputs == tuple(said)
    assert [found.correct[i] for i in (1, 4)] == [True, True]
    assert sum(found.correct) < len(prompts)
    assert found.shortcut[7]
    assert sum(found.shortcut) == 1
    assert found.prompt_ids == tuple(prompt.prompt_id for prompt in prompts)
    assert found.popularity == tuple(prompt.fact.popularity for prompt in prompts)


def test_by_default_the_shortcut_is_the_most_frequent_answer_of_the_prompts_themselves() -> None:
    model = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    said = generate(model, tiny_prompts()[:1], max_new_tokens=10, batch_size=1)[0]
    wrong = tiny_prompts()[0].fact
    usual = dataclasses.replace(wrong, answers=(said,))
    prompts = [
        dataclasses.replace(tiny_prompts()[0], prompt_id=str(i), fact=fact)
        for i, fact in enumerate([wrong, usual, usual])
    ]
    found = recall(model, prompts)
    assert found.correct == (False, True, True)
    assert found.shortcut == (True, False, False)


def test_recall_of_no_prompts_is_refused() -> None:
    with pytest.raises(DataError, match="at least one prompt"):
        recall(load_model(tiny_model("gpt2"), tokenizer=tiny_tokenizer()), [])
