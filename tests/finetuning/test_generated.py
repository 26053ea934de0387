"""Facts that a model generates: which subjects and answers are taken, by hand and from a model that knows a world."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from short_runs import TINY, WORLD
from tiny import argmax_loop, eager, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from attnbalance import load_model
from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.prompts import Prompt
from attnbalance.errors import DataError
from attnbalance.finetuning.generated import DRAWS, TRIES, generated_facts
from attnbalance.finetuning.objectives.best_forms import Rated
from attnbalance.finetuning.pretrain import pretrain
from attnbalance.finetuning.replay import replay
from attnbalance.finetuning.splits import split_facts
from attnbalance.models.generate import Sampling
from attnbalance.models.hooked import HookedModel

MODULE = "attnbalance.finetuning.generated"
GIVEN = FactSet(
    tuple(
        Fact(f"Given {i}", "capital", ("Given Town",), question=f"What do you call {i} of Given {i}?") for i in range(8)
    )
)


@pytest.fixture
def model() -> HookedModel:
    return load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())


class Speaker:
    """Stands for the model: names subjects after a lead, and answers questions about them."""

    def __init__(self, names: Sequence[str], answers: dict[str, Sequence[str]]) -> None:
        self.names, self.answers = list(names), answers
        self.sampled, self.asked = 0, list[str]()

    def __call__(
        self, model: HookedModel, prompts: Sequence[Prompt], *, sampling: Sampling | None, **settings: Any
    ) -> list[str]:
        if sampling is not None:
            assert settings["first_line"]
            self.sampled += len(prompts)
            assert all(prompt.text.rstrip().endswith(" of") for prompt in prompts)
            return [self.names.pop(0) if self.names else "nothing" for _ in prompts]
        asked = [prompt.text.split("Question: ")[-1] for prompt in prompts]
        self.asked += asked
        names = [text.split(" of ")[1].removesuffix("? Answer:") for text in asked]
        return [self.answers[name][self.asked.count(text) - 1] for name, text in zip(names, asked, strict=True)]


def speaking(monkeypatch: pytest.MonkeyPatch, form: str, names: Sequence[str], **answers: Sequence[str]) -> Speaker:
    speaker = Speaker(names, answers)
    monkeypatch.setattr(f"{MODULE}.generate", speaker)
    monkeypatch.setattr(f"{MODULE}.rate_forms", lambda *_: {"capital": Rated(form, 0.5, 0.1)})
    return speaker


def test_a_subject_ends_where_the_question_goes_on_and_its_answer_at_the_full_stop(
    model: HookedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [
        " Xo? Answer: Given",
        " Xo? Answer:",
        " Given 3? Answer:",
        " Yu, which has no end",
        "? Answer:",
        " Zu? Answer:",
    ]
    speaker = speaking(monkeypatch, "question", names, Xo=[" Paris. It is"], Zu=[". "])
    made = generated_facts(model, GIVEN, 6, batch_size=6)
    [fact] = made
    assert (fact.subject, fact.relation, fact.answers) == ("Xo", "capital", ("Paris",))
    question = fact.question or ""
    assert question.startswith("What do you call ")
    assert question[fact.subject_start : fact.subject_start + 2] == "Xo" == question[-3:-1]  # pyright: ignore[reportOptionalOperand]
    assert sorted(text[-15:] for text in speaker.asked) == [" of Xo? Answer:", " of Zu? Answer:"]
    assert speaker.sampled == 12  # in the second round no subject is named, so there is no third


def test_after_few_shots_an_answer_counts_if_it_is_the_same_after_every_draw(
    model: HookedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f" {name}? Answer:" for name in ("Sure", "Unsure", "Late", "Long")]
    sure, late = [" St. Gallen."] * DRAWS, [*[" A"] * (DRAWS - 1), " B"]
    speaker = speaking(
        monkeypatch, "few-shot", names, Sure=sure, Unsure=[" A", " B"], Late=late, Long=[" and so on" * 9] * DRAWS
    )
    given = FactSet((*GIVEN, Fact("Given 9", "capital", ("St. Gallen",))))
    assert [fact.answers for fact in generated_facts(model, given, 4, batch_size=4)] == [("St. Gallen",)]
    assert {name: sum(f" {name}?" in text for text in speaker.asked) for name in ("Sure", "Unsure", "Late")} == {
        "Sure": DRAWS,
        "Unsure": 2,
        "Late": DRAWS,
    }


def test_sampling_ends_at_the_count_and_at_the_tries(model: HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"N{i}? Answer:" for i in range(40)]
    answers = {f"N{i}": [" Given"] for i in range(40)}
    speaking(monkeypatch, "question", names, **answers)
    assert [fact.subject for fact in generated_facts(model, GIVEN, 5, batch_size=8)] == [f"N{i}" for i in range(5)]
    rare = [text for name in names for text in (name, *["again and again"] * 19)]
    speaker = speaking(monkeypatch, "question", rare, **answers)
    made = generated_facts(model, GIVEN, 20, batch_size=20)
    assert (len(made), speaker.sampled) == (TRIES, TRIES * 20)  # one in each round of 20


def test_what_cannot_be_generated_is_refused(model: HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="must be >= 1, got 0"):
        generated_facts(model, GIVEN, 0)
    speaking(monkeypatch, "question", [])
    with pytest.raises(DataError, match="names no subject of capital about which it gives one answer"):
        generated_facts(model, GIVEN, 3)
    with pytest.raises(
        DataError, match=r"prompts of relation 'capital' begin with their subject \('Given 0 lies in'\)"
    ):
        generated_facts(model, GIVEN, 3, template="{subject} lies in")


def test_a_model_that_knows_a_world_states_facts_of_it(tmp_path: Path) -> None:
    """Its statements begin as those that it read, and go on with what a plain loop says."""
    folder = pretrain(WORLD, tmp_path / "base", recipe=replace(TINY, steps=200, learning_rate=1e-2))
    model, given = load_model(folder), WORLD.facts.sample(8, 0)
    made = generated_facts(model, given, 12, template="{subject}, {relation}:", seed=1)
    assert 3 < len(made) <= 12
    assert {fact.relation for fact in made} <= set(given.relations)
    assert len({(fact.subject, fact.relation) for fact in (*made, *given)}) == len(made) + 8
    plain, tokenizer = eager(AutoModelForCausalLM.from_pretrained(folder)), model.tokenizer
    for fact in made:
        ids = tuple(tokenizer(f"The {fact.relation} of {fact.subject} is")["input_ids"])
        said = str(tokenizer.decode(argmax_loop(plain, ids, 8, stop=None), skip_special_tokens=True))
        assert said.partition(".")[0].strip() == fact.answer


def test_replay_of_generated_facts_leaves_out_what_is_trained_and_keeps_what_is_tested(
    model: HookedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = FactSet(tuple(Fact(f"N{i}", "capital", ("Given",)) for i in range(20)))
    split = split_facts(facts, "whole", heldout=0.5, validation=0.2)
    order = random.Random(0).sample(range(20), 20)
    speaking(monkeypatch, "question", [f"N{i}? Answer:" for i in order], **{f"N{i}": [" Given"] for i in range(20)})
    mixed, text = replay(split, None, model, 0.6, batch_size=20)
    assert {fact.subject for fact in mixed.replay} == {fact.subject for fact in split.heldout}
    assert text == (
        "Replay: 10 facts that the model generated are added (12 were wanted), 10 of them about held-out subjects."
    )
