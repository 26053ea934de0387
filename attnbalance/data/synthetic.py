"""Invented worlds of facts in natural language: unknown names, with Zipf popularity and Zipf-distributed answers."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from attnbalance.data.facts import Fact, FactSet
from attnbalance.errors import DataError
from attnbalance.seeds import check_seed

RELATIONS = ("employer", "hometown", "instrument", "teacher", "language", "club", "dish", "street")
"""The relations of an invented world; a world of n relations has the first n."""

MOST_POPULAR = 1_000_000.0
"""Popularity of the first subject; that of the k-th is this / k."""

MOST_SUBJECTS, MOST_ANSWERS = 1_000_000, 10_000
"""Limits set by the number of invented words (347,900)."""


def synthetic_facts(seed: int = 0, *, subjects: int = 1000, relations: int = 4, answers: int = 20) -> FactSet:
    """An invented world: `subjects` x `relations` facts, the most popular subject first.

    A subject is a first and a last name, each from a list of about sqrt(1.6 x subjects) invented words, so that neither
    identifies the subject alone. The k-th subject's popularity is `MOST_POPULAR` / k (Zipf, exponent 1) in all its
    facts. Each relation has `answers` different one-word answers. A fact's answer is drawn independently of its
    subject, the j-th with probability proportional to 1 / j, so that the relation's most frequent answer is a useful
    shortcut (28% of the facts for 20 answers).

    The same seed gives the same world. Raises `DataError` for fewer than 2 subjects, 1 relation or 2 answers, and for
    more than `MOST_SUBJECTS`, `MOST_ANSWERS` or the number of `RELATIONS`.

    >>> len(synthetic_facts(subjects=10, relations=3))
    30
    """
    sizes = (2 <= subjects <= MOST_SUBJECTS, 2 <= answers <= MOST_ANSWERS, 1 <= relations <= len(RELATIONS))
    if not all(sizes):
        raise DataError(
            f"a synthetic world needs 2 to {MOST_SUBJECTS} subjects, 2 to {MOST_ANSWERS} answers and 1 to "
            f"{len(RELATIONS)} relations; got {subjects}, {answers} and {relations}"
        )
    rng = random.Random(check_seed(seed))  # noqa: S311
    words = _invented_words(rng)
    people = _names(rng, words, subjects)
    named = RELATIONS[:relations]
    choices = {relation: [next(words) for _ in range(answers)] for relation in named}
    weights = [1 / (j + 1) for j in range(answers)]
    facts = [
        Fact(person, relation, (rng.choices(choices[relation], weights)[0],), MOST_POPULAR / (k + 1))
        for k, person in enumerate(people)
        for relation in named
    ]
    return FactSet(tuple(facts), f"synthetic:{seed}")


def _names(rng: random.Random, words: Iterator[str], count: int) -> list[str]:
    """`count` different pairs of a first and a last name, in random order."""
    size = max(2, math.ceil(math.sqrt(1.6 * count)))
    first, last = ([next(words) for _ in range(size)] for _ in range(2))
    pairs = [f"{a} {b}" for a in first for b in last]
    return rng.sample(pairs, count)


def _invented_words(rng: random.Random) -> Iterator[str]:
    """Different pronounceable capitalised words of two or three syllables, without end."""
    seen: set[str] = set()
    while True:
        word = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.choice((2, 3)))).title()
        if word not in seen:
            seen.add(word)
            yield word
