"""Tokens of one answer after two prompts, matched by hand and by what they spell."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from base_oracle import TOWNS
from tiny import eager, tiny_model, tiny_tokenizer

from attnbalance.data.prompts import make_prompts
from attnbalance.data.statements import statement_prompts
from attnbalance.data.tokens import as_chat
from attnbalance.finetuning.examples import IGNORED, examples_of
from attnbalance.finetuning.objectives.alignment import Spaces, match_tokens, text_end
from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.finetuning.objectives.targets import add_targets
from attnbalance.models.hooked import hook


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
    matches = match_tokens(ids_of(*own.split()), ids_of(*other.split()), tokenizer, Spaces(tokenizer))
    assert sorted((match.own, match.other) for match in matches) == pairs
    back = match_tokens(ids_of(*other.split()), ids_of(*own.split()), tokenizer, Spaces(tokenizer))
    assert sorted((match.other, match.own) for match in back) == pairs


def test_all_tokens_become_what_they_are_without_their_space_and_back() -> None:
    tokenizer = tiny_tokenizer()
    spaces = Spaces(tokenizer)
    bare, spaced = ids_of("a", "Ġa")
    remove, add = spaces.become(spaced, bare), spaces.become(bare, spaced)
    assert remove is not None
    assert add is not None
    everything = torch.arange(len(tokenizer))
    for i, without in enumerate(remove(everything).tolist()):
        text = str(tokenizer.convert_ids_to_tokens(i))
        if without >= 0:
            assert text == "Ġ" + str(tokenizer.convert_ids_to_tokens(without))
            assert add(torch.tensor([without])).tolist() == [i]
        else:
            assert not text.startswith("Ġ") or text[1:] not in tokenizer.get_vocab()
    assert spaces.become(bare, bare) is None
    assert spaces.become(*ids_of("a", "t")) is None


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
    with_targets = add_targets(chats, parse_objective("kl(statement)"), hook(model, tokenizer, "tiny"))
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
    with pytest.warns(UserWarning, match="splits 1 of 2 labels otherwise after the form statement"):
        split, _ = add_targets(chats, parse_objective("kl(statement)"), hook(model, tokenizer, "tiny"))
    ids, values = (split.targets[f"kl(statement){part}/token"] for part in (" ids", ""))
    assert ids[:2, 0].tolist() == ids_of("w", "ho")
    assert values[:2].exp().tolist() == [[1.0] + [0.0] * (values.shape[-1] - 1)] * 2
    assert values[2].max() < -0.01  # a prediction
