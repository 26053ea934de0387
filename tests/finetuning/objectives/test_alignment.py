"""Tokens of one answer after two prompts, matched by hand and by what they spell."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from base_oracle import TOWNS
from tiny import VOCABULARY, eager, tiny_model, tiny_tokenizer

from attnbalance.data.prompts import make_prompts
from attnbalance.data.statements import statement_prompts
from attnbalance.data.tokens import as_chat
from attnbalance.finetuning.examples import IGNORED, INPUTS, collate, examples_of
from attnbalance.finetuning.objectives.alignment import match_tokens, space_tables, text_end
from attnbalance.finetuning.objectives.forward_pass import forward_pass
from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.finetuning.objectives.targets import add_targets
from attnbalance.models.hooked import hook

KL = parse_objective("kl(statement)")


def ids_of(*tokens: str) -> list[int]:
    vocabulary = tiny_tokenizer().get_vocab()
    return [vocabulary[token] for token in tokens]


@pytest.mark.parametrize(
    ("own", "other", "pairs"),
    [
        ("c an o e", "c an o e", [(0, 0), (1, 1), (2, 2), (3, 3)]),
        ("it e m", "Ġit e m", [(0, 0), (1, 1), (2, 2)]),  # the space alone
        ("P a r is", "Ġ P a r is", [(0, 1), (1, 2), (2, 3), (3, 4)]),  # the space is a token of its own
        ("w ho", "Ġwho", []),  # no token of the one spells what a token of the other does
        ("t el l t al e", "Ġtell t al e", [(3, 1), (4, 2), (5, 3)]),
        ("w ho Ġis", "Ġwho Ġis", [(2, 1)]),
    ],
)
def test_tokens_match_that_spell_the_same_characters(own: str, other: str, pairs: list[tuple[int, int]]) -> None:
    tokenizer = tiny_tokenizer()
    matches = match_tokens(ids_of(*own.split()), ids_of(*other.split()), tokenizer, space_tables(tokenizer))
    assert sorted((match.own, match.other) for match in matches) == pairs
    back = match_tokens(ids_of(*other.split()), ids_of(*own.split()), tokenizer, space_tables(tokenizer))
    assert sorted((match.other, match.own) for match in back) == pairs


def test_the_tables_hold_each_token_that_has_a_counterpart_and_go_both_ways() -> None:
    tokenizer = tiny_tokenizer()
    without, spaced = space_tables(tokenizer)
    texts = {i: text for text, i in tokenizer.get_vocab().items()}
    expected = {i for i, text in texts.items() if text.startswith("Ġ") and text[1:] in tokenizer.get_vocab()}
    assert set(without) == expected
    assert all(texts[i] == "Ġ" + texts[bare] for i, bare in without.items())
    assert spaced == {bare: i for i, bare in without.items()}


@pytest.mark.parametrize("text", ["東", "ぁ", "naïve 東京", "👩‍👩‍👧 Band", "e\u0301té"])
def test_characters_of_several_tokens_match_whole(text: str) -> None:
    """Tokens that decode alone to no character: the first ones may differ by the space, all others are equal."""
    tokenizer = tiny_tokenizer()
    own, other = (tokenizer(space + text, add_special_tokens=False)["input_ids"] for space in ("", " "))
    assert len(own) > 1
    matches = match_tokens(own, other, tokenizer, space_tables(tokenizer))
    assert len(matches) >= len(own) - 1
    assert all(own[match.own] == other[match.other] for match in matches if match.respaced is None)
    assert all(match.other - match.own == len(other) - len(own) for match in matches)  # in step, none crossed
    both = tokenizer(f"{text}.", add_special_tokens=False)["input_ids"]
    assert text_end(both, text, tokenizer) == len(both) - 1


def test_a_text_ends_where_its_characters_do() -> None:
    tokenizer = tiny_tokenizer()
    assert text_end(ids_of("P", "a", "r", "i", "s", "."), "Paris", tokenizer) == 5
    assert text_end(ids_of("P", "a", "r"), "Pa", tokenizer) == 2
    assert text_end(ids_of("Ġand", "s"), "an", tokenizer) == 2  # no token ends there


def test_a_chat_is_held_to_what_the_base_says_after_a_statement() -> None:
    """The targets are plain predictions after the statement, with the space of the first token taken off."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("chat")
    answers = ("at once", "item", "it is of the Rust")
    plain, facts = eager(model), [replace(fact, answers=(a,)) for fact, a in zip(TOWNS, answers, strict=False)]
    chats = examples_of(as_chat(make_prompts(facts, "plain"), tokenizer), tokenizer)
    with_targets = add_targets(chats, KL, hook(model, tokenizer, "tiny"))
    checked = 0
    for prompt, example in zip(statement_prompts(facts), with_targets, strict=True):
        labels = [label for label in example.labels if label != IGNORED]
        ids, values = (example.targets[f"kl(statement){part}/token"] for part in (" ids", ""))
        start = tokenizer(prompt.text)["input_ids"]
        behind = tokenizer(f"{prompt.text} {prompt.fact.answer}")["input_ids"][len(start) :]
        texts = [str(token) for token in tokenizer.convert_ids_to_tokens(behind)]
        own = [str(token) for token in tokenizer.convert_ids_to_tokens(labels)]
        logits = plain(input_ids=torch.tensor([[*start, *behind]])).logits[0, len(start) - 1 :].log_softmax(-1)
        assert texts[0] == f"Ġ{own[0]}"
        expected = {
            bare: float(logits[0, spaced])
            for text, spaced in tokenizer.get_vocab().items()
            if text.startswith("Ġ") and (bare := tokenizer.get_vocab().get(text[1:])) is not None
        }
        held = {i: value for i, value in zip(ids[0].tolist(), values[0].tolist(), strict=True) if value > -torch.inf}
        assert held == pytest.approx(expected, abs=1e-4)  # all of the small vocabulary that has a counterpart
        assert texts[1:] == own[1 : len(texts)]
        for k in range(1, len(texts)):
            torch.testing.assert_close(values[k], logits[k].gather(-1, ids[k].long()), atol=1e-4, rtol=1e-5)
            checked += 1
        assert values[len(texts) :].exp().sum(-1).tolist() == [1.0] * (len(labels) - len(texts))  # the end, for certain
    assert checked


def test_answers_that_the_form_splits_otherwise_are_learned_and_counted() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("chat")
    facts = [replace(fact, answers=(a,)) for fact, a in zip(TOWNS, ("who is", "at once"), strict=False)]
    assert (tokenizer.tokenize("who is"), tokenizer.tokenize(" who is")) == (["w", "ho", "Ġis"], ["Ġwho", "Ġis"])
    chats = examples_of(as_chat(make_prompts(facts, "plain"), tokenizer), tokenizer)
    with pytest.warns(UserWarning, match="splits 1 of 2 labels differently after the form statement"):
        split, _ = add_targets(chats, KL, hook(model, tokenizer, "tiny"))
    ids, values = (split.targets[f"kl(statement){part}/token"] for part in (" ids", ""))
    assert ids[:2, 0].tolist() == ids_of("w", "ho")
    assert values[:2].exp().tolist() == [[1.0] + [0.0] * (values.shape[-1] - 1)] * 2
    assert values[2].max() < -0.01  # a prediction


def test_the_loss_of_a_chat_is_the_divergence_over_the_tokens_that_have_a_counterpart() -> None:
    """A naive loop over the first token: its counterparts one by one, and all others of both models as one."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("chat")
    fact = replace(TOWNS[0], answers=("item",))
    [chat] = examples_of(as_chat(make_prompts([fact], "plain"), tokenizer), tokenizer)
    [example] = add_targets([chat], KL, hook(model, tokenizer, "tiny"))
    batch = collate([example])
    inputs = {name: batch[name] for name in INPUTS}
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0))
    logits[0] += 6.0  # the id that stands for tokens without a counterpart has much of the probability
    output = model(**inputs)
    output.logits[0, example.query] = logits
    (term,) = KL.terms
    loss = float(term.losses(forward_pass(output, batch, None))[0])

    statement = statement_prompts([fact])[0].text
    base = eager(model)(input_ids=torch.tensor([tokenizer(statement)["input_ids"]])).logits[0, -1].softmax(-1)
    vocabulary, own = tokenizer.get_vocab(), logits.softmax(-1)
    pairs = [(i, vocabulary[text[1:]]) for text, i in vocabulary.items() if text[0] == "Ġ" and text[1:] in vocabulary]
    expected = sum(float(base[spaced] * (base[spaced] / own[bare]).log()) for spaced, bare in pairs)
    rest, own_rest = (
        1 - sum(float(p) for p in part) for part in ([base[i] for i, _ in pairs], [own[i] for _, i in pairs])
    )
    assert loss == pytest.approx(expected + rest * math.log(rest / own_rest), rel=1e-4)
