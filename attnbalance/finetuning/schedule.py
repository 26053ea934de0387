"""The schedule of a training: how long, how fast, and when it is measured."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from attnbalance.errors import DataError
from attnbalance.finetuning.curriculum import check_examples
from attnbalance.seeds import check_seed

MIXED_PRECISIONS = ("no", "bf16")
"""Mixed precisions, by accelerate's names: none, and `torch.autocast` in bfloat16."""

LARGEST_COUNT = 10**9
"""No training takes more steps, examples or ranks."""


def warn_of_precisions(precisions: Sequence[str | None], what: str, stacklevel: int) -> None:
    """Warn if trainings that name no mixed precision had different ones, chosen by their machines; None: unknown."""
    count = Counter(filter(None, precisions))
    if len(count) > 1:
        of = ", ".join(f"{number} {name}" for name, number in sorted(count.items()))
        warnings.warn(
            f"{what} were trained in different mixed precisions, which their machines chose ({of}); name one with "
            "mixed_precision, and a new folder",
            stacklevel=stacklevel,
        )


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train. Raises `DataError` for values that no training could use.

    >>> Schedule(steps=200, batch_size=8, learning_rate=3e-4, checkpoint_every=20, seed=0).decay
    False
    """

    steps: int
    """Optimizer steps at most."""
    batch_size: int
    """Examples of one optimizer step, over all devices and accumulated batches."""
    learning_rate: float
    """Learning rate of AdamW."""
    checkpoint_every: int
    """Steps between checkpoints, each with a validation; the last step always has one."""
    seed: int
    """Seed of everything random in training."""
    decay: bool = False
    """Whether the learning rate falls linearly to 0 at the last step; else it is constant."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
    accumulate: int = 1
    """Parts in which each device computes its share of a batch."""
    patience: int | None = None
    """Validations in a row without a new best loss after which training stops; None: never stop early."""
    gradient_rank: int | None = None
    """Largest rank of each matrix's gradient (see `low_rank`); None: no limit."""
    mixed_precision: str | None = None
    """As in `FinetuneSettings`."""

    def __post_init__(self) -> None:
        """Refuse values that no training could use."""
        for name in ("steps", "batch_size", "checkpoint_every", "accumulate", "patience", "gradient_rank"):
            value = getattr(self, name)
            optional = name in ("patience", "gradient_rank")
            if not (optional and value is None):
                check_count(name, value)
        check_rate("learning_rate", self.learning_rate)
        check_rate("weight_decay", self.weight_decay, above=False)
        if self.batch_size % self.accumulate:
            raise DataError(
                f"`batch_size` must be a multiple of `accumulate`, got {self.batch_size} and {self.accumulate}"
            )
        if self.mixed_precision not in (None, *MIXED_PRECISIONS):
            raise DataError(f"`mixed_precision` must be {' or '.join(MIXED_PRECISIONS)}, got {self.mixed_precision!r}")
        check_examples(self.steps, self.batch_size)
        check_seed(self.seed)


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise `DataError` for a value that is not a Python integer from `least` to `LARGEST_COUNT`."""
    if isinstance(value, bool) or not isinstance(value, int):
        hint = "; pass a Python int" if hasattr(value, "__index__") else ""
        raise DataError(f"`{name}` must be a whole number >= {least}, got {value!r}{hint}")
    if value > LARGEST_COUNT:  # Python refuses to write out numbers of more than 4,300 digits
        raise DataError(f"`{name}` must be at most {LARGEST_COUNT:,}, got a larger number")
    if value < least:
        got = value if value > -LARGEST_COUNT else "a number of many digits"
        raise DataError(f"`{name}` must be a whole number >= {least}, got {got}")


def check_rate(name: str, value: object, above: bool = True) -> None:
    """Raise `DataError` for a value that is not a finite Python number > 0, or with `above` False >= 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        hint = "; pass a Python float" if hasattr(value, "__float__") else ""
        raise DataError(f"`{name}` must be a number, got {value!r}{hint}")
    if not 0 <= value <= sys.float_info.max or (above and value == 0):
        got = value if isinstance(value, float) or abs(value) < LARGEST_COUNT else "a larger one"
        raise DataError(f"`{name}` must be a finite number {'>' if above else '>='} 0, got {got}")
