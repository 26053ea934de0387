"""A model's answers to conflicts, kept in a work folder, so that an interrupted run does not repeat them."""

from __future__ import annotations

from pathlib import Path

from attnbalance.data.prompts import Prompt
from attnbalance.files.kept_tensors import keep, kept
from attnbalance.readings.reading import Reading
from attnbalance.readings.reliance import Reliance


def save_reliance(reliance: Reliance, dtype: str, folder: Path, key: str) -> None:
    """Write what was read of a model, and in which dtype, whole or not at all, under the key of what it depends on."""
    about_readings = {
        role: [reading.name, reading.unit, reading.layers, reading.prompt_ids]
        for role, reading in reliance.attention.items()
    }
    about = {"dtype": dtype, "outputs": reliance.outputs, "without": reliance.without, "attention": about_readings}
    values = {role: reading.values for role, reading in reliance.attention.items()}
    keep(folder, key, about, {"log_odds": reliance.log_odds, **values})


def load_reliance(folder: Path, key: str, prompts: tuple[Prompt, ...]) -> tuple[Reliance, str] | None:
    """What was read of these prompts under this key, and in which dtype, or None.

    What an earlier version kept otherwise counts as not there. A damaged folder is set aside with a warning.
    """
    saved = kept(folder, key)
    if saved is None or "dtype" not in saved[0] or any(len(about) != 4 for about in saved[0]["attention"].values()):
        return None
    about, values = saved
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    attention = {
        role: Reading.of([by_id[prompt_id] for prompt_id in prompt_ids], name, unit, values[role], tuple(layers))
        for role, (name, unit, layers, prompt_ids) in about["attention"].items()
    }
    reliance = Reliance(prompts, tuple(about["outputs"]), tuple(about["without"]), values["log_odds"], attention)
    return reliance, about["dtype"]
