"""A model's answers to conflicts, kept in a work folder, so that an interrupted run does not repeat them."""

from __future__ import annotations

from pathlib import Path

from attnbalance.data.prompts import Prompt
from attnbalance.files.outputs import read_json, replacing, set_aside, write_json
from attnbalance.files.seals import damage, seal
from attnbalance.readings.reading import Reading
from attnbalance.readings.reliance import Reliance


def save_reliance(reliance: Reliance, folder: Path, key: str) -> None:
    """Write what was read of a model, whole or not at all, under the key of all that it depends on."""
    from safetensors.torch import save_file

    names = {role: [reading.name, reading.unit, reading.layers] for role, reading in reliance.attention.items()}
    about = {"key": key, "outputs": reliance.outputs, "without": reliance.without, "attention": names}
    values = {role: reading.values.contiguous() for role, reading in reliance.attention.items()}
    with replacing(folder) as temporary:
        temporary.mkdir()
        save_file({"log_odds": reliance.log_odds.contiguous(), **values}, temporary / "readings.safetensors")
        write_json(temporary / "answers.json", about)
        seal(temporary)


def load_reliance(folder: Path, key: str, prompts: tuple[Prompt, ...]) -> Reliance | None:
    """What was read of these prompts under this key, or None. A damaged folder is set aside with a warning."""
    from safetensors.torch import load_file

    if not folder.is_dir():
        return None
    if reason := damage(folder):
        set_aside([folder], reason)
        return None
    about = read_json(folder / "answers.json")
    if about.get("key") != key:
        return None
    values = load_file(folder / "readings.safetensors")
    attention = {
        role: Reading.of(prompts, name, unit, values[role], tuple(layers))
        for role, (name, unit, layers) in about["attention"].items()
    }
    return Reliance(prompts, tuple(about["outputs"]), tuple(about["without"]), values["log_odds"], attention)
