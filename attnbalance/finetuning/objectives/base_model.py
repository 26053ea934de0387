"""The base model of an objective: how it is asked for the facts of examples, and how adapters are switched off."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from torch import nn

from attnbalance.data.prompts import Prompt
from attnbalance.data.statements import statement_prompts
from attnbalance.errors import DataError
from attnbalance.finetuning.examples import Example
from attnbalance.models.fingerprint import adapter_parameters
from attnbalance.models.hooked import HookedModel

FORMS = ("statement", "question", "few-shot")
"""Prompts that ask the base model what it knows: a statement of the fact up to its answer, the question itself, or the
question after a few answered ones of its relation."""

SHOTS = 4
"""Answered questions before the one asked, in the form few-shot."""


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

    def ask(self, form: str, examples: Sequence[Example]) -> list[Prompt]:
        """The prompts that ask for the examples' facts in one of `FORMS`."""
        return in_form(form, prompts_of(examples), self.seed, prompts_of(self.among))


def prompts_of(examples: Sequence[Example]) -> list[Prompt]:
    """The examples' prompts; raises `DataError` if an example has none."""
    prompts = [example.prompt for example in examples if example.prompt is not None]
    if len(prompts) != len(examples):
        raise DataError(
            f"the objective needs prompts, but {len(examples) - len(prompts)} of {len(examples)} examples have "
            "none; make them with make_examples or as_examples (rows without a fact train on the objective ce only)"
        )
    return prompts


def in_form(
    form: str, prompts: Sequence[Prompt], seed: int = 0, shots_from: Sequence[Prompt] | None = None
) -> list[Prompt]:
    """Ask for the prompts' facts in another of `FORMS`, up to the answer.

    Few-shot puts `SHOTS` answered questions before each question, drawn once for each relation from `shots_from` (by
    default from the prompts themselves). They are about different subjects, none of them the one asked about: the same
    fact in other words would give its answer away. Raises `DataError` for a relation with too few subjects.
    """
    if form == "question":
        return list(prompts)
    if form == "statement":
        return list(statement_prompts([prompt.fact for prompt in prompts]))
    if any(prompt.has_special_tokens for prompt in (*prompts, *(shots_from or ()))):
        raise DataError("few-shot puts answered questions before the prompt; a rendered chat does not allow that")
    rng, shots = random.Random(seed), dict[str, list[Prompt]]()  # noqa: S311
    for relation in dict.fromkeys(prompt.fact.relation for prompt in prompts):
        others = [prompt for prompt in shots_from or prompts if prompt.fact.relation == relation]
        by_subject = {prompt.fact.subject: prompt for prompt in others}
        if len(by_subject) <= SHOTS:
            raise DataError(
                f"few-shot needs more than {SHOTS} subjects of each relation; {relation!r} has {len(by_subject)}"
            )
        shots[relation] = rng.sample(list(by_subject.values()), SHOTS + 1)
    return [_after_shots(prompt, shots[prompt.fact.relation]) for prompt in prompts]


def _after_shots(prompt: Prompt, shots: Sequence[Prompt]) -> Prompt:
    """A prompt after answered ones; those about its own subject are left out."""
    used = [shot for shot in shots if shot.fact.subject != prompt.fact.subject][:SHOTS]
    prefix = "".join(f"{shot.text} {shot.fact.answer}\n\n" for shot in used)
    spans = {role: (start + len(prefix), end + len(prefix)) for role, (start, end) in prompt.spans.items()}
    return replace(prompt, text=prefix + prompt.text, spans=spans)


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
