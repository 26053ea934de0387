"""The log of a training: the names under which a Trainer logs what is watched, and how they are read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SCALARS = ("objective", "answer_loss", "accuracy", "shortcut_rate")
"""Numbers that an evaluation logs next to the loss, each with "eval_" before it.

`objective` is the sum of the objective's terms; "eval_loss" also holds a router's balancing loss, and label smoothing
and the like if the objective is plain cross-entropy.
"""

SUBJECT_ATTENTION = "subject_attention"
"""Logged for each layer, with "eval_" before it and "/LAYER" after it."""

BASE_COMPLETES = "base_completes"
"""Logged for each form, with "/FORM" after it: the share of the training facts that the base completes."""

BASE_OBJECTIVE = "base_objective"
"""Logged once, at step 0: the objective on the validation examples before training."""

Log = Sequence[Mapping[str, float]]
"""A Trainer's log: one entry for each event, with its step."""


def validation_losses(log: Log) -> dict[int, float]:
    """The objective on the validation examples, by step.

    >>> validation_losses([{"step": 2, "loss": 0.4}, {"step": 2, "eval_objective": 0.5}])
    {2: 0.5}
    """
    return {int(entry["step"]): float(entry["eval_objective"]) for entry in log if "eval_objective" in entry}


def trajectory(log: Log) -> list[dict[str, object]]:
    """What was watched at each validation, in order of steps; subject attention as a list over layers."""
    result = list[dict[str, object]]()
    for entry in log:
        if "eval_objective" in entry:
            prefix = f"eval_{SUBJECT_ATTENTION}/"  # a saved log holds the layers in alphabetical order: 0, 1, 10, 2
            layers = {int(name.removeprefix(prefix)): share for name, share in entry.items() if name.startswith(prefix)}
            by_layer = [layers[layer] for layer in sorted(layers)]
            scalars = {name: entry[f"eval_{name}"] for name in SCALARS if f"eval_{name}" in entry}
            result.append({"step": int(entry["step"]), **scalars, SUBJECT_ATTENTION: by_layer})
    return result


def base_completes(log: Log) -> dict[str, float]:
    """The share of the training facts that the base completes, by form (see `completion_rates`).

    >>> base_completes([{"step": 0, "base_completes/statement": 0.25}])
    {'statement': 0.25}
    """
    prefix = f"{BASE_COMPLETES}/"
    return {name.removeprefix(prefix): rate for entry in log for name, rate in entry.items() if name.startswith(prefix)}


def base_objective(log: Log) -> float | None:
    """The objective on the validation examples before training; None if the log lacks it.

    >>> base_objective([{"step": 0, "base_objective": 0.5}])
    0.5
    """
    return next((entry[BASE_OBJECTIVE] for entry in log if BASE_OBJECTIVE in entry), None)


def stops(losses: Mapping[int, float], patience: int | None) -> bool:
    """Whether the last `patience` validation losses have all failed to be below the best before them.

    >>> stops({10: 3.0, 20: 2.0, 30: 2.5, 40: 2.0}, patience=2)
    True
    """
    values = list(losses.values())
    return bool(values) and patience is not None and len(values) - 1 - values.index(min(values)) >= patience
