"""Context reliance: which answer a model gives to a knowledge conflict, and where it looks (Goyal et al. 2024)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

from attnbalance.data.conflicts import Conflict, says
from attnbalance.data.prompts import Prompt
from attnbalance.data.scoring import CONTAINMENT, is_match
from attnbalance.errors import DataError
from attnbalance.readings.reading import Reading
from attnbalance.statistics.intervals import Interval, mean_intervals
from attnbalance.statistics.shares import share_interval

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
        attention: The share of the last token's attention on the "context", on the "subject", and on the "rest" of the
            prompt. They add up to 1, or less in models with attention sinks. "context answer" and "memory answer" are
            parts of the context's share: what goes to all mentions of either answer there, more for one that is said
            more often. They are read in the prompts whose context says both (see `find_mentions`), and absent if none
            does.
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
            _side(output, as_conflict(prompt)) for output, prompt in zip(self.outputs, self.prompts, strict=True)
        )

    @property
    def first(self) -> tuple[str, ...]:
        """For each prompt, whose answer the output mentions first as whole words: one of `SIDES`."""
        return tuple(_first(output, as_conflict(p)) for output, p in zip(self.outputs, self.prompts, strict=True))

    @property
    def remembers(self) -> tuple[bool, ...]:
        """For each prompt, whether the output without the context gives the remembered answer and not the context's."""
        pairs = zip(self.without, self.prompts, strict=True)
        return tuple(_side(output, as_conflict(prompt)) == MEMORY for output, prompt in pairs)

    def contains(self, memory: bool) -> list[bool]:
        """For each prompt, whether the output contains the remembered answer, or else the context's, anywhere."""
        conflicts = map(as_conflict, self.prompts)
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
        return self._share([_side(output, as_conflict(prompt)) == CONTEXT for output, prompt in pairs])

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
        read = {role: set(reading.prompt_ids) for role, reading in self.attention.items()}
        known = {role: [name for name in names if name in read[role]] for role in read}
        return (
            Reliance(
                tuple(self.prompts[i] for i in indices),
                tuple(self.outputs[i] for i in indices),
                tuple(self.without[i] for i in indices),
                self.log_odds[indices],
                {role: reading.at(known[role]) for role, reading in self.attention.items() if known[role]},
            )
            if indices
            else None
        )

    @property
    def _clusters(self) -> list[str]:
        return [prompt.fact.composed_subject for prompt in self.prompts]

    def _share(self, hits: Sequence[bool]) -> Interval:
        return share_interval(list(hits), self._clusters)


def as_conflict(prompt: Prompt) -> Conflict:
    """The conflict that a prompt asks about; raises `DataError` for other facts."""
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
