"""The base model's numbers against plain transformers, one prompt at a time, and against formulas by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from one_layer import VOCABULARY as WORDS
from one_layer import one_layer, word_prompts, word_tokenizer
from peft import LoraConfig, get_peft_model
from tiny import FACTS, VOCABULARY, eager, tiny_model, tiny_tokenizer
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import PreTrainedModel

from attnbalance import Fact, HookedModel, Prompt, load_model
from attnbalance.errors import BadRowsError, DataError
from attnbalance.finetune import targets
from attnbalance.finetune.examples import IGNORED, Example, as_examples, examples_of, make_examples
from attnbalance.finetune.objectives import DOWNWEIGHT, ForwardPass, parse_objective
from attnbalance.finetune.targets import SHOTS, add_targets, in_form
from attnbalance.models.hooked import hook
from attnbalance.prompts import make_prompts
from attnbalance.readings.relevance import read_relevance

NAMES = ("Ann", "Bo", "Cyd", "Dee", "Eve", "Fay", "Gus")
TOWNS = tuple(
    Fact(name, "city", (("Paris", "Rome", "Oslo")[i % 3],), 9.0 - i, f"Where is {name}?")
    for i, name in enumerate(NAMES)
)
SPORTS = tuple(replace(fact, relation="sport", question=f"What does {fact.subject} play?") for fact in TOWNS[:5])
CHOSEN = (*FACTS[:3], *FACTS[7:])
"""Facts whose statement is "The RELATION of SUBJECT is"."""

FORMED = {"question": "Question: {question} Answer:", "statement": "The {relation} of {subject} is"}


@cache
def base(family: str = "llama") -> tuple[HookedModel, PreTrainedModel]:
    """A tiny model as we hook it, and with plain eager attention."""
    model = tiny_model(family)
    plain = eager(model)
    return hook(model, tiny_tokenizer(), family), plain


def asked(fact: Fact, form: str) -> str:
    return FORMED[form].format(question=fact.question, relation=fact.relation, subject=fact.subject)


def added(
    text: str, facts: Sequence[Fact] = CHOSEN, family: str = "llama", template: str = "qa", **more: int
) -> list[Example]:
    model = base(family)[0]
    return add_targets(make_examples(facts, model.tokenizer, template), parse_objective(text), model, **more)


def only(example: Example, name: str) -> Tensor:
    return example.targets[name]


def tokens_of(text: str, part: str) -> list[int]:
    start = text.rindex(part)
    found = tiny_tokenizer()(text)
    return sorted({found.char_to_token(c) for c in range(start, start + len(part))})


# Forms ---------------------------------------------------------------------------------------------------------------


def test_questions_are_the_prompts_and_statements_end_before_the_answer() -> None:
    prompts = make_prompts(TOWNS)
    assert in_form("question", prompts) == list(prompts)
    stated = in_form("statement", prompts)
    assert [one.text for one in stated] == [f"The city of {name} is" for name in NAMES]
    assert [one.part("subject") for one in stated] == list(NAMES)


def test_few_shot_puts_four_answered_questions_of_the_relation_before_the_own_one() -> None:
    prompts = make_prompts([*TOWNS, *SPORTS])
    found = in_form("few-shot", prompts, seed=1)
    for prompt, one in zip(prompts, found, strict=True):
        *shots, last = one.text.split("\n\n")
        assert last == prompt.text
        assert len(shots) == len(set(shots)) == SHOTS == 4
        own = f"{prompt.text} {prompt.fact.answer}"
        assert own not in shots
        relation = TOWNS if prompt.fact.relation == "city" else SPORTS
        assert set(shots) <= {f"Question: {fact.question} Answer: {fact.answer}" for fact in relation}
        assert one.part("subject") == prompt.fact.subject
        assert one.spans["subject"][0] > one.text.rindex("\n\n")  # in the last question, not in a shot
        assert (one.fact, one.prompt_id) == (prompt.fact, prompt.prompt_id)


def test_the_shots_are_drawn_once_a_relation_by_the_seed() -> None:
    prompts = make_prompts(TOWNS)
    drawn = {seed: in_form("few-shot", prompts, seed) for seed in range(8)}
    assert drawn[0] == in_form("few-shot", prompts, 0)
    assert len({one[0].text for one in drawn.values()}) > 1
    for found in drawn.values():
        # Five are drawn, of which those that are not asked themselves all have the same first four before them.
        leads = [one.text.rpartition("\n\n")[0] for one in found]
        assert max(leads.count(lead) for lead in leads) >= len(TOWNS) - SHOTS


def test_few_shot_needs_more_facts_than_shots() -> None:
    with pytest.raises(DataError, match="few-shot needs more than 4 facts of each relation; 'sport' has 4"):
        in_form("few-shot", make_prompts([*TOWNS, *SPORTS[:4]]))
    assert len(in_form("few-shot", make_prompts(SPORTS))) == 5


# Numbers -------------------------------------------------------------------------------------------------------------


def test_an_objective_without_a_base_leaves_examples_as_they_are() -> None:
    examples = make_examples(FACTS, tiny_tokenizer())
    found = add_targets(examples, parse_objective("ce + floor + project"), base()[0])
    assert all(one is other for one, other in zip(found, examples, strict=True))


def test_examples_without_prompts_are_counted() -> None:
    bare = [replace(one, prompt=None) for one in make_examples(FACTS[:2], tiny_tokenizer())]
    known = make_examples(FACTS[:3], tiny_tokenizer())
    for text in ("kl", "row-anchor", "state-anchor", "weighted-ce"):
        with pytest.raises(DataError, match="2 of 5 examples know none; make them with make_examples or as_examples"):
            add_targets([*known, *bare], parse_objective(text), base()[0])


@pytest.mark.parametrize("family", ["llama", "gemma2", "neox"])
def test_row_anchors_hold_the_rows_of_plain_transformers(family: str) -> None:
    found = added("row-anchor(question) + row-anchor(statement)", family=family, batch_size=3)
    for fact, one in zip(CHOSEN, found, strict=True):
        for form in ("question", "statement"):
            text = asked(fact, form)
            ids = torch.tensor([tiny_tokenizer()(text)["input_ids"]])
            with torch.no_grad():
                maps = base(family)[1](input_ids=ids, output_attentions=True, use_cache=False).attentions
            rows = torch.stack([layer[0, :, -1] for layer in maps])
            # Float32 probabilities, padded with others or alone: 1e-6 apart, as in tests of rows.
            if form == "question":
                torch.testing.assert_close(only(one, "row-anchor(question)/position"), rows, atol=1e-6, rtol=0)
            else:
                share = rows[..., tokens_of(text, fact.subject)].sum(-1)
                torch.testing.assert_close(only(one, "row-anchor(statement)"), share, atol=2e-6, rtol=0)
                assert float(share.max()) > 0.05


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("form", ["question", "statement"])
def test_state_anchors_hold_the_states_of_plain_transformers(family: str, form: str) -> None:
    for fact, one in zip(CHOSEN, added(f"state-anchor({form})", family=family, batch_size=3), strict=True):
        ids = torch.tensor([tiny_tokenizer()(asked(fact, form))["input_ids"]])
        with torch.no_grad():
            states = base(family)[1](input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        expected = torch.stack([layer[0, -1] for layer in states[1:]])  # the first are the embeddings
        found = only(one, f"state-anchor({form})")
        # Entries of some 1 to 10 in float32, summed in another order.
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


def predictions(plain: PreTrainedModel, text: str, answer: str) -> Tensor:
    """Log-probabilities of every token of the answer, by one prompt alone."""
    tokenizer = tiny_tokenizer()
    start, ids = len(tokenizer(text)["input_ids"]), tokenizer(f"{text} {answer}")["input_ids"]
    with torch.no_grad():
        return plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0, start - 1 : -1].log_softmax(-1)


def divergences(example: Example, form: str, logits: Tensor) -> list[float]:
    """What the term kl makes of an example's targets for these predictions."""
    labels = torch.tensor([label for label in example.labels if label != IGNORED])
    which = torch.zeros(len(labels), dtype=torch.long)
    term = parse_objective(f"kl({form})").terms[0]
    return term.losses(ForwardPass(logits, labels, which, 1, None, None, {}, example.targets)).tolist()


@pytest.mark.parametrize("form", ["question", "statement"])
def test_kl_is_the_whole_divergence_where_the_vocabulary_is_small(form: str) -> None:
    assert VOCABULARY <= targets.TOP
    generator = torch.Generator().manual_seed(0)
    for fact, one in zip(CHOSEN, added(f"kl({form})"), strict=True):
        held = predictions(base()[1], asked(fact, form), fact.answer)
        own = torch.randn(len(held) + 1, VOCABULARY, generator=generator)
        expected = kl_div(own[:-1].log_softmax(-1), held, reduction="none", log_target=True).sum(-1).tolist()
        naive = [
            sum(p * (math.log(p) - q) for p, q in zip(row.exp().tolist(), mine, strict=True) if p > 0)
            for row, mine in zip(held, own[:-1].log_softmax(-1).tolist(), strict=True)
        ]
        found = divergences(one, form, own)
        # A few nats in float32, from two forward passes that differ in the sixth digit.
        assert found[:-1] == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert naive == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert min(expected) > 0.1
        end = tiny_tokenizer().eos_token_id
        assert found[-1] == pytest.approx(-float(own[-1].log_softmax(-1)[end]), rel=1e-5)


def test_kl_over_fewer_tokens_is_the_divergence_of_the_parts_and_at_most_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    top = 30
    monkeypatch.setattr(targets, "TOP", top)
    generator = torch.Generator().manual_seed(1)
    for fact, one in zip(CHOSEN, added("kl(statement)"), strict=True):
        assert only(one, "kl(statement)/token").shape[-1] == only(one, "kl(statement) ids/token").shape[-1] == top
        held = predictions(base()[1], asked(fact, "statement"), fact.answer)
        own = torch.randn(len(held) + 1, VOCABULARY, generator=generator)
        found = divergences(one, "statement", own)
        for k, row in enumerate(held):
            p, q = row.exp().tolist(), own[k].softmax(-1).tolist()
            best = sorted(range(VOCABULARY), key=lambda i: -p[i])[:top]
            rest = [1 - sum(one[i] for i in best) for one in (p, q)]
            parts = sum(p[i] * math.log(p[i] / q[i]) for i in best) + rest[0] * math.log(rest[0] / rest[1])
            whole = sum(p[i] * math.log(p[i] / q[i]) for i in range(VOCABULARY))
            assert rest[0] > 1e-3  # so that leaving the others out, or not joining them, would show
            # 30 of the smallest probabilities go over as differences from 1: 1e-6 of it
            assert found[k] == pytest.approx(parts, rel=1e-4, abs=1e-5)
            assert found[k] < whole


def test_the_end_of_an_answer_is_held_for_certain_in_every_form() -> None:
    for form in ("question", "statement", "few-shot"):
        for one in added(f"kl({form})", TOWNS[:5], template="plain"):
            labels = [label for label in one.labels if label != IGNORED]
            ids, values = only(one, f"kl({form}) ids/token"), only(one, f"kl({form})/token")
            assert len(ids) == len(values) == len(labels)
            assert ids[-1, 0] == labels[-1] == tiny_tokenizer().eos_token_id
            assert values[-1].exp().tolist() == [1.0] + [0.0] * (values.shape[-1] - 1)
            # what is held of the others sums to 1 as well: 420 float32 probabilities
            assert values[:-1].exp().sum(-1).tolist() == pytest.approx([1.0] * (len(labels) - 1), abs=1e-5)


def test_kl_of_few_shots_is_asked_behind_them() -> None:
    prompts = in_form("few-shot", make_prompts(TOWNS[:5], "plain"), 3)
    found = added("kl(few-shot)", TOWNS[:5], template="plain", seed=3)
    for prompt, one in zip(prompts, found, strict=True):
        held = predictions(base()[1], prompt.text, prompt.fact.answer)
        ids, values = only(one, "kl(few-shot) ids/token").long(), only(one, "kl(few-shot)/token")
        assert held[0].argmax() == ids[0, 0]
        torch.testing.assert_close(values[:-1], held.gather(-1, ids[:-1]), atol=1e-4, rtol=1e-5)


def test_answers_with_other_tokens_behind_the_other_form_are_shown() -> None:
    model = base()[0]
    examples = make_examples(TOWNS[:3], model.tokenizer)
    (token,) = model.tokenizer("#")["input_ids"]
    own = examples[1]
    ids = (*own.ids[: own.query + 1], token, *own.ids[own.query + 2 :])
    labels = tuple(IGNORED if k <= own.query else i for k, i in enumerate(ids))
    examples[1] = Example(ids, labels, own.prompt, own.spans)
    with pytest.raises(BadRowsError, match="1 of 3 answers have other tokens in the form statement") as caught:
        add_targets(examples, parse_objective("kl"), model)
    assert caught.value.indices == (1,)
    assert "'The city of Bo is'" in str(caught.value)
    assert "use another form" in str(caught.value)


def test_neither_batch_size_nor_order_nor_company_changes_a_target() -> None:
    text = "kl(statement) + row-anchor(question) + row-anchor(statement) + state-anchor + weighted-ce(relevance)"
    alone = [one for fact in FACTS for one in added(text, [fact])]
    for size in (1, 4):
        together = added(text, FACTS[::-1], batch_size=size)[::-1]
        for one, other in zip(alone, together, strict=True):
            assert set(one.targets) == set(other.targets)
            assert len(one.targets) == 6  # kl has two
            for name, expected in one.targets.items():
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
    found = add_targets(examples, parse_objective(text), adapted)
    with torch.no_grad():
        assert torch.equal(adapted.model(**inputs).logits, before)
        assert (base()[1](**inputs).logits - before).abs().max() > 0.1  # the adapter does something
    for one, other in zip(found, added(text, FACTS[:3]), strict=True):
        for name, expected in other.targets.items():
            if "ids" not in name:
                torch.testing.assert_close(one.targets[name], expected, atol=2e-5, rtol=1e-5)


def test_targets_leave_the_model_in_its_mode_and_without_gradients() -> None:
    model = base()[0]
    model.model.train()
    added("kl + row-anchor + state-anchor + weighted-ce")
    assert model.model.training
    assert all(parameter.grad is None for parameter in model.model.parameters())
    model.model.eval()


# Weights of facts ----------------------------------------------------------------------------------------------------


def test_relevance_weighs_facts_by_the_sign_of_their_push_prompt_by_prompt() -> None:
    model = base()[0]
    facts = [replace(fact, answers=(answer,)) for answer in ("Paris", "golf") for fact in FACTS]
    prompts = make_prompts(facts)
    pushes = [float(read_relevance(model, [prompt]).push.values.double().sum()) for prompt in prompts]
    expected = [1.0 if push > 0 else DOWNWEIGHT for push in pushes]
    assert set(expected) == {1.0, DOWNWEIGHT}
    found = added("weighted-ce(relevance)", facts, batch_size=5)
    assert [float(only(one, "weighted-ce(relevance)")) for one in found] == pytest.approx(expected)


def stated_by_hand() -> tuple[list[Prompt], list[Example], HookedModel, PreTrainedModel]:
    model, prompts = one_layer(), list(word_prompts())
    hooked = load_model(model, tokenizer=word_tokenizer())
    return prompts, examples_of(prompts, hooked.tokenizer), hooked, model


def test_in_one_layer_relevance_weights_follow_theorem_4_5() -> None:
    prompts, examples, hooked, model = stated_by_hand()
    layer = model.model.layers[0]
    layer.mlp.down_proj.weight.data.zero_()  # the paper's model has no MLP
    W_Q, W_K, W_V = (getattr(layer.self_attn, f"{name}_proj").weight.detach() for name in "qkv")
    phi, expected = torch.eye(WORDS), []
    for prompt in prompts:
        s, p, a = word_tokenizer()(f"{prompt.text} {prompt.fact.answer}")["input_ids"]
        row = torch.stack([W_K @ phi[s] @ (W_Q @ phi[p]), W_K @ phi[p] @ (W_Q @ phi[p])]) / math.sqrt(WORDS)
        row = row.softmax(0)
        surprise = phi[a] - (W_V @ (row[0] * phi[s] + row[1] * phi[p]) + phi[p]).softmax(0)
        s_rel, p_rel = float(surprise @ W_V @ phi[s]), float(surprise @ W_V @ phi[p])
        assert abs(s_rel - p_rel) > 1e-3  # far from where rounding decides
        expected.append(1.0 if s_rel > p_rel else 0.1)
    assert len(set(expected)) == 2
    found = add_targets(examples, parse_objective("weighted-ce"), hooked)
    assert [float(only(one, "weighted-ce(relevance)")) for one in found] == pytest.approx(expected)


def test_in_one_layer_salience_weights_are_ranks_of_what_the_values_store() -> None:
    prompts, examples, hooked, model = stated_by_hand()
    W_V, phi = model.model.layers[0].self_attn.v_proj.weight.detach(), torch.eye(WORDS)
    stored = []
    for prompt in prompts:
        relation = [other.fact.answer for other in prompts if other.fact.relation == prompt.fact.relation]
        others = [answer for answer in dict.fromkeys(relation) if answer != prompt.fact.answer]
        subject, answer, *rivals = (
            word_tokenizer()(word)["input_ids"][0] for word in (prompt.fact.subject, prompt.fact.answer, *others)
        )
        direction = phi[answer] - torch.stack([phi[rival] for rival in rivals]).mean(0)
        stored.append(float(direction @ W_V @ phi[subject]))
    ordered = sorted(stored)
    assert min(b - a for a, b in itertools.pairwise(ordered)) > 1e-4  # no ties, which rounding would break
    expected = [(ordered.index(value) + 0.5) / len(stored) for value in stored]
    found = add_targets(examples, parse_objective("weighted-ce(salience)"), hooked)
    assert [float(only(one, "weighted-ce(salience)")) for one in found] == pytest.approx(expected)


def test_rows_that_are_tokenized_already_get_the_targets_of_the_same_facts() -> None:
    model = base()[0]
    made = make_examples(TOWNS[:5], model.tokenizer, "plain")
    rows = [{"input_ids": list(one.ids), "labels": list(one.labels)} for one in made]
    text = "kl(question) + kl(few-shot) + row-anchor(statement) + weighted-ce(relevance)"
    found = add_targets(as_examples(rows, TOWNS[:5], model.tokenizer), parse_objective(text), model)
    for one, other in zip(found, added(text, TOWNS[:5], template="plain"), strict=True):
        assert set(one.targets) == set(other.targets)
        for name, expected in other.targets.items():
            torch.testing.assert_close(one.targets[name], expected, atol=0, rtol=0)  # the same forward passes
