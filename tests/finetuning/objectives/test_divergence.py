"""The divergence from the base, by hand and against plain transformers' predictions."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from base_oracle import (
    CHOSEN,
    TOWNS,
    added,
    asked,
    base,
    divergences,
    only,
    predictions,
)
from objective_oracle import (
    examples_for,
    forward,
    gradients_of,
    loss_of,
    losses,
    made,
    pair,
)
from tiny import FACTS, VOCABULARY, tiny_model, tiny_tokenizer
from torch import Tensor
from torch.nn.functional import kl_div

from attnbalance import Fact
from attnbalance.data.forms import in_form
from attnbalance.data.prompts import make_prompts
from attnbalance.errors import BadRowsError
from attnbalance.finetuning.examples import (
    IGNORED,
    Example,
    as_examples,
    make_examples,
)
from attnbalance.finetuning.objectives import divergence
from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.finetuning.objectives.targets import add_targets
from attnbalance.models.hooked import hook


def test_divergence_by_hand_with_all_other_tokens_as_one() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]] * 3).log()
    ids = torch.tensor([[1, 2], [3, 0], [2, 2]], dtype=torch.int32)
    base = torch.tensor([[0.5, 0.3], [0.9, 0.1], [1.0, 0.0]]).log()
    forward_pass = made(logits=logits, targets={"kl(statement) ids/token": ids, "kl(statement)/token": base})
    expected = [
        0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.3) + 0.2 * math.log(0.2 / 0.3),  # the rest: 0.2 and 0.3
        0.9 * math.log(0.9 / 0.2) + 0.1 * math.log(0.1 / 0.1),  # no rest
        -math.log(0.3),  # one token for certain, as at the end of an answer: cross-entropy
    ]
    assert losses("kl", forward_pass) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_base_does_not_diverge_from_itself(family: str) -> None:
    base = pair(family)[0]
    (term,) = parse_objective("kl(question)").terms
    forward_pass = forward(base, examples_for(parse_objective("kl(question)"), family))
    end = forward_pass.labels == base.tokenizer.eos_token_id  # learned by cross-entropy, and so not at rest
    divergence = term.losses(forward_pass)[~end]
    # 420 terms p (log p - log q), each off by 1e-6 p
    assert divergence.tolist() == pytest.approx([0.0] * int((~end).sum()), abs=3e-6)
    largest = [
        max(float(gradient.abs().max()) for gradient in gradients_of(loss, base.model))
        for loss in (divergence.mean(), loss_of("kl(statement)", base, examples_for(parse_objective("kl"), family)))
    ]
    assert largest[0] < 1e-5 * largest[1]  # rounding, beside the pull from another form


@pytest.mark.parametrize("form", ["question", "statement"])
def test_kl_is_the_whole_divergence_where_the_vocabulary_is_small(form: str) -> None:
    assert VOCABULARY <= divergence.TOP
    generator = torch.Generator().manual_seed(0)
    for fact, example in zip(CHOSEN, added(f"kl({form})"), strict=True):
        held = predictions(base()[1], asked(fact, form), fact.answer)
        own = torch.randn(len(held) + 1, VOCABULARY, generator=generator)
        expected = kl_div(own[:-1].log_softmax(-1), held, reduction="none", log_target=True).sum(-1).tolist()
        naive = [
            sum(p * (math.log(p) - q) for p, q in zip(row.exp().tolist(), mine, strict=True) if p > 0)
            for row, mine in zip(held, own[:-1].log_softmax(-1).tolist(), strict=True)
        ]
        ours = divergences(example, form, own)
        # A few nats in float32, from two forward passes that differ in the sixth digit.
        assert ours[:-1] == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert naive == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert min(expected) > 0.1
        end = tiny_tokenizer().eos_token_id
        assert ours[-1] == pytest.approx(-float(own[-1].log_softmax(-1)[end]), rel=1e-5)


def test_kl_over_fewer_tokens_is_the_divergence_of_the_parts_and_at_most_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    top = 30
    monkeypatch.setattr(divergence, "TOP", top)
    generator = torch.Generator().manual_seed(1)
    for fact, example in zip(CHOSEN, added("kl(statement)"), strict=True):
        assert (
            only(example, "kl(statement)/token").shape[-1] == only(example, "kl(statement) ids/token").shape[-1] == top
        )
        held = predictions(base()[1], asked(fact, "statement"), fact.answer)
        own = torch.randn(len(held) + 1, VOCABULARY, generator=generator)
        ours = divergences(example, "statement", own)
        for k, row in enumerate(held):
            p, q = row.exp().tolist(), own[k].softmax(-1).tolist()
            best = sorted(range(VOCABULARY), key=lambda i: -p[i])[:top]
            rest = [1 - sum(probabilities[i] for i in best) for probabilities in (p, q)]
            parts = sum(p[i] * math.log(p[i] / q[i]) for i in best) + rest[0] * math.log(rest[0] / rest[1])
            whole = sum(p[i] * math.log(p[i] / q[i]) for i in range(VOCABULARY))
            assert rest[0] > 1e-3  # so that leaving the others out, or not joining them, would show
            # 30 of the smallest probabilities go over as differences from 1: 1e-6 of it
            assert ours[k] == pytest.approx(parts, rel=1e-4, abs=1e-5)
            assert ours[k] < whole


def test_kl_keeps_the_logits_of_one_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    examples, alive, most = make_examples(FACTS, tiny_tokenizer("bos")), [], []
    predict = divergence.answer_logits

    def watched(*arguments: object) -> Iterator[list[tuple[int, Tensor]]]:
        for logits in predict(*arguments):  # pyright: ignore[reportArgumentType]
            alive.extend(weakref.ref(part) for _, part in logits)
            most.append(sum(reference() is not None for reference in alive))
            yield logits

    monkeypatch.setattr(divergence, "answer_logits", watched)
    model = hook(tiny_model("llama"), tiny_tokenizer("bos"), "tiny")
    add_targets(examples, parse_objective("kl(statement)"), model, batch_size=2)
    assert len(most) == 5
    assert max(most) <= 2 * 2  # of a batch of 2 and the one before it, never of all 9


def test_the_end_of_an_answer_is_held_for_certain_in_every_form() -> None:
    for form in ("question", "statement", "few-shot"):
        for example in added(f"kl({form})", TOWNS[:5], template="plain"):
            labels = [label for label in example.labels if label != IGNORED]
            ids, values = only(example, f"kl({form}) ids/token"), only(example, f"kl({form})/token")
            assert len(ids) == len(values) == len(labels)
            assert ids[-1, 0] == labels[-1] == tiny_tokenizer().eos_token_id
            assert values[-1].exp().tolist() == [1.0] + [0.0] * (values.shape[-1] - 1)
            # what is held of the others sums to 1 as well: 420 float32 probabilities
            assert values[:-1].exp().sum(-1).tolist() == pytest.approx([1.0] * (len(labels) - 1), abs=1e-5)


def test_kl_of_few_shots_is_asked_behind_them() -> None:
    prompts = in_form("few-shot", make_prompts(TOWNS[:5], "plain"), 3)
    examples = added("kl(few-shot)", TOWNS[:5], template="plain", seed=3)
    for prompt, example in zip(prompts, examples, strict=True):
        held = predictions(base()[1], prompt.text, prompt.fact.answer)
        ids, values = only(example, "kl(few-shot) ids/token").long(), only(example, "kl(few-shot)/token")
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
    with pytest.raises(BadRowsError, match="1 of 3 labels cannot follow the form statement") as caught:
        add_targets(examples, parse_objective("kl"), model)
    assert caught.value.indices == (1,)
    assert "'The city of Bo is'" in str(caught.value)
    assert "use another form" in str(caught.value)


def labelled(fact: Fact, label: str) -> Example:
    """A row whose answer is put otherwise than the fact's first one."""
    tokenizer = tiny_tokenizer()
    ids = [*tokenizer(f"{asked(fact, 'question')} {label}")["input_ids"], tokenizer.eos_token_id]
    start = len(tokenizer(asked(fact, "question"))["input_ids"])
    row = {"input_ids": ids, "labels": [IGNORED] * start + ids[start:]}
    return as_examples([row], [fact], tokenizer)[0]


SEVERAL = replace(TOWNS[0], answers=("Paris", "Lutetia", "Lutetia Parisiorum"))


@pytest.mark.parametrize("form", ["question", "statement"])
@pytest.mark.parametrize("label", ["Lutetia", "Lutetia Parisiorum", "Paris. It lies on the Seine."])
def test_kl_holds_the_base_to_the_label_whichever_accepted_answer_it_begins_with(form: str, label: str) -> None:
    example = add_targets([labelled(SEVERAL, label)], parse_objective(f"kl({form})"), base()[0])[0]
    held = predictions(base()[1], asked(SEVERAL, form), label)
    own = torch.randn(len(held) + 1, VOCABULARY, generator=torch.Generator().manual_seed(0))
    ours = divergences(example, form, own)
    expected = kl_div(own[:-1].log_softmax(-1), held, reduction="none", log_target=True).sum(-1).tolist()
    assert ours[:-1] == pytest.approx(expected, rel=1e-5, abs=1e-5)  # as for first answers
    end = tiny_tokenizer().eos_token_id
    assert ours[-1] == pytest.approx(-float(own[-1].log_softmax(-1)[end]), rel=1e-5)


def test_a_sentence_is_held_behind_the_question_and_refused_behind_a_statement() -> None:
    sentence = "It is in Paris."
    example = add_targets([labelled(SEVERAL, sentence)], parse_objective("kl(question)"), base()[0])[0]
    held = predictions(base()[1], asked(SEVERAL, "question"), sentence)
    values = only(example, "kl(question)/token")[:-1].sort().values
    torch.testing.assert_close(values, held.sort().values, atol=1e-4, rtol=1e-5)
    with pytest.raises(
        BadRowsError, match="'It is in Paris.' after 'The city of Ann is' does not begin with"
    ) as caught:
        add_targets([labelled(SEVERAL, sentence)], parse_objective("kl(statement)"), base()[0])
    assert "kl(question) takes any label" in str(caught.value)


def test_a_label_in_other_capitals_is_held_to_what_the_base_says_of_its_own_tokens() -> None:
    example = add_targets([labelled(SEVERAL, "PARIS")], parse_objective("kl(statement)"), base()[0])[0]
    held = predictions(base()[1], asked(SEVERAL, "statement"), "PARIS")
    ids, values = (only(example, f"kl(statement){part}/token")[:-1] for part in (" ids", ""))
    torch.testing.assert_close(values, held.gather(-1, ids.long()), atol=1e-4, rtol=1e-5)


def test_labels_with_a_gap_are_refused_behind_another_form() -> None:
    whole = labelled(SEVERAL, "Paris. It lies on the Seine.")
    middle = whole.query + 3
    gap = replace(whole, labels=(*whole.labels[:middle], IGNORED, *whole.labels[middle + 1 :]))
    with pytest.raises(BadRowsError, match="some labels between others are ignored"):
        add_targets([gap], parse_objective("kl(statement)"), base()[0])
    with_gap = add_targets([gap], parse_objective("kl(question)"), base()[0])[0]
    whole = add_targets([whole], parse_objective("kl(question)"), base()[0])[0]
    for name, value in with_gap.targets.items():  # what is predicted at the other tokens stays as it is
        expected = torch.cat([only(whole, name)[:2], only(whole, name)[3:]])
        torch.testing.assert_close(value, expected, atol=0, rtol=0)
