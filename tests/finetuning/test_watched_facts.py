"""Watched facts: the sample, the numbers and the rule of the warnings, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import FACTS, eager, tiny_model, tiny_prompts, tiny_tokenizer
from torch.nn.functional import kl_div

from attnbalance import FactSet
from attnbalance.data.facts import Fact
from attnbalance.errors import BadRowsError
from attnbalance.finetuning.examples import examples_of
from attnbalance.finetuning.objectives import divergence
from attnbalance.finetuning.watched_facts import (
    Look,
    Start,
    WatchedFacts,
    divergence_from,
    falls,
    logged,
    look,
    start_of,
)
from attnbalance.models.hooked import hook
from attnbalance.readings.recall import score

HOW = {"limit": 64, "template": "qa", "chat": False, "seed": 0, "batch_size": 4}
PEOPLE = FactSet(tuple(Fact(f"Person {i}", "sport", ("golf" if i % 3 else "polo",)) for i in range(40)))


def made(facts=PEOPLE, **changes):
    return WatchedFacts.of(facts, tiny_tokenizer("bos"), **HOW | changes)


def said(right, attention):
    """A look at which the first `right` people are answered right, the last four not, and the others by "golf"."""
    prompts = list(made().prompts)
    others = ["golf"] * 36 + ["none"] * 4
    outputs = [p.fact.answer if i < right else others[i] for i, p in enumerate(prompts)]
    recall = score(prompts, outputs, PEOPLE.most_frequent_answers())
    return Look(recall, torch.as_tensor(attention, dtype=torch.float64))


def start(right, attention):
    nothing = torch.zeros(1, 1)
    return Start(torch.as_tensor(attention, dtype=torch.float64), torch.arange(40) < right, nothing.int(), nothing)


def spread(mean):
    """Forty numbers of this mean, from half to one and a half times it."""
    return mean * torch.linspace(0.5, 1.5, 40, dtype=torch.float64)


def test_the_sample_and_the_shortcuts_of_all_facts() -> None:
    sample = made(limit=10, seed=7)
    assert [prompt.fact for prompt in sample.prompts] == list(PEOPLE.sample(10, 7))
    assert sample.shortcuts == PEOPLE.most_frequent_answers()
    assert sample.key == made(limit=10, seed=7).key
    changes = ({"seed": 8}, {"limit": 9}, {"template": "plain"})
    assert sample.key not in [made(**{"limit": 10, "seed": 7} | change).key for change in changes]


def test_questions_are_put_into_a_chat_and_facts_that_cannot_be_asked_are_refused() -> None:
    chat = WatchedFacts.of(PEOPLE, tiny_tokenizer("chat"), **HOW | {"chat": True, "template": "plain"})
    assert chat.prompts[0].text.endswith("Assistant:")
    with pytest.raises(BadRowsError, match="subject"):
        made(FactSet((Fact("Ann", "sport", ("golf",), question="What sport is played?"),)))


def test_what_is_logged_by_hand() -> None:
    # answered right now: 0 to 23, and by "golf" 25, 26, 28, 29, 31, 32, 34, 35; wrong: four by "golf", four by "none"
    numbers = logged(said(24, spread(0.02)), start(30, spread(0.04)), 0.25)
    assert numbers == {
        "watch/subject_attention": pytest.approx(0.02),
        "watch/accuracy": 32 / 40,
        "watch/kl_from_start": 0.25,
        "watch/shortcut_rate": 4 / 8,
        "watch/still_answered": 28 / 30,  # of 0 to 29 without 24 and 27
    }
    everything = logged(said(40, spread(0.02)), start(0, spread(0.04)), 0.0)
    assert "watch/shortcut_rate" not in everything
    assert "watch/still_answered" not in everything


def test_a_fall_is_said_where_the_whole_interval_lies_below_nine_tenths_and_not_where_it_reaches_higher() -> None:
    before = start(40, spread(0.05))
    same = said(40, spread(0.05))
    assert list(falls(same, before)) == []
    names = [name for name, _ in falls(said(40, spread(0.05) * 0.85), before)]
    assert names == ["subject_attention"]  # each fact loses the same share: the interval has no width
    assert list(falls(said(40, spread(0.05) * 0.95), before)) == []
    noisy = spread(0.05) * torch.where(torch.arange(40) % 2 == 0, 0.2, 1.5)  # 85% on average, and not surely so
    assert list(falls(said(40, noisy), before)) == []
    few, many = said(30, spread(0.05)), said(12, spread(0.05))  # 34 and 28 are right, by "golf" as well
    assert list(falls(few, before)) == []
    ((name, sentence),) = falls(many, before)
    assert name == "still_answered"
    z = 2.0227  # Student's for 40 facts
    low, high = wilson(28 / 40, 40 / (40 / 39), z)
    assert sentence == (
        "the model still answers 28 of the 40 facts that it answered at the start: "
        f"70% [{100 * low:.0f}, {100 * high:.0f}]"
    )


def wilson(p, n, z):
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


def test_a_fall_of_attention_says_its_numbers() -> None:
    ((name, sentence),) = falls(said(40, spread(0.02)), start(40, spread(0.05)))
    assert name == "subject_attention"
    assert sentence == ("attention to the subject fell: 40% [40, 40] is left (0.020 against 0.050, 40 facts)")


def test_too_few_facts_warn_of_nothing() -> None:
    four = FactSet(PEOPLE.facts[:4])
    prompts = list(made(four).prompts)
    now = Look(score(prompts, ["polo", "golf", "none", "none"], {}), torch.tensor([0.1, 0.1, 0.1, 0.2]).double())
    before = Start(torch.ones(4).double(), torch.tensor([True] * 4), torch.zeros(1, 1).int(), torch.zeros(1, 1))
    assert list(falls(now, before)) == []


@pytest.mark.parametrize("top", [1024, 7])
def test_divergence_from_the_start_against_whole_distributions(monkeypatch, top) -> None:
    monkeypatch.setattr(divergence, "TOP", top)
    facts = made(FactSet(FACTS))
    first, later = (hook(tiny_model("llama"), tiny_tokenizer("bos"), "tiny") for _ in range(2))
    begun = start_of(first, facts, look(first, facts))
    assert begun.ids.shape == (sum(facts.answer_tokens), min(top, 420))
    assert divergence_from(begun, first, facts) == pytest.approx(0, abs=1e-6)  # sums of float32
    with torch.no_grad():
        later.model.lm_head.weight[:] += 0.1 * torch.randn(later.model.lm_head.weight.shape, generator=generator())
    total = count = 0
    for example in examples_of(tiny_prompts(), tiny_tokenizer("bos"), end=False):
        with torch.no_grad():
            now, then = (
                eager(model.model)(torch.tensor([example.ids])).logits[0, example.query : -1].double().log_softmax(-1)
                for model in (later, first)
            )
        if top == 7:  # all but the seven most probable tokens of the start count as one
            kept, index = then.topk(7)
            now, then = (
                torch.cat([part, (1 - part.exp().sum(-1, keepdim=True)).log()], -1)
                for part in (now.gather(-1, index), kept)
            )
        total += float(kl_div(now, then, reduction="sum", log_target=True))
        count += len(then)
    assert divergence_from(begun, later, facts) == pytest.approx(total / count, rel=1e-4)  # float32 logits
    assert total / count > 0.01


def generator():
    return torch.Generator().manual_seed(0)


def test_a_look_is_recall_and_the_mean_of_attention() -> None:
    facts = made(FactSet(FACTS))
    model = hook(tiny_model("llama"), tiny_tokenizer("bos"), "tiny")
    seen = look(model, facts)
    rows = eager(model.model)
    for i, encoding in enumerate(facts.prompts.encodings):
        with torch.no_grad():
            maps = rows(torch.tensor([encoding.ids]), output_attentions=True).attentions
        of_subject = torch.stack([layer[0, :, -1, list(encoding.spans["subject"])].amax(-1) for layer in maps])
        assert float(seen.attention[i]) == pytest.approx(float(of_subject.mean()), abs=1e-5)
    assert seen.recall.prompt_ids == facts.prompts.prompt_ids
