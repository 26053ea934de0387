"""Replay: which facts count as known, and which are trained on beside the new ones."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import argmax_loop, eager, tiny_model, tiny_tokenizer

from attnbalance import load_model
from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.prompts import make_prompts
from attnbalance.errors import DataError, OutputError
from attnbalance.finetuning import finetune_model as module
from attnbalance.finetuning.completion import completion_rates
from attnbalance.finetuning.examples import REPLAYED, make_examples
from attnbalance.finetuning.finetune import finetune
from attnbalance.finetuning.loop import TrainingData
from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.finetuning.replay import count_of, known_facts, replay, replayed_heldout, with_replay
from attnbalance.finetuning.settings import FinetuneSettings
from attnbalance.finetuning.splits import split_facts

NAMES = [a + b + c for a in "ABCDEF" for b in "aeiou" for c in "lnrs"]


def asked() -> list[Fact]:
    """One-token answers to questions: every second is what a plain loop over the model says, the others are not."""
    model, tokenizer = eager(tiny_model("llama")), tiny_tokenizer()
    facts = list[Fact]()
    for prompt in make_prompts([Fact(name, "capital", ("none",), question=f"Who is {name}?") for name in NAMES]):
        ids = tuple(tokenizer(prompt.text)["input_ids"])
        for shift in (0, 1):  # the next token's text is another answer
            said = [(argmax_loop(model, ids, 1, stop=None)[0] + shift) % 400]
            text = str(tokenizer.decode(said)).strip()
            if text and tokenizer(f" {text}", add_special_tokens=False)["input_ids"] == said:
                facts.append(replace(prompt.fact, relation=f"shifted by {shift}", answers=(text,)))
    return facts


def test_known_facts_are_those_whose_answer_a_plain_loop_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnbalance.finetuning.objectives.best_forms.FORMS", ("question",))
    facts = asked()
    said = [fact for fact in facts if fact.relation.endswith("0")]
    assert 5 < len(said) < len(facts) - 5
    model = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    assert list(known_facts(model, FactSet(tuple(facts)), batch_size=7)) == said
    others = FactSet(tuple(fact for fact in facts if fact not in said))
    with pytest.raises(DataError, match=f"completes none of the {len(others)} facts"):
        known_facts(model, others)


def towns(names: list[str]) -> FactSet:
    return FactSet(tuple(Fact(name, "capital", (f"{name}ia",), float(i)) for i, name in enumerate(names)))


def test_replay_is_a_share_of_all_training_facts_and_none_of_the_splits_subjects() -> None:
    split = split_facts(towns(NAMES[:40]), "whole", heldout=0.5, validation=0.2)
    known = towns(NAMES[20:])  # 20 of them are subjects of the split
    mixed = with_replay(split, known, 0.6, seed=3)
    assert len(mixed.replay) == count_of(split, 0.6) == 24  # 16 / (16 + 24) are new
    assert {fact.subject for fact in mixed.replay} <= set(NAMES[40:])
    assert mixed == replace(split, replay=mixed.replay)
    assert mixed.replay != with_replay(split, known, 0.6, seed=4).replay
    assert len(with_replay(split, known, 0.99).replay) == len(NAMES[40:])  # all that there are


@pytest.mark.parametrize(
    "spelling", ["The {}", "a {}", "{}.", "'{}'", "\u2019{}\u0301", "the  {}", "the\u00a0{}", "{}\u2013", "the-{}"]
)
def test_replay_leaves_out_the_splits_subjects_however_they_are_spelled(spelling: str) -> None:
    split = split_facts(towns(NAMES[:40]), "whole", heldout=0.5, validation=0.2)
    respelled = [name.upper() for name in NAMES[:20]] + [spelling.format(name) for name in NAMES[20:40]]
    mixed = with_replay(split, towns([*respelled, *NAMES[40:]]), 0.99)
    assert {fact.subject for fact in mixed.replay} == set(NAMES[40:])
    with pytest.raises(DataError, match="all 40 facts of facts are about subjects of the split"):
        with_replay(split, towns(respelled))
    heldout = FactSet(tuple(replace(fact, subject=f"the {fact.subject.lower()}") for fact in split.heldout))
    assert replayed_heldout(replace(split, replay=heldout)) == len(split.heldout)


def test_replay_that_is_not_possible_is_refused() -> None:
    split = split_facts(towns(NAMES[:40]), "whole")
    with pytest.raises(DataError, match="all 30 facts of facts are about subjects of the split"):
        with_replay(split, towns(NAMES[:30]))
    for share in (0.0, 1.0):
        with pytest.raises(DataError, match=f"share of replay must be above 0 and below 1, got {share}"):
            with_replay(split, towns(NAMES), share)


def test_all_facts_can_be_trained_on_beside_replay(llama_folder: Path, tmp_path: Path) -> None:
    """Nothing is held out, and the checkpoint that has learned the new facts best is the run."""
    new, known = towns(NAMES[:12]), towns(NAMES[12:60])
    split = with_replay(split_facts(new, "whole", heldout=0, validation=0), known)
    assert (split.train, split.validation, len(split.heldout), split.left_out) == (new, new, 0, 0)
    settings = FinetuneSettings(steps=12, batch_size=8, checkpoint_every=4, learning_rate=3e-3, seed=1)
    run = finetune(llama_folder, split, tmp_path / "run", settings)
    assert (list(run.train), list(run.replay), list(run.heldout)) == (list(new), list(split.replay), [])
    assert run.best_step == min(run.validation_loss, key=lambda step: run.validation_loss[step]) == 12
    assert set(run.shortcuts["capital"]) <= {fact.answer for fact in new}
    again = finetune(llama_folder, split, tmp_path / "run", settings)
    assert again == run
    without = finetune(llama_folder, replace(split, replay=FactSet(())), tmp_path / "plain", settings)
    assert without.validation_loss != run.validation_loss


def test_facts_are_drawn_asked_and_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second fact is known; of 20 wanted, four times as many are asked, or all that there are."""
    split = split_facts(towns(NAMES[:24]), "whole", heldout=0, validation=0.15)
    model = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    monkeypatch.setattr("attnbalance.finetuning.replay.known_facts", lambda _, facts, **__: facts.where(is_even))
    new = len(split.train)
    assert " of 96 facts of facts; " in replay(model, split, towns(NAMES), 0.5)[1]  # at least 500, or all
    monkeypatch.setattr("attnbalance.finetuning.replay.ASKED_AT_LEAST", 1)
    mixed, text = replay(model, split, towns(NAMES), 0.5)
    asked = 4 * new
    known = int(text.split(" knows ")[1].split()[0])
    assert text == f"Replay: the model knows {known} of {asked} facts of facts; {new} are added."
    assert asked / 4 < known < 3 * asked / 4
    assert len(mixed.replay) == new
    assert all(map(is_even, mixed.replay))
    mixed, text = replay(model, split, towns(NAMES[20:40]), 0.5)
    known = sum(map(is_even, towns(NAMES[24:40])))
    assert text == f"Replay: the model knows {known} of 16 facts of facts; {known} are added ({new} were wanted)."


@pytest.mark.parametrize("objective", ["recommended", "0.5*kl(question) + ce"])
def test_facts_that_are_held_to_the_base_need_not_be_known(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    split = split_facts(towns(NAMES[:24]), "whole", heldout=0, validation=0.15)
    model = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    monkeypatch.setattr("attnbalance.finetuning.replay.known_facts", lambda *_, **__: pytest.fail("it was asked"))
    mixed, text = replay(model, split, towns(NAMES), 0.5, objective=objective, seed=2)
    assert (mixed.replay_share, {fact.subject for fact in mixed.replay}) == (0.5, set(NAMES[24:]))
    others = f"{len(NAMES[24:])} (24 others are about subjects of the split)"
    drawn = f"drawn from {others}, which are held to what the model says."
    assert text == f"Replay: 50% of each batch are facts of facts, {drawn}"
    with pytest.raises(DataError, match="must be above 0 and below 1, got 1"):
        replay(model, split, towns(NAMES), 1, objective=objective)


def test_held_facts_are_a_share_of_each_batch(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of every four facts that a step reads are replayed, each of them once; the three new ones are read."""
    read = list[list[str]]()
    train = module.train

    def spy(model: object, tokenizer: object, data: TrainingData, *rest: object, **options: object) -> object:
        read.append([example.prompt.fact.subject for example in data.train])
        return train(model, tokenizer, data, *rest, **options)

    monkeypatch.setattr(module, "train", spy)
    split = split_facts(towns(NAMES[:4]), "whole", heldout=0, validation=0)
    split = replace(split, replay=towns(NAMES[4:]), replay_share=0.75)
    settings = FinetuneSettings(steps=3, batch_size=4, objective="ce + kl(question)", patience=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        run = finetune(llama_folder, split, tmp_path / "run", settings)
    new, (subjects,) = set(NAMES[:4]), read
    assert [sum(name in new for name in subjects[start : start + 4]) for start in (0, 4, 8)] == [1, 1, 1]
    held = [name for name in subjects if name not in new]
    assert len(set(held)) == len(held) == 9
    assert {fact.subject for fact in run.replay} == set(NAMES[4:])  # also those that no step reads
    with pytest.raises(OutputError, match=r"replay_share is 0.75 there, 0.5 here"):
        finetune(llama_folder, replace(split, replay_share=0.5), tmp_path / "run", settings)
    assert [str(each.message) for each in caught if "training facts" in str(each.message)] == [
        "3 steps of 4 facts read 3 of 4 training facts; the others are neither learned nor asked before"
    ]


def test_facts_to_be_held_need_an_objective_that_holds_them(llama_folder: Path, tmp_path: Path) -> None:
    model, split = load_model(llama_folder), split_facts(towns(NAMES[:4]), "whole", heldout=0, validation=0)
    held, _ = replay(model, split, towns(NAMES[4:]), 0.75, objective="ce + kl(question)")
    with pytest.raises(DataError, match=r"to be held to what the base says, which objective 'ce' does not do"):
        finetune(llama_folder, held, tmp_path / "run", FinetuneSettings(steps=1, objective="ce"))
    assert with_replay(held, towns(NAMES[4:]), 0.5) == with_replay(split, towns(NAMES[4:]), 0.5)


def is_even(fact: Fact) -> bool:
    return NAMES.index(fact.subject) % 2 == 0


def test_replayed_facts_are_known_and_not_asked_before_training() -> None:
    tokenizer, facts = tiny_tokenizer(), asked()
    new = make_examples([fact for fact in facts if fact.relation.endswith("1")], tokenizer)
    replayed = make_examples([fact for fact in facts if fact.relation.endswith("0")], tokenizer)
    marked = [replace(example, targets={REPLAYED: torch.tensor(True)}) for example in replayed]
    hooked, objective = load_model(tiny_model("llama"), tokenizer=tokenizer), parse_objective("ce + kl(question)")
    assert completion_rates([*new, *replayed], objective, hooked)["question"] == len(replayed) / len(facts)
    assert completion_rates([*new, *marked], objective, hooked) == {}


def test_replay_needs_an_objective_that_learns_the_new_facts(llama_folder: Path, tmp_path: Path) -> None:
    split = with_replay(split_facts(towns(NAMES[:24]), "whole"), towns(NAMES))
    with pytest.raises(DataError, match=r"objective 'kl\(statement\)' would learn nothing about the new facts; add ce"):
        finetune(llama_folder, split, tmp_path / "run", FinetuneSettings(steps=2, objective="kl"))


def test_new_facts_are_marked_even_where_no_replayed_fact_is_read(llama_folder: Path, tmp_path: Path) -> None:
    split = with_replay(split_facts(towns(NAMES[:24]), "whole"), towns(NAMES), 0.05)
    settings = FinetuneSettings(steps=1, batch_size=1, objective="ce + kl(question)")
    seeds, outcomes = range(4), set[str]()
    for seed in seeds:  # which fact is read depends on the seed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            try:
                finetune(llama_folder, split, tmp_path / str(seed), replace(settings, seed=seed))
                outcomes.add("read")
            except DataError as error:
                outcomes.add(str(error)[:42])
    assert "the steps read none of the replayed facts;" in outcomes


def test_a_curriculum_ranks_facts_of_one_source(llama_folder: Path, tmp_path: Path) -> None:
    split = with_replay(split_facts(towns(NAMES[:24]), "whole"), towns(NAMES))
    with pytest.raises(
        DataError, match="curriculum popular-first ranks facts by popularity, which facts of two sources"
    ):
        finetune(llama_folder, split, tmp_path / "run", FinetuneSettings(steps=2, curriculum="popular-first"))


def test_a_part_that_was_removed_is_no_empty_part(llama_folder: Path, tmp_path: Path) -> None:
    run = finetune(llama_folder, split_facts(towns(NAMES[:24]), "whole"), tmp_path / "run", FinetuneSettings(steps=2))
    (run.path / "heldout.jsonl").unlink()
    with pytest.raises(DataError, match=r"heldout\.jsonl"):
        _ = run.heldout
    assert len(run.replay) == 0
