"""The training loop that pretraining and finetuning share: Hugging Face's Trainer, made resumable to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from attnbalance.errors import DataError, ModelError
from attnbalance.finetune.checkpoints import checkpoints, mark_complete
from attnbalance.finetune.objective_trainer import WATCHED, ObjectiveTrainer
from attnbalance.finetune.objectives import Objective
from attnbalance.finetune.parameters import Guard

Result = TypeVar("Result")

VALIDATION_LOSS = "eval_objective"


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train; `batch_size` counts examples over all devices and accumulated batches.

    `decay` lowers the learning rate linearly to 0 at the last step. A checkpoint is written, and the validation loss
    measured, `every` so many steps and after the last; training stops when `patience` measurements in a row have not
    been below the best before them (None: never). `gradient_rank`: see `ObjectiveMixin`.
    """

    steps: int
    batch_size: int
    learning_rate: float
    every: int
    seed: int
    decay: bool = False
    weight_decay: float = 0.0
    accumulate: int = 1
    patience: int | None = None
    gradient_rank: int | None = None

    def __post_init__(self) -> None:
        """Refuse what could not be trained with."""
        counts = {
            "steps": self.steps,
            "batch_size": self.batch_size,
            "every": self.every,
            "accumulate": self.accumulate,
        }
        counts |= {"patience": 1 if self.patience is None else self.patience}
        low = [f"{name} {value}" for name, value in counts.items() if value < 1]
        if low:
            raise DataError(f"steps, sizes and patience are at least 1; got {', '.join(low)}")
        if not self.learning_rate > 0 or self.weight_decay < 0:
            what = f"{self.learning_rate} and {self.weight_decay}"
            raise DataError(f"the learning rate is above 0 and weight decay at least 0; got {what}")


def train(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    data: Sequence[Any],
    collator: Callable[[Sequence[Any]], dict[str, Tensor]] | None,
    work: Path,
    schedule: Schedule,
    validation: Sequence[Any] | None = None,
    objective: str | Objective = "ce",
    guard: Guard | None = None,
    label: str = "training",
    progress: bool = False,
) -> list[dict[str, float]]:
    """Train on `data` in its order, once, from the newest complete checkpoint in `work`; return the log, by step.

    `data` holds steps x batch_size examples, so that what a step sees depends on nothing but its number; killed and
    called again, training goes on to the same weights, bit for bit on a CPU. The result is in `work`'s checkpoints.
    Examples need no collator. `objective` and `guard` are those of `ObjectiveMixin`. `label` names the progress bar,
    drawn where `progress` is true. Raises `ModelError` where a loss or a weight is no finite number.
    """
    done = checkpoints(work)
    last = done[max(done)] if done else None
    if last is not None:
        state = TrainerState.load_from_json(str(last / "trainer_state.json"))
        if state.global_step >= schedule.steps or stops(validation_losses(state.log_history), schedule.patience):
            return state.log_history
    arguments = _arguments(work, schedule, validation is not None)
    trainer = ObjectiveTrainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=validation,
        data_collator=collator,
        processing_class=tokenizer,
        callbacks=[_MarkComplete(), _StopEarly(schedule.patience)],
        objective=objective,
        guard=guard,
        gradient_rank=schedule.gradient_rank,
    )
    trainer.remove_callback(PrinterCallback)
    if progress:
        trainer.add_callback(_Bar(label))
    trainer.train(resume_from_checkpoint=None if last is None else str(last))
    return trainer.state.log_history


def on_main_process_first(action: Callable[[], Result]) -> Result:
    """What `action` returns; under `accelerate launch` the other processes wait until the main one has done it."""
    with PartialState().main_process_first():
        return action()


def validation_losses(log: Sequence[dict[str, float]]) -> dict[int, float]:
    """The objective on the validation examples by step, from a Trainer's log."""
    return {int(entry["step"]): float(entry[VALIDATION_LOSS]) for entry in log if VALIDATION_LOSS in entry}


def trajectory(log: Sequence[dict[str, float]]) -> list[dict[str, object]]:
    """What was watched (`WATCHED`) at each validation, in order of steps; subject attention as a list over layers."""
    result = []
    for entry in log:
        if VALIDATION_LOSS in entry:
            lead = f"eval_{WATCHED[-1]}/"
            by_layer = [value for name, value in entry.items() if name.startswith(lead)]
            scalars = {name: entry[f"eval_{name}"] for name in WATCHED[:-1] if f"eval_{name}" in entry}
            result.append({"step": int(entry["step"]), **scalars, WATCHED[-1]: by_layer})
    return result


def stops(losses: dict[int, float], patience: int | None) -> bool:
    """Whether the last `patience` validation losses have all failed to be below the best before them."""
    values = list(losses.values())
    return bool(values) and patience is not None and len(values) - 1 - values.index(min(values)) >= patience


def _arguments(work: Path, schedule: Schedule, validates: bool) -> TrainingArguments:
    """Trainer's arguments; each device takes its share of a batch."""
    devices = max(1, TrainingArguments(output_dir=str(work), report_to="none").world_size)
    share, rest = divmod(schedule.batch_size, devices * schedule.accumulate)
    if rest or not share:
        raise DataError(
            f"batch size {schedule.batch_size} cannot be shared by {devices} devices x {schedule.accumulate} parts; "
            "use a multiple of these"
        )
    return TrainingArguments(
        output_dir=str(work),
        max_steps=schedule.steps,
        per_device_train_batch_size=share,
        per_device_eval_batch_size=share,
        gradient_accumulation_steps=schedule.accumulate,
        learning_rate=schedule.learning_rate,
        lr_scheduler_type="linear" if schedule.decay else "constant",
        weight_decay=schedule.weight_decay,
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        train_sampling_strategy="sequential",
        save_strategy="steps",
        save_steps=schedule.every,
        eval_strategy="steps" if validates else "no",
        eval_steps=schedule.every,
        logging_steps=schedule.every,
        remove_unused_columns=False,
        label_names=["labels"],
        disable_tqdm=True,  # Trainer's own bar; ours is added where progress is wanted
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=schedule.seed,
        report_to="none",
    )


class _MarkComplete(TrainerCallback):
    """Checks the weights of a checkpoint and marks it complete once every process has written its part."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        model: nn.Module = kwargs["model"]
        if not all(bool(torch.isfinite(p).all()) for p in model.parameters() if p.requires_grad):
            raise ModelError(f"weights are no finite numbers after step {state.global_step}; lower the learning rate")
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()
        if state.is_world_process_zero:
            mark_complete(Path(args.output_dir or "."), state.global_step)


class _StopEarly(TrainerCallback):
    """Stops by the log alone, which a checkpoint holds, so that a resumed run stops where an unbroken one does."""

    def __init__(self, patience: int | None) -> None:
        self.patience = patience

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        losses = validation_losses(state.log_history)
        if losses and not math.isfinite(list(losses.values())[-1]):
            raise ModelError(
                f"the validation loss is no finite number at step {state.global_step}; lower the learning rate"
            )
        if stops(losses, self.patience):
            control.should_training_stop = True


class _Bar(ProgressCallback):
    """The bar over steps, with a name and without the log lines."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description(self.label)

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """No second bar while validating."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        """The log is kept, not printed."""

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """What was watched, live, behind the bar."""
        seen = trajectory(state.log_history)
        if self.training_bar is not None and seen:
            now = {name: value for name, value in seen[-1].items() if isinstance(value, float)}
            attention = " ".join(f"{value:.2f}" for value in seen[-1][WATCHED[-1]])  # pyright: ignore
            shown = {name.replace("_", " "): f"{value:.3f}" for name, value in now.items()}
            self.training_bar.set_postfix(shown | {"subject attention": attention})
