"""Curves and head maps: a reading averaged over prompts."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from attnbalance.readings.intervals import finite, mean_intervals
from attnbalance.readings.reading import Reading


@dataclass(frozen=True)
class Curve:
    """A reading averaged over heads and prompts, layer by layer, with 95% intervals (see `layer_curve`).

    `low` and `high` are NaN where the prompts have too few subjects (see
    `mean_intervals`). `n` is the number of prompts.
    """

    name: str
    unit: str
    layers: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    n: int

    def as_dict(self) -> dict[str, object]:
        """The curve as it stands in `curves.json`; a bound that is not known is null."""
        return {
            "layers": list(self.layers),
            "mean": list(self.mean),
            "low": [finite(x) for x in self.low],
            "high": [finite(x) for x in self.high],
            "n": self.n,
        }


def layer_curve(reading: Reading, *, confidence: float = 0.95, seed: int = 0) -> Curve:
    """The mean of a reading over heads, then over prompts, in each layer (Ghosal et al. 2024, B.3 and Figure 3a).

    The intervals are bootstrapped over prompts, clustered by subject, each layer by itself. For many layers at once,
    as in "is there a layer that differs?", pass a `confidence` of 1 - 0.05 / number of layers (Bonferroni).
    """
    per_prompt = reading.values.double().mean(dim=-1).numpy()
    found = mean_intervals(per_prompt, reading.subjects, confidence=confidence, seed=seed)
    return Curve(
        reading.name,
        reading.unit,
        reading.layers,
        tuple(x.mean for x in found),
        tuple(x.low for x in found),
        tuple(x.high for x in found),
        len(reading.prompt_ids),
    )


def head_map(reading: Reading) -> Float[Tensor, "layer head"]:
    """The mean of a reading over prompts, for each layer and head."""
    return reading.values.mean(dim=0)
