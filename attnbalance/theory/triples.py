"""Facts (s, r, a) of single tokens: subjects with Zipf popularity, statements (s, r) -> a and prompts (s, p_r) -> a."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnbalance.errors import DataError

SPLITS = ("top", "whole", "random", "bottom")


@dataclass(frozen=True)
class Examples:
    """Prompts (s, q) with their answers, as tokens; `weight` sums to 1 in each run."""

    subject: Int[Tensor, "run example"]
    query: Int[Tensor, "run example"]
    answer: Int[Tensor, "run example"]
    weight: Float[Tensor, "run example"]

    def take(self, index: Int[Tensor, "run chosen"]) -> Examples:
        """The examples with these indices in each run, with equal weights."""
        even = torch.full(index.shape, 1 / index.shape[1], dtype=self.weight.dtype)
        subject, query, answer = (x.gather(1, index) for x in (self.subject, self.query, self.answer))
        return Examples(subject, query, answer, even)


@dataclass(frozen=True)
class Triples:
    """A world of facts for each run: one answer per subject and relation, with the most popular subject first.

    Tokens are numbered in this order: subjects, relations r, their prompt tokens p_r, answers. Relations share no
    answers.
    """

    answer: Int[Tensor, "run subject relation"]
    weight: Float[Tensor, "run subject"]
    tokens: int

    @property
    def subjects(self) -> int:
        """The number of subjects."""
        return self.answer.shape[1]

    @property
    def relations(self) -> int:
        """The number of relations."""
        return self.answer.shape[2]

    def examples(self, *, asked: bool = False) -> Examples:
        """Every fact as (s, r) -> a, or as (s, p_r) -> a if `asked`, subject by subject, with equal weights."""
        runs, subjects, relations = self.answer.shape
        subject = torch.arange(subjects).repeat_interleave(relations).expand(runs, -1)
        query = subjects + relations * asked + torch.arange(relations).repeat(subjects).expand(runs, -1)
        even = torch.full((runs, subjects * relations), 1 / (subjects * relations), dtype=self.weight.dtype)
        return Examples(subject, query, self.answer.flatten(1), even)

    def drawn(self, count: int, generators: Sequence[torch.Generator]) -> Examples:
        """Draw `count` statements (s, r) -> a for each run: s by popularity, r uniformly (section 3.1)."""
        indices = [
            torch.multinomial(weight, count, replacement=True, generator=generator) * self.relations
            + torch.randint(self.relations, (count,), generator=generator)
            for weight, generator in zip(self.weight, generators, strict=True)
        ]
        return self.examples().take(torch.stack(indices))

    def of(self, subjects: Bool[Tensor, "run subject"], *, asked: bool = True) -> Examples:
        """The facts of the given subjects as prompts (statements unless `asked`); runs have equally many subjects."""
        counts = subjects.sum(1)
        if int(counts.min()) < 1 or int(counts.min()) != int(counts.max()):
            raise DataError(f"expected the same number of subjects in each run, at least one, got {counts.tolist()}")
        chosen = subjects.repeat_interleave(self.relations, dim=1)
        return self.examples(asked=asked).take(chosen.nonzero()[:, 1].view(len(chosen), -1))


def make_triples(
    seeds: Sequence[int],
    *,
    subjects: int,
    relations: int,
    answers: int,
    alpha: float | Sequence[float] = 1.0,
    answer_alpha: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> Triples:
    """A world for each seed; the k-th subject's popularity is proportional to k^-alpha (one alpha, or one per run).

    The `answers` are divided among the relations. A fact's answer is drawn from those of its relation: uniformly, or
    the k-th with a probability proportional to k^-answer_alpha. Raises `DataError` unless alpha > 0, answer_alpha >= 0,
    subjects >= 2, 1 <= relations <= answers and there is a seed.
    """
    alphas = [alpha] * len(seeds) if isinstance(alpha, int | float) else list(alpha)
    if len(alphas) != len(seeds) or not seeds:
        raise DataError(
            f"expected at least one seed, and one alpha or one per seed, got {len(seeds)} and {len(alphas)}"
        )
    if not all(0 < exponent < float("inf") for exponent in alphas):
        raise DataError(f"the Zipf exponent alpha must be finite and > 0, got {min(alphas)}")
    if not 0 <= answer_alpha < float("inf"):
        raise DataError(f"the Zipf exponent answer_alpha must be finite and >= 0, got {answer_alpha}")
    if subjects < 2 or relations < 1:
        raise DataError(f"expected at least 2 subjects and 1 relation, got {subjects} and {relations}")
    if relations > answers:
        raise DataError(
            f"{relations} relations need at least as many answers, got {answers}: relations share no answers"
        )
    ranks = torch.arange(1, subjects + 1, dtype=dtype)
    weight = torch.stack([ranks**-exponent / (ranks**-exponent).sum() for exponent in alphas])
    first, answer = subjects + 2 * relations, []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        dealt = torch.arange(answers).tensor_split(relations)
        columns = [part[_drawn(len(part), subjects, answer_alpha, generator)] for part in dealt]
        answer.append(first + torch.stack(columns, dim=1))
    return Triples(torch.stack(answer), weight, first + answers)


def _drawn(answers: int, count: int, alpha: float, generator: torch.Generator) -> Int[Tensor, " count"]:
    """`count` indices below `answers`; index k - 1 has a probability proportional to k^-alpha."""
    if alpha == 0:
        return torch.randint(answers, (count,), generator=generator)
    weight = torch.arange(1, answers + 1, dtype=torch.float64) ** -alpha
    return torch.multinomial(weight, count, replacement=True, generator=generator)


@dataclass(frozen=True)
class Subjects:
    """Masks of each run's subjects: held out for testing, and trained on."""

    heldout: Bool[Tensor, "run subject"]
    trained: Bool[Tensor, "run subject"]


def split_subjects(world: Triples, name: str, seeds: Sequence[int]) -> Subjects:
    """Hold out a random half of the subjects; `name` chooses the training subjects from the others (section 3.2).

    "top" and "bottom" choose the more and the less popular half of the others, "random" a random half, "whole" all. One
    seed holds out the same subjects for every name. Raises `DataError` for an unknown name.
    """
    if name not in SPLITS:
        raise DataError(f"no split {name!r}; choose one of {', '.join(SPLITS)}")
    heldout, trained = (torch.zeros(world.weight.shape, dtype=torch.bool) for _ in range(2))
    for run, seed in enumerate(seeds):
        order = torch.randperm(world.subjects, generator=torch.Generator().manual_seed(seed))
        held, rest = order.tensor_split([world.subjects // 2])
        half = len(rest) // 2
        ranked = rest.sort().values
        chosen = {"top": ranked[:half], "bottom": ranked[-half:], "random": rest[:half], "whole": rest}[name]
        heldout[run, held] = True
        trained[run, chosen] = True
    return Subjects(heldout, trained)
