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
from tiny import eager, tiny_model, tiny_tokenizer
from transformers import PreTrainedModel

from attnbalance import Fact, HookedModel
from attnbalance.data.forms import FORMS, in_form
from attnbalance.data.prompts import Prompt, make_prompts
from attnbalance.data.statements import statement_prompts
from attnbalance.errors import DataError
from attnbalance.finetuning.completion import CONSTANT, completion_rates, weak_forms
from attnbalance.finetuning.examples import REPLAYED, examples_of, make_examples
from attnbalance.finetuning.objectives import best_forms
from attnbalance.finetuning.objectives.best_forms import CHOSEN, choose_forms, chosen_forms
from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.finetuning.objectives.targets import add_targets
from attnbalance.models.hooked import hook

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


def test_each_relation_is_asked_once_in_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked, calls = base()[0], []
    own = best_forms.answer_logits
    monkeypatch.setattr(best_forms, "answer_logits", lambda *given: calls.append(len(given[1])) or own(*given))
    known = make_examples([fact for fact in facts_known_in_two_forms() if fact.relation == "e"], hooked.tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        choose_forms(known, hooked, 4, seed=0)
    assert calls
    assert set(calls) == {6}
    assert len(calls) <= len(FORMS)


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
            for name in ("kl({})/token", "state-anchor({})"):
                values, alone_values = with_targets[i].targets[name.format("best")], expected.targets[name.format(form)]
                torch.testing.assert_close(values, alone_values, atol=2e-5, rtol=1e-5)


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


def test_replayed_facts_need_be_known_only_where_they_are_learned_too() -> None:
    examples = make_examples([Fact("Ada", "e", ("Peru",))], base()[0].tokenizer)
    replayed = [replace(example, targets={REPLAYED: torch.tensor(True)}) for example in examples]
    with pytest.warns(UserWarning, match=r"e \(0\.0% as .*; train on ce alone, or replay facts that it knows"):
        anchored = add_targets(replayed, parse_objective("ce + row-anchor(best)"), base()[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        held = add_targets(replayed, parse_objective("ce + kl(best)"), base()[0])
    assert anchored[0].targets[CHOSEN] == held[0].targets[CHOSEN]


def test_a_relation_that_no_form_knows_is_named_with_both_numbers() -> None:
    facts = [Fact(name, "city", ("Paris" if i < 4 else "Rome",)) for i, name in enumerate(NAMES)]
    hooked = base()[0]
    with pytest.warns(UserWarning, match=r"city \(0\.0% as [a-z-]+, a constant answer 57\.1%\)"):
        choose_forms(make_examples(facts, hooked.tokenizer), hooked, 4, seed=0)


def test_of_forms_that_complete_nothing_the_one_that_expects_the_answers_most_is_chosen() -> None:
    hooked, plain = roomy()
    for answers in (("Paris", "Rome"), ("pop", "golf")):
        facts = [Fact(name, "city", (answers[i % 2],), question=f"Where is {name}?") for i, name in enumerate(NAMES)]
        expected = {form: log_probability(plain, in_form(form, make_prompts(facts), 3)) for form in FORMS}
        with pytest.warns(UserWarning, match=r"city \(0\.0% as"):
            best = choose_forms(make_examples(facts, hooked.tokenizer), hooked, 4, seed=3)
        assert best == {"city": max(FORMS, key=lambda form: expected[form])}


def log_probability(model: PreTrainedModel, prompts: Sequence[Prompt]) -> float:
    """The sum of the log-probabilities of the answers, each prompt by itself."""
    total, tokenizer = 0.0, tiny_tokenizer()
    for prompt in prompts:
        ids = tokenizer(prompt.text)["input_ids"]
        answer = tokenizer(f" {prompt.fact.answer}", add_special_tokens=False)["input_ids"]
        chances = model(input_ids=torch.tensor([[*ids, *answer]])).logits[0].log_softmax(-1)
        total += sum(float(chances[len(ids) - 1 + i, token]) for i, token in enumerate(answer))
    return total


def roomy() -> tuple[HookedModel, PreTrainedModel]:
    """The model with room for few shots, as we hook it and with plain eager attention."""
    model = tiny_model("llama")
    model.config.max_position_embeddings = 512
    return hook(model, tiny_tokenizer(), "roomy"), eager(model)


def test_few_shot_is_chosen_and_taught_with_the_shots_that_it_was_measured_with() -> None:
    hooked, plain = roomy()
    names = [a + b + c for a in "ABCDEF" for b in "aeiou" for c in "lnrs"]
    facts = [Fact(name, "e", ("me",), question=f"Who is {name}?") for name in names]
    asked = in_form("few-shot", make_prompts(facts), 3)
    shown = "\n\n".join(prompt.text.rpartition("\n\n")[0] for prompt in asked)
    known = [right_after(p) if f"Who is {p.fact.subject}?" not in shown else None for p in asked]
    facts = [fact or other for fact, other in zip(known, facts, strict=True)]
    assert sum(fact is not None for fact in known) > 2
    examples = make_examples(facts, hooked.tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with_targets = add_targets(examples, BEST, hooked, seed=3)
    assert chosen_forms(with_targets) == {"e": "few-shot"}
    for prompt, example in zip(in_form("few-shot", make_prompts(facts), 3), with_targets[:5], strict=False):
        ids = tiny_tokenizer()(prompt.text)["input_ids"]
        held = plain(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        own, values = (example.targets[f"kl(best){part}/token"][0] for part in (" ids", ""))
        torch.testing.assert_close(values, held[own.long()], atol=1e-4, rtol=1e-5)
    ivy = Fact("Ivy", "e", ("pop",), question="Who is Ivy?")
    [asked_alone] = add_targets(make_examples([ivy], hooked.tokenizer), BEST, hooked, seed=3, among=with_targets)
    [prompt] = in_form("few-shot", make_prompts([ivy]), 3, make_prompts(facts))
    ids = tiny_tokenizer()(prompt.text)["input_ids"]
    held = plain(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    own, values = (asked_alone.targets[f"kl(best){part}/token"][0] for part in (" ids", ""))
    torch.testing.assert_close(values, held[own.long()], atol=1e-4, rtol=1e-5)


def test_a_form_that_cannot_ask_every_fact_takes_no_part_and_is_named() -> None:
    hooked, _ = roomy()
    facts = [Fact(name, "city", ("Paris",), question=f"Where is {name}?") for name in NAMES]
    long = Fact("Ab" * 220, "city", ("Paris",), question=f"Where is {'Ab' * 220}?")  # fits alone
    examples = make_examples([*facts, long], hooked.tokenizer)
    with pytest.warns(UserWarning, match="city") as caught:
        choose_forms(examples, hooked, 4, seed=0)
    said = [str(warning.message) for warning in caught]
    assert [form for form in FORMS if any(f"'city' is not asked as {form}: " in text for text in said)] == [
        "few-shot",
        "few-shot-statement",
    ]
    with pytest.warns(UserWarning, match="city"):  # few-shot forms need more subjects
        assert choose_forms(examples[:3], hooked, 4, seed=0)["city"] in ("statement", "question")


def test_a_relation_that_no_form_can_ask_is_refused() -> None:
    hooked = base()[0]
    examples = make_examples(
        [Fact("Ab" * 150, "city", ("Paris",), question=f"Where is {'Ab' * 150}?")], hooked.tokenizer
    )
    with (
        pytest.warns(UserWarning, match="longer than the model's 96 positions"),
        pytest.raises(DataError, match="no form can ask about the facts of relation 'city'"),
    ):
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
