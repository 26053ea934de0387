"""Checks of a training step: it is taken, its loss is the objective's, and the loss is finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from attnbalance.errors import DivergenceError, ModelError
from attnbalance.finetuning.example_sets import first_text
from attnbalance.finetuning.objectives.objective import Objective


class RequireStep(TrainerCallback):
    """Refuses optimizer steps that were not preceded by `ObjectiveMixin.training_step`, which a subclass may skip.

    name: the name of the trainer's class.
    """

    def __init__(self, name: str) -> None:
        self.name, self.taken = name, False

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise `ModelError` if no training step was taken since the last optimizer step."""
        if not self.taken:
            raise ModelError(
                f"{self.name}.training_step leaves out that of ObjectiveMixin, which checks the loss and applies the "
                "rules on gradients: let it call super().training_step, or train all weights on the objective 'ce'"
            )
        self.taken = False


def check_step(trainer: Trainer, objective: Objective, loss: Tensor, inputs: Mapping[str, Any], computed: bool) -> None:
    """Raise `ModelError` for a loss that the objective has no part in, `DivergenceError` for one that is not finite.

    `computed`: whether the objective was computed in this step. A `compute_loss` of the user's own, before
    `ObjectiveMixin` or put on the trainer itself, may leave it out.
    """
    if not computed and not objective.plain:
        raise ModelError(
            f"{type(trainer).__name__}.compute_loss leaves out the objective {objective.text!r}: let it call "
            "super().compute_loss, or train on the objective 'ce'"
        )
    finite = torch.isfinite(loss.detach()).all().int().reshape(1)
    everywhere: Any = trainer.accelerator.gather(finite)
    if not bool(everywhere.all()):  # all processes end together
        text, step = first_text(inputs, trainer.processing_class), trainer.state.global_step + 1
        value = f"{float(loss)} at step {step}, in the batch that begins with {text!r}"
        raise DivergenceError(
            f"the training loss is {f'not finite at step {step}, in another process' if finite else value}; lower the "
            "learning rate, or load the model in float32"
        )
