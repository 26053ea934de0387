"""Facts of which prompts can be made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from attnbalance.data.facts import FactSet
from attnbalance.data.prompts import Prompt
from attnbalance.errors import BadRowsError, DataError

Prompts = TypeVar("Prompts", bound=Sequence[Prompt])


def without_bad(facts: FactSet, make: Callable[[FactSet], Prompts], skip_bad: bool) -> tuple[Prompts, dict[str, int]]:
    """The prompts that `make` gives for the facts, and the number of facts that it refused, by reason.

    Without `skip_bad` the first refusal is raised as `BadRowsError`; raises `DataError` if no fact is left.
    """
    prompts, dropped = drop_bad(facts, make) if skip_bad or not len(facts) else (make(facts), {})
    if prompts is None:
        raise DataError(f"no usable facts are left: {dropped}")
    return prompts, dropped


def drop_bad(facts: FactSet, make: Callable[[FactSet], Prompts]) -> tuple[Prompts | None, dict[str, int]]:
    """The prompts that `make` gives for the facts, None if it refuses all; and how many it refused, by reason."""
    dropped: Counter[str] = Counter()
    while len(facts):
        try:
            return make(facts), dict(dropped)
        except BadRowsError as error:
            dropped[error.what] += len(error.indices)
            bad = set(error.indices)
            facts = replace(facts, facts=tuple(fact for i, fact in enumerate(facts) if i not in bad))
    return None, dict(dropped)
