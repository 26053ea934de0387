"""Context reliance: which answer a model gives to a knowledge conflict, and where it looks (Goyal et al. 2024)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache

from attnbalance.arguments import expects
from attnbalance.data.batches import PromptBatch, in_order
from attnbalance.data.conflicts import Conflict, says
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt
from attnbalance.data.scoring import CONTAINMENT, is_match
from attnbalance.errors import DataError, ModelError
from attnbalance.models.generate import generate
from attnbalance.models.hooked import HookedModel
from attnbalance.models.shared_prefixes import can_share
from attnbalance.readings.answer_probability import probability_after, read_answer_probability
from attnbalance.readings.attention import REST, AttentionRows, read_from_rows, rows_of
from attnbalance.readings.reading import Reading, concatenate
from attnbalance.statistics.intervals import Interval, mean_intervals
from attnbalance.statistics.shares import share_interval

NEW_TOKENS = 32
"""Tokens of an answer, at least: instruction-tuned models answer in sentences."""

ROLES = ("context", "subject")
"""The spans whose share of the last token's attention is read."""

GOES_ON = re.compile(r"\n\s*(?:###|Question:|Context:)")
"""Where a model that has answered goes on with a prompt of its own."""

CONTEXT, MEMORY, NEITHER = SIDES = ("context", "memory", "neither")
"""Where an output has its answer from: it contains the context's answer, the remembered one alone, or none."""


@dataclass(frozen=True)
class Reliance:
    """A model's answers to knowledge conflicts, with the context and without it.

    Attributes:
        prompts: The prompts with the context; their facts are conflicts.
        outputs: The greedy answer to each.
        without: The greedy answer to the same question without the context.
        log_odds: For each prompt, log p(context's answer) - log p(remembered answer) of the first accepted ones, in
            nats. Its logistic is M_C (Goyal et al. 2024, Eq. 14). The paper's answers are single tokens; here whole
            answers are scored, so the shorter one has an advantage.
        attention: For each of `ROLES`, and for the "rest" of the prompt, the share of the last token's attention. They
            add up to 1, or less in models with attention sinks.
    """

    prompts: tuple[Prompt, ...]
    outputs: tuple[str, ...]
    without: tuple[str, ...]
    log_odds: Float[Tensor, " prompt"]
    attention: dict[str, Reading]

    @property
    def sides(self) -> tuple[str, ...]:
        """For each prompt, where the output's answer comes from: one of `SIDES`, by whole words (see `is_match`).

        The output is read up to the point where the model starts a new prompt of its own.

        An output with both answers counts for the context, since most such outputs say "moved from Paris to Lyon". On
        50 outputs of SmolLM2-135M-Instruct that were labelled by hand, this rule agrees with 47 labels; counting the
        answer that comes first agrees with 37.
        """
        return tuple(
            _side(output, _conflict(prompt)) for output, prompt in zip(self.outputs, self.prompts, strict=True)
        )

    @property
    def first(self) -> tuple[str, ...]:
        """For each prompt, whose answer the output mentions first as whole words: one of `SIDES`."""
        return tuple(_first(output, _conflict(p)) for output, p in zip(self.outputs, self.prompts, strict=True))

    @property
    def remembers(self) -> tuple[bool, ...]:
        """For each prompt, whether the output without the context gives the remembered answer and not the context's."""
        pairs = zip(self.without, self.prompts, strict=True)
        return tuple(_side(output, _conflict(prompt)) == MEMORY for output, prompt in pairs)

    def contains(self, memory: bool) -> list[bool]:
        """For each prompt, whether the output contains the remembered answer, or else the context's, anywhere."""
        conflicts = map(_conflict, self.prompts)
        answers = [conflict.memory_answers if memory else conflict.answers for conflict in conflicts]
        return [is_match(*pair, CONTAINMENT) for pair in zip(self.outputs, answers, strict=True)]

    def share(self, side: str) -> Interval:
        """The share of outputs from one of `SIDES`."""
        return self._share([own == side for own in self.sides])

    def first_share(self, side: str) -> Interval:
        """The share of outputs that mention a side's answer first."""
        return self._share([first == side for first in self.first])

    def counterfactual(self) -> Interval:
        """The share of outputs that contain the context's answer anywhere, also inside a word (Goyal et al. 2024, 2.1).

        An output may contain both answers, and counts for `parametric` too.
        """
        return self._share(self.contains(memory=False))

    def parametric(self) -> Interval:
        """The share of outputs that contain the remembered answer anywhere."""
        return self._share(self.contains(memory=True))

    def remembered(self) -> Interval:
        """The share of questions without the context whose output is from memory."""
        return self._share(self.remembers)

    def guessed(self) -> Interval:
        """The control: the share of outputs without the context that contain the context's answer."""
        pairs = zip(self.without, self.prompts, strict=True)
        return self._share([_side(output, _conflict(prompt)) == CONTEXT for output, prompt in pairs])

    def m_c(self, seed: int = 0) -> Interval:
        """The mean of M_C: p(context's answer) divided by the sum over both answers (Goyal et al. 2024, Eq. 14).

        `seed` is that of the bootstrap.
        """
        shares = self.log_odds.double().sigmoid().numpy()[:, None]
        [interval] = mean_intervals(np.asarray(shares), self._clusters, seed=seed)
        return interval.within(0.0, 1.0)

    def remembering(self) -> Reliance | None:
        """The conflicts whose remembered answer the model gives without the context; None if there are none."""
        indices = [i for i, known in enumerate(self.remembers) if known]
        names = [self.prompts[i].prompt_id for i in indices]
        return (
            Reliance(
                tuple(self.prompts[i] for i in indices),
                tuple(self.outputs[i] for i in indices),
                tuple(self.without[i] for i in indices),
                self.log_odds[indices],
                {role: reading.at(names) for role, reading in self.attention.items()},
            )
            if indices
            else None
        )

    @property
    def _clusters(self) -> list[str]:
        return [prompt.fact.composed_subject for prompt in self.prompts]

    def _share(self, hits: Sequence[bool]) -> Interval:
        return share_interval(list(hits), self._clusters)


def _conflict(prompt: Prompt) -> Conflict:
    if not isinstance(prompt.fact, Conflict):
        raise DataError(f"expected prompts about conflicts, got one about the fact of {prompt.fact.subject!r}")
    return prompt.fact


def _said(output: str) -> str:
    """An output up to where the model goes on with a prompt of its own, as one line."""
    return " ".join(GOES_ON.split(output, maxsplit=1)[0].split())


def _sides(output: str, conflict: Conflict) -> dict[str, Sequence[str]]:
    """The sides of which an output says an answer, with their answers, the context's first."""
    both = {CONTEXT: conflict.answers, MEMORY: conflict.memory_answers}
    return {side: answers for side, answers in both.items() if says(_said(output), answers)}


def _side(output: str, conflict: Conflict) -> str:
    return next(iter(_sides(output, conflict)), NEITHER)


def _first(output: str, conflict: Conflict) -> str:
    """The side whose answer is said in the fewest words; of two in one word, the one that begins earlier in it."""
    line = _said(output)
    words, folded = line.split(), line.casefold()

    def place(answers: Sequence[str]) -> tuple[int, int]:
        beginnings = (" ".join([*words[:count], "and"]) for count in range(1, len(words) + 1))  # no line of its own
        count = next((i for i, beginning in enumerate(beginnings) if says(beginning, answers)), len(words))
        return count, min((folded.find(text.casefold()) for text in answers if text.casefold() in folded), default=0)

    sides = _sides(output, conflict)
    return min(sides, key=lambda side: place(sides[side]), default=NEITHER)


def reliance_budgets(prompts: PromptSet) -> list[int]:
    """Tokens to generate for each prompt: `NEW_TOKENS`, or as many as its longest accepted or remembered answer has.

    Raises `BadRowsError` for answers whose probability could not be read (see `encode_answers`).
    """
    both_answers = prompts.answers, _remembered(prompts).answers
    for answers in both_answers:
        answers.ids  # noqa: B018
    lengths = [answers.lengths for answers in both_answers]
    return [max(NEW_TOKENS, *both) for both in zip(*lengths, strict=True)]


def _remembered(prompts: PromptSet) -> PromptSet:
    """The same prompts with the remembered answers as those that are accepted."""
    return PromptSet.of([replace(prompt, fact=_conflict(prompt).remembered) for prompt in prompts], prompts.tokenizer)


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
    budgets, remembered = reliance_budgets(asked), _remembered(asked)
    ask = partial(generate, model, max_new_tokens=budgets, batch_size=batch_size, progress=progress)
    longest = max(len(each.ids) + more for each, more in zip(asked.encodings, budgets, strict=True))
    if can_share(model, longest):
        reader = _OnePass(model, asked, remembered)
        outputs = ask(asked, read=reader)
        log_odds, attention = reader.results()
    else:
        outputs = ask(asked)
        log_p, against = (
            read_answer_probability(model, each, batch_size=batch_size, progress=progress)
            for each in (asked, remembered)
        )
        log_odds = log_p - against
        attention = read_from_rows(model, asked, READERS, batch_size=batch_size, progress=progress)
    return Reliance(tuple(asked), tuple(outputs), tuple(ask(alone)), log_odds, attention)


class _OnePass:
    """Reads each batch of prompts once: the rows, the probabilities of both answers, and what an answer begins with."""

    def __init__(self, model: HookedModel, prompts: PromptSet, remembered: PromptSet) -> None:
        self._model, self._prompts, self._remembered = model, prompts, remembered
        self._indices, self._log_odds = list[list[int]](), list[Tensor]()
        self._readings: dict[str, list[Reading]] = {name: [] for name in READERS}

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
        for name, reader in READERS.items():
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


READERS = {**{role: partial(AttentionRows.to, role=role, reduce="sum") for role in ROLES}, REST: _to_rest}
"""What is read of each prompt's rows: the share of attention to each of `ROLES` and to the rest."""
