"""Objectives in a Hugging Face Trainer: one mixin for `Trainer` and its kin (trl's `SFTTrainer`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.modeling_outputs import CausalLMOutput

from attnbalance.errors import DataError, ModelError
from attnbalance.finetune.examples import IGNORED, QUERY, SPAN, TARGET, Example, collate
from attnbalance.finetune.gradients import GradientRules
from attnbalance.finetune.objectives import ForwardPass, Objective, parse_objective
from attnbalance.finetune.parameters import Guard
from attnbalance.finetune.targets import add_targets
from attnbalance.models.forward import rows_of_output, states_of_output
from attnbalance.models.hooked import HookedModel, hook

WATCHED = ("objective", "answer_loss", "accuracy", "shortcut_rate", "subject_attention")
"""What an evaluation logs beside the loss, each with "eval_" before it; subject attention by layer, behind a "/"."""

SHORTCUT = "shortcut"
"""The target that holds the first token of an example's relation's most frequent training answer; -1 if not known."""

DATA = ("train_dataset", "eval_dataset")

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class ObjectiveMixin(_Base):
    """Trains on an objective (see `parse_objective`), given as an expression; put it before the trainer's class.

    `train_dataset` and `eval_dataset` are sequences of `Example` (see `make_examples`, `as_examples`), which are put
    together by `collate`, whatever `data_collator` is. Which weights learn is up to the model: the objective
    "recommended" is meant for those of attention alone (an adapter on them, or `train_only(model, choose(model,
    "attention"))`, whose guard is then passed). The model is taken as the base where the objective needs one: with
    adapters these are switched off, else the numbers are those of the model as it is passed, so pass it before any
    finetuning. They are computed once, here; no second copy is kept (of W_Q and W_K one, for `weight-anchor`). `guard`
    holds entries of weights that are not trained (see `train_only`); `gradient_rank` r replaces the gradient of every
    matrix by its best approximation of rank r (Xu & Chen 2025, appendix H: 1).

    Right under gradient accumulation and several processes (DDP, FSDP2): losses are divided by the tokens or examples
    of the whole accumulated batch. Evaluations log `WATCHED`, unless `compute_metrics` is passed. Raises `DataError`
    for data that the objective cannot use, `ModelError` where nothing that is trained moves the rows that an objective
    looks at (as with reentrant checkpointing), for ways of training in which part of what was asked for would not
    happen, and for a loss that is no finite number.
    """

    def __init__(
        self,
        *args: Any,
        objective: str | Objective = "ce",
        guard: Guard | None = None,
        gradient_rank: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes what the trainer's own class takes, and the objective."""
        held = {name: kwargs[name] for name in DATA if _examples(kwargs.get(name))}
        super().__init__(*args, **kwargs | {name: _one_row(data) for name, data in held.items()})
        for name, data in held.items():
            setattr(self, name, data)
        self.objective = objective if isinstance(objective, Objective) else parse_objective(objective)
        self._guard = guard or Guard({})
        self._counts: tuple[float, float] | None = None
        self._hooked: HookedModel | None = None
        self._watches = self.compute_metrics is None
        model: nn.Module = self.model  # pyright: ignore[reportAssignmentType]
        if _examples(self.train_dataset):
            self._use_examples(model)
        elif not self.objective.plain:
            raise DataError(
                f"objective {self.objective.text!r} needs examples that know their prompt, got a dataset of "
                f"{type(_first(self.train_dataset)).__name__}; make them with make_examples or as_examples"
            )
        if not self.objective.plain:
            self.loss_is_scaled_for_ga = True
        self._check(gradient_rank is not None or "gradients" in self.objective.needs)
        self._rules = GradientRules(model, self.objective, gradient_rank)
        self.add_callback(_AfterStep(self._guard))

    def _check(self, rules: bool) -> None:
        """Refuse ways of training in which something that was asked for would silently not happen."""
        if not self.objective.plain and self.args.n_gpu > 1:
            raise ModelError("several GPUs in one process are not supported: start with `accelerate launch`")
        if rules and (self.is_fsdp_enabled or self.is_deepspeed_enabled or self.args.fp16):
            raise ModelError(
                "project, weight-anchor and a gradient rank need whole gradients that are not scaled: "
                "use DDP instead of FSDP or DeepSpeed, and bf16 instead of fp16"
            )
        if self._guard and self.is_deepspeed_enabled:
            raise ModelError("parts of fused weights cannot be trained under DeepSpeed; use DDP or FSDP2")
        if self.model_init is not None and (rules or not self.objective.plain):
            raise ModelError("an objective is about one model: pass model=, not model_init=")

    def _use_examples(self, model: nn.Module) -> None:
        sets = [_listed(data) for data in (self.train_dataset, self.eval_dataset) if _examples(data)]
        known = all(example.prompt is not None for data in sets for example in data)
        roles = {need.removeprefix("span ") for need in self.objective.needs if need.startswith("span ")}
        for role in sorted(roles):
            lacking = sum(role not in example.spans for data in sets for example in data)
            if lacking:
                raise DataError(
                    f"objective {self.objective.text!r} needs the place of the {role} in every prompt, but {lacking} "
                    f"examples do not tell it; ask with a template that "
                    f"names {{{role}}}, such as 'What is the {{relation}} of {{subject}}?'"
                )
        if {"rows", "base"} & self.objective.needs or (known and self._watches and self.eval_dataset is not None):
            tokenizer: Any = self.processing_class
            self._hooked = hook(model, tokenizer, type(model).__name__)
        self.train_dataset = self._with_targets(self.train_dataset)
        if isinstance(self.eval_dataset, dict):
            self.eval_dataset = {name: self._with_targets(data) for name, data in self.eval_dataset.items()}
        else:
            self.eval_dataset = self._with_targets(self.eval_dataset)
        pad_id = 0 if self._hooked is None else self._hooked.pad_id
        self.data_collator = lambda some: collate(some, pad_id)
        if self._watches and known:
            self.compute_metrics = watched_means

    def _with_targets(self, data: Any) -> Any:
        """A data set with the base model's numbers, each example's computed once however often it comes."""
        if data is not None and not _examples(data):
            raise DataError(
                f"training is on examples, and the evaluation data holds {type(_first(data)).__name__}s; make examples "
                "of them too, with make_examples or as_examples"
            )
        if data is None or self._hooked is None or "base" not in self.objective.needs:
            return data
        listed, size = _listed(data), self.args.per_device_eval_batch_size
        different = list({id(example): example for example in listed}.values())
        made = add_targets(different, self.objective, self._hooked, batch_size=size, seed=self.args.seed)
        place = {id(old): new for old, new in zip(different, made, strict=True)}
        return [place[id(example)] for example in listed]

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The batches that one optimizer step accumulates; counts their labelled tokens and examples, everywhere."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not self.objective.plain and batches:
            counts = torch.zeros(2, device=device)
            for batch in batches:
                counts += torch.tensor(_sizes(batch["labels"]), device=device)
            self._counts = tuple(self.accelerator.reduce(counts, "sum").tolist())  # pyright: ignore
        return batches, items

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The objective's loss; with `return_outputs`, in evaluation, what is watched of every example beside it."""
        extra = {name: value for name, value in inputs.items() if name == QUERY or name.startswith((SPAN, TARGET))}
        inputs = {name: value for name, value in inputs.items() if name not in extra}
        watching = return_outputs and not model.training and self.compute_metrics is watched_means
        if self.objective.plain and not watching:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs.pop("labels")
        outputs = self._forward(model, inputs, extra, watching)
        kernel = None if self._hooked is None else self._hooked.kernel
        found = forward_pass(outputs, {**inputs, **extra, "labels": labels}, kernel)
        training = model.training
        if training and found.rows is not None and not found.rows.requires_grad:
            raise ModelError(
                f"the objective {self.objective.text!r} looks at attention, but nothing that is trained moves it: "
                "train weights below the last attention layer, and checkpoint gradients with use_reentrant=False"
            )
        tokens, examples = self._counts if training and self._counts is not None else _sizes(labels)
        loss = found.logits.new_zeros((), dtype=torch.float32)
        for term in self.objective.terms:
            loss = loss + term.losses(found).sum() / (tokens if term.by_token else examples)
        if training:
            self._rules.collect(found, examples)
            loss = loss * self.accelerator.num_processes  # whose gradients are averaged
        if not return_outputs:
            return loss
        # what trainers gather of an evaluation is called logits
        seen = _watched(found, self.objective) if watching else outputs.logits
        return loss, CausalLMOutput(loss=loss, logits=seen)  # pyright: ignore[reportArgumentType]

    def _forward(self, model: nn.Module, inputs: Mapping[str, Any], extra: Mapping[str, Any], watching: bool) -> Any:
        asked: dict[str, Any] = {}
        if "states" in self.objective.needs:
            asked["output_hidden_states"] = True
        if ("rows" in self.objective.needs or watching) and self._hooked is not None:
            asked["output_attentions"] = True
            if self._hooked.kernel != "eager":
                asked[QUERY] = extra[QUERY]
        return model(**inputs, **asked, use_cache=False)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The loader of the evaluation data; other examples than those of the start get the base's numbers first."""
        known = eval_dataset is None or isinstance(eval_dataset, str) or not _examples(self.train_dataset)
        return super().get_eval_dataloader(eval_dataset if known else self._with_targets(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The loader of the data of `predict`, with the base's numbers."""
        known = not _examples(self.train_dataset)
        return super().get_test_dataloader(test_dataset if known else self._with_targets(test_dataset))

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """One forward and backward pass; then the gradient is given the form that was asked for."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not bool(torch.isfinite(loss).all()):
            raise ModelError(
                f"the training loss is {float(loss)} at step {self.state.global_step + 1}, in the batch that begins "
                f"with {self._shown(inputs)!r}; lower the learning rate, or load the model in float32"
            )
        self._guard.mask_gradients(model)
        if self.accelerator.sync_gradients:
            self._rules.apply(self.accelerator)
            self._guard.mask_gradients(model)  # a gradient of low rank fills all entries
        return loss

    def _shown(self, inputs: Mapping[str, Any]) -> str:
        tokenizer: Any = self.processing_class
        return str(tokenizer.decode(inputs["input_ids"][0], skip_special_tokens=True))[:80]


class ObjectiveTrainer(ObjectiveMixin, Trainer):
    """`transformers.Trainer` with an objective: `ObjectiveTrainer(model, args, train_dataset=..., objective=...)`."""


class _AfterStep(TrainerCallback):
    """Gives entries of weights that are not trained their old values back, whatever the optimizer did to them."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.guard.restore(kwargs["model"])


def watched_means(prediction: EvalPrediction) -> dict[str, float]:
    """The means of `WATCHED` over all evaluated examples, however these were batched and spread over processes."""
    values = torch.as_tensor(prediction.predictions)  # pyright: ignore[reportArgumentType]
    loss, count, right, shortcut, by_token, by_example = values[:, :6].double().unbind(-1)
    found = {"objective": float(by_token.sum() / count.sum() + by_example.mean())}
    found |= {"answer_loss": float(loss.sum() / count.sum()), "accuracy": float(right.mean())}
    told = shortcut[(right == 0) & ~shortcut.isnan()]
    if len(told):
        found["shortcut_rate"] = float(told.mean())
    by_layer = values[:, 6:].double().mean(0).tolist()
    found |= {f"subject_attention/{layer}": value for layer, value in enumerate(by_layer) if not math.isnan(value)}
    return found


def _watched(found: ForwardPass, objective: Objective) -> Float[Tensor, "example column"]:
    """Of each example: summed loss and number of tokens, whether all are right, whether the first is the shortcut's.

    Then what it adds to the objective by its tokens and by itself, and the largest attention to a token of the subject
    by layer, mean over heads; NaN where not known.

    The answer is read off beside the right tokens (teacher forcing): all right is exactly what greedy decoding that
    starts with the answer means.
    """
    guesses, missing = found.logits.argmax(-1), torch.nan
    each = torch.arange(found.examples, device=guesses.device)
    hit = (guesses == found.labels).float()

    def summed(values: Tensor) -> Tensor:
        return values.new_zeros(found.examples).index_add(0, found.example, values)

    count = summed(torch.ones_like(hit))
    right = (summed(hit) == count).float()
    shortcut = torch.full_like(right, missing)
    if SHORTCUT in found.targets:
        first, expected = torch.searchsorted(found.example, each), found.targets[SHORTCUT]
        cannot_tell = (expected == found.labels[first]) | (expected < 0)
        shortcut = torch.where(cannot_tell, missing, (guesses[first] == expected).float())
    by_token = [summed(term.losses(found).float()) for term in objective.terms if term.by_token]
    by_example = [term.losses(found).float() for term in objective.terms if not term.by_token]
    none = torch.zeros_like(right)
    columns = [summed(found.losses()), count, right, shortcut, sum(by_token, none), sum(by_example, none)]
    attention = right.new_full((found.examples, 0), missing)
    if found.rows is not None and "subject" in found.spans:
        inside = found.rows.masked_fill(~found.spans["subject"][:, None, None, :], 0.0)
        attention = inside.amax(-1).mean(-1)
    return torch.cat([torch.stack(columns, dim=-1), attention.to(right)], dim=-1)


def forward_pass(outputs: Any, batch: Mapping[str, Tensor], kernel: str | None) -> ForwardPass:
    """What a model gave for a batch of `collate`, as objectives see it; `kernel` is that of its `HookedModel`."""
    labels = batch["labels"]
    example, place = (labels[:, 1:] != IGNORED).nonzero().unbind(-1)
    rows = None
    if getattr(outputs, "attentions", None) and kernel is not None:
        rows = rows_of_output(outputs, kernel, batch[QUERY], batch["attention_mask"] != 0)
    states = None
    if getattr(outputs, "hidden_states", None):
        states = states_of_output(outputs, batch[QUERY])
    return ForwardPass(
        outputs.logits[example, place],
        labels[example, place + 1],
        example,
        len(labels),
        rows,
        states,
        {name.removeprefix(SPAN): value for name, value in batch.items() if name.startswith(SPAN)},
        {name.removeprefix(TARGET): value for name, value in batch.items() if name.startswith(TARGET)},
    )


def _sizes(labels: Tensor) -> tuple[float, float]:
    """The labelled tokens, and the examples."""
    return float((labels[:, 1:] != IGNORED).sum()), float(len(labels))


def _examples(data: Any) -> bool:
    return isinstance(_first(data), Example)


def _listed(data: Any) -> list[Example]:
    """The examples of a data set that is a sequence, such as a list or torch's Subset."""
    return [data[i] for i in range(len(data))]


def _one_row(data: Any) -> Any:
    """The first example as a table, for trainers that take nothing else while they are set up (trl's)."""
    from datasets import Dataset

    return Dataset.from_list([{"input_ids": list(data[0].ids), "labels": list(data[0].labels)}])


def _first(data: Any) -> Any:
    try:
        return data[0]
    except (TypeError, IndexError, KeyError):
        return None
