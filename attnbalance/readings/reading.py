"""Reading: one number for each prompt, layer and head; measurements produce it, curves and reports consume it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attnbalance.arguments import expects
from attnbalance.data.prompts import Prompt
from attnbalance.errors import DataError


@dataclass(frozen=True)
class Reading:
    """One number for each prompt, layer and head.

    Attributes:
        name: What was measured, such as "subject attention (max)".
        unit: Unit of the values, such as "probability".
        values: The numbers, float32, on the CPU.
        layers: The model's layer numbers in order.
        prompt_ids: Distinct names of the prompts.
        subjects: The prompts' subjects, by which intervals are clustered.
    """

    name: str
    unit: str
    values: Float[Tensor, "prompt layer head"]
    layers: tuple[int, ...]
    prompt_ids: tuple[str, ...]
    subjects: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse labels that do not match the shape of the values, and prompt ids that repeat."""
        expected = (len(self.prompt_ids), len(self.layers))
        if tuple(self.values.shape[:2]) != expected or len(self.subjects) != len(self.prompt_ids):
            raise DataError(
                f"reading {self.name!r}: values of shape {tuple(self.values.shape)} and {len(self.subjects)} subjects "
                f"do not match {expected[0]} prompt ids and {expected[1]} layers"
            )
        repeated = [name for name, count in Counter(self.prompt_ids).items() if count > 1]
        if repeated:
            raise DataError(f"reading {self.name!r}: prompt id {repeated[0]!r} occurs more than once")

    def __repr__(self) -> str:
        prompts, layers, heads = self.values.shape
        return f"Reading({self.name!r}, {self.unit}, {prompts} prompts x {layers} layers x {heads} heads)"

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prompt],
        name: str,
        unit: str,
        values: Float[Tensor, "prompt layer head"],
        layers: tuple[int, ...],
    ) -> Reading:
        """What was measured of these prompts; the other arguments are the fields."""
        ids, subjects = (prompt.prompt_id for prompt in prompts), (prompt.fact.composed_subject for prompt in prompts)
        return cls(name, unit, values, layers, tuple(ids), tuple(subjects))

    @property
    def title(self) -> str:
        """The name without its final part in brackets: "subject attention" for "subject attention (max)"."""
        return self.name.partition(" (")[0]

    @expects(prompt_ids=[str])
    def at(self, prompt_ids: Sequence[str]) -> Reading:
        """The reading of the named prompts, in that order; raises `DataError` for an unknown name."""
        index_of = {name: i for i, name in enumerate(self.prompt_ids)}
        missing = [name for name in prompt_ids if name not in index_of]
        if missing:
            raise DataError(
                f"reading {self.name!r} has no prompt {missing[0]!r} ({len(missing)} of {len(prompt_ids)} missing)"
            )
        indices = [index_of[name] for name in prompt_ids]
        return Reading(
            self.name,
            self.unit,
            self.values[indices],
            self.layers,
            tuple(prompt_ids),
            tuple(self.subjects[i] for i in indices),
        )


def concatenate(readings: Sequence[Reading]) -> Reading:
    """Several readings of the same measurement as one, with all their prompts in order."""
    first = readings[0]
    for other in readings[1:]:
        if (other.name, other.unit, other.layers) != (first.name, first.unit, first.layers):
            raise DataError(f"cannot join readings of {first.name!r} and {other.name!r}, or of different layers")
    return Reading(
        first.name,
        first.unit,
        torch.cat([reading.values for reading in readings]),
        first.layers,
        tuple(name for reading in readings for name in reading.prompt_ids),
        tuple(subject for reading in readings for subject in reading.subjects),
    )


@expects(a=Reading, b=Reading)
def difference(a: Reading, b: Reading) -> Reading:
    """The paired difference a - b, prompt by prompt, in a's order.

    Prompts are paired by their ids, so that the same facts in two templates are compared too. A reading does not record
    the dtype of its model. Read both models in one dtype; otherwise the difference includes rounding errors. Raises
    `DataError` if the two differ in prompt ids, layers, number of heads or unit.
    """
    if set(a.prompt_ids) != set(b.prompt_ids):
        raise DataError(
            "a paired difference needs the same prompts: "
            f"{len(set(a.prompt_ids) ^ set(b.prompt_ids))} are in only one of the readings"
        )
    if a.layers != b.layers or a.values.shape != b.values.shape or a.unit != b.unit:
        raise DataError(
            f"a paired difference needs the same layers, heads and unit: got {tuple(a.values.shape)} in {a.unit} "
            f"and {tuple(b.values.shape)} in {b.unit}"
        )
    name = f"{a.name}: difference" if a.name == b.name else f"{a.name} - {b.name}"
    return Reading(name, a.unit, a.values - b.at(a.prompt_ids).values, a.layers, a.prompt_ids, a.subjects)
