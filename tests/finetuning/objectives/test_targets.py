"""The base model's numbers of examples: for whom they are computed, and what leaves them unchanged."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace

import pytest
import torch
from base_oracle import (
    TOWNS,
    added,
    base,
)
from peft import LoraConfig, get_peft_model
from tiny import FACTS, tiny_model, tiny_tokenizer

from attnbalance import load_model
from attnbalance.data.forms import SHOTS, in_form
from attnbalance.data.prompts import make_prompts
from attnbalance.errors import DataError, ModelError
from attnbalance.finetuning.examples import IGNORED, REPLAYED, Example, as_examples, collate, make_examples
from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.finetuning.objectives.targets import add_targets


def test_an_objective_without_a_base_leaves_examples_as_they_are() -> None:
    examples = make_examples(FACTS, tiny_tokenizer())
    unchanged = add_targets(examples, parse_objective("ce + floor + project"), base()[0])
    assert all(after is before for after, before in zip(unchanged, examples, strict=True))


def test_a_bar_shows_the_progress_of_each_term_and_of_the_choice_of_forms(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # elsewhere there are lines, and seldom
    examples = make_examples(TOWNS, base()[0].tokenizer)
    for progress in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            add_targets(examples, parse_objective("kl(best) + state-anchor"), base()[0], progress=progress)
        shown = capsys.readouterr().err
        for name in ("which forms the base knows", "numbers for kl(best)", "numbers for state-anchor(statement)"):
            assert (name in shown) is progress


def test_training_examples_without_targets_choose_no_form() -> None:
    examples = make_examples(TOWNS, base()[0].tokenizer)
    with pytest.raises(DataError, match="`among` must have the targets that add_targets gave"):
        add_targets(examples[:1], parse_objective("kl(best)"), base()[0], among=examples)


def test_rows_about_no_fact_change_no_target_of_the_others() -> None:
    general = Example((5, 6, 7, 8), (IGNORED, IGNORED, 7, 8))
    for text in ("kl", "row-anchor", "row-anchor(statement)", "state-anchor", "weighted-ce"):
        first, *rest = alone = added(text, FACTS[:3])
        examples = make_examples(FACTS[:3], base()[0].tokenizer)
        mixed = add_targets([examples[0], general, *examples[1:]], parse_objective(text), base()[0])
        for mine, own in zip([mixed[0], *mixed[2:]], [first, *rest], strict=True):
            for name, expected in own.targets.items():
                torch.testing.assert_close(mine.targets[name], expected, atol=2e-5, rtol=1e-5)
        collate([*alone, mixed[1]])  # the shapes go together
        assert all(bool((target == 1).all()) for target in mixed[1].targets.values())
        with pytest.raises(DataError, match="needs examples about facts, but none of 2 has a prompt"):
            add_targets([general] * 2, parse_objective(text), base()[0])
        later = add_targets([general], parse_objective(text), base()[0], among=alone)
        assert later[0].targets.keys() >= set(alone[0].targets) - {f"{text} score"}


def as_replayed(example: Example) -> Example:
    return replace(example, targets={REPLAYED: torch.tensor(True)})


def test_where_facts_are_replayed_the_base_is_asked_these_alone() -> None:
    hooked = base()[0]
    examples = make_examples(TOWNS, hooked.tokenizer)
    new, replayed = examples[:2], [as_replayed(example) for example in examples[2:]]
    for text in ("kl", "kl(best)", "row-anchor", "row-anchor(statement)", "state-anchor"):
        objective = parse_objective(f"ce + {text}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            alone = add_targets(replayed, objective, hooked)
            mixed = add_targets([*new, *replayed], objective, hooked)
        assert [bool(example.targets[REPLAYED]) for example in mixed] == [False] * len(new) + [True] * len(replayed)
        for mine, own in zip(mixed[len(new) :], alone, strict=True):
            assert mine.targets.keys() == own.targets.keys()
            for name, expected in own.targets.items():
                torch.testing.assert_close(mine.targets[name], expected, atol=2e-5, rtol=1e-5)
        later = add_targets(new, objective, hooked, among=mixed)  # such as validation facts
        for blank in (*mixed[: len(new)], *later):
            assert not blank.targets[REPLAYED]
            assert all(bool((target == 1).all()) for name, target in blank.targets.items() if name != REPLAYED)
        collate([*mixed, *later])  # the shapes go together


def test_replayed_facts_that_few_shots_cannot_ask_are_named_as_such() -> None:
    examples, objective = make_examples(TOWNS, base()[0].tokenizer), parse_objective("ce + kl(few-shot)")
    mixed = [*map(as_replayed, examples[:3]), *examples[3:]]
    with pytest.raises(DataError, match="of the replayed facts, which alone are held to the base: few-shot needs more"):
        add_targets(mixed, objective, base()[0])


def test_a_run_with_replay_whose_steps_read_no_replayed_fact_is_refused() -> None:
    new = [replace(each, targets={REPLAYED: torch.tensor(False)}) for each in make_examples(FACTS, tiny_tokenizer())]
    with pytest.raises(DataError, match="the steps read none of the replayed facts; train for more steps"):
        add_targets(new, parse_objective("ce + kl"), base()[0])


def test_blank_targets_take_no_memory() -> None:
    examples = make_examples(FACTS, base()[0].tokenizer)
    mixed = add_targets([as_replayed(examples[0]), *examples[1:]], parse_objective("ce + kl"), base()[0])
    assert mixed[1].targets["kl(statement)/token"].untyped_storage().nbytes() == 4


def test_terms_that_learn_the_answers_ask_the_base_of_new_facts_too() -> None:
    examples, objective = make_examples(FACTS, base()[0].tokenizer), parse_objective("weighted-ce(relevance)")
    expected = add_targets(examples, objective, base()[0])
    mixed = add_targets([as_replayed(examples[0]), *examples[1:]], objective, base()[0])
    for mine, own in zip(mixed, expected, strict=True):
        torch.testing.assert_close(mine.targets["weighted-ce(relevance)"], own.targets["weighted-ce(relevance)"])


def test_neither_batch_size_nor_order_nor_company_changes_a_target() -> None:
    text = "kl(statement) + row-anchor(question) + row-anchor(statement) + state-anchor + weighted-ce(relevance)"
    alone = [example for fact in FACTS for example in added(text, [fact])]
    for size in (1, 4):
        together = added(text, FACTS[::-1], batch_size=size)[::-1]
        for example, other in zip(alone, together, strict=True):
            assert set(example.targets) == set(other.targets)
            assert len(example.targets) == 6  # kl has two
            for name, expected in example.targets.items():
                if "ids" in name:
                    assert len(expected) == len(other.targets[name])  # near ties may change places
                    continue
                # log-probabilities down to -20 and states up to 10, in float32 and other batch shapes
                torch.testing.assert_close(other.targets[name], expected, atol=2e-5, rtol=1e-5, msg=name)


def test_adapters_are_switched_off_and_on_again() -> None:
    text = "kl(statement) + row-anchor(question) + state-anchor(statement)"
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = load_model(get_peft_model(tiny_model("llama"), config), tokenizer=tiny_tokenizer())
    examples = make_examples(FACTS[:3], adapted.tokenizer)
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "use_cache": False}
    with torch.no_grad():
        before = adapted.model(**inputs).logits
    with_targets = add_targets(examples, parse_objective(text), adapted)
    with torch.no_grad():
        assert torch.equal(adapted.model(**inputs).logits, before)
        assert (base()[1](**inputs).logits - before).abs().max() > 0.1  # the adapter does something
    for example, other in zip(with_targets, added(text, FACTS[:3]), strict=True):
        for name, expected in other.targets.items():
            if "ids" not in name:
                torch.testing.assert_close(example.targets[name], expected, atol=2e-5, rtol=1e-5)


def test_targets_leave_the_model_in_its_mode_and_without_gradients() -> None:
    model = base()[0]
    model.model.train()
    added("kl + row-anchor + state-anchor + weighted-ce")
    assert model.model.training
    assert all(parameter.grad is None for parameter in model.model.parameters())
    model.model.eval()


def test_few_shots_of_other_facts_are_training_facts() -> None:
    prompts = make_prompts(TOWNS)
    asked = in_form("few-shot", prompts[:1], shots_from=prompts[1:])[0]
    *shots, last = asked.text.split("\n\n")
    assert last == prompts[0].text
    assert set(shots) < {f"{other.text} {other.fact.answer}" for other in prompts[1:]}
    assert len(set(shots)) == SHOTS
    with pytest.raises(DataError, match="few-shot needs more than 4 subjects of each relation; 'city' has 4"):
        in_form("few-shot", prompts[:1], shots_from=prompts[1:5])


def test_rows_that_are_tokenized_already_get_the_targets_of_the_same_facts() -> None:
    model = base()[0]
    made = make_examples(TOWNS[:5], model.tokenizer, "plain")
    rows = [{"input_ids": list(example.ids), "labels": list(example.labels)} for example in made]
    text = "kl(question) + kl(few-shot) + row-anchor(statement) + weighted-ce(relevance)"
    with_targets = add_targets(as_examples(rows, TOWNS[:5], model.tokenizer), parse_objective(text), model)
    for example, other in zip(with_targets, added(text, TOWNS[:5], template="plain"), strict=True):
        assert set(example.targets) == set(other.targets)
        for name, expected in other.targets.items():
            torch.testing.assert_close(example.targets[name], expected, atol=0, rtol=0)  # the same forward passes


def test_a_base_that_an_adapter_changed_is_refused() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="olora")
    adapted = load_model(get_peft_model(tiny_model("llama"), config), tokenizer=tiny_tokenizer())
    with pytest.raises(ModelError, match="init_lora_weights='olora' changes its weights"):
        add_targets(make_examples(FACTS[:3], adapted.tokenizer), parse_objective("kl(question)"), adapted)
