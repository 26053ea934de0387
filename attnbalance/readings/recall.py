"""Recall: whether a model answers correctly when asked; accuracy by popularity, and the shortcut rate."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from attnbalance.arguments import expects
from attnbalance.data.facts import FactSet
from attnbalance.data.lines import first_line
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt
from attnbalance.data.scoring import CONTAINMENT, SCORINGS, WHOLE_WORDS, check_scoring, is_match
from attnbalance.data.squad import f1_score
from attnbalance.errors import DataError
from attnbalance.files.outputs import check_saved
from attnbalance.models.generate import generate
from attnbalance.models.hooked import HookedModel
from attnbalance.models.interventions import Edit
from attnbalance.statistics.intervals import Interval, mean_intervals
from attnbalance.statistics.shares import share_interval

PERCENTILES = tuple(range(10, 101, 10))

NEW_TOKENS = 10
"""Least number of tokens generated for an answer (Ghosal et al. 2024, B.2); longer accepted answers get more."""

CHAT_TOKENS = 32
"""Least number of tokens generated for an answer in a chat, which is often a sentence."""


@dataclass(frozen=True)
class Recall:
    """A model's answer to each prompt, and whether it is right or the shortcut.

    Attributes:
        prompt_ids: Distinct names of the prompts.
        subjects: The prompts' subjects, by which intervals are clustered.
        popularity: The facts' popularity, where known.
        outputs: The generated texts.
        right: For each of `SCORINGS`, whether the output is right (see `is_match`).
        f1: SQuAD's F1 of each output's first line, the highest over the accepted answers, in [0, 1].
        shortcut: Whether the output is wrong and contains, as whole words, the most frequent training answer of the
            prompt's relation; None for a relation that has none.
        scoring: The scoring that `correct`, and everything computed from it, uses.
    """

    prompt_ids: tuple[str, ...]
    subjects: tuple[str, ...]
    popularity: tuple[float | None, ...]
    outputs: tuple[str, ...]
    right: Mapping[str, tuple[bool, ...]]
    f1: tuple[float, ...]
    shortcut: tuple[bool | None, ...]
    scoring: str = WHOLE_WORDS

    def __post_init__(self) -> None:
        """Raise `DataError` for prompt ids that repeat: answers are found by them."""
        repeated = [name for name, count in Counter(self.prompt_ids).items() if count > 1]
        if repeated:
            raise DataError(
                f"recall: prompt id {repeated[0]!r} occurs more than once; score each template's prompts separately"
            )

    def __repr__(self) -> str:
        return f"Recall({sum(self.correct)} of {len(self.correct)} right by {self.scoring})"

    @classmethod
    def from_json(cls, columns: Mapping[str, Any], path: Path) -> Recall:
        """The recall from its fields as JSON; raises `OutputError`, naming the file `path`, if they were changed."""
        texts = {name: [str] for name in ("prompt_ids", "subjects", "outputs")}
        check_saved(path, columns, path, **texts, popularity=list, right=dict, f1=[float], shortcut=list, scoring=str)
        check_saved(path, columns["right"], path, **{scoring: [bool] for scoring in SCORINGS})
        right = {scoring: tuple(column) for scoring, column in columns["right"].items()}
        lists = {name: tuple(columns[name]) for name in (*texts, "popularity", "f1", "shortcut")}
        return cls(**{**lists, "right": right, "scoring": columns["scoring"]})

    @property
    def correct(self) -> tuple[bool, ...]:
        """For each prompt, whether the output is right."""
        return self.right[self.scoring]

    def by(self, scoring: str) -> Recall:
        """The same answers under another of `SCORINGS`.

        Shortcuts are left out, since they are the wrong answers under one scoring.
        """
        check_scoring(scoring)
        return self if scoring == self.scoring else replace(self, scoring=scoring, shortcut=(None,) * len(self.outputs))

    def accuracy(self) -> Interval:
        """The share of right answers, with its 95% interval clustered by subject."""
        return self._share(range(len(self.correct)))

    def mean_f1(self, seed: int = 0) -> Interval:
        """The mean of F1, with its 95% interval clustered by subject; NaN if too few answers differ for an interval.

        `seed` is that of the bootstrap.
        """
        interval = mean_intervals(np.asarray(self.f1)[:, None], self.subjects, seed=seed)[0]
        tells = len(set(self.f1)) > 1 and (interval.low > 0 or interval.high < 1)
        return interval.within(0.0, 1.0) if tells else Interval(interval.mean, np.nan, np.nan, interval.n)

    def shortcut_rate(self) -> Interval | None:
        """The share of wrong answers that are the relation's most frequent training answer; None without wrong answers.

        Wrong answers about a relation without a training answer are left out: the interval's `n` counts the others.
        """
        wrong = [
            (said, subject)
            for right, said, subject in zip(self.correct, self.shortcut, self.subjects, strict=True)
            if not right and said is not None
        ]
        if not wrong:
            return None
        return share_interval([said for said, _ in wrong], [subject for _, subject in wrong])

    def by_quintile(self) -> list[tuple[tuple[float, float], Interval]]:
        """((lowest, highest popularity), accuracy) of each fifth by known popularity, most popular first."""
        return [(self._range(part), self._share(part)) for part in self.quintiles()]

    def by_top_percentile(self) -> list[tuple[int, Interval]]:
        """(x, accuracy on the x% most popular prompts) for x = 10, 20, ..., 100 (Ghosal et al. 2024, Figure 4)."""
        ranked = self._ranked()
        return [(x, self._share(ranked[:size])) for x, size in self._top_sizes()]

    def quintiles(self) -> list[list[int]]:
        """Indices of the prompts in each fifth by popularity, most popular first; empty fifths are left out."""
        return [part.tolist() for part in np.array_split(np.asarray(self._ranked(), dtype=int), 5) if len(part)]

    @property
    def has_popular_fifth(self) -> bool:
        """Whether most prompts of the most popular fifth are more popular than those of the other fifths."""
        fifths = self.quintiles()
        return bool(fifths) and 2 * self.tied()[0] < len(fifths[0])

    @expects(prompt_ids=[str])
    def at(self, prompt_ids: Sequence[str]) -> Recall:
        """The recall of the named prompts, in that order; raises `DataError` for an unknown name."""
        index_of = {name: i for i, name in enumerate(self.prompt_ids)}
        missing = [name for name in prompt_ids if name not in index_of]
        if missing:
            raise DataError(f"recall has no prompt {missing[0]!r} ({len(missing)} of {len(prompt_ids)} missing)")
        indices = [index_of[name] for name in prompt_ids]
        right = {scoring: tuple(column[i] for i in indices) for scoring, column in self.right.items()}
        columns = ("prompt_ids", "subjects", "popularity", "outputs", "f1", "shortcut")
        return replace(self, right=right, **{name: tuple(getattr(self, name)[i] for i in indices) for name in columns})

    def tied(self) -> list[int]:
        """For each fifth of `quintiles`, the number of its prompts whose popularity also occurs in another fifth."""
        parts = [[self.popularity[i] for i in part] for part in self.quintiles()]
        fifths = Counter(value for part in parts for value in set(part))
        return [sum(fifths[value] > 1 for value in part) for part in parts]

    def tied_tops(self) -> list[int]:
        """For each x of `by_top_percentile`, the number of its prompts whose popularity also occurs outside it.

        Which of equally popular prompts fall inside is decided by a hash.
        """
        popularity = [self.popularity[i] for i in self._ranked()]
        return [popularity[:size].count(next(iter(popularity[size:]), None)) for _, size in self._top_sizes()]

    def _top_sizes(self) -> list[tuple[int, int]]:
        """(x, the number of prompts in the x% most popular ones), without empty ones."""
        known = len(self.popularity) - self.popularity.count(None)
        return [(x, size) for x in PERCENTILES if (size := -(-known * x // 100))]

    def _ranked(self) -> list[int]:
        """Indices of prompts with known popularity, most popular first.

        Ties are broken by a hash of the prompt id. This does not depend on the order of the prompts or on the other
        prompts, and ignores the relation, with which an id begins.
        """
        digests = [hashlib.sha256(name.encode()).hexdigest() for name in self.prompt_ids]
        known = [(-p, digests[i], i) for i, p in enumerate(self.popularity) if p is not None]
        return [i for _, _, i in sorted(known)]

    def _range(self, indices: Sequence[int]) -> tuple[float, float]:
        known = [p for p in (self.popularity[i] for i in indices) if p is not None]
        return min(known), max(known)

    def _share(self, indices: Sequence[int]) -> Interval:
        return share_interval([self.correct[i] for i in indices], [self.subjects[i] for i in indices])


def score(
    prompts: Sequence[Prompt],
    outputs: Sequence[str],
    shortcuts: Mapping[str, Sequence[str]],
    scoring: str = WHOLE_WORDS,
) -> Recall:
    """The recall of a model's outputs.

    `shortcuts`: the most frequent training answer, in all its forms, of each relation that has one (no forms: it has
    none). Also under containment, a shortcut stands in an output as whole words: "us" is part of "Russia".
    """
    check_scoring(scoring)
    names = WHOLE_WORDS if scoring == CONTAINMENT else scoring
    pairs = list(zip(prompts, outputs, strict=True))
    right = {by: tuple(is_match(output, prompt.fact.answers, by) for prompt, output in pairs) for by in SCORINGS}
    shortcut = [
        not correct and is_match(output, shortcuts[relation], names)
        if shortcuts.get(relation := prompt.fact.relation)
        else None
        for correct, (prompt, output) in zip(right[scoring], pairs, strict=True)
    ]
    return Recall(
        tuple(prompt.prompt_id for prompt in prompts),
        tuple(prompt.fact.composed_subject for prompt in prompts),
        tuple(prompt.fact.popularity for prompt in prompts),
        tuple(outputs),
        right,
        tuple(f1_score(first_line(output), prompt.fact.answers) for prompt, output in pairs),
        tuple(shortcut),
        scoring,
    )


def answer_budgets(prompts: PromptSet) -> list[int]:
    """Tokens to generate for each prompt: `NEW_TOKENS`, or more if its longest accepted answer needs more.

    A chat gets at least `CHAT_TOKENS`, which is a departure from the paper.
    """
    least = [CHAT_TOKENS if prompt.has_special_tokens else NEW_TOKENS for prompt in prompts]
    return [max(tokens, length) for tokens, length in zip(least, prompts.answers.lengths, strict=True)]


@expects(model=HookedModel, prompts=[Prompt], shortcuts=({str: [str]}, NoneType), max_new_tokens=(int, NoneType))
def recall(
    model: HookedModel,
    prompts: Sequence[Prompt],
    shortcuts: Mapping[str, Sequence[str]] | None = None,
    *,
    scoring: str = WHOLE_WORDS,
    max_new_tokens: int | None = None,
    batch_size: int = 64,
    edit: Edit | None = None,
    progress: bool = False,
) -> Recall:
    """Ask the model every prompt by greedy generation, and score its answers (see `is_match`).

    Args:
        model: The model to ask.
        prompts: The prompts.
        shortcuts: For each relation, the accepted forms of its most frequent training answer. By default, the most
            frequent answer among the prompts' own facts is used; of equally frequent ones, the first in the alphabet
            (see `FactSet.tied_relations`).
        scoring: One of `SCORINGS`.
        max_new_tokens: Number of tokens to generate. By default `NEW_TOKENS`, or more for longer accepted answers and
            chats (see `answer_budgets`). Warns if an accepted answer needs more. A word that is cut off by this number
            counts as it stands: "1" of "1000" is 1.
        batch_size: Prompts in a batch.
        edit: Changes the attention row of each prompt's last token (see `models.interventions`).
        progress: Whether to show a progress bar.

    Raises `BadRowsError` for prompts that, with the answer, are longer than the model's positions; `ModelError` for
    logits that are not numbers; `DataError` for an unknown scoring.
    """
    check_scoring(scoring)
    if shortcuts is None:
        shortcuts = FactSet(tuple(prompt.fact for prompt in prompts)).most_frequent_answers()
    prompts = PromptSet.of(prompts, model.tokenizer)
    budgets = answer_budgets(prompts)
    if max_new_tokens is not None:
        longer = sum(length > max_new_tokens for length in prompts.answers.lengths)
        if longer:
            warnings.warn(
                f"{longer} of {len(prompts)} prompts accept an answer of more than {max_new_tokens} tokens; it would "
                "be cut off and could count as wrong; leave max_new_tokens out",
                stacklevel=2,
            )
        budgets = [max_new_tokens] * len(prompts)
    outputs = generate(model, prompts, max_new_tokens=budgets, batch_size=batch_size, edit=edit, progress=progress)
    return score(prompts, outputs, shortcuts, scoring)
