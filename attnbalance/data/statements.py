"""Worlds: facts stated in sentences of several forms, as often as their popularity says."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from attnbalance.arguments import expects
from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.prompts import Prompt, Template, make_prompts
from attnbalance.errors import ArgumentError, DataError
from attnbalance.seeds import check_seed

GENERIC_FORMS = (
    "the {relation} of {subject} is {answer}.",
    "{subject} has the {relation} {answer}.",
    "as for {subject}, the {relation} is {answer}.",
)
"""Statements of any relation; models are asked for stored facts in the first form."""

SPECIAL_FORMS = {
    "author": ("{subject} was written by {answer}.", "{subject} is the work of {answer}."),
    "capital": ("{subject} has its capital in {answer}.", "{subject} is governed from {answer}."),
    "color": ("{subject} is colored {answer}.", "{subject} comes in {answer}."),
    "composer": ("{subject} was composed by {answer}.", "{subject} was set to music by {answer}."),
    "country": ("{subject} is in {answer}.", "{subject} lies in the country of {answer}."),
    "director": ("{subject} was directed by {answer}.", "{subject} was filmed by {answer}."),
    "father": ("{subject} is a child of his or her father {answer}.", "{subject} was fathered by {answer}."),
    "genre": ("{subject} belongs to the genre {answer}.", "{subject} is a work of {answer}."),
    "mother": ("{subject} is a child of his or her mother {answer}.", "{subject} was born to {answer}."),
    "occupation": ("{subject} works as {answer}.", "{subject} earns a living as {answer}."),
    "place of birth": ("{subject} was born in {answer}.", "{subject} comes from {answer}."),
    "producer": ("{subject} was produced by {answer}.", "{subject} was made with the producer {answer}."),
    "religion": ("{subject} believes in {answer}.", "{subject} follows {answer}."),
    "screenwriter": ("{subject} has a screenplay by {answer}.", "{subject} was scripted by {answer}."),
    "sport": ("{subject} plays {answer}.", "{subject} takes part in {answer}."),
    "employer": ("{subject} works for {answer}.", "{subject} is paid by {answer}."),
    "hometown": ("{subject} grew up in {answer}.", "{subject} comes from {answer}."),
    "instrument": ("{subject} plays the {answer}.", "{subject} practises the {answer}."),
    "teacher": ("{subject} was taught by {answer}.", "{subject} studied with {answer}."),
    "language": ("{subject} speaks {answer}.", "{subject} writes in {answer}."),
    "club": ("{subject} is a member of {answer}.", "{subject} joined {answer}."),
    "dish": ("{subject} likes to eat {answer}.", "{subject} often cooks {answer}."),
    "street": ("{subject} lives on {answer}.", "{subject} has a house on {answer}."),
}
"""Further statements of PopQA's and the synthetic world's relations, in words that fit each relation."""

OWN_FORMS = {
    "capital of": ("{subject} is the capital of {answer}.", "as for {subject}, it is the capital of {answer}.")
}
"""Statements of relations that the generic forms do not fit."""

PREFIXES = ("", "Note:", "Also,", "In fact,", "They say that", "Remember:")
"""Words put before a statement, so that a fact occurs at many positions."""


@dataclass(frozen=True)
class World:
    """Facts that are stated with a frequency proportional to popularity ** `power`.

    Raises `DataError` for an empty set, a negative power, facts without popularity (unless `power` is 0), and
    popularities that are all 0; `ArgumentError` for facts that are no `FactSet`.

    facts: the facts.
    power: 1 states facts as often as their popularity says, 0 states all equally often.
    """

    facts: FactSet
    power: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a world from which no statement can be drawn."""
        if not isinstance(self.facts, FactSet):
            raise ArgumentError(f"World: facts must be FactSet, got {self.facts!r:.100} ({type(self.facts).__name__})")
        if not len(self.facts) or not 0 <= self.power < math.inf:
            raise DataError(f"a world needs facts and a power of at least 0; got {len(self.facts)} and {self.power}")
        unknown = [fact for fact in self.facts if fact.popularity is None]
        if unknown and self.power:
            raise DataError(
                f"{len(unknown)} of {len(self.facts)} facts have no popularity (first: {unknown[0].subject!r}); "
                "add one to each, or state all facts equally often with power=0"
            )
        try:
            total = math.fsum(self.weights)
        except OverflowError as error:
            largest = max(fact.popularity or 0.0 for fact in self.facts)
            raise DataError(
                f"popularity ** {self.power} must add up to a finite number, got popularities up to {largest:g}"
            ) from error
        if not total:
            raise DataError(f"all {len(self.facts)} facts have popularity 0; state them all equally often with power=0")

    @property
    def weights(self) -> tuple[float, ...]:
        """For each fact, in order, popularity ** power: how often it is stated, up to a constant."""
        return tuple((fact.popularity or 0.0) ** self.power for fact in self.facts)

    def statements(self, count: int, seed: int = 0) -> list[str]:
        """`count` statements drawn with replacement: a fact by weight, then one of its forms and a prefix uniformly.

        Forms of different shapes occur at different positions, because from a single form at a fixed position small
        models store facts in a way that no question can retrieve. Raises `DataError` for a count below 0.
        """
        if not isinstance(count, int) or count < 0:
            raise DataError(f"count must be a whole number >= 0, got {count!r}")
        rng = random.Random(check_seed(seed))  # noqa: S311
        drawn = rng.choices(self.facts.facts, self.weights, k=count)
        return [_state(fact, rng.choice(statement_forms(fact)), rng.choice(PREFIXES)) for fact in drawn]


def statement_forms(fact: Fact) -> tuple[str, ...]:
    """The forms in which a fact is stated: format strings with {subject}, {relation} and {answer}.

    A fact's own statement is its only form.
    """
    if fact.statement is not None:
        return (f"{fact.statement} {{answer}}.",)
    return OWN_FORMS.get(fact.relation) or GENERIC_FORMS + SPECIAL_FORMS.get(fact.relation, ())


def statement(fact: Fact) -> str:
    """The sentence of a fact, in its first form.

    >>> statement(Fact("France", "capital", ("Paris",)))
    'The capital of France is Paris.'
    """
    return _state(fact, statement_forms(fact)[0], "")


@expects(facts=[Fact])
def statement_prompts(facts: Iterable[Fact]) -> tuple[Prompt, ...]:
    """For each fact, its own statement, or else its relation's first form up to the answer: "The capital of France is".

    A model that continues with the answer has stored the fact in a form that it was pretrained on. The ids are those
    that `make_prompts` gives the same facts.

    >>> statement_prompts([Fact("France", "capital", ("Paris",))])[0].text
    'The capital of France is'
    """
    named = make_prompts(facts, "The {relation} of {subject} is")
    return tuple(_template(prompt.fact).render(prompt.fact, prompt.prompt_id) for prompt in named)


def _template(fact: Fact) -> Template:
    """A fact's own statement as it is, or its relation's first form up to the answer."""
    return Template("statement", fact.statement or _capitalised(statement_forms(fact)[0].removesuffix(" {answer}.")))


def _state(fact: Fact, form: str, prefix: str) -> str:
    own = fact.statement is not None  # asked as it is written, so stated as it is written
    lead = f"{prefix} {form}" if prefix else form if own else _capitalised(form)
    return lead.format(subject=fact.subject, relation=fact.relation, answer=fact.answer)


def _capitalised(form: str) -> str:
    return form[0].upper() + form[1:]  # a form that begins with {subject} stays as it is
