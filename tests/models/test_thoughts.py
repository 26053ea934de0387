"""Thoughts before answers are counted in a warning."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace

import pytest
from tiny import tiny_model, tiny_prompts, tiny_tokenizer

from attnbalance import Fact, knowledge, load_model, recall
from attnbalance.data.prompts import make_prompts
from attnbalance.models.thoughts import warn_of_thoughts

MARKS = ("<think>\n", "[THINK]", "<seed:think>", "<|START_THINKING|>", "<thought>", "<reasoning>\n")
OTHERS = ("analysis", "So it is.</think> ", "<|channel|>final<|message|>")


def warned(prompt_end: str, *outputs: str) -> list[str]:
    prompts = [replace(prompt, text=prompt.text + prompt_end) for prompt in tiny_prompts()[: len(outputs)]]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_thoughts(prompts, outputs)
    return [str(warning.message).partition(" the model's thoughts")[0] for warning in caught]


@pytest.mark.parametrize("mark", [*MARKS, *OTHERS])
def test_answers_that_hold_thoughts_are_counted(mark: str) -> None:
    assert warned("", f"{mark}Okay, the user asks", "Paris") == ["1 of 2 answers hold"]


@pytest.mark.parametrize("mark", MARKS)
def test_a_chat_template_may_begin_the_thoughts(mark: str) -> None:
    assert warned(mark, "Okay, the user asks", "Paris") == ["2 of 2 answers hold"]
    assert warned("<think>\n\n</think>\n", "Paris") == []


def test_other_answers_are_not_spoken_of() -> None:
    assert warned("", "Paris, I think", "analysis of it", "Who thought <b>so</b>?") == []


def test_recall_and_knowledge_warn_of_thoughts() -> None:
    model = tiny_model("llama")
    model.config.max_position_embeddings = 512  # rotary positions have no table to run out of
    hooked = load_model(model, tokenizer=tiny_tokenizer())
    prompts = make_prompts([Fact(f"Town {i}", "country", ("Norway",)) for i in range(6)], "Where is {subject}? <think>")
    with pytest.warns(UserWarning, match="6 of 6 answers hold the model's thoughts"):
        recall(hooked, prompts)
    with pytest.warns(UserWarning, match="6 of 6 answers hold the model's thoughts"):
        knowledge(hooked, prompts, forms=("question",))


def test_a_mark_that_is_a_special_token_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of an answer leaves special tokens out."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]"]})
    mark = tokenizer.convert_tokens_to_ids("[THINK]")
    hooked = load_model(tiny_model("llama"), tokenizer=tokenizer)
    answer = tokenizer("Okay", add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(
        sys.modules["attnbalance.models.generate"], "_continuations", lambda *_: [[mark, *answer], answer]
    )
    with pytest.warns(UserWarning, match="1 of 2 answers hold the model's thoughts"):
        assert recall(hooked, tiny_prompts()[:2]).outputs == ("Okay", "Okay")
