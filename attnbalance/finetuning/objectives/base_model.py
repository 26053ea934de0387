"""The base model of an objective: how it is asked for the facts of examples, and how adapters are switched off."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from torch import nn

from attnbalance.data.forms import BEST, FORMS, in_form
from attnbalance.data.prompts import Prompt
from attnbalance.errors import ModelError
from attnbalance.finetuning.examples import REPLAYED, Example
from attnbalance.models.fingerprint import adapter_parameters
from attnbalance.models.hooked import HookedModel

REWRITING = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of peft's `init_lora_weights` that subtract the adapter's initial value from the base's weights."""


@dataclass(frozen=True)
class BaseModel:
    """The base model, and how it is asked."""

    hooked: HookedModel
    """The model; adapters are switched off while it is asked."""
    batch_size: int = 64
    """Examples of one forward pass."""
    seed: int = 0
    """Seed that draws the few shots."""
    among: Sequence[Example] = ()
    """Training examples that others are compared with and take their few shots from; none: the examples themselves."""
    best: Mapping[str, str] = field(default_factory=dict)
    """The form that `BEST` stands for, by relation; relations that are not here are asked as statements."""

    def ask(self, form: str, examples: Sequence[Example]) -> list[Prompt]:
        """The prompts that ask for the examples' facts in one of `FORMS`, or each relation's in its `BEST`."""
        prompts, shots_from = prompts_of(examples), prompts_of(self.among)
        asked = dict[int, Prompt]()
        for relation in dict.fromkeys(prompt.fact.relation for prompt in prompts):  # its shots depend on no other
            own = [i for i, prompt in enumerate(prompts) if prompt.fact.relation == relation]
            named = self.best.get(relation, FORMS[0]) if form == BEST else form
            asked |= zip(own, in_form(named, [prompts[i] for i in own], self.seed, shots_from), strict=True)
        return [asked[i] for i in range(len(prompts))]


def check_start(model: nn.Module, text: str) -> None:
    """Raise `ModelError` if a model's adapters changed its base's weights when they were added, or are merged into it.

    With such an adapter switched off, the model is not the one that training began with; and peft takes merged ones out
    for good when it switches others off. `text`: the objective.
    """
    if any(getattr(module, "merged_adapters", None) for module in model.modules()):
        raise ModelError(
            f"objective {text!r} compares with the base model, but adapters are temporarily merged into it; make them "
            "part of it with merge_and_unload() before others are added, or take them out with unmerge_adapter()"
        )
    for config in getattr(model, "peft_config", {}).values():
        start = getattr(config, "init_lora_weights", "")
        if str(start).lower().startswith(REWRITING):
            raise ModelError(
                f"objective {text!r} compares with the base model, but init_lora_weights={start!r} changes its "
                "weights, so that the model with the adapter off is another; use True, 'gaussian', 'eva', 'mica' or "
                "'orthogonal'"
            )
        if getattr(config, "kasa_config", None) is not None:
            raise ModelError(
                f"objective {text!r} compares with the base model, but kasa_config cuts small singular values off its "
                "weights, so that the model with the adapter off is another; leave kasa_config out"
            )


def prompts_of(examples: Sequence[Example]) -> list[Prompt]:
    """The prompts of examples about facts."""
    return [example.prompt for example in examples if example.prompt is not None]


def has_replay(examples: Iterable[Example]) -> bool:
    """Whether facts are replayed: then examples say of themselves whether they are."""
    return any(REPLAYED in example.targets for example in examples)


def held_to_base(examples: Iterable[Example], among: Iterable[Example] = ()) -> list[Example]:
    """The examples that terms hold to the base model: the replayed ones; all, if there is no replay."""
    examples = list(examples)
    if not has_replay((*examples, *among)):
        return examples
    return [example for example in examples if bool(example.targets.get(REPLAYED, False))]


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Switch a model's adapters off, peft's or transformers' own; afterwards restore which are on and which train."""
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    states = [(module, getattr(module, "disable_adapters", None)) for module in model.modules()]
    if getattr(model, "_hf_peft_config_loaded", False):
        model.disable_adapters()  # pyright: ignore[reportCallIssue]
    try:
        with getattr(model, "disable_adapter", nullcontext)():  # pyright: ignore[reportOptionalCall]
            yield
    finally:
        for module, disabled in states:  # a flag of adapter layers; a model has a method of that name
            if isinstance(disabled, bool) and module.disable_adapters != disabled:
                module.enable_adapters(not disabled)  # pyright: ignore[reportCallIssue]
        for parameter, flag in trained:
            parameter.requires_grad_(flag)


def base_is_kept(model: nn.Module) -> bool:
    """Whether switching adapters off gives the base model: only weights that adapters added are trained."""
    added = adapter_parameters(model)
    return all(id(parameter) in added for parameter in model.parameters() if parameter.requires_grad)
