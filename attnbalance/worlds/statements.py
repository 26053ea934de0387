"""A world told in sentences: every fact stated in several forms, as often as its popularity says."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from attnbalance.errors import DataError
from attnbalance.facts import Fact, FactSet
from attnbalance.prompts import Prompt, Template, make_prompts

GENERIC_FORMS = (
    "the {relation} of {subject} is {answer}.",
    "{subject} has the {relation} {answer}.",
    "as for {subject}, the {relation} is {answer}.",
)
"""Statements of any relation; the first is the one in which stored facts are asked."""

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
"""Further statements of PopQA's relations and of those of the synthetic world, in words of their own."""

OWN_FORMS = {
    "capital of": ("{subject} is the capital of {answer}.", "as for {subject}, it is the capital of {answer}.")
}
"""Statements of relations that the generic forms do not fit."""

PREFIXES = ("", "Note:", "Also,", "In fact,", "They say that", "Remember:")
"""What may stand before a statement, so that a fact is met at many positions."""


@dataclass(frozen=True)
class World:
    """Facts that are stated with a frequency proportional to popularity ** `power`.

    `power` 1 states facts as often as their popularity says, 0 all alike. Raises `DataError` for an empty set, a
    negative power, facts without popularity (unless `power` is 0), and popularities that leave no fact any weight.
    """

    facts: FactSet
    power: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a world from which nothing could be drawn."""
        if not len(self.facts) or self.power < 0:
            raise DataError(f"a world needs facts and a power of at least 0; got {len(self.facts)} and {self.power}")
        unknown = [fact for fact in self.facts if fact.popularity is None]
        if unknown and self.power:
            raise DataError(
                f"{len(unknown)} of {len(self.facts)} facts have no popularity (first: {unknown[0].subject!r}); "
                "add one to each, or state all facts alike with power=0"
            )
        if not any(self.weights):
            raise DataError(f"all {len(self.facts)} facts have popularity 0; state them all alike with power=0")

    @property
    def weights(self) -> tuple[float, ...]:
        """For each fact, in order, popularity ** power: how often it is stated, up to a constant."""
        return tuple((fact.popularity or 0.0) ** self.power for fact in self.facts)

    def statements(self, count: int, seed: int = 0) -> list[str]:
        """`count` statements drawn with replacement: a fact by weight, then one of its forms and a prefix, all alike.

        The form "The {relation} of {subject} is {answer}." and forms of quite another shape both occur, and the
        prefix moves them about: with a single form at a fixed place, small models store facts that no question can
        bring back.
        """
        rng = random.Random(seed)  # noqa: S311
        drawn = rng.choices(self.facts.facts, self.weights, k=count)
        forms = {relation: statement_forms(relation) for relation in self.facts.relations}
        return [_state(fact, rng.choice(forms[fact.relation]), rng.choice(PREFIXES)) for fact in drawn]


def statement_forms(relation: str) -> tuple[str, ...]:
    """The format strings, with {subject}, {relation} and {answer}, in which facts of a relation are stated."""
    return OWN_FORMS.get(relation) or GENERIC_FORMS + SPECIAL_FORMS.get(relation, ())


def statement_prompts(facts: Iterable[Fact]) -> tuple[Prompt, ...]:
    """For each fact, its first statement form up to the answer: "The capital of France is".

    A model that goes on with the answer has the fact stored in a form that it was pretrained on. The ids are those
    that `make_prompts` gives the same facts.
    """
    named = make_prompts(facts, "The {relation} of {subject} is")
    return tuple(replace(statement_template(p.fact.relation).render(p.fact), prompt_id=p.prompt_id) for p in named)


def statement_template(relation: str) -> Template:
    """The first statement form of a relation, up to its answer, as a template."""
    form = statement_forms(relation)[0].removesuffix(" {answer}.")
    return Template("statement", _capitalised(form))


def _state(fact: Fact, form: str, prefix: str) -> str:
    lead = f"{prefix} {form}" if prefix else _capitalised(form)
    return lead.format(subject=fact.subject, relation=fact.relation, answer=fact.answer)


def _capitalised(form: str) -> str:
    return form[0].upper() + form[1:]  # a form that begins with {subject} stays as it is
