"""Best forms, against plain greedy decoding in every form."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from base_oracle import NAMES, base
from tiny import tiny_tokenizer

from attnbalance import Fact
from attnbalance.data.forms import FORMS, in_form
from attnbalance.data.prompts import Prompt, make_prompts
from attnbalance.data.statements import statement_prompts
from attnbalance.errors import DataError
from attnbalance.finetuning.completion import CONSTANT, completion_rates, weak_forms
from attnbalance.finetuning.examples import examples_of, make_examples
from attnbalance.finetuning.objectives.best_forms import choose_forms, chosen_forms
from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.finetuning.objectives.targets import add_targets

BEST = parse_objective("kl(best)")


def greedy(text: str, tokens: int) -> list[int]:
    """Plain greedy decoding by eager attention, without a cache."""
    model, ids = base()[1], tiny_tokenizer()(text)["input_ids"]
    for _ in range(tokens):
        ids = [*ids, int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[-tokens:]


def right_after(prompt: Prompt) -> Fact | None:
    """The prompt's fact with the answer that the model gives after it, if that is a text that reads as its token."""
    said = greedy(prompt.text, 1)
    text = str(tiny_tokenizer().decode(said)).strip()
    reads = bool(text) and tiny_tokenizer()(f" {text}", add_special_tokens=False)["input_ids"] == said
    return replace(prompt.fact, answers=(text,)) if reads else None


@cache
def facts_known_in_two_forms() -> tuple[Fact, ...]:
    """The first relation as the model states it, the second as it answers questions; six facts of each."""
    names = [a + b + c for a in "ABCDEF" for b in "aeiou" for c in "lnrs"]
    first, second = ([Fact(name, r, ("none",), question=f"Who is {name}?") for name in names] for r in ("e", "t"))
    known = [filter(None, map(right_after, prompts)) for prompts in (statement_prompts(first), make_prompts(second))]
    return tuple(fact for facts in known for fact in itertools.islice(facts, 6))


def rates_by_hand(facts: Sequence[Fact], relation: str) -> dict[str, float]:
    tokenizer, own = tiny_tokenizer(), [fact for fact in facts if fact.relation == relation]
    rates = {}
    for form in FORMS:
        hits = []
        for prompt in in_form(form, make_prompts(own)):
            wanted = tokenizer(f" {prompt.fact.answer}", add_special_tokens=False)["input_ids"]
            hits.append(greedy(prompt.text, len(wanted)) == wanted)
        rates[form] = sum(hits) / len(hits)
    return rates


def test_each_relation_has_the_form_that_plain_greedy_decoding_completes_most() -> None:
    facts = facts_known_in_two_forms()
    hooked = base()[0]
    examples = make_examples(facts, hooked.tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        best = choose_forms(examples, hooked, 4, seed=0)
    by_hand = {relation: rates_by_hand(facts, relation) for relation in ("e", "t")}
    assert {relation: rates[best[relation]] for relation, rates in by_hand.items()} == {
        relation: max(rates.values()) for relation, rates in by_hand.items()
    }
    assert best == {"e": "statement", "t": "question"}


def test_best_targets_are_those_of_each_relations_form_asked_alone() -> None:
    facts, hooked = facts_known_in_two_forms(), base()[0]
    examples = make_examples(facts, hooked.tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with_targets = add_targets(examples, parse_objective("kl(best) + state-anchor(best)"), hooked)
    assert chosen_forms(with_targets) == {"e": "statement", "t": "question"}
    for relation, form in (("e", "statement"), ("t", "question")):
        own = [i for i, fact in enumerate(facts) if fact.relation == relation]
        alone = parse_objective(f"kl({form}) + state-anchor({form})")
        for i, expected in zip(own, add_targets([examples[i] for i in own], alone, hooked), strict=True):
            for name in ("kl({}) ids/token", "kl({})/token", "state-anchor({})"):
                if "ids" not in name:  # near ties may change places
                    torch.testing.assert_close(
                        with_targets[i].targets[name.format("best")],
                        expected.targets[name.format(form)],
                        atol=2e-5,
                        rtol=1e-5,
                    )


def test_other_facts_are_asked_in_the_forms_of_the_training_facts() -> None:
    facts, hooked = facts_known_in_two_forms(), base()[0]
    examples = make_examples(facts, hooked.tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        train = add_targets(examples, BEST, hooked)
    [other] = make_examples([Fact("Ivy", "t", ("pop",), question="Who is Ivy?")], hooked.tokenizer)
    [asked] = add_targets([other], BEST, hooked, among=train)
    [alone] = add_targets([other], parse_objective("kl(question)"), hooked)
    torch.testing.assert_close(
        asked.targets["kl(best)/token"], alone.targets["kl(question)/token"], atol=2e-5, rtol=1e-5
    )


def test_a_relation_that_no_form_knows_is_named_with_both_numbers() -> None:
    facts = [Fact(name, "city", ("Paris" if i < 4 else "Rome",)) for i, name in enumerate(NAMES)]
    hooked = base()[0]
    with pytest.warns(UserWarning, match=r"city \(0\.0% as statement, a constant answer 57\.1%\)"):
        choose_forms(make_examples(facts, hooked.tokenizer), hooked, 4, seed=0)


def test_few_shots_take_part_only_where_there_are_enough_subjects() -> None:
    facts = [Fact(name, "city", ("Paris",)) for name in NAMES[:3]]
    hooked = base()[0]
    with pytest.warns(UserWarning, match="city"):
        assert choose_forms(make_examples(facts, hooked.tokenizer), hooked, 4, seed=0) == {"city": "statement"}


def test_a_relation_that_no_form_can_ask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked = base()[0]
    examples = make_examples([Fact(name, "city", ("Paris",)) for name in NAMES], hooked.tokenizer)
    monkeypatch.setattr("attnbalance.finetuning.objectives.best_forms.FORMS", ())
    with pytest.raises(DataError, match="no form can ask about the facts of relation 'city'"):
        choose_forms(examples, hooked, 4, seed=0)


def test_the_rates_name_each_relation_with_its_form_and_its_own_hits() -> None:
    facts, hooked = facts_known_in_two_forms(), base()[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        examples = add_targets(examples_of(make_prompts(facts), hooked.tokenizer), BEST, hooked)
    rates = completion_rates(examples, BEST, hooked)
    assert set(rates) == {"best", "question", "statement for e", "question for t", CONSTANT}
    assert rates["statement for e"] == pytest.approx(rates_by_hand(facts, "e")["statement"])
    assert rates["question for t"] == pytest.approx(rates_by_hand(facts, "t")["question"])
    assert rates["best"] == pytest.approx((rates["statement for e"] + rates["question for t"]) / 2)
    assert weak_forms({"best": 0.1, CONSTANT: 0.5}, BEST) == []
