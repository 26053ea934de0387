"""Asks a model about knowledge conflicts, and reads where it looks (Goyal et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache

from attnbalance.arguments import expects
from attnbalance.data.batches import PromptBatch, in_order
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt
from attnbalance.errors import DataError, ModelError
from attnbalance.models.generate import generate
from attnbalance.models.hooked import HookedModel
from attnbalance.models.shared_prefixes import can_share
from attnbalance.readings.answer_probability import probability_after, read_answer_probability
from attnbalance.readings.attention import REST, AttentionRows, read_from_rows, rows_of
from attnbalance.readings.mentions import find_mentions, to_mentions
from attnbalance.readings.reading import Reading, concatenate
from attnbalance.readings.reliance import Reliance, as_conflict

NEW_TOKENS = 32
"""Tokens of an answer, at least: instruction-tuned models answer in sentences."""

ROLES = ("context", "subject")
"""The spans whose share of the last token's attention is read."""

Readers = Mapping[str, Callable[[AttentionRows], Reading]]
"""Functions from rows to a reading, by its name."""


def reliance_budgets(prompts: PromptSet) -> list[int]:
    """Tokens to generate for each prompt: `NEW_TOKENS`, or as many as its longest accepted or remembered answer has.

    Raises `BadRowsError` for answers whose probability could not be read (see `encode_answers`), or whose mentions in
    the context could not be found (see `find_mentions`).
    """
    both_answers = prompts.answers, _remembered(prompts).answers
    for answers in both_answers:
        answers.ids  # noqa: B018
    find_mentions(prompts)
    lengths = [answers.lengths for answers in both_answers]
    return [max(NEW_TOKENS, *both) for both in zip(*lengths, strict=True)]


def _remembered(prompts: PromptSet) -> PromptSet:
    """The same prompts with the remembered answers as those that are accepted."""
    return PromptSet.of([replace(prompt, fact=as_conflict(prompt).remembered) for prompt in prompts], prompts.tokenizer)


@torch.no_grad()
@expects(model=HookedModel, prompts=[Prompt], without=[Prompt])
def read_reliance(
    model: HookedModel,
    prompts: Sequence[Prompt],
    without: Sequence[Prompt],
    *,
    batch_size: int = 32,
    progress: bool = False,
) -> Reliance:
    """Ask a model about knowledge conflicts with their context and without it, and read where it looks.

    Where the model's cache allows it (see `HookedModel.shares_prefixes`), prompts with their context are read only
    once; elsewhere they are read four times.

    Raises `DataError` for prompts that are not about conflicts or have no span "context", and unless both have the same
    facts; `BadRowsError` as `generate` and `read_answer_probability` do.

    model: the model.
    prompts: the questions with their contexts.
    without: the same questions alone, in the same order.
    batch_size: prompts in a forward pass.
    progress: show progress bars.
    """
    asked, alone = (PromptSet.of(each, model.tokenizer) for each in (prompts, without))
    if [prompt.fact for prompt in asked] != [prompt.fact for prompt in alone]:
        raise DataError(f"both prompts must be about the same conflicts, got {len(asked)} and {len(alone)}")
    if without_context := [prompt for prompt in asked if "context" not in prompt.spans]:
        raise DataError(f"expected prompts with their context, got {without_context[0].text[:60]!r}")
    budgets, remembered, mentions = reliance_budgets(asked), _remembered(asked), find_mentions(asked)
    to_answers = {kind: partial(to_mentions, kind=kind, positions=positions) for kind, positions in mentions.items()}
    readers = {**READERS, **to_answers}
    ask = partial(generate, model, max_new_tokens=budgets, batch_size=batch_size, progress=progress)
    longest = max(len(each.ids) + more for each, more in zip(asked.encodings, budgets, strict=True))
    if can_share(model, longest):
        reader = _OnePass(model, asked, remembered, readers)
        outputs = ask(asked, read=reader)
        log_odds, attention = reader.results()
    else:
        outputs = ask(asked)
        log_p, against = (
            read_answer_probability(model, each, batch_size=batch_size, progress=progress)
            for each in (asked, remembered)
        )
        log_odds = log_p - against
        attention = read_from_rows(model, asked, readers, batch_size=batch_size, progress=progress)
    for kind, positions in mentions.items():
        reading = attention.pop(kind)
        if positions:
            attention[kind] = reading.at(list(positions))
    return Reliance(tuple(asked), tuple(outputs), tuple(ask(alone)), log_odds, attention)


class _OnePass:
    """Reads each batch of prompts once: the rows, the probabilities of both answers, and what an answer begins with."""

    def __init__(self, model: HookedModel, prompts: PromptSet, remembered: PromptSet, readers: Readers) -> None:
        self._model, self._prompts, self._remembered, self._readers = model, prompts, remembered, readers
        self._indices, self._log_odds = list[list[int]](), list[Tensor]()
        self._readings: dict[str, list[Reading]] = {name: [] for name in readers}

    def __call__(self, indices: list[int], batch: PromptBatch) -> DynamicCache:
        """The keys and values of all tokens but each prompt's last (see `generate`)."""
        cache = DynamicCache()
        rows = rows_of(batch, self._model.rows(batch, cache), self._model.layers)
        if {cache.get_seq_length(layer) for layer in range(len(cache.layers))} != {batch.input_ids.shape[1]}:
            raise ModelError(f"{self._model.name} does not keep the keys and values of all tokens in every layer")
        cache.crop(-1)
        log_p, against = (
            probability_after(self._model, batch, [each.answers.ids[i] for i in indices], cache)
            for each in (self._prompts, self._remembered)
        )
        self._indices.append(indices)
        self._log_odds.append(log_p - against)
        for name, reader in self._readers.items():
            self._readings[name].append(reader(rows))
        return cache

    def results(self) -> tuple[Float[Tensor, " prompt"], dict[str, Reading]]:
        """The log odds and the readings of all prompts, in their order."""
        readings = {name: concatenate(parts).at(self._prompts.prompt_ids) for name, parts in self._readings.items()}
        return in_order(self._log_odds, self._indices), readings


def _to_rest(rows: AttentionRows) -> Reading:
    """The attention to all tokens but those of `ROLES`; an attention sink is no token."""
    context, subject = (rows.to(role, "sum") for role in ROLES)
    rest = rows.values.sum(dim=-1) - context.values - subject.values
    return replace(context, name="rest attention (sum)", values=rest)


READERS: Readers = {**{role: partial(AttentionRows.to, role=role, reduce="sum") for role in ROLES}, REST: _to_rest}
"""What is read of each prompt's rows: the share of attention to each of `ROLES` and to the rest."""
