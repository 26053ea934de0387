"""Watch: a callback for any Trainer that logs, while it trains, what becomes of facts that the model knew."""

from __future__ import annotations

import sys
import time
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from attnbalance.arguments import expects
from attnbalance.data.facts import FactSet
from attnbalance.data.prompts import Template
from attnbalance.errors import DataError, ModelError, OutputError
from attnbalance.files.kept_tensors import keep, kept
from attnbalance.finetuning.schedule import check_count
from attnbalance.finetuning.watched_facts import Start, WatchedFacts, divergence_from, falls, logged, look, start_of
from attnbalance.models.implementations import borrow
from attnbalance.seeds import check_seed

FOLDER = "attnbalance-watch"
"""The folder beside the checkpoints that holds the start's numbers, for runs that are resumed."""


class Watch(TrainerCallback):
    """Logs what a model still knows while any `Trainer` trains it, on any objective; does not change the training.

    `trainer.add_callback(ab.Watch(facts, trainer))`, as the last callback. At the start, every `every` steps and at the
    last step the model is asked a fixed sample of the facts. The trainer's own reports (`report_to`) and
    `state.log_history` get, on the main process:

    - "watch/subject_attention": the largest attention to a token of the subject, mean over facts, layers and heads;
    - "watch/accuracy": the share of facts answered (see `recall`);
    - "watch/still_answered": of the facts answered at the start, the share answered now;
    - "watch/shortcut_rate": the share of wrong answers that are the relation's most frequent answer among `facts`;
    - "watch/kl_from_start": KL(start || now) of the first answers' tokens, nats a token (see `divergence`).

    A share of no facts is not logged. The start is the model itself before the first step, with its adapters as they
    are then. Its numbers are kept beside the checkpoints, and a resumed run uses them. All numbers are the same as
    `recall` and `read_subject_attention` give for a checkpoint: in the weights' own dtype, whatever autocast training
    uses.

    Warns once for attention, and once for the share still answered, if it has surely fallen: if the whole 95% interval
    of what is left, clustered by subject, lies below 90% of the start. An interval that is computed many times excludes
    100% now and then by chance; the margin of a tenth guards against that. If logits are not numbers, Watch warns
    and skips that step.

    Attributes:
        every: Steps between two measurements.
        facts: The sample.
    """

    @expects(facts=FactSet, trainer=Trainer, template=(str, Template), chat=bool)
    def __init__(
        self,
        facts: FactSet,
        trainer: Trainer,
        *,
        every: int = 50,
        limit: int = 64,
        template: str | Template = "qa",
        chat: bool = False,
        seed: int = 0,
        batch_size: int = 32,
    ) -> None:
        """Check that the trainer's model can be asked; ask nothing yet.

        Args:
            facts: Facts of which the model should know some: its training's own, or others.
            trainer: The trainer that gets the callback; it needs `processing_class`.
            every: Steps between two looks.
            limit: The number of facts in the sample.
            template: How the facts are asked (see `Template`).
            chat: Whether to put questions into the tokenizer's chat template.
            seed: Seed that draws the sample.
            batch_size: Prompts of one forward pass.

        Raises `DataError` for no facts or no tokenizer and for numbers out of range; `BadRowsError` for facts that
        cannot be asked; `ModelError` for a model that cannot be read, and for ways of training that divide its weights.
        """
        for name, number in (("every", every), ("limit", limit), ("batch_size", batch_size)):
            check_count(name, number)
        check_seed(seed)
        if not len(facts):
            raise DataError("expected facts to watch, got none")
        tokenizer = _checked_tokenizer(trainer)
        self.trainer, self.every = trainer, every
        how = {"limit": limit, "template": template, "chat": chat, "seed": seed, "batch_size": batch_size}
        self.facts = WatchedFacts.of(facts, tokenizer, **how)
        self._words = f"{len(self.facts.prompts)} of {len(facts):,} facts ({facts.name}, seed {seed})"
        model: Any = trainer.model
        self._borrowed = borrow(model, tokenizer, type(model).__name__) if trainer.is_world_process_zero() else None
        self._start: Start | None = None
        self._start_numbers: dict[str, float] = {}
        self._batch_size = 0  # of the last training that began
        self._looked = -1  # the last step that was looked at
        self._warned = set[str]()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look at the model before its first step; where training is resumed, find the numbers of its first start.

        `auto_find_batch_size` begins anew with a smaller batch after an out-of-memory error, from weights that may have
        been trained: the start stays the first one.
        """
        self._looked = -1
        self._warned.clear()
        if sum(isinstance(callback, Watch) for callback in self.trainer.callback_handler.callbacks) > 1:
            raise ModelError("a trainer takes one Watch: pass the facts of all of them to one, as one FactSet")
        if self._borrowed is None:
            return
        if self._borrowed.hooked.model is not kwargs["model"]:
            raise ModelError("the trainer's model was replaced after Watch was made; make Watch just before training")
        folder = Path(args.output_dir or ".") / FOLDER
        if state.global_step:
            self._start = self._kept_start(folder, state)
        elif args.auto_find_batch_size and self.trainer._train_batch_size < self._batch_size:
            self._log(self._start_numbers, control)
        else:
            self._start = self._new_start(folder, args, control)
        self._batch_size = self.trainer._train_batch_size

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look at the model every `every` steps, and at the last step."""
        if state.global_step % self.every == 0 or control.should_training_stop:
            self._look(state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look at the model if training ends here."""
        if control.should_training_stop:
            self._look(state, control)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look at the model if the evaluation ends training."""
        if control.should_training_stop:
            self._look(state, control)

    def _look(self, state: TrainerState, control: TrainerControl) -> None:
        """Ask the model, log the numbers, and warn of what has fallen; once for each step, on the main process."""
        if self._borrowed is None or self._start is None or self._looked == state.global_step:
            return
        self._looked = state.global_step
        try:
            with self._borrowed.lent() as model:
                now = look(model, self.facts)
                numbers = logged(now, self._start, divergence_from(self._start, model, self.facts))
                fallen = list(falls(now, self._start))
        except (ModelError, torch.OutOfMemoryError) as error:
            warnings.warn(f"Watch leaves out step {state.global_step}: {error}", stacklevel=2)
            return
        self._log(numbers, control)
        for name, sentence in fallen:
            if name not in self._warned:
                self._warned.add(name)
                warnings.warn(f"At step {state.global_step}, {sentence}", stacklevel=2)

    def _log(self, numbers: dict[str, float], control: TrainerControl) -> None:
        """Log through the trainer, whose own entry of this step, if one is due, still follows.

        It is `Trainer.log` itself: that of trl's trainers also empties the averages kept for their own next entry.
        """
        due = control.should_log
        Trainer.log(self.trainer, dict(numbers))
        control.should_log = due

    def _new_start(self, folder: Path, args: TrainingArguments, control: TrainerControl) -> Start:
        """The numbers of the model as it is: kept in the folder, logged, and said in a line on stderr."""
        assert self._borrowed is not None  # noqa: S101
        began = time.perf_counter()
        with self._borrowed.lent() as model:
            first = look(model, self.facts)
            start = start_of(model, self.facts, first)
            numbers = logged(first, start, divergence_from(start, model, self.facts))
        tensors = {field.name: getattr(start, field.name) for field in fields(Start)}
        keep(folder, self.facts.key, {"numbers": numbers, "prompt_ids": self.facts.prompts.prompt_ids}, tensors)
        self._start_numbers = numbers
        self._log(numbers, control)
        if not args.disable_tqdm:
            every = f"every {self.every} steps" if self.every > 1 else "every step"
            right = f"The model answers {sum(first.recall.correct)} of them before training"
            seconds = f"{time.perf_counter() - began:.1f} s"
            tqdm.write(f"Watching {self._words}, {every}. {right}; a look takes about {seconds}.", file=sys.stderr)
        return start

    def _kept_start(self, folder: Path, state: TrainerState) -> Start:
        """The numbers of the first start, which the log of the checkpoint must hold as well."""
        entry = next((entry for entry in state.log_history if "watch/subject_attention" in entry), {})
        saved = kept(folder, self.facts.key)
        if saved is None or any(entry.get(name) != value for name, value in saved[0]["numbers"].items()):
            raise OutputError(
                f"training resumes at step {state.global_step}, but {folder} holds no numbers of its start for these "
                "facts; watch the same facts, with template, seed and output_dir as at the start (a chat template "
                "that writes the date gives other prompts on another day), or leave Watch out"
            )
        return Start(**saved[1])


def _checked_tokenizer(trainer: Trainer) -> Any:
    """The trainer's tokenizer; raises for what cannot be watched."""
    divided = [trainer.is_fsdp_enabled, trainer.is_deepspeed_enabled]
    sizes = trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size()
    if any(divided) or sizes > 1:
        raise ModelError(
            "Watch asks the whole model on the main process; FSDP, DeepSpeed and tensor, context or sequence "
            "parallelism divide it: train with DDP or on one device, or look at the checkpoints with "
            "`attnbalance trajectory`"
        )
    if not isinstance(trainer.model, nn.Module) or trainer.model_init is not None:
        raise ModelError("Watch needs one model: pass model=, not model_init=")
    if trainer.processing_class is None:
        raise DataError("Watch needs the model's tokenizer: pass processing_class=tokenizer to the trainer")
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
