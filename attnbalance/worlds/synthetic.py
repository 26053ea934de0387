"""Invented fact worlds in natural language: names nobody has heard, with Zipf popularity and Zipf-skewed answers."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from attnbalance.errors import DataError
from attnbalance.facts import Fact, FactSet

RELATIONS = ("employer", "hometown", "instrument", "teacher", "language", "club", "dish", "street")
"""Names of the relations of an invented world, in the order in which they are taken."""

MOST_POPULAR = 1_000_000.0
"""Popularity of the first subject; the k-th has this / k."""


def synthetic_facts(seed: int = 0, *, subjects: int = 1000, relations: int = 4, answers: int = 20) -> FactSet:
    """An invented world: `subjects` x `relations` facts, the most popular subject first.

    Every subject is a first and a last name, each taken from a list of about sqrt(1.6 x subjects) invented words, so
    that neither names the subject alone. The k-th subject's popularity is `MOST_POPULAR` / k (Zipf, exponent 1) in all
    its facts. Each relation has `answers` one-word answers of its own; a fact's answer is drawn independently of its
    subject, the j-th with probability proportional to 1 / j, so that the relation's most frequent answer is a shortcut
    worth taking (28% of the facts for 20 answers).

    The same seed gives the same world. Raises `DataError` for sizes below 2 subjects, 1 relation, 2 answers, or more
    relations than `RELATIONS` has.
    """
    if subjects < 2 or answers < 2 or not 1 <= relations <= len(RELATIONS):
        raise DataError(
            f"a synthetic world needs at least 2 subjects, 2 answers and 1 to {len(RELATIONS)} relations; "
            f"got {subjects}, {answers} and {relations}"
        )
    rng = random.Random(seed)  # noqa: S311
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
    """So many different pairs of a first and a last name, in random order."""
    size = max(2, math.ceil(math.sqrt(1.6 * count)))
    first, last = ([next(words) for _ in range(size)] for _ in range(2))
    pairs = [f"{a} {b}" for a in first for b in last]
    return rng.sample(pairs, count)


def _invented_words(rng: random.Random) -> Iterator[str]:
    """Pronounceable capitalised words of two or three syllables, no two alike, without end."""
    seen: set[str] = set()
    while True:
        word = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.choice((2, 3)))).title()
        if word not in seen:
            seen.add(word)
            yield word
