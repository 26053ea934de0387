"""Recall: whether a model, asked, gives the right answer; accuracy by popularity, and the shortcut rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

from attnbalance.errors import DataError
from attnbalance.facts import FactSet
from attnbalance.models.edits import Edit
from attnbalance.models.generate import generate
from attnbalance.models.hooked import HookedModel
from attnbalance.prompts import Prompt
from attnbalance.readings.intervals import Interval, mean_intervals, share_interval

PERCENTILES = tuple(range(10, 101, 10))


NEW_TOKENS = 10
"""Tokens generated for an answer (Ghosal et al. 2024, B.2)."""


@dataclass(frozen=True)
class Recall:
    """What a model answered to each prompt, and whether that is right or the shortcut.

    `correct[i]`: the normalised output contains an accepted answer (see `is_match`). `shortcut[i]`: the output is
    wrong and contains the most frequent training answer of the prompt's relation. `popularity[i]` may be None.
    """

    prompt_ids: tuple[str, ...]
    subjects: tuple[str, ...]
    popularity: tuple[float | None, ...]
    outputs: tuple[str, ...]
    correct: tuple[bool, ...]
    shortcut: tuple[bool, ...]

    def accuracy(self, seed: int = 0) -> Interval:
        """The share of right answers over all prompts, with its 95% interval, clustered by subject."""
        return self._share(range(len(self.correct)), seed)

    def shortcut_rate(self, seed: int = 0) -> Interval | None:
        """The share of wrong answers that are the relation's most frequent training answer; None without wrong ones."""
        wrong = [i for i, right in enumerate(self.correct) if not right]
        if not wrong:
            return None
        return share_interval([self.shortcut[i] for i in wrong], [self.subjects[i] for i in wrong], seed=seed)

    def by_quintile(self, seed: int = 0) -> list[tuple[tuple[float, float], Interval]]:
        """((lowest, highest popularity), accuracy) of each fifth by popularity, where known, most popular first."""
        return [(self._range(part), self._share(part, seed)) for part in self.quintiles()]

    def by_top_percentile(self, seed: int = 0) -> list[tuple[int, Interval]]:
        """(x, accuracy on the x% most popular prompts) for x = 10, 20, ..., 100 (Ghosal et al. 2024, Figure 4)."""
        ranked = self._ranked()
        sizes = [(x, -(-len(ranked) * x // 100)) for x in PERCENTILES]
        return [(x, self._share(ranked[:size], seed)) for x, size in sizes if size]

    def quintiles(self) -> list[list[int]]:
        """Places of the prompts in each fifth by popularity, most popular first; empty fifths are left out."""
        return [part.tolist() for part in np.array_split(np.asarray(self._ranked(), dtype=int), 5) if len(part)]

    def at(self, prompt_ids: Sequence[str]) -> Recall:
        """The same recall of some of its prompts, in the order given; raises `DataError` for one that is not there."""
        place = {name: i for i, name in enumerate(self.prompt_ids)}
        missing = [name for name in prompt_ids if name not in place]
        if missing:
            raise DataError(f"recall has no prompt {missing[0]!r} ({len(missing)} of {len(prompt_ids)} missing)")
        index = [place[name] for name in prompt_ids]
        return Recall(
            tuple(prompt_ids),
            tuple(self.subjects[i] for i in index),
            tuple(self.popularity[i] for i in index),
            tuple(self.outputs[i] for i in index),
            tuple(self.correct[i] for i in index),
            tuple(self.shortcut[i] for i in index),
        )

    def _ranked(self) -> list[int]:
        """Places of prompts with known popularity, most popular first; ties are broken by prompt id."""
        known = [(-p, self.prompt_ids[i], i) for i, p in enumerate(self.popularity) if p is not None]
        return [i for _, _, i in sorted(known)]

    def _range(self, places: Sequence[int]) -> tuple[float, float]:
        known = [p for p in (self.popularity[i] for i in places) if p is not None]
        return min(known), max(known)

    def _share(self, places: Sequence[int], seed: int) -> Interval:
        return share_interval([self.correct[i] for i in places], [self.subjects[i] for i in places], seed=seed)


@dataclass(frozen=True)
class PairedAccuracy:
    """The accuracy of a minus that of b on the same prompts: mean with 95% interval, and the exact McNemar test.

    `a_only` and `b_only` are the numbers of prompts that one of the two alone gets right; `p_value` is that of the
    exact two-sided McNemar test on them, which takes the prompts as independent.
    """

    interval: Interval
    a_only: int
    b_only: int
    p_value: float

    @property
    def differs(self) -> bool:
        """Whether one is more accurate: only where the interval excludes zero and the exact test has p < 0.05.

        On a few prompts that are answered differently the interval can exclude zero by itself, as the resamples hold
        no prompt that goes the other way.
        """
        return self.interval.excludes_zero and self.p_value < 0.05


def compare_accuracy(a: Recall, b: Recall, seed: int = 0) -> PairedAccuracy:
    """Compare two models' accuracy on the same prompts; raises `DataError` where the prompts are not the same."""
    if set(a.prompt_ids) != set(b.prompt_ids):
        raise DataError("a paired comparison needs the same prompts in both recalls")
    right_a, right_b = np.asarray(a.correct, dtype=int), np.asarray(b.at(a.prompt_ids).correct, dtype=int)
    gained = right_a - right_b
    a_only, b_only = int((gained > 0).sum()), int((gained < 0).sum())
    p_value = float(stats.binomtest(a_only, a_only + b_only).pvalue) if a_only + b_only else 1.0
    return PairedAccuracy(gain_interval(gained, a.subjects, seed), a_only, b_only, p_value)


def gain_interval(gained: npt.NDArray[np.int_], subjects: Sequence[str], seed: int) -> Interval:
    """The mean of gains in {-1, 0, 1} with its interval: bootstrap, or Wilson's where all gains are alike.

    No end lies outside [-1, 1]. `share_interval` says how many subjects either of the two needs.

    There the bootstrap has no width, however few prompts were seen. With a share of such gains of at least w, at most
    1 - w are of the other kinds, so that the mean of gains of +1 is at least 2 w - 1, and of 0 within 1 - w of 0.
    """
    if len(set(gained.tolist())) > 1:
        return mean_intervals(gained[:, None], subjects, seed=seed)[0].within(-1.0, 1.0)
    alike, other = float(gained[0]), 1 - share_interval([True] * len(gained), subjects).low
    width = (1 + abs(alike)) * other
    return Interval(alike, alike - width, alike + width, len(gained)).within(-1.0, 1.0)


def is_match(output: str, answers: Sequence[str]) -> bool:
    """Whether an output contains one of the answers, both lower-cased and stripped (Ghosal et al. 2024, B.2).

    The paper's code lower-cases the output only, though its text says that both are normalised; both are here. As in
    the paper a short answer matches inside a longer word ("pol" in "Apollo"); empty answers never match.
    """
    given = output.lower().strip()
    return any(wanted in given for wanted in (answer.lower().strip() for answer in answers) if wanted)


def score(prompts: Sequence[Prompt], outputs: Sequence[str], shortcuts: Mapping[str, Sequence[str]]) -> Recall:
    """The recall of a model's outputs; `shortcuts`: a relation's most frequent training answer, in all its forms."""
    correct = [is_match(output, prompt.fact.answers) for prompt, output in zip(prompts, outputs, strict=True)]
    shortcut = [
        not right and is_match(output, shortcuts.get(prompt.fact.relation, ()))
        for right, prompt, output in zip(correct, prompts, outputs, strict=True)
    ]
    return Recall(
        tuple(prompt.prompt_id for prompt in prompts),
        tuple(prompt.fact.subject for prompt in prompts),
        tuple(prompt.fact.popularity for prompt in prompts),
        tuple(outputs),
        tuple(correct),
        tuple(shortcut),
    )


def recall(
    model: HookedModel,
    prompts: Sequence[Prompt],
    shortcuts: Mapping[str, Sequence[str]] | None = None,
    *,
    max_new_tokens: int = NEW_TOKENS,
    batch_size: int = 64,
    edit: Edit | None = None,
    progress: bool = False,
) -> Recall:
    """Ask the model every prompt, by greedy generation of up to `max_new_tokens` tokens, and score what it says.

    `shortcuts` maps each relation to the accepted forms of its most frequent training answer; by default the most
    frequent answer among the prompts' own facts stands in for it. `edit` changes the attention row of each prompt's
    last token (see `models.edits`), which is how steering and transplants are tested. Raises `BadRowsError` for prompts
    that, with the answer, are longer than the model's positions; `ModelError` for logits that are not numbers.
    """
    if shortcuts is None:
        shortcuts = FactSet(tuple(prompt.fact for prompt in prompts)).most_frequent_answers()
    outputs = generate(
        model, prompts, max_new_tokens=max_new_tokens, batch_size=batch_size, edit=edit, progress=progress
    )
    return score(prompts, outputs, shortcuts)
