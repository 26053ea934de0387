"""Curves and head maps: a reading averaged over prompts."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from attnbalance.arguments import expects
from attnbalance.readings.reading import Reading
from attnbalance.statistics.intervals import finite, mean_intervals


@dataclass(frozen=True)
class Curve:
    """A reading averaged over heads and prompts in each layer, with 95% intervals (see `layer_curve`).

    Attributes:
        name: What was measured.
        unit: Unit of the numbers.
        layers: Layer numbers, one for each number below.
        mean: The means.
        low: Lower ends of the intervals; NaN with too few subjects (see `mean_intervals`).
        high: Upper ends of the intervals; NaN with too few subjects.
        n: Number of prompts.
    """

    name: str
    unit: str
    layers: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    n: int

    def as_dict(self) -> dict[str, object]:
        """The curve as in `curves.json`; unknown bounds are null."""
        return {
            "layers": list(self.layers),
            "mean": list(self.mean),
            "low": [finite(x) for x in self.low],
            "high": [finite(x) for x in self.high],
            "n": self.n,
        }


@expects(reading=Reading)
def layer_curve(reading: Reading, *, simultaneous: bool = False, seed: int = 0) -> Curve:
    """The mean of a reading over heads, then over prompts, in each layer (Ghosal et al. 2024, B.3 and Figure 3a).

    The intervals are bootstrapped over prompts, clustered by subject, separately for each layer. With `simultaneous`
    they hold for all layers together, as the question "does any layer differ?" requires: in 95% of samples every
    layer's mean lies within its interval (see `mean_intervals`).
    """
    per_prompt = reading.values.double().mean(dim=-1).numpy()
    intervals = mean_intervals(per_prompt, reading.subjects, simultaneous=simultaneous, seed=seed)
    return Curve(
        reading.name,
        reading.unit,
        reading.layers,
        tuple(interval.mean for interval in intervals),
        tuple(interval.low for interval in intervals),
        tuple(interval.high for interval in intervals),
        len(reading.prompt_ids),
    )


@expects(reading=Reading)
def head_map(reading: Reading) -> Float[Tensor, "layer head"]:
    """The mean of a reading over prompts, for each layer and head."""
    return reading.values.mean(dim=0)
