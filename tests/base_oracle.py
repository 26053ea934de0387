"""Facts and a base model whose numbers are computed with plain transformers, one prompt at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from tiny import FACTS, eager, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from attnbalance import Fact, HookedModel
from attnbalance.finetuning.examples import (
    IGNORED,
    Example,
    make_examples,
)
from attnbalance.finetuning.objectives.forward_pass import ForwardPass
from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.finetuning.objectives.targets import add_targets
from attnbalance.models.hooked import hook

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
    encoding = tiny_tokenizer()(text)
    return sorted({encoding.char_to_token(c) for c in range(start, start + len(part))})


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
