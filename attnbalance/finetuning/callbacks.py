"""Callbacks of training: frozen weights, checkpoints, early stopping, the base's numbers, the progress bar."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState, ProgressCallback

from attnbalance.errors import DataError, DivergenceError, ModelError
from attnbalance.finetuning.checkpoints import mark_complete
from attnbalance.finetuning.parameters import FrozenWeights
from attnbalance.finetuning.training_log import (
    BASE_COMPLETES,
    BASE_OBJECTIVE,
    SUBJECT_ATTENTION,
    base_objective,
    stops,
    trajectory,
    validation_losses,
)
from attnbalance.progress import progress_bar


class RestoreFrozen(TrainerCallback):
    """Gives frozen entries of weights their old values back after each step of the optimizer."""

    def __init__(self, frozen: FrozenWeights) -> None:
        self.frozen = frozen

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep the values that the entries have now."""
        self.frozen.begin()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the frozen entries."""
        self.frozen.restore(kwargs["model"])


class LogBase(TrainerCallback):
    """Logs once, at step 0, which share of the training facts the base completes in each form."""

    def __init__(self, rates: Mapping[str, float]) -> None:
        self.rates = {f"{BASE_COMPLETES}/{form}": rate for form, rate in rates.items()}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log the rates, if the log lacks them."""
        if self.rates and not any(entry.keys() >= self.rates.keys() for entry in state.log_history):
            state.log_history.append({"step": 0, **self.rates})


class LogBaseObjective(TrainerCallback):
    """Logs once, at step 0, the objective on the validation examples."""

    def __init__(self, measure: Callable[[], float]) -> None:
        self.measure = measure

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure and log the objective if nothing is trained yet; raise `ModelError` if it is not finite."""
        if state.global_step or base_objective(state.log_history) is not None:
            return
        objective = self.measure()
        if not math.isfinite(objective):
            raise ModelError(
                f"the base's objective on the validation examples must be finite, got {objective}; check its weights, "
                "or load it in float32"
            )
        state.log_history.append({"step": 0, BASE_OBJECTIVE: objective})


class MarkComplete(TrainerCallback):
    """Checks the weights of a checkpoint and marks it complete once every process has written its part."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raise `DivergenceError` for non-finite weights; else mark the checkpoint complete."""
        model: nn.Module = kwargs["model"]
        if not all(bool(torch.isfinite(p).all()) for p in model.parameters() if p.requires_grad):
            raise DivergenceError(f"non-finite weights after step {state.global_step}; lower the learning rate")
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()
        if state.is_world_process_zero:
            mark_complete(Path(args.output_dir or "."), state.global_step)


class RecordPrecision(TrainerCallback, ExportableState):
    """Records in each checkpoint the mixed precision of training, which may be the machine's choice."""

    def __init__(self, precision: str) -> None:
        self.precision = precision

    def state(self) -> dict[str, dict[str, str]]:
        """What a checkpoint records."""
        return {"args": {"precision": self.precision}, "attributes": {}}

    def check(self, state: TrainerState, checkpoint: Path) -> None:
        """Raise `DataError` for a checkpoint that was trained in another precision; some record none."""
        callbacks: Any = state.stateful_callbacks or {}  # as saved, a mapping
        recorded = callbacks.get(type(self).__name__)
        if recorded not in (None, self.state()):
            raise DataError(
                f"{checkpoint} was trained in mixed precision {recorded['args']['precision']!r}, and training would go "
                f"on in {self.precision!r} here; go on where it was begun, or remove {checkpoint.parent} to begin anew"
            )


class StopEarly(TrainerCallback):
    """Stops by the log alone; a checkpoint holds the log, so a resumed run stops where an unbroken one does."""

    def __init__(self, patience: int | None) -> None:
        self.patience = patience

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raise `DivergenceError` for a non-finite loss; else stop if the last losses were no better."""
        losses = validation_losses(state.log_history)
        if losses and not math.isfinite(list(losses.values())[-1]):
            raise DivergenceError(f"non-finite validation loss at step {state.global_step}; lower the learning rate")
        if stops(losses, self.patience):
            control.should_training_stop = True


class ProgressBar(ProgressCallback):
    """The bar over steps, with a name, and without a line for each log entry."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the bar, with its name."""
        self.current_step = 0
        if state.is_world_process_zero:
            self.training_bar = progress_bar(self.name, total=state.max_steps, unit="step", shown=True, leave=True)

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """No second bar while validating."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        """The log is kept, not printed."""

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Shows what was watched last after the bar."""
        validations = trajectory(state.log_history)
        if self.training_bar is not None and validations:
            latest = validations[-1]
            shown = {name.replace("_", " "): f"{x:.3f}" for name, x in latest.items() if isinstance(x, float)}
            attention = " ".join(f"{value:.2f}" for value in latest[SUBJECT_ATTENTION])  # pyright: ignore
            self.training_bar.set_postfix(shown | {"subject attention": attention})
