"""Reading: a number for each prompt, layer and head; the narrow waist between measurements and what is made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attnbalance.errors import DataError


@dataclass(frozen=True)
class Reading:
    """One number for each prompt, layer and head, in float32 on the CPU.

    `name` and `unit` say what was measured ("subject attention (max)", "probability"). `layers` holds the model's
    layer numbers in order. `prompt_ids` name the prompts, each once; `subjects` are the prompts' subjects, by which
    intervals are clustered.
    """

    name: str
    unit: str
    values: Float[Tensor, "prompt layer head"]
    layers: tuple[int, ...]
    prompt_ids: tuple[str, ...]
    subjects: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse labels that do not fit the values, and prompts that cannot be told apart."""
        expected = (len(self.prompt_ids), len(self.layers))
        if tuple(self.values.shape[:2]) != expected or len(self.subjects) != len(self.prompt_ids):
            raise DataError(
                f"reading {self.name!r}: values of shape {tuple(self.values.shape)} and {len(self.subjects)} subjects "
                f"do not fit {expected[0]} prompt ids and {expected[1]} layers"
            )
        twice = [name for name, count in Counter(self.prompt_ids).items() if count > 1]
        if twice:
            raise DataError(f"reading {self.name!r}: prompt id {twice[0]!r} occurs more than once")

    def at(self, prompt_ids: Sequence[str]) -> Reading:
        """The same reading of some of its prompts, in the order given; raises `DataError` for one that is not there."""
        place = {name: i for i, name in enumerate(self.prompt_ids)}
        missing = [name for name in prompt_ids if name not in place]
        if missing:
            raise DataError(
                f"reading {self.name!r} has no prompt {missing[0]!r} ({len(missing)} of {len(prompt_ids)} missing)"
            )
        index = [place[name] for name in prompt_ids]
        return Reading(
            self.name,
            self.unit,
            self.values[index],
            self.layers,
            tuple(prompt_ids),
            tuple(self.subjects[i] for i in index),
        )


def concatenate(readings: Sequence[Reading]) -> Reading:
    """One reading of all prompts of several readings of the same thing, in order."""
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


def difference(a: Reading, b: Reading) -> Reading:
    """The paired difference a - b, prompt by prompt, in a's order.

    Raises `DataError` where the two do not hold the same prompts, layers and number of heads.
    """
    if set(a.prompt_ids) != set(b.prompt_ids):
        raise DataError(
            "a paired difference needs the same prompts: "
            f"{len(set(a.prompt_ids) ^ set(b.prompt_ids))} are in one reading only"
        )
    if a.layers != b.layers or a.values.shape != b.values.shape or a.unit != b.unit:
        raise DataError(
            f"a paired difference needs the same layers, heads and unit: got {tuple(a.values.shape)} in {a.unit} "
            f"and {tuple(b.values.shape)} in {b.unit}"
        )
    name = f"{a.name}: difference" if a.name == b.name else f"{a.name} - {b.name}"
    return Reading(name, a.unit, a.values - b.at(a.prompt_ids).values, a.layers, a.prompt_ids, a.subjects)
