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
from attnbalance.finetuning.generated import DRAWS, ROUND, TRIES, generated_facts
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
    model = tiny_model("llama")
    model.config.max_position_embeddings = 512  # rotary positions have no table to run out of
    return load_model(model, tokenizer=tiny_tokenizer())


class Speaker:
    """Stands for the model: names subjects after a lead, and answers questions about them."""

    def __init__(self, names: Sequence[str], answers: dict[str, Sequence[str]]) -> None:
        self.names, self.answers = list(names), answers
        self.sampled, self.asked = 0, list[str]()

    def subject_of(self, text: str) -> str:
        return text.split(" of ")[1].removesuffix("? Answer:")

    def __call__(
        self, model: HookedModel, prompts: Sequence[Prompt], *, sampling: Sampling | None, **settings: Any
    ) -> list[str]:
        if sampling is not None:
            assert settings["first_line"]
            self.sampled += len(prompts)
            assert all(prompt.text.rstrip().endswith(" of") for prompt in prompts)
            return [self.names.pop(0) if self.names else "" for _ in prompts]
        asked = [prompt.text.split("Question: ")[-1] for prompt in prompts]
        self.asked += asked
        names = [self.subject_of(text) for text in asked]
        return [self.answers[name][self.asked.count(text) - 1] for name, text in zip(names, asked, strict=True)]


def speaking(monkeypatch: pytest.MonkeyPatch, form: str, names: Sequence[str], **answers: Sequence[str]) -> Speaker:
    speaker = Speaker(names, answers)
    monkeypatch.setattr(f"{MODULE}.generate", speaker)
    monkeypatch.setattr(f"{MODULE}.rate_forms", lambda *_: {"capital": Rated(form, (), ())})
    return speaker


def test_a_subject_ends_where_the_question_goes_on_and_its_answer_with_its_sentence(
    model: HookedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [" Xo? Answer: Given", " Xo? Answer:", " Given 3? Answer:", " Yu, endless", "? Answer:", " Zu? Answer:"]
    names += [" Vo? Answer:", " No? Answers are" + " x" * 40]
    answers = {"Xo": [" Rome. It is"], "Zu": [". "], "Vo": [" J. K. St. Row. She is"]}
    speaker = speaking(monkeypatch, "question", names, **answers)
    given = FactSet((*GIVEN, Fact("Given 9", "capital", ("J. K. St. Rowling",), question="What is 9 of Given 9?")))
    fact, other = generated_facts(model, given, 6, batch_size=8)
    assert (fact.subject, fact.relation, fact.answers) == ("Xo", "capital", ("Rome",))
    assert (other.subject, other.answers) == ("Vo", ("J. K. St. Row",))
    question, start = fact.question or "", fact.subject_start or 0
    assert question[start : start + 2] == "Xo" == question[-3:-1]
    assert sorted(text[-15:] for text in speaker.asked) == [f" of {name}? Answer:" for name in ("Vo", "Xo", "Zu")]
    assert speaker.sampled == TRIES * 6


def test_the_text_behind_the_subject_is_found_as_words(model: HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [" A isb is it", " Sisis isb"]
    speaker = Speaker(names, {"A isb": ["Given"]})
    monkeypatch.setattr(f"{MODULE}.generate", speaker)
    monkeypatch.setattr(f"{MODULE}.rate_forms", lambda *_: {"capital": Rated("statement", (), ())})
    monkeypatch.setattr(speaker, "subject_of", lambda text: text.partition(" of ")[2].removesuffix(" is"))
    assert [fact.subject for fact in generated_facts(model, GIVEN, 2, batch_size=2)] == ["A isb"]


def test_a_name_that_the_budget_may_have_cut_is_left_out(model: HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the subject ends its line, nothing else says that it has ended."""
    speaker = Speaker([" Xo", " Xo" * 30], {"Xo": [" Given"]})
    monkeypatch.setattr(f"{MODULE}.generate", speaker)
    monkeypatch.setattr(f"{MODULE}.rate_forms", lambda *_: {"capital": Rated("question", (), ())})
    monkeypatch.setattr(speaker, "subject_of", lambda text: text.split(" of ")[1].partition("\n")[0])
    made = generated_facts(model, GIVEN, 2, template="The {relation} of {subject}\nIs", batch_size=2)
    assert [fact.subject for fact in made] == ["Xo"]


def test_the_count_is_divided_among_relations(model: HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    given = FactSet(tuple(replace(fact, relation=f"r{i % 3}") for i, fact in enumerate(GIVEN)))
    names = [f"N{i}? Answer:" for i in range(90)]
    answers = {f"N{i}": [" Given"] for i in range(90)}
    for count, parts in ((1, [0, 1, 0]), (5, [2, 2, 1]), (8, [3, 3, 2])):
        speaking(monkeypatch, "question", names, **answers)
        monkeypatch.setattr(
            f"{MODULE}.rate_forms", lambda *_: dict.fromkeys(("r0", "r1", "r2"), Rated("question", (), ()))
        )
        made = generated_facts(model, given, count, batch_size=4)
        assert [sum(fact.relation == f"r{i}" for fact in made) for i in range(3)] == parts


def test_generated_facts_are_stated_as_the_given_ones_are(model: HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    given = FactSet(tuple(replace(fact, statement="{subject} is ruled from") for fact in GIVEN))
    speaking(monkeypatch, "question", [" New Land? Answer:"], **{"New Land": [" Given"]})
    made = generated_facts(model, given, 1, batch_size=4)
    assert [(fact.subject, fact.statement) for fact in made] == [("New Land", "{subject} is ruled from")]


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
    assert (len(made), speaker.sampled) == (TRIES, TRIES * 20)
    speaker = speaking(monkeypatch, "question", [*names[:3], *[""] * ROUND], **answers)
    made = generated_facts(model, GIVEN, 20, batch_size=20)
    assert (len(made), speaker.sampled) == (3, 2 * ROUND)  # the second round gives none


def test_what_cannot_be_generated_is_refused(model: HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="to generate >= 1, got 8 facts and 0"):
        generated_facts(model, GIVEN, 0)
    speaking(monkeypatch, "question", [])
    with pytest.raises(DataError, match="names no subject of capital about which it gives one answer"):
        generated_facts(model, GIVEN, 3)
    with (
        pytest.warns(
            UserWarning, match=r"'capital' is not generated: its prompts begin with their subject \('Given 0 lies in'\)"
        ),
        pytest.raises(DataError, match="names no subject of capital"),
    ):
        generated_facts(model, GIVEN, 3, template="{subject} lies in")


def test_an_answer_is_a_line_of_letters_or_digits(model: HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f" {name}? Answer:" for name in ("Mark", "Turn", "Half", "Year", "Old Echo")]
    answers = {"Mark": ["?"] * DRAWS, "Turn": ["?", *["A"] * DRAWS], "Half": ["A\N{REPLACEMENT CHARACTER}"] * DRAWS}
    speaking(monkeypatch, "few-shot", names, **answers, **{"Year": ["1879."] * DRAWS, "Old Echo": ["Echo"] * DRAWS})
    assert [fact.answers for fact in generated_facts(model, GIVEN, 4)] == [("1879",)]


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


def test_prompts_near_the_last_position_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    long = [f"Lo{'ng' * length}" for length in (1, 90)]
    names = [f"{name}? Answer:" for name in long]
    speaking(monkeypatch, "question", names, **{name: ["Given"] for name in long})
    monkeypatch.setattr(f"{MODULE}._Generator._length", lambda *_: 3)  # else long names are taken for cut ones
    made = generated_facts(model, GIVEN, 2)
    assert [fact.subject for fact in made] == long[:1]


def test_without_validation_facts_each_fact_is_given_once(model: HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    split, given = split_facts(GIVEN, "whole", heldout=0, validation=0), list[Fact]()
    assert split.train == split.validation
    made = FactSet((Fact("Xo", "capital", ("Rome",)),))
    monkeypatch.setattr(
        "attnbalance.finetuning.replay.generated_facts", lambda _, facts, *__, **___: (given.extend(facts), made)[1]
    )
    mixed = replay(model, split)[0]
    assert (mixed.replay, mixed.replay_share) == (made, None)
    assert given == list(split.train)
    assert replay(model, split, share=0.6, objective="recommended")[0].replay_share == 0.6


def test_replay_of_generated_facts_leaves_out_what_is_trained_and_keeps_what_is_tested(
    model: HookedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = FactSet(tuple(Fact(f"N{i}", "capital", ("Given",)) for i in range(20)))
    split = split_facts(facts, "whole", heldout=0.5, validation=0.2)
    order = random.Random(0).sample(range(20), 20)
    speaking(monkeypatch, "question", [f"N{i}? Answer:" for i in order], **{f"N{i}": [" Given"] for i in range(20)})
    mixed, text = replay(model, split, share=0.6)
    assert {fact.subject for fact in mixed.replay} == {fact.subject for fact in split.heldout}
    assert text == (
        "Replay: 10 facts that the model generated are added (12 were wanted), 10 of them about held-out subjects."
    )
