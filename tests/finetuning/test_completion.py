"""What the base completes, against plain greedy decoding, and what is said of it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import FACTS, eager, tiny_model, tiny_tokenizer
from transformers import TrainingArguments

from attnbalance import Fact
from attnbalance.data.prompts import make_prompts
from attnbalance.data.statements import statement_prompts
from attnbalance.finetuning import completion
from attnbalance.finetuning.completion import CONSTANT, completion_rates, describe, warn_of_weak_forms, weak_forms
from attnbalance.finetuning.examples import Example, make_examples
from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.finetuning.trainer import ObjectiveTrainer
from attnbalance.models.hooked import hook

KL = parse_objective("kl(statement)")


def greedy(text: str, tokens: int) -> list[int]:
    """Plain greedy decoding by eager attention, without a cache."""
    model, ids = eager(tiny_model("llama")), tiny_tokenizer("bos")(text)["input_ids"]
    for _ in range(tokens):
        ids = [*ids, int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[-tokens:]


def known_facts() -> list[Fact]:
    """The facts, every other one with the answer that the model gives behind its statement, where that is a text."""
    tokenizer, facts = tiny_tokenizer("bos"), []
    for i, fact in enumerate(FACTS):
        said = greedy(statement_prompts([fact])[0].text, 2)
        text = str(tokenizer.decode(said)).strip()
        same = tokenizer(f" {text}", add_special_tokens=False)["input_ids"] == said
        facts.append(replace(fact, answers=(text,)) if i % 2 == 0 and same else fact)
    return facts


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_rates_are_those_of_greedy_decoding(batch_size: int) -> None:
    facts, tokenizer = known_facts(), tiny_tokenizer("bos")
    expected = {}
    for form, prompts in (("statement", statement_prompts(facts)), ("question", make_prompts(facts))):
        right = []
        for prompt in prompts:
            wanted = tokenizer(f" {prompt.fact.answer}", add_special_tokens=False)["input_ids"]
            right.append(greedy(prompt.text, len(wanted)) == wanted)
        expected[form] = sum(right) / len(right)
    base = hook(tiny_model("llama"), tokenizer, "tiny")
    rates = completion_rates(make_examples(facts, tokenizer), KL, base, batch_size=batch_size)
    assert rates.pop(CONSTANT) > 0
    assert rates == pytest.approx(expected)
    assert rates["statement"] > 0


def test_the_constant_answer_is_the_most_frequent_of_each_relation() -> None:
    answers = [("a", "x"), ("a", "x"), ("a", "y"), ("b", "z"), ("b", "w")]
    facts = [Fact(f"Subject {i}", relation, (answer,)) for i, (relation, answer) in enumerate(answers)]
    base = hook(tiny_model("llama"), tiny_tokenizer("bos"), "tiny")
    rates = completion_rates(make_examples(facts, tiny_tokenizer("bos")), KL, base)
    assert rates[CONSTANT] == pytest.approx((2 + 1) / 5)


def test_an_objective_that_asks_the_base_nothing_has_no_rates() -> None:
    examples = make_examples(FACTS, tiny_tokenizer("bos"))
    base = hook(tiny_model("llama"), tiny_tokenizer("bos"), "tiny")
    assert completion_rates(examples, parse_objective("ce + floor(0.5)"), base) == {}


def test_of_many_examples_some_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(completion, "ASKED", 4)
    monkeypatch.setattr(
        completion, "completions", lambda examples, *_: asked.append(len(examples)) or [True] * len(examples)
    )
    examples = make_examples(FACTS, tiny_tokenizer("bos"))
    completion_rates([*examples, *examples], KL, hook(tiny_model("llama"), tiny_tokenizer("bos"), "tiny"))
    assert asked == [4, 4]


@pytest.mark.parametrize(
    ("rates", "weak"),
    [
        ({"statement": 0.1, "question": 0.0, CONSTANT: 0.3}, ["statement"]),  # below a constant answer
        ({"statement": 0.4, "question": 0.5, CONSTANT: 0.3}, ["statement"]),  # below the question itself
        ({"statement": 0.5, "question": 0.5, CONSTANT: 0.3}, []),
        ({"statement": 0.96, "question": 0.0, CONSTANT: 1.0}, []),  # one answer for all: half is enough
        ({"statement": 0.4, "question": 0.0, CONSTANT: 1.0}, ["statement"]),
        ({CONSTANT: 0.3}, []),  # no form could be asked
    ],
)
def test_a_form_is_weak_below_a_constant_answer_or_the_question(rates: dict[str, float], weak: list[str]) -> None:
    assert weak_forms(rates, KL) == weak
    assert weak_forms({"question": 0.2, CONSTANT: 0.3}, parse_objective("kl(question)")) == ["question"]


def test_a_relation_that_a_form_does_not_fit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base that completes all statements of one relation, none of another, and 30% of a third (10 facts)."""

    def complete(examples: Sequence[Example], *_: object) -> list[bool]:
        facts = [example.prompt.fact for example in examples if example.prompt]
        asked = [example.prompt.text.startswith("Question") for example in examples if example.prompt]
        counts = Counter[str]()
        hits = []
        for fact, question in zip(facts, asked, strict=True):
            counts[fact.relation] += 1
            hits.append(
                not question and (fact.relation == "home" or (fact.relation, counts["few"] > 7) == ("few", True))
            )
        return hits

    monkeypatch.setattr(completion, "completions", complete)
    sizes = {"home": 40, "comes from": 40, "few": 10}
    facts = [
        Fact(f"{relation} {i}", relation, (f"place {i % 2}",), question=f"Where is {relation} {i}?")
        for relation, size in sizes.items()
        for i in range(size)
    ]
    examples, tokenizer = make_examples(facts, tiny_tokenizer("bos")), tiny_tokenizer("bos")
    rates = completion_rates(examples, KL, hook(tiny_model("llama"), tokenizer, "tiny"))
    assert rates == {"statement": 43 / 90, "question": 0.0, "statement about comes from": 0.0, CONSTANT: 0.5}
    with pytest.warns(
        UserWarning, match=r"0\.0% as statement about comes from.*Teaching from statement for comes from"
    ):
        warn_of_weak_forms(rates | {CONSTANT: 0.4}, KL)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warn_of_weak_forms({"statement": 0.5, "question": 0.0, CONSTANT: 0.5}, KL)
        named = {"few-shot for facts about cities": 0.6, "best": 0.6, "question": 0.0, CONSTANT: 0.3}
        warn_of_weak_forms(named, parse_objective("kl(best)"))


def test_no_weak_form_is_recommended() -> None:
    rates = {"statement": 0.1, "question": 0.2, CONSTANT: 0.3}
    with pytest.warns(UserWarning, match=r"form \(few-shot, not measured; few-shot-statement, not measured\), or rec"):
        warn_of_weak_forms(rates, KL)
    both = parse_objective("ce + kl(statement) + kl(few-shot)")
    rates |= {"few-shot": 0.6, "few-shot about job": 0.0}
    with pytest.warns(UserWarning, match=r"try another form \(few-shot-statement, not measured\), or recommended"):
        warn_of_weak_forms(rates, both)


def test_a_relation_of_one_answer_is_weak_below_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """96 and 4 of 100 facts of one answer are completed."""
    facts = [Fact(f"Town {i}", relation, ("France",)) for relation in ("home", "land") for i in range(100)]

    def complete(examples: Sequence[Example], *_: object) -> list[bool]:
        return [
            example.prompt.text.startswith("The")
            and (int(example.prompt.fact.subject[5:]) < 4) == (example.prompt.fact.relation == "land")
            for example in examples
            if example.prompt
        ]

    monkeypatch.setattr(completion, "completions", complete)
    tokenizer = tiny_tokenizer("bos")
    rates = completion_rates(make_examples(facts, tokenizer), KL, hook(tiny_model("llama"), tokenizer, "tiny"))
    assert rates == {"statement": 0.5, "question": 0.0, "statement about land": 0.04, CONSTANT: 1.0}


def test_what_is_said_names_the_forms_and_whether_answers_are_learned() -> None:
    rates = {"statement": 0.431, "question": 0.0, CONSTANT: 0.28}
    text = describe(rates, KL)
    assert "43.1% as statement, 0.0% as question; a constant answer gets 28.0%" in text
    assert "the answers given are not learned" in text
    assert "not learned" not in describe(rates, parse_objective("ce + kl(statement)"))
    assert describe({}, parse_objective("floor(0.9)")) == (
        "floor(0.9) teaches no answers; the answers given are not learned."
    )
    assert describe({}, parse_objective("ce + floor(0.9)")) == ""


def trainer(folder: Path, facts: list[Fact], objective: str) -> ObjectiveTrainer:
    settings = TrainingArguments(str(folder), max_steps=1, use_cpu=True, report_to="none", save_strategy="no")
    tokenizer = tiny_tokenizer("bos")
    return ObjectiveTrainer(
        model=tiny_model("llama"),
        args=settings,
        train_dataset=make_examples(facts, tokenizer),
        processing_class=tokenizer,
        objective=objective,
    )


def test_teaching_from_a_form_that_the_base_does_not_know_is_warned_of_before_training(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"Teaching from statement would lose what it knows"):
        trainer(tmp_path, list(FACTS), "state-anchor(statement)")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer(tmp_path, list(FACTS), "ce")


def test_the_rates_stand_in_the_log_once(tmp_path: Path) -> None:
    made = trainer(tmp_path, known_facts(), "kl(statement)")
    made.train()
    entries = [entry for entry in made.state.log_history if "base_completes/statement" in entry]
    assert [entry["base_completes/statement"] for entry in entries] == [made.base_completes["statement"]]
