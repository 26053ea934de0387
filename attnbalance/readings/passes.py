"""The prompts of each pass of `knowledge`: every form, and further draws of few-shot examples."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from attnbalance.data.batches import check_lengths
from attnbalance.data.forms import FEW_SHOT, FORMS, SHOTS, in_form
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt, make_prompts
from attnbalance.data.tokens import as_chat
from attnbalance.errors import BadRowsError, DataError, ModelError
from attnbalance.readings.recall import answer_budgets

CHAT = "chat"
"""The form that puts the question into the model's chat template."""

ALL_FORMS = (*FORMS, CHAT)

DRAWS = 10
"""Draws of examples (Gekhman et al. 2024)."""

SAMPLES, TEMPERATURE = 16, 0.5
"""Sampled answers to each few-shot question, and their temperature (Gekhman et al. 2024)."""


def passes(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, forms: Sequence[str] = ALL_FORMS, seed: int = 0
) -> dict[str, Sequence[Prompt]]:
    """The prompts of each greedy pass of `knowledge`, by form, and by "draw N" for the further draws of examples.

    The chat is left out for a tokenizer without a chat template and, with a warning, for a template that refuses.
    """
    unknown = [form for form in forms if form not in ALL_FORMS]
    if unknown:
        raise DataError(f"no form {unknown[0]!r}; there are {', '.join(ALL_FORMS)}")
    asked: dict[str, Sequence[Prompt]] = {
        form: in_form(form, prompts, DRAWS * seed) for form in FORMS if form in forms or form == FEW_SHOT
    }
    if CHAT in forms and tokenizer.chat_template:
        try:
            asked[CHAT] = chats(prompts, tokenizer)
        except ModelError as error:
            warnings.warn(f"the model is not asked in a chat: {error}", stacklevel=3)
    return asked | {f"draw {draw}": in_form(FEW_SHOT, prompts, DRAWS * seed + draw) for draw in range(1, DRAWS)}


def chats(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> Sequence[Prompt]:
    """The bare questions in the tokenizer's chat template; raises `ModelError` for one that is missing or refuses."""
    return as_chat(make_prompts([prompt.fact for prompt in prompts], "plain"), tokenizer)


def check_passes(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, positions: int | None, seed: int = 0
) -> None:
    """Raise `BadRowsError` for facts that some pass of `knowledge` could not ask within the model's positions.

    Where a few-shot prompt is too long, these are the facts that take more than their part of the positions.
    """
    for name, asked in passes(prompts, tokenizer, seed=seed).items():
        encoded = PromptSet.of(asked, tokenizer)
        try:
            check_lengths(encoded.encodings, positions, extra=answer_budgets(encoded))
        except BadRowsError:
            if positions is not None and name not in ("question", "statement", CHAT):
                _check_parts(PromptSet.of(prompts, tokenizer), positions)
            raise


def _check_parts(prompts: PromptSet, positions: int) -> None:
    """Raise `BadRowsError` for prompts too long to be one of the `SHOTS + 1` of a few-shot prompt.

    An example that is too long makes every prompt after it too long, and is the one to name.
    """
    lengths = [len(of.ids) + more for of, more in zip(prompts.encodings, prompts.answers.lengths, strict=True)]
    long = [i for i, length in enumerate(lengths) if length * (SHOTS + 1) > positions]
    if long:
        raise BadRowsError(
            f"questions are too long to be asked after {SHOTS} others within the model's {positions} positions",
            [(i, f"{lengths[i]} tokens with the answer: {prompts[i].text[:60]!r}...") for i in long],
            len(prompts),
            "shorten these rows, or drop and count them (`skip_bad=True`)",
        )


def other_prompts(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """For each prompt, one of its relation about another subject if there is one, drawn at random."""
    rng, others = random.Random(seed), list(prompts)  # noqa: S311
    for relation in dict.fromkeys(prompt.fact.relation for prompt in prompts):
        order = [i for i, prompt in enumerate(prompts) if prompt.fact.relation == relation]
        rng.shuffle(order)
        for index, i in enumerate(order):
            after = [prompts[j] for j in (*order[index + 1 :], *order[:index])]
            others[i] = next(
                (p for p in after if p.fact.composed_subject != prompts[i].fact.composed_subject), prompts[i]
            )
    return others
