"""The settings of a finetuning: one checked value, from the command line and study files to the training loop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from attnbalance.data.prompts import Template, as_template
from attnbalance.errors import DataError
from attnbalance.finetuning.curriculum import changes_over_time, check_curriculum
from attnbalance.finetuning.objectives.expression import parse_expression
from attnbalance.finetuning.schedule import Schedule, check_count, check_rate

HIGHEST_RANK = 65_536
"""Largest rank of LoRA adapters. Few weight matrices have more rows and columns; a typing error would fill memory."""

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""The dtypes in which weights can be trained."""


@dataclass(frozen=True)
class FinetuneSettings:
    """How `finetune` trains. Raises `DataError` for values that no training could use.

    The names of the objective's terms and of the weights' parts are checked when training begins (`parse_objective`,
    `parse_parts`): this needs torch, and a finished run can be found without torch.

    >>> FinetuneSettings(lora_rank=8).alpha
    16
    """

    template: str | Template = "qa"
    """How facts are asked: "qa", "plain", or a text with {question} or {subject}."""
    steps: int = 200
    """Optimizer steps at most."""
    learning_rate: float = 3e-4
    """Learning rate of AdamW."""
    decay: bool = False
    """Whether the learning rate falls linearly to 0 at the last step; else it is constant."""
    batch_size: int = 128
    """Facts of one optimizer step, over all devices."""
    accumulate: int = 1
    """The number of parts into which each device splits its share of a batch."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
    lora_rank: int = 0
    """Rank of LoRA adapters (Hu et al. 2022); 0 trains the weights themselves."""
    lora_alpha: float | None = None
    """Adapters are scaled by lora_alpha / lora_rank; None: twice the rank."""
    peft: Mapping[str, Any] | None = None
    """Other adapters of peft: the fields of their configuration, such as {"peft_type": "OFT", "oft_block_size": 32}."""
    train: str = "all"
    """Which weights are trained (see `parse_parts`)."""
    objective: str = "ce"
    """The loss, as an expression (see `parse_objective`)."""
    curriculum: str = "shuffled"
    """The order of the facts by their popularity (see `curriculum.order`)."""
    gradient_rank: int | None = None
    """Largest rank of each matrix's gradient (see `low_rank`); None: no limit."""
    dtype: str | None = None
    """Dtype of the weights; None: float32 if they are trained themselves, the checkpoint's own under adapters."""
    mixed_precision: str | None = None
    """"bf16": matrices are multiplied in bfloat16, and weights keep their dtype; "no": in the weights' dtype; None:
    bf16 on CUDA devices that support it, and elsewhere what `accelerate launch` was told."""
    checkpoint_every: int = 20
    """Steps between checkpoints, each with a validation."""
    patience: int | None = 3
    """Validations in a row without a new best objective after which training stops; None: never stop early."""
    seed: int = 0
    """Seed of everything random in training."""

    def __post_init__(self) -> None:
        """Refuse values that no training could use."""
        for name in ("train", "curriculum", "dtype"):
            text = getattr(self, name)
            if not isinstance(text, str) and not (text is None and name == "dtype"):
                raise DataError(f"`{name}` must be a text, got {text!r}")
        if not isinstance(self.decay, bool):
            raise DataError(f"decay must be bool, got {self.decay!r}")
        as_template(self.template)
        check_curriculum(self.curriculum)
        parse_expression(self.objective)
        check_count("lora_rank", self.lora_rank, 0)
        if self.lora_rank > HIGHEST_RANK:
            raise DataError(f"`lora_rank` must be at most {HIGHEST_RANK}, got {self.lora_rank}")
        if self.lora_alpha is not None:
            check_rate("lora_alpha", self.lora_alpha)
            if not self.lora_rank and self.peft is None:
                raise DataError("`lora_alpha` scales LoRA adapters; give `lora_rank` as well")
        if self.peft is not None:
            self._check_peft(self.peft)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise DataError(f"`dtype` must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, got {self.dtype!r}")
        if self.mixed_precision == "bf16" and self.dtype == "float64":
            raise DataError("`mixed_precision` bf16 needs weights of 32 or 16 bits; leave `dtype` float64 out")
        _ = self.schedule

    def _check_peft(self, config: object) -> None:
        if not isinstance(config, Mapping) or not isinstance(config.get("peft_type"), str):
            raise DataError(f"`peft` must be a mapping with peft_type, such as {{'peft_type': 'OFT'}}, got {config!r}")
        if self.lora_rank or self.lora_alpha is not None:
            raise DataError(
                "`peft` names the adapters; leave `lora_rank` and `lora_alpha` out (in `peft`: r, lora_alpha)"
            )
        try:
            json.dumps(dict(config), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(f"`peft` must hold texts, finite numbers, lists and mappings, got {config!r}") from error

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained, and not the weights themselves."""
        return bool(self.lora_rank) or self.peft is not None

    @property
    def alpha(self) -> float:
        """The scale of LoRA adapters, with the default filled in."""
        return 2 * self.lora_rank if self.lora_alpha is None else self.lora_alpha

    @property
    def weights_dtype(self) -> str | None:
        """The dtype that weights are loaded in; None: the checkpoint's own. Steps would be lost in 16 bits."""
        return "float32" if self.dtype is None and not self.has_adapters else self.dtype

    @property
    def compared_dtype(self) -> str | None:
        """The dtype in which the finetuned weights and their base are compared; None: the base's own, with adapters."""
        return None if self.has_adapters else self.weights_dtype

    @property
    def schedule(self) -> Schedule:
        """The schedule of training. A rate or curriculum that changes over time runs to its end: no early stopping."""
        return Schedule(
            steps=self.steps,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            checkpoint_every=self.checkpoint_every,
            seed=self.seed,
            decay=self.decay,
            weight_decay=self.weight_decay,
            accumulate=self.accumulate,
            patience=None if self.decay or changes_over_time(self.curriculum) else self.patience,
            gradient_rank=self.gradient_rank,
            mixed_precision="no" if self.dtype == "float64" else self.mixed_precision,
        )

    def record(self) -> dict[str, object]:
        """The settings as a run's attnbalance.json holds them: by name, with defaults that depend on others filled in.

        "decay", "peft" and "mixed_precision" are there only if they were given. `recommended` is written out, so that a
        run is never taken for one of another version, in which the name stood for other terms.

        >>> FinetuneSettings(template="{subject} is", steps=5).record()["template"]
        '{subject} is'
        """
        filled: dict[str, object] = {
            "template": as_template(self.template).text,
            "lora_alpha": self.alpha if self.lora_rank else None,
            "objective": parse_expression(self.objective).written_out,
        }
        record = {field.name: filled.get(field.name, getattr(self, field.name)) for field in fields(self)}
        added = {
            "decay": self.decay or None,
            "peft": self.peft and dict(self.peft),
            "mixed_precision": self.mixed_precision,
        }
        given = {name: value for name, value in added.items() if value is not None}
        return {name: value for name, value in record.items() if name not in added} | given
