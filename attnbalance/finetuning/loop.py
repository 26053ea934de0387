"""The training loop that pretraining and finetuning share: Hugging Face's Trainer, resumable bit for bit."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, Trainer, TrainerState, TrainingArguments
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback

from attnbalance.errors import AttnBalanceError, DataError, DivergenceError, ModelError, OutputError
from attnbalance.files.outputs import writing
from attnbalance.files.processes import held_together
from attnbalance.files.work import work_of, working
from attnbalance.finetuning.callbacks import LogBaseObjective, MarkComplete, ProgressBar, RecordPrecision, StopEarly
from attnbalance.finetuning.checkpoints import checkpoints, drop_incomplete, set_damaged_aside
from attnbalance.finetuning.completion import describe
from attnbalance.finetuning.objectives.base_model import without_adapters
from attnbalance.finetuning.objectives.objective import Objective
from attnbalance.finetuning.parameters import FrozenWeights
from attnbalance.finetuning.schedule import Schedule
from attnbalance.finetuning.trainer import ObjectiveTrainer
from attnbalance.finetuning.trainer_checks import own_loss
from attnbalance.finetuning.training_log import stops, validation_losses


@dataclass(frozen=True)
class TrainingData:
    """What a training reads."""

    train: Sequence[Any]
    """steps x batch_size items, read once, in this order: a step's data depends on its number alone."""
    validation: Sequence[Any] | None = None
    """Items whose loss is measured at each checkpoint; None: none is measured."""
    collate: Callable[[Sequence[Any]], dict[str, Tensor]] | None = None
    """Makes a batch of items; None: the items are examples, and are batched as such."""


def train(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    data: TrainingData,
    work: Path,
    schedule: Schedule,
    *,
    objective: str | Objective = "ce",
    frozen: FrozenWeights | None = None,
    bar: str | None = None,
) -> list[dict[str, float]]:
    """Train from the newest complete checkpoint in `work`, or from the beginning; return the log, by step.

    Killed and called again, training ends with the same weights, bit for bit on a CPU. The result is in the checkpoints
    of `work`. Raises `DivergenceError` for a non-finite loss, gradient or weight, and `DataError` for a checkpoint that
    was trained in another mixed precision.

    Args:
        model: The model, whose parameters say which of them are trained.
        tokenizer: Its tokenizer, saved with each checkpoint.
        data: What training reads.
        work: The folder of the checkpoints.
        schedule: How long and how fast to train.
        objective: What training minimizes (see `parse_objective`).
        frozen: Entries of partly trained weights that stay as they are (see `train_only`).
        bar: The name of a progress bar; None: no bar.
    """
    done = checkpoints(work)
    last = done[max(done)] if done else None
    precision = RecordPrecision(precision_of(schedule))
    if last is not None:
        state = TrainerState.load_from_json(str(last / "trainer_state.json"))
        precision.check(state, last)
        if state.global_step >= schedule.steps or stops(validation_losses(state.log_history), schedule.patience):
            return state.log_history
    trainer = _Trainer(
        model=model,
        args=_arguments(work, schedule, data.validation is not None, bars=bar is not None),
        train_dataset=data.train,
        eval_dataset=data.validation,
        data_collator=data.collate,
        processing_class=tokenizer,
        callbacks=[MarkComplete(), precision, StopEarly(schedule.patience)],
        objective=objective,
        frozen=frozen,
        gradient_rank=schedule.gradient_rank,
    )
    check_whole(trainer)
    for callback in (PrinterCallback, DEFAULT_PROGRESS_CALLBACK):  # the trainer's own, in notebooks too
        trainer.remove_callback(callback)
    if data.validation is not None:
        trainer.add_callback(LogBaseObjective(trainer.validation_objective))
    if bar is not None:
        trainer.add_callback(ProgressBar(bar))
        if about := describe(trainer.base_completes, trainer.objective):
            tqdm.write(about, file=sys.stderr)
    trainer.train(resume_from_checkpoint=None if last is None else str(last))
    return trainer.state.log_history


def check_whole(trainer: Trainer) -> None:
    """Raise `ModelError` for FSDP in which each process writes its own part of the weights, and none a model."""
    plugin: Any = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_fsdp_enabled and plugin is not None and plugin.state_dict_type.name != "FULL_STATE_DICT":
        raise ModelError(
            f"FSDP with {plugin.state_dict_type.name} writes no checkpoint that can be loaded as a model; set "
            "fsdp_state_dict_type: FULL_STATE_DICT in accelerate's configuration"
        )


@contextmanager
def training_in(out: Path, kind: str, config: Mapping[str, Any]) -> Iterator[Path]:
    """The work folder of a training, without incomplete checkpoints; the main process holds it (see `working`)."""
    with held_together(lambda: _complete_checkpoints(out, kind, config), work_of(out)) as work:
        yield work


@contextmanager
def _complete_checkpoints(out: Path, kind: str, config: Mapping[str, Any]) -> Iterator[Path]:
    with working(out, kind, config) as work:
        set_damaged_aside(drop_incomplete(work))
        try:
            yield work
        except AttnBalanceError:
            drop_incomplete(work)
            raise


def _arguments(work: Path, schedule: Schedule, validates: bool, bars: bool) -> TrainingArguments:
    """Trainer's arguments; each device takes its share of a batch."""
    use_cpu = not torch.accelerator.is_available()
    devices = max(1, TrainingArguments(output_dir=str(work), use_cpu=use_cpu, report_to="none").world_size)
    share, rest = divmod(schedule.batch_size, devices * schedule.accumulate)
    if rest or not share:
        raise DataError(
            f"batch_size must be a multiple of the number of devices x accumulate, got {schedule.batch_size} for "
            f"{devices} x {schedule.accumulate}"
        )
    precision = precision_of(schedule)
    arguments = TrainingArguments(
        output_dir=str(work),
        use_cpu=use_cpu,
        max_steps=schedule.steps,
        per_device_train_batch_size=share,
        per_device_eval_batch_size=share,
        gradient_accumulation_steps=schedule.accumulate,
        learning_rate=schedule.learning_rate,
        lr_scheduler_type="linear" if schedule.decay else "constant",
        weight_decay=schedule.weight_decay,
        bf16=precision == "bf16",
        train_sampling_strategy="sequential",
        save_strategy="steps",
        save_steps=schedule.checkpoint_every,
        eval_strategy="steps" if validates else "no",
        eval_steps=schedule.checkpoint_every,
        logging_steps=schedule.checkpoint_every,
        remove_unused_columns=False,
        label_names=["labels"],
        disable_tqdm=not bars,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=schedule.seed,
        report_to="none",
    )
    arguments.mixed_precision = precision  # with `bf16` False, transformers takes what `accelerate launch` was told
    return arguments


def precision_of(schedule: Schedule) -> str:
    """The precision in which training multiplies, by accelerate's names: "no", "bf16" or "fp16".

    It is the schedule's; without one bf16 on CUDA devices that can, and elsewhere what `accelerate launch` was told.
    """
    if schedule.mixed_precision is not None:
        return schedule.mixed_precision
    capable = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return "bf16" if capable else os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


class _Trainer(ObjectiveTrainer):
    """Refuses gradients that train nothing; raises one kind of error for a checkpoint that cannot be written.

    Of plain cross-entropy on examples it computes the logits of labelled tokens alone, where nothing but the labels is
    in the loss.
    """

    def _own_loss(self) -> bool:
        return super()._own_loss() or (self._on_examples and self.args.n_gpu <= 1 and not own_loss(self))

    def validation_objective(self) -> float:
        """The base's objective on the validation examples, as checkpoints are chosen by it; draws no random number."""
        model: nn.Module = self.model  # pyright: ignore[reportAssignmentType]
        with torch.random.fork_rng(devices=[]), without_adapters(model):  # a data loader draws a seed on the CPU
            measured = self.evaluation_loop(self.get_eval_dataloader(), "Validation", metric_key_prefix="now")
        return float((measured.metrics or {})["now_objective"])

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm: Any = super()._get_grad_norm(*args, **kwargs)
        if not math.isfinite(norm):  # clipping divides by it
            raise DivergenceError(
                f"the norm of the gradients must be finite, got {float(norm)} at step {self.state.global_step + 1}; "
                f"lower the learning rate, or the weights in the objective {self.objective.text!r}"
            )
        return norm

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        path = Path(self.args.output_dir or ".") / f"checkpoint-{self.state.global_step}"
        try:
            with writing(path):
                super()._save_checkpoint(*args, **kwargs)
        except RuntimeError as error:  # raised by torch's own writer
            raise OutputError(
                f"cannot write {path}: {error}; is the disk full? Make room and run the same command again to resume"
            ) from error
