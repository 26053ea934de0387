"""Facts that are watched while a model is trained: what it says of them at the start, and what is left of it later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from attnbalance.data.facts import FactSet
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Template, make_prompts
from attnbalance.data.tokens import as_chat
from attnbalance.finetuning.examples import IGNORED, TOKENS, Example, examples_of
from attnbalance.finetuning.labelled_logits import answer_logits
from attnbalance.finetuning.objectives.base_model import BaseModel
from attnbalance.finetuning.objectives.divergence import KL, divergence_of, make_predictions
from attnbalance.finetuning.objectives.objective import Term
from attnbalance.models.hooked import HookedModel
from attnbalance.readings.attention import read_subject_attention
from attnbalance.readings.recall import Recall, recall
from attnbalance.report import wording
from attnbalance.statistics.intervals import Interval, ratio_intervals
from attnbalance.statistics.shares import share_interval

LEFT = 0.9
"""A fall is warned of where the whole 95% interval of what is left of the start lies below this share."""

OWN = Term(KL, "question", 1.0)
"""The term whose numbers are the model's own predictions of an answer after its prompt."""


@dataclass(frozen=True, eq=False)
class WatchedFacts:
    """A fixed sample of facts, and how a model is asked for them; make it with `WatchedFacts.of`."""

    prompts: PromptSet
    """The questions."""
    shortcuts: Mapping[str, tuple[str, ...]]
    """The accepted forms of each relation's most frequent answer among all facts, in the sample or not."""
    batch_size: int
    """Prompts of one forward pass."""

    @classmethod
    def of(
        cls,
        facts: FactSet,
        tokenizer: PreTrainedTokenizerBase,
        *,
        limit: int,
        template: str | Template,
        chat: bool,
        seed: int,
        batch_size: int,
    ) -> WatchedFacts:
        """At most `limit` facts, drawn by the seed; raises `BadRowsError` for facts that cannot be asked."""
        prompts = make_prompts(facts.sample(limit, seed), template)
        asked = as_chat(prompts, tokenizer) if chat else prompts
        return cls(PromptSet.of(asked, tokenizer), facts.most_frequent_answers(), batch_size)

    @property
    def key(self) -> str:
        """SHA-256 of the questions and their answers: numbers of others cannot be compared."""
        asked = [(prompt.text, prompt.prompt_id, prompt.fact.answers) for prompt in self.prompts]
        return hashlib.sha256(json.dumps([asked, self.shortcuts]).encode()).hexdigest()

    @cached_property
    def examples(self) -> list[Example]:
        """Each question with its first answer."""
        return examples_of(self.prompts, self.prompts.tokenizer, end=False)

    @property
    def answer_tokens(self) -> list[int]:
        """The number of tokens of each first answer."""
        return [sum(label != IGNORED for label in example.labels) for example in self.examples]


@dataclass(frozen=True)
class Look:
    """What a model said of the watched facts at one step."""

    recall: Recall
    """Its answers."""
    attention: Float[Tensor, " prompt"]
    """The largest attention to a token of the subject, mean over layers and heads."""


@dataclass(frozen=True)
class Start:
    """What later looks are compared with: the model before the first step."""

    attention: Float[Tensor, " prompt"]
    """As in `Look`."""
    right: Bool[Tensor, " prompt"]
    """Which facts it answered."""
    ids: Int[Tensor, "token top"]
    """The tokens that it held most probable at each token of the first answers, all answers concatenated."""
    log_probabilities: Float[Tensor, "token top"]
    """Their log-probabilities."""


def look(model: HookedModel, facts: WatchedFacts) -> Look:
    """Ask a model for the watched facts, and read its attention to their subjects."""
    reading = read_subject_attention(model, facts.prompts, batch_size=facts.batch_size)
    answers = recall(model, facts.prompts, facts.shortcuts, batch_size=facts.batch_size)
    return Look(answers, reading.values.double().mean(dim=(1, 2)))


def start_of(model: HookedModel, facts: WatchedFacts, first: Look) -> Start:
    """The start of a training, from the first look at its model and the model's predictions of the answers."""
    numbers = dict(make_predictions(OWN, facts.examples, BaseModel(model, facts.batch_size)))
    ids, log_probabilities = (
        torch.cat([numbers[i][name] for i in range(len(numbers))])
        for name in (f"{OWN.key} ids{TOKENS}", f"{OWN.key}{TOKENS}")
    )
    return Start(first.attention, torch.tensor(first.recall.correct), ids, log_probabilities)


def divergence_from(start: Start, model: HookedModel, facts: WatchedFacts) -> float:
    """The mean over all tokens of the first answers of KL(start || model), in nats.

    The start's `TOP` most probable tokens count one by one and all others as one, so this is at most the whole
    divergence (see `divergence`).
    """
    counts = facts.answer_tokens
    parts = list(zip(start.ids.split(counts), start.log_probabilities.split(counts), strict=True))
    total = 0.0
    for batch in answer_logits(model, facts.examples, facts.batch_size):
        for i, logits in batch:
            ids, kept = (part.to(logits.device) for part in parts[i])
            total += float(divergence_of(logits, ids, kept).sum())
    return total / sum(counts)


def logged(now: Look, start: Start, divergence: float) -> dict[str, float]:
    """The numbers of a look by the names under which they are logged; a share of nothing is left out."""
    shortcuts, still = now.recall.shortcut_rate(), _still(now, start)
    numbers = {
        "subject_attention": float(now.attention.mean()),
        "accuracy": sum(now.recall.correct) / len(now.recall.correct),
        "kl_from_start": divergence,
    }
    numbers |= {} if shortcuts is None else {"shortcut_rate": shortcuts.mean}
    numbers |= {} if not still else {"still_answered": sum(still) / len(still)}
    return {f"watch/{name}": value for name, value in numbers.items()}


def falls(now: Look, start: Start) -> Iterator[tuple[str, str]]:
    """What has surely fallen since the start (see `LEFT`): its logged name, and a sentence about it."""
    subjects = now.recall.subjects
    before, after = float(start.attention.mean()), float(now.attention.mean())
    (left,) = ratio_intervals(now.attention.numpy()[:, None], start.attention.numpy(), subjects)
    if left.high < LEFT:
        values = f"{wording.share(after)} against {wording.share(before)}"
        yield (
            "subject_attention",
            f"attention to the subject fell: {_left(left)} is left ({values}, {len(subjects)} facts)",
        )
    still = _still(now, start)
    known = [subject for subject, right in zip(subjects, start.right.tolist(), strict=True) if right]
    if still and (left := share_interval(still, known)).high < LEFT:
        of = f"{sum(still)} of the {len(still)} facts that it answered at the start"
        yield "still_answered", f"the model still answers {of}: {_left(left)}"


def _left(share: Interval) -> str:
    return f"{100 * share.mean:.0f}% [{100 * share.low:.0f}, {100 * share.high:.0f}]"


def _still(now: Look, start: Start) -> list[bool]:
    """Of each fact that the model answered at the start, whether it answers it now."""
    return [right for right, known in zip(now.recall.correct, start.right.tolist(), strict=True) if known]
