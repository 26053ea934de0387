"""Checks of a trainer: settings that examples or an objective would silently ignore are refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    DefaultDataCollator,
    PreTrainedModel,
    Trainer,
    default_data_collator,
)

from attnbalance.errors import DataError, ModelError
from attnbalance.finetuning.example_sets import tokenizer_of
from attnbalance.finetuning.examples import Example
from attnbalance.finetuning.objectives.base_model import check_start
from attnbalance.finetuning.objectives.objective import Objective
from attnbalance.finetuning.parameters import FrozenWeights, loras_of_parts, trained_in_part
from attnbalance.models.adapter_kinds import beyond_lora
from attnbalance.models.forward import base_of
from attnbalance.models.hooked import HookedModel, check_adapters, hook
from attnbalance.models.length_thresholds import length_thresholds

LOSS = {"label_smoothing_factor": (0.0,), "loss_type": ("nll",)}
"""Settings that change a trainer's own loss, with the values that leave it unchanged."""

PLAIN_LOSSES = ("transformers.trainer.Trainer.compute_loss", "trl.trainer.sft_trainer.SFTTrainer.compute_loss")
"""Methods of trainers that compute the cross-entropy of the labels, unless a setting says otherwise."""

OWN_LOSSES = ("ADALORA", "CPT", "SHADOW")
"""Types of adapters that add a loss of their own where a model is given labels."""

DATA = {
    "packing": (False,),
    "eval_packing": (None, False),
    "padding_free": (False,),
    "pad_to_multiple_of": (None,),
    "shuffle_dataset": (False,),
    "completion_only_loss": (None, True),
    "eos_token": (None,),
    "chat_template_path": (None,),
    "train_sampling_strategy": ("random", "sequential"),
    "predict_with_generate": (False,),
    "label_names": (None, ["labels"]),
}
"""Settings that change data sets and batches, with the values that leave examples unchanged."""

PADDERS = (DataCollatorForSeq2Seq, DataCollatorWithPadding, DefaultDataCollator)
"""Collators that may be passed with examples: they only pad, as `collate` does instead."""

METRICS = {"batch_eval_metrics": (False,), "eval_do_concat_batches": (True,)}
"""Settings that change how metrics are computed, with the values under which watching works."""


def own_loss(trainer: Trainer) -> list[str]:
    """What makes a trainer's own loss another than the cross-entropy of the labels."""
    model: Any = trainer.model
    base, adapters = base_of(model), getattr(model, "peft_config", {}).values()
    own = _other(trainer.args, LOSS) + (["compute_loss_func"] if trainer.compute_loss_func is not None else [])
    own += _own_method(type(trainer))
    own += ["a loss_function of the model's own"] if getattr(base, "_loss_function", None) is not None else []
    own += ["the model's z_loss_coefficient"] if getattr(base, "z_loss_coefficient", 0) else []
    return own + [f"{a.peft_type.value} adapters" for a in adapters if a.peft_type.value in OWN_LOSSES]


def check_loss(trainer: Trainer, objective: Objective) -> None:
    """Raise `ModelError` for settings of the loss, and adapters, that an objective other than `ce` would not follow."""
    if objective.plain:
        return
    _check_adapters(trainer.model, objective)  # pyright: ignore[reportArgumentType]
    ignored = own_loss(trainer)
    if trainer.args.world_size > 1 and not trainer.args.average_tokens_across_devices:
        ignored += ["average_tokens_across_devices=False"]
    if trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size() > 1:
        ignored += ["tensor, context or sequence parallelism"]
    _refuse(f"objective {objective.text!r}", ignored, "leave them out, or train on the objective 'ce'")


def _own_method(kind: type[Trainer]) -> list[str]:
    """The class behind `ObjectiveMixin` whose `compute_loss` is of the user's own, with what to do, or nothing."""
    ours = max(i for i, each in enumerate(kind.__mro__) if each.__module__.startswith(f"{__package__}."))
    behind = next(each for each in kind.__mro__[ours + 1 :] if "compute_loss" in vars(each))
    method = vars(behind)["compute_loss"]
    name = f"{getattr(method, '__module__', '')}.{getattr(method, '__qualname__', '')}"
    plain = name in PLAIN_LOSSES and not hasattr(method, "__wrapped__")
    return [] if plain else [f"{behind.__name__}.compute_loss (list {behind.__name__} before ObjectiveMixin)"]


def check_data(trainer: Trainer, given: Mapping[str, Any], longest: int) -> None:
    """Raise `ModelError` for settings of data and batches; `given` to the trainer; `longest`: tokens of an example."""
    check_adapters(trainer.model, type(trainer.model).__name__)
    ignored = _other(trainer.args, DATA) + (["formatting_func"] if given.get("formatting_func") else [])
    collator = given.get("data_collator")
    pads = collator in (None, default_data_collator) or type(collator) in PADDERS
    ignored += [] if pads else [f"data_collator={type(collator).__name__}"]
    ignored += ["dispatch_batches=True"] if getattr(trainer.args.accelerator_config, "dispatch_batches", None) else []
    limit = getattr(trainer.args, "max_length", None)
    ignored += [f"max_length={limit} (an example has {longest} tokens)"] if limit and longest > limit else []
    _refuse("training on examples, which are used unchanged,", ignored, "leave them out")


LOWER_IS_BETTER = ("objective", "shortcut_rate")
"""Watched numbers that transformers takes for better when higher, as their names do not end in "loss"."""


def check_metrics(trainer: Trainer) -> None:
    """Raise `ModelError` for settings under which evaluations cannot be watched, or are read the wrong way round."""
    metric = trainer.args.metric_for_best_model or ""
    if metric.endswith(LOWER_IS_BETTER) and trainer.args.greater_is_better:
        raise ModelError(f"metric_for_best_model={metric!r} is better when lower; pass greater_is_better=False as well")
    ignored = _other(trainer.args, METRICS)
    ignored += ["preprocess_logits_for_metrics"] if trainer.preprocess_logits_for_metrics is not None else []
    _refuse("watching evaluations", ignored, "leave them out, or pass your own compute_metrics")


def check_optimizer(trainer: Trainer) -> None:
    """Raise `ModelError` for optimizers that step inside the backward pass, before a gradient can be changed."""
    name = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if "lomo" in name or "layerwise" in name:
        raise ModelError(
            f"optim={name} takes its step inside the backward pass, where project, weight-anchor, a gradient rank and "
            "partly trained weights cannot act; choose another optimizer"
        )


def check_ways_of_training(
    trainer: Trainer, objective: Objective, rules: bool, frozen: FrozenWeights, reads: bool
) -> None:
    """Refuse ways of training that would ignore part of what is asked for. Raises `ModelError`.

    `rules`: whether gradients are changed; `frozen`: entries that are kept; `reads`: whether attention is read.
    """
    if not objective.plain and trainer.args.n_gpu > 1:
        raise ModelError("several GPUs in one process are not supported: start with `accelerate launch`")
    if rules and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or trainer.args.mixed_precision == "fp16"):
        raise ModelError(
            "project, weight-anchor and a gradient rank need whole gradients that are not scaled: "
            "use DDP instead of FSDP or DeepSpeed, and bf16 instead of fp16"
        )
    partly = bool(frozen)
    held = [name for name in trained_in_part(trainer.model) if name not in frozen.names]  # pyright: ignore[reportArgumentType]
    if held:
        raise ModelError(
            f"{held[0]} is to be trained in part, and would be trained whole: pass what train_only or add_lora "
            "returned last as frozen=; to train all of it, choose it whole with train_only first"
        )
    loras = [name for name in loras_of_parts(trainer.model) if name not in frozen.names]  # pyright: ignore[reportArgumentType]
    if loras:
        warnings.warn(
            f"{loras[0]} has zeros as if it was trained for a part of its layer (add_lora), and is trained whole now; "
            "to keep to a part, add a new adapter and pass its frozen=",
            stacklevel=4,
        )
    if rules or partly:
        check_optimizer(trainer)
    if partly and trainer.is_deepspeed_enabled:
        raise ModelError("parts of fused weights cannot be trained under DeepSpeed; use DDP or FSDP2")
    if trainer.model_init is not None and (rules or reads or not objective.plain):
        raise ModelError(
            "an objective, and evaluations that watch attention, need one model: pass model=, not model_init="
        )


def check_wrapped(accelerator: Accelerator, model: Module) -> None:
    """Raise `ModelError` for training in several processes whose gradients nothing averages.

    That is so in transformers' trainers if `evaluate` is called before `train`: the model then stays without
    DistributedDataParallel, and each process trains on its own.
    """
    several = accelerator.num_processes > 1 and accelerator.distributed_type.value.startswith("MULTI_")
    wrapped = isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel)
    if several and model.training and torch.is_grad_enabled() and not wrapped:
        raise ModelError(
            "the model was evaluated before it was trained, so that transformers trains it without averaging gradients "
            "over processes; call train() first, or evaluate with a trainer of its own"
        )


def router_coefficient(trainer: Trainer) -> float:
    """The factor of the router's balancing loss of a mixture of experts, in the forward pass with labels.

    The factor of trl's trainers, if there is one, takes precedence. 0 if the model does not ask for that loss
    (`output_router_logits`). Raises `ModelError` if it does and its factor is unknown, and if trl asks for the loss at
    each step instead (JetMoE).
    """
    base: PreTrainedModel = base_of(trainer.model)  # pyright: ignore[reportArgumentType]
    if not getattr(base.config.get_text_config(), "output_router_logits", False):
        if getattr(trainer, "aux_loss_enabled", False):
            raise ModelError(
                f"{type(base).__name__} gives the loss that router_aux_loss_coef asks for only with "
                "output_router_logits=True; set that in its config, or router_aux_loss_coef=0"
            )
        return 0.0
    sources: tuple[tuple[Any, str], ...] = (
        (trainer, "router_aux_loss_coef"),
        (base, "router_aux_loss_coef"),
        (base, "aux_loss_coef"),  # JetMoE
    )
    known = [value for source, name in sources if (value := getattr(source, name, None)) is not None]
    if not known:
        raise ModelError(
            f"{type(base).__name__} has output_router_logits=True, but not router_aux_loss_coef: its router's "
            "balancing loss cannot be added to the objective; set output_router_logits=False to train without it"
        )
    return float(known[0])


def router_loss(outputs: Any, coefficient: float) -> Tensor | float:
    """The router's balancing loss of a forward pass, times its coefficient; 0 if the model gives none."""
    loss = getattr(outputs, "aux_loss", None)
    return 0.0 if loss is None or not coefficient else coefficient * loss


def hooked_for(trainer: Trainer, objective: Objective, examples: Sequence[Example]) -> HookedModel:
    """The trainer's model, whose attention can be read.

    Raises `ModelError` for a model that cannot be hooked, `DataError` without a tokenizer, and as `check_lengths`.
    """
    model: Any = trainer.model
    hooked = hook(model, tokenizer_of(trainer.processing_class, objective), type(model).__name__)
    settings = base_of(model).config.get_text_config().to_dict()
    dropped = [f"{key}={rate}" for key, rate in settings.items() if "att" in key and "drop" in key and rate]
    if objective.needs.rows and hooked.kernel == "eager" and dropped:
        raise ModelError(
            f"{hooked.name} is read through eager attention, which gives rows after dropout in training; objective "
            f"{objective.text!r} needs them before: set {' and '.join(dropped)} to 0"
        )
    check_lengths(hooked, model, examples)
    return hooked


def crosses_threshold(model: Module, examples: Sequence[Example]) -> bool:
    """Whether examples reach a number of tokens from which, by its configuration, a model may read texts otherwise.

    Whether it then reads them otherwise beside shorter ones is known once the model is hooked (see `check_lengths`).
    """
    longest = max(len(example.ids) for example in examples)
    return any(longest >= threshold for lengths in length_thresholds(base_of(model).config) for threshold in lengths)


def check_lengths(hooked: HookedModel | None, model: Module, examples: Sequence[Example]) -> None:
    """Raise `DataError` for examples so long that the model reads them otherwise in a batch of shorter ones.

    Trainers mix lengths (see `HookedModel.alike_from`). A model that was not hooked, since all examples that a trainer
    was made with are short, is not hooked later: examples beyond a threshold of its configuration are then refused.
    """
    longest = max(len(example.ids) for example in examples)
    if hooked is None:
        if crosses_threshold(model, examples):
            raise DataError(
                f"the configuration of {type(base_of(model)).__name__} names a length from which it may read texts "
                f"otherwise, and the longest of these examples, with {longest} tokens, reaches it, as no other did; "
                "pass all data as `eval_dataset` when you make the trainer, which then checks how the model reads it"
            )
        return
    if hooked.alike_from is not None and longest >= hooked.alike_from:
        raise DataError(
            f"{hooked.name} reads texts of {hooked.alike_from} tokens or more otherwise beside shorter ones, and the "
            f"longest example has {longest}; shorten it, or train with transformers' own Trainer"
        )


def _check_adapters(model: Module, objective: Objective) -> None:
    """Raise `ModelError` for adapters whose loss or base an objective would not follow."""
    if objective.needs_base or objective.needs.initial_weights:
        check_start(model, objective.text)
    for config in getattr(model, "peft_config", {}).values():
        kind = str(config.peft_type.value)
        if kind in OWN_LOSSES:
            raise ModelError(
                f"objective {objective.text!r} would leave out the loss that {kind} adapters add to the model's own; "
                "use LoRA, or train on the objective 'ce'"
            )
        beyond = beyond_lora(config) if kind == "LORA" else []
        if objective.changes_gradients and (kind != "LORA" or beyond):
            raise ModelError(
                f"objective {objective.text!r} acts on the product of LoRA's two matrices, but the adapter is "
                f"{' with '.join([kind, *beyond])}; use plain LoRA, or train the weights themselves"
            )


def _other(args: Any, right: Mapping[str, tuple[object, ...]]) -> list[str]:
    """The settings whose value is not among the right ones; settings that a trainer does not have are right."""
    values = {name: getattr(args, name, allowed[0]) for name, allowed in right.items()}
    return [f"{name}={value}" for name, value in values.items() if value not in right[name]]


def _refuse(what: str, ignored: list[str], remedy: str) -> None:
    if ignored:
        raise ModelError(f"{what} would ignore {', '.join(ignored)}; {remedy}")
