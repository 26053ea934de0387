"""Objectives in a Hugging Face Trainer: one mixin for `Trainer` and its subclasses (trl's `SFTTrainer`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.modeling_outputs import CausalLMOutput
from transformers.trainer_utils import get_last_checkpoint

from attnbalance.errors import DataError, ModelError
from attnbalance.finetuning.base_cost import announce
from attnbalance.finetuning.base_targets import BaseTargets
from attnbalance.finetuning.bases import check_resumed, keep_base, warn_of_trained
from attnbalance.finetuning.callbacks import LogBase, RestoreFrozen
from attnbalance.finetuning.completion import completion_rates, warn_of_weak_forms
from attnbalance.finetuning.evaluation import WatchedMeans, watch
from attnbalance.finetuning.example_sets import (
    DATA_ARGUMENTS,
    are_examples,
    as_list,
    as_table,
    check_examples,
    data_sets,
    describe_items,
    rows_collator,
)
from attnbalance.finetuning.examples import EXTRA, QUERY, REPLAYED, about_facts, collate, sizes_of
from attnbalance.finetuning.labelled_logits import only_labelled
from attnbalance.finetuning.objectives.forward_pass import ForwardPass, forward_pass
from attnbalance.finetuning.objectives.gradients import GradientRules
from attnbalance.finetuning.objectives.objective import Objective
from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.finetuning.parameters import FrozenWeights
from attnbalance.finetuning.step_checks import RequireStep, check_step
from attnbalance.finetuning.trainer_checks import (
    check_data,
    check_lengths,
    check_loss,
    check_metrics,
    check_ways_of_training,
    check_wrapped,
    crosses_threshold,
    hooked_for,
    own_loss,
    router_coefficient,
    router_loss,
)
from attnbalance.models.fingerprint import base_sums
from attnbalance.models.forward import base_of
from attnbalance.models.hooked import HookedModel

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class ObjectiveMixin(_Base):
    """Trains on an objective, given as an expression (see `parse_objective`). List it before the trainer's class.

    Data: `train_dataset` and `eval_dataset` are sequences of `Example` (see `make_examples`, `as_examples`), batched by
    `collate`. Weights: the model decides which of them are trained: those of its adapter, or those chosen by
    `train_only(model, select_weights(model, "attention"))`. Pass the result of `train_only` as `frozen`.

    Base: if the objective needs a base model, the model itself is the base: with its adapters switched off or, without
    adapters, as it is passed. So pass it before any finetuning. The base's numbers are computed once for each example,
    before training. No second copy of the model is kept, except of W_Q and W_K for `weight-anchor`. Once the base's own
    weights have been trained, the base is gone. So pass all data to be evaluated as `eval_dataset`, several sets as a
    dict.

    Losses are correct under gradient accumulation and several processes (DDP, FSDP2): each term is a mean over the
    tokens or examples of the whole accumulated batch that it teaches (see `Objective.losses`). The balancing loss of a
    mixture of experts is added if the model asks for it (`output_router_logits`), as its own forward pass does: a mean
    over each batch, averaged over the batches of a step ("ce" alone, which is transformers' own loss, sums it over
    them). Evaluations log the names of `training_log`, unless `compute_metrics` is passed. Settings that would change
    the loss or the batches, but are not implemented here, are refused (see `trainer_checks`).

    Raises `DataError` for data that the objective cannot use. Raises `ModelError` if nothing that is trained moves the
    rows that an objective needs (as with reentrant checkpointing), for ways of training that would do only part of what
    is asked for, and for a non-finite loss.
    """

    def __init__(
        self,
        *args: Any,
        objective: str | Objective = "ce",
        frozen: FrozenWeights | None = None,
        gradient_rank: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes the arguments of the trainer's own class, and three more.

        objective: what training minimizes.
        frozen: entries of partly trained weights that stay as they are (see `train_only`).
        gradient_rank: largest rank of each matrix's gradient (Xu & Chen 2025, appendix H: 1); None: no limit.
        """
        held = {name: kwargs[name] for name in DATA_ARGUMENTS if any(map(are_examples, data_sets(kwargs.get(name))))}
        super().__init__(*args, **kwargs | {name: as_table(data) for name, data in held.items()})
        for name, data in held.items():
            setattr(self, name, data)
        self.objective = objective if isinstance(objective, Objective) else parse_objective(objective)
        self._frozen = frozen or FrozenWeights({})
        self._sizes_of_step: tuple[list[float], float, int] | None = None
        self._hooked: HookedModel | None = None
        self._targets: BaseTargets | None = None
        self.base_completes, self._router = dict[str, float](), 0.0
        model: nn.Module = self.model  # pyright: ignore[reportAssignmentType]
        check_loss(self, self.objective)
        self._base_sums = base_sums(model)
        self._has_base = self.objective.needs_base or self.objective.needs.initial_weights
        warn_of_trained(model, self._base_sums, self.objective.text, self._has_base)
        self._on_examples = any(map(are_examples, self._all_data()))
        if self._on_examples:
            self._use_examples(model, kwargs)
        else:
            self.data_collator = rows_collator(self.data_collator, self._all_data(), self.objective)
        if self._own_loss():
            self.loss_is_scaled_for_ga = True
        rules = gradient_rank is not None or self.objective.changes_gradients
        check_ways_of_training(self, self.objective, rules, self._frozen, self._hooked is not None)
        self._rules = GradientRules(model, self.objective, gradient_rank)
        self._required_step = RequireStep(type(self).__name__)
        required = [self._required_step] if rules or self._frozen or not self.objective.plain else []
        for callback in (RestoreFrozen(self._frozen), LogBase(self.base_completes), *required):
            self.add_callback(callback)

    def _own_loss(self) -> bool:
        """Whether the loss is computed here, and not by the trainer's own class."""
        return not self.objective.plain

    def _all_data(self) -> list[Any]:
        """All data sets for training and evaluation."""
        return data_sets(self.train_dataset) + data_sets(self.eval_dataset)

    def _use_examples(self, model: nn.Module, given: dict[str, Any]) -> None:
        """Prepare to train on examples: check them, hook the model, add the base's numbers, watch evaluations."""
        examples = check_examples(self._all_data(), self.objective)
        check_data(self, given, max(len(example.ids) for example in examples))
        tested = [example for data in data_sets(self.eval_dataset) for example in as_list(data)]
        watches = self.compute_metrics is None
        how = {"batch_size": self.args.per_device_eval_batch_size, "seed": self.args.seed}
        reads = self.objective.needs.rows or self.objective.needs_base or (watches and about_facts(tested))
        if reads or crosses_threshold(model, examples):
            self._hooked = hooked_for(self, self.objective, examples)
        if self._hooked is not None and self.objective.needs_base:
            bar = self.is_world_process_zero() and not self.args.disable_tqdm
            self._targets = BaseTargets(self.objective, self._hooked, self._base_sums, self.args.output_dir, bar)
            if bar:
                announce(examples, len(tested), self.objective, self._hooked, how["batch_size"])
        self.train_dataset = self._with_targets(self.train_dataset)
        if self._hooked is not None and self.train_dataset is not None and self.objective.forms:
            self.base_completes = completion_rates(as_list(self.train_dataset), self.objective, self._hooked, **how)
            warn_of_weak_forms(self.base_completes, self.objective)
        if self._targets is not None and self.train_dataset is not None:
            self._targets.set_train(as_list(self.train_dataset))
        if isinstance(self.eval_dataset, dict):
            self.eval_dataset = {name: self._with_targets(data) for name, data in self.eval_dataset.items()}
        else:
            self.eval_dataset = self._with_targets(self.eval_dataset)
        if watches or self._hooked is not None or not self.objective.plain:
            self._router = router_coefficient(self)
        pad_id, layers = (0, ()) if self._hooked is None else (self._hooked.pad_id, self._hooked.layers)
        self.data_collator = lambda batch: collate(batch, pad_id)
        if watches:
            check_metrics(self)
            self.compute_metrics = WatchedMeans(len(self.objective.terms), layers)

    def _with_targets(self, data: Any) -> Any:
        """A data set with the base model's numbers, if the objective needs them."""
        if data is not None and not are_examples(data):
            raise DataError(
                f"training data hold examples, and evaluation data {describe_items(data)}; make examples "
                "of them too, with make_examples or as_examples"
            )
        if data is not None:
            check_lengths(self._hooked, self.model, as_list(data))  # pyright: ignore[reportArgumentType]
        if data is None or self._targets is None:
            return data
        size, seed = self.args.per_device_eval_batch_size, self.args.seed
        return self._targets.add(as_list(data), trained=bool(self.state.global_step), batch_size=size, seed=seed)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The batches that one optimizer step accumulates; counts what each term teaches, over all processes."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._own_loss() and batches:
            taught = torch.cat([self.objective.taught(*sizes_of(batch)) for batch in batches]).to(device)
            counts = torch.cat([taught.sum(0), taught.new_tensor([len(taught)])])
            *sizes, examples = self.accelerator.reduce(counts, "sum").tolist()  # pyright: ignore
            self._sizes_of_step = sizes, examples, len(batches)
        return batches, items

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The objective's loss; with `return_outputs`, in evaluation, also what is watched of every example.

        The model is wrapped as the trainer trains it; `inputs` is a batch of `collate`; `num_items_in_batch` is passed
        on where the trainer's own class computes the loss.
        """
        self._computed = True
        check_wrapped(self.accelerator, model)
        extra = {name: value for name, value in inputs.items() if name.startswith(EXTRA)}
        inputs = {name: value for name, value in inputs.items() if name not in extra}
        watching = return_outputs and not model.training and isinstance(self.compute_metrics, WatchedMeans)
        if not (self._own_loss() or watching):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        own = None  # a loss of the trainer's own, which evaluations of plain cross-entropy report as well
        if self.objective.plain and own_loss(self):
            own = super().compute_loss(model, dict(inputs), False, num_items_in_batch)
        labels = inputs.pop("labels")
        kept = {} if return_outputs and not watching else only_labelled(base_of(self.model), labels)  # pyright: ignore
        outputs = self._forward(model, {**inputs, **kept}, extra, watching)
        kernel = None if self._hooked is None else self._hooked.kernel
        forward = forward_pass(outputs, {**inputs, **extra, "labels": labels}, kernel)
        loss = self._loss(forward, outputs, model.training and torch.is_grad_enabled())
        if not return_outputs:
            return loss
        # trainers gather what an evaluation returns as logits
        gathered = watch(forward, self.objective).pack() if watching else outputs.logits
        loss = loss if own is None else own
        return loss, CausalLMOutput(loss=loss, logits=gathered)  # pyright: ignore[reportArgumentType]

    def _forward(self, model: nn.Module, inputs: Mapping[str, Any], extra: Mapping[str, Any], watching: bool) -> Any:
        """The model's outputs, with what the objective and evaluations need of them."""
        options: dict[str, Any] = {}
        if self.objective.needs.states:
            options["output_hidden_states"] = True
        if (self.objective.needs.rows or watching) and self._hooked is not None:
            self._hooked.check_implementation()
            options["output_attentions"] = True
            if self._hooked.kernel != "eager":
                options[QUERY] = extra[QUERY]
        return model(**inputs, **options, use_cache=False)

    def _loss(self, forward: ForwardPass, outputs: Any, training: bool) -> Tensor:
        """The objective's loss of a batch; in training, its part of the loss of the whole step."""
        if training and forward.rows is not None and not forward.rows.requires_grad:
            raise ModelError(
                f"the objective {self.objective.text!r} needs attention rows, but nothing that is trained moves them: "
                "train weights below the last attention layer, and checkpoint gradients with use_reentrant=False"
            )
        of_step = self._sizes_of_step if training else None
        taught = self.objective.taught(forward.tokens, forward.targets.get(REPLAYED))
        sizes, examples, batches = of_step or (taught.sum(0).tolist(), float(forward.examples), 1)
        loss, least = forward.logits.new_zeros((), dtype=torch.float32), float(REPLAYED in forward.targets)
        for term, size in zip(self.objective.terms, sizes, strict=True):  # a step may hold new facts alone
            loss = loss + self.objective.losses(term, forward).sum() / max(size, least)
        if not any(term.kind.by_token for term in self.objective.terms):
            loss = loss + forward.logits[..., :0].float().sum()  # 0: DDP waits for gradients of all outputs' sources
        if training:
            self._rules.collect(forward, examples)
            loss = loss * self.accelerator.num_processes  # gradients are averaged over processes
        return loss + router_loss(outputs, self._router) / batches

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The loader of the evaluation data; new examples get the base's numbers first."""
        unchanged = eval_dataset is None or isinstance(eval_dataset, str) or not self._on_examples
        return super().get_eval_dataloader(eval_dataset if unchanged else self._with_targets(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The loader of the data of `predict`, with the base's numbers."""
        return super().get_test_dataloader(self._with_targets(test_dataset) if self._on_examples else test_dataset)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's own; resumes from a checkpoint only with the base model that training began with."""
        checkpoint: str | bool | None = resume_from_checkpoint
        if checkpoint is True:
            checkpoint = get_last_checkpoint(self.args.output_dir or ".")
        if checkpoint and self._has_base:
            check_resumed(Path(checkpoint), self._base_sums)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the trainer's own; next to the weights it writes what identifies the model that training began with."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            keep_base(Path(output_dir or self.args.output_dir or "."), self._base_sums)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """One forward and backward pass; then the rules for gradients are applied."""
        self._computed = False
        loss = super().training_step(model, inputs, num_items_in_batch)
        check_step(self, self.objective, loss, inputs, self._computed)
        self._frozen.mask_gradients(model)
        if self.accelerator.sync_gradients:
            self._rules.apply(self.accelerator)
            self._frozen.mask_gradients(model)  # a gradient of low rank fills all entries
        self._required_step.taken = True
        return loss


class ObjectiveTrainer(ObjectiveMixin, Trainer):
    """`transformers.Trainer` with an objective: `ObjectiveTrainer(model, args, train_dataset=..., objective=...)`."""
