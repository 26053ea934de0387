"""Knowledge: which facts a model can give, asked in several forms, and how surely (SLiCK's four categories)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType

from attnbalance.arguments import expects
from attnbalance.data.facts import FactSet
from attnbalance.data.forms import FEW_SHOT
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt
from attnbalance.data.scoring import WHOLE_WORDS, check_scoring, is_match
from attnbalance.errors import DataError
from attnbalance.files.outputs import read_saved, write_saved
from attnbalance.models.config_changes import settings_of
from attnbalance.models.fingerprint import adapters_fingerprint, fingerprint
from attnbalance.models.forward import base_of
from attnbalance.models.generate import Sampling, generate, stop_ids
from attnbalance.models.hooked import HookedModel
from attnbalance.readings.passes import ALL_FORMS, CHAT, DRAWS, SAMPLES, TEMPERATURE, other_prompts, passes
from attnbalance.readings.recall import answer_budgets, score
from attnbalance.seeds import check_seed
from attnbalance.statistics.intervals import Interval
from attnbalance.statistics.shares import share_interval

CATEGORIES = ("HighlyKnown", "MaybeKnown", "WeaklyKnown", "Unknown")
"""SLiCK's categories of facts, best known first (Gekhman et al. 2024, Section 3)."""


@dataclass(frozen=True)
class Knowledge:
    """A model's answers to questions about facts, in every form, and how surely it gives the right one.

    Attributes:
        prompts: The question about each fact.
        outputs: For each form, the greedy answer about each fact.
        right: For each form, whether that answer is right.
        greedy: For each fact, the share of right greedy answers over `DRAWS` draws of shots, from 0 to 1.
        sampled: For each fact, whether any sampled answer is right. False if a greedy answer is right: then nothing is
            sampled, since it would not change the category.
        chance: The control of `greedy`: the share of the same answers that are right about another fact of the
            relation, drawn at random. Answers that ignore the subject are right equally often about both.
        scoring: What makes an answer right, one of `SCORINGS`.
    """

    prompts: tuple[Prompt, ...]
    outputs: Mapping[str, tuple[str, ...]]
    right: Mapping[str, tuple[bool, ...]]
    greedy: tuple[float, ...]
    sampled: tuple[bool, ...]
    chance: tuple[float, ...]
    scoring: str = WHOLE_WORDS

    def __repr__(self) -> str:
        return f"Knowledge({sum(map(bool, self.greedy))} of {len(self.greedy)} facts HighlyKnown or MaybeKnown)"

    @property
    def categories(self) -> tuple[str, ...]:
        """Each fact's category, one of `CATEGORIES`.

        HighlyKnown: all greedy answers are right. MaybeKnown: some are. WeaklyKnown: none is, but a sampled answer is.
        Unknown: no answer is right. No category excludes guessing. A model that answers everything alike makes all
        facts with that answer HighlyKnown. Where few answers are possible, 160 samples make most facts WeaklyKnown.
        Compare with `by_chance`.
        """
        pairs = zip(self.greedy, self.sampled, strict=True)
        return tuple(CATEGORIES[0 if share == 1 else 1 if share else 2 if hit else 3] for share, hit in pairs)

    @property
    def scores(self) -> tuple[float, ...]:
        """How surely each fact is known, 0 to 1: share of right greedy answers; a little if only a sample is right."""
        return tuple(share or 0.5 * hit / DRAWS for share, hit in zip(self.greedy, self.sampled, strict=True))

    def known(self) -> Interval:
        """The share of facts that are HighlyKnown or MaybeKnown (Gekhman et al. also count WeaklyKnown as known)."""
        return self._share([share > 0 for share in self.greedy])

    def by_chance(self) -> Interval:
        """The control of `known`: the share of facts with a greedy answer that is right about another fact."""
        return self._share([share > 0 for share in self.chance])

    def accuracy(self, form: str) -> Interval:
        """The share of right answers in a form, with its 95% interval clustered by subject."""
        if form not in self.right:
            raise DataError(f"the model was asked as {', '.join(self.right)}, not as {form!r}")
        return self._share(self.right[form])

    @property
    def highly_known(self) -> tuple[int, ...]:
        """Indices of the HighlyKnown facts."""
        return tuple(i for i, share in enumerate(self.greedy) if share == 1)

    @property
    def unanswered(self) -> tuple[int, ...]:
        """Indices of the facts without a right greedy answer, in any form or draw."""
        pairs = zip(self.greedy, zip(*self.right.values(), strict=True), strict=True)
        return tuple(i for i, (share, hits) in enumerate(pairs) if not share and not any(hits))

    def kept(self, after: Knowledge, form: str) -> Interval | None:
        """The share of HighlyKnown facts that another (finetuned) model answers in a form; None without such facts.

        Raises `DataError` if the other model was asked about other facts, by another scoring, or not in the form.
        """
        return self._answered_by(after, form, self.highly_known)

    def gained(self, after: Knowledge, form: str) -> Interval | None:
        """The share of the facts in `unanswered` that another model answers in a form; None without such facts.

        Raises `DataError` as `kept` does.
        """
        return self._answered_by(after, form, self.unanswered)

    def _answered_by(self, after: Knowledge, form: str, indices: Sequence[int]) -> Interval | None:
        facts, others = ([(prompt.prompt_id, prompt.fact) for prompt in known.prompts] for known in (self, after))
        if facts != others or self.scoring != after.scoring:
            raise DataError(
                "expected what two models know of the same facts, in the same order, by the same scoring; got "
                f"{len(facts)} facts ({self.scoring}) and {len(others)} ({after.scoring})"
            )
        part = after.at(indices) if indices else None
        rate = (part or after).accuracy(form)  # refuses a form that it was not asked in, also for no facts
        return None if part is None else rate

    def of_relation(self, relation: str) -> Knowledge:
        """What is known of one relation; raises `DataError` for an unknown one."""
        indices = [i for i, prompt in enumerate(self.prompts) if prompt.fact.relation == relation]
        if not indices:
            raise DataError(f"no facts of relation {relation!r}; there are {', '.join(self.relations)}")
        return self.at(indices)

    def at(self, indices: Sequence[int]) -> Knowledge:
        """What is known of the facts at some indices."""
        return Knowledge(
            tuple(self.prompts[i] for i in indices),
            {form: tuple(texts[i] for i in indices) for form, texts in self.outputs.items()},
            {form: tuple(column[i] for i in indices) for form, column in self.right.items()},
            tuple(self.greedy[i] for i in indices),
            tuple(self.sampled[i] for i in indices),
            tuple(self.chance[i] for i in indices),
            self.scoring,
        )

    @property
    def relations(self) -> tuple[str, ...]:
        """The facts' relations, in order of their first fact."""
        return tuple(dict.fromkeys(prompt.fact.relation for prompt in self.prompts))

    def best_form(self) -> str | None:
        """The form with most right answers; of equally good ones, the first of `ALL_FORMS`. None: no form has any."""
        answering = [form for form, hits in self.right.items() if any(hits)]
        return max(answering, key=lambda form: sum(self.right[form]), default=None)

    def by_popularity(self) -> list[Knowledge]:
        """The facts of known popularity in fifths, most popular first; none where ties leave no most popular fifth."""
        answers = score(self.prompts, self.outputs[FEW_SHOT], {})
        return [self.at(part) for part in answers.quintiles()] if answers.has_popular_fifth else []

    @property
    def constant_right(self) -> tuple[bool, ...]:
        """For each fact, whether it accepts its relation's most frequent answer: right without any knowledge."""
        facts = [prompt.fact for prompt in self.prompts]
        frequent = FactSet(tuple(facts)).most_frequent_answers()
        return tuple(is_match(frequent[fact.relation][0], fact.answers, self.scoring) for fact in facts)

    def constant(self) -> float:
        """The share of facts that accept their relation's most frequent answer."""
        return sum(self.constant_right) / len(self.prompts)

    def _share(self, hits: Sequence[bool]) -> Interval:
        return share_interval(list(hits), [prompt.fact.composed_subject for prompt in self.prompts])


@expects(model=HookedModel, prompts=[Prompt], forms=[str], work=(Path, NoneType))
def knowledge(
    model: HookedModel,
    prompts: Sequence[Prompt],
    *,
    forms: Sequence[str] = ALL_FORMS,
    scoring: str = WHOLE_WORDS,
    batch_size: int = 64,
    seed: int = 0,
    work: Path | None = None,
    progress: bool = False,
) -> Knowledge:
    """Ask a model about facts in every form, and sort the facts by how surely it knows them (SLiCK).

    The forms are those of `FORMS` (statement, question, and both after `SHOTS` answered ones of the relation), and the
    plain question in the model's chat template, if it has one. The categories come from the few-shot question with
    `DRAWS` random draws of examples. Each draw gets one greedy answer. If none of these is right, each gets `SAMPLES`
    answers sampled at `TEMPERATURE` (Gekhman et al. 2024, Section 3). Few-shot answers end with their line.

    Departures: examples come from the given facts, not from a separate training set. All questions of a relation share
    a draw (with five subjects, all draws hold the same examples in different orders). `is_match` decides what is right,
    not exact match. Tokens are sampled from the whole distribution. Sampling ends after the first draw with a right
    answer, since that decides the category.

    Raises `DataError` for a relation with fewer than five subjects, prompts that are rendered chats, and an unknown
    form or scoring; `BadRowsError` for prompts that are longer than the model's positions.

    Args:
        model: The model to ask.
        prompts: The question about each fact.
        forms: Which of `ALL_FORMS` to ask in; the few-shot question is always asked.
        scoring: What makes an answer right, one of `SCORINGS`.
        batch_size: Prompts in a batch.
        seed: Seed of the examples and the samples.
        work: A folder that keeps the answers of each pass, so that a killed run resumes; none: they are not kept.
        progress: Whether to show a progress bar for each pass.
    """
    check_scoring(scoring)
    weights = "" if work is None else _weights(model)
    asked = passes(prompts, model.tokenizer, forms, check_seed(seed))
    draws = [name for name in asked if name == FEW_SHOT or name not in ALL_FORMS]
    samples = [f"samples {draw}" for draw in range(len(draws))]
    ask = _Asking(model, scoring, batch_size, work, weights, (*asked, *samples), progress)
    answers = {name: ask.greedily(name, of) for name, of in asked.items()}
    outputs = {name: texts for name, texts in answers.items() if name in ALL_FORMS}
    greedy, chance = (
        tuple(sum(hits) / DRAWS for hits in zip(*(ask.right(facts, answers[name]) for name in draws), strict=True))
        for facts in (prompts, other_prompts(prompts, seed))
    )
    sampled = [False] * len(prompts)
    for draw, (name, again) in enumerate(zip(draws, samples, strict=True)):
        left = [i for i, share in enumerate(greedy) if not share and not sampled[i]]
        hits = ask.sampled(again, [asked[name][i] for i in left], DRAWS * seed + draw)
        for i, hit in zip(left, hits, strict=True):
            sampled[i] = hit
    right = {form: ask.right(prompts, texts) for form, texts in outputs.items()}
    return Knowledge(tuple(prompts), outputs, right, greedy, tuple(sampled), chance, scoring)


def _weights(model: HookedModel) -> str:
    """What tells the model's weights, adapters and configuration from others."""
    parts = [fingerprint(model.model), settings_of(base_of(model.model).config)]
    return f"{json.dumps(parts, sort_keys=True, default=str)} {adapters_fingerprint(model.model)}"


@dataclass(frozen=True)
class _Asking:
    """How a model is asked in each pass."""

    model: HookedModel
    scoring: str
    batch_size: int
    work: Path | None
    weights: str
    """What `_weights` says of the model, where answers are kept."""
    names: tuple[str, ...]
    """The names of all passes, in order; those that sample may turn out not to be needed."""
    progress: bool

    def greedily(self, name: str, prompts: Sequence[Prompt]) -> tuple[str, ...]:
        """The greedy answer to each prompt, kept under the pass's name."""
        return tuple(self._kept(name, PromptSet.of(prompts, self.model.tokenizer), None))

    def sampled(self, name: str, prompts: Sequence[Prompt], seed: int) -> list[bool]:
        """Whether any of `SAMPLES` sampled answers to each prompt is right."""
        if not prompts:
            return []
        repeated = PromptSet.of(prompts, self.model.tokenizer).at(
            [i for i in range(len(prompts)) for _ in range(SAMPLES)]
        )
        hits = self.right(repeated, self._kept(name, repeated, Sampling(TEMPERATURE, seed)))
        return [any(hits[start : start + SAMPLES]) for start in range(0, len(hits), SAMPLES)]

    def right(self, prompts: Sequence[Prompt], outputs: Sequence[str]) -> tuple[bool, ...]:
        """Whether each output holds an accepted answer."""
        pairs = zip(prompts, outputs, strict=True)
        return tuple(is_match(output, prompt.fact.answers, self.scoring) for prompt, output in pairs)

    def _kept(self, name: str, prompts: PromptSet, sampling: Sampling | None) -> list[str]:
        """The answers of a pass: those that an earlier run kept, if it asked the same weights the same."""
        if self.work is None:
            return self._answers(name, prompts, sampling)
        ids, budgets = [encoding.ids for encoding in prompts.encodings], answer_budgets(prompts)
        stops = stop_ids(self.model)
        asked = json.dumps([self.model.name, self.weights, ids, budgets, stops, str(sampling)])
        key, file = hashlib.sha256(asked.encode()).hexdigest(), self.work / f"{name}.json"
        saved = read_saved(file)
        if saved.get("asked") != key:
            saved = {"asked": key, "outputs": self._answers(name, prompts, sampling)}
            write_saved(file, saved)
        return saved["outputs"]

    def _answers(self, name: str, prompts: PromptSet, sampling: Sampling | None) -> list[str]:
        return generate(
            self.model,
            prompts,
            max_new_tokens=answer_budgets(prompts),
            batch_size=self.batch_size,
            sampling=sampling,
            first_line=name not in ("question", "statement", CHAT),
            progress=self.progress,
            title=f"{name}, pass {self.names.index(name) + 1} of at most {len(self.names)}",
        )
