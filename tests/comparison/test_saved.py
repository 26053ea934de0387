"""Measurements that are saved come back as they were; damaged ones are set aside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import FACTS

from attnbalance import FactSet, make_prompts
from attnbalance.comparison.measure import measure_all
from attnbalance.comparison.saved import load_measured, save_measured
from attnbalance.comparison.specs import MeasureSettings, ModelSpec
from tests.fakes import a_comparison

GOOD = FactSet(FACTS)
SETTINGS = MeasureSettings(recall=True, batch_size=4)


def test_what_is_saved_comes_back_with_every_reading(tmp_path: Path) -> None:
    made = a_comparison({"top": [0.1, 0.2]}, {"top": [i < 30 for i in range(40)]}, pair=None)["top"]
    other = replace(made.reading(), name="value salience", unit="logits", values=made.reading().values[..., :1] + 1)
    two = replace(made, readings=(made.reading(), other))
    save_measured(two, tmp_path / "work", "key")
    again = load_measured(tmp_path / "work", "key")
    assert again is not None
    assert (again.label, again.recall, again.examples) == (two.label, two.recall, two.examples)
    assert dict(again.source) == dict(two.source)
    for before, after in zip(two.readings, again.readings, strict=True):
        assert torch.equal(before.values, after.values)
        assert replace(before, values=after.values) == after


def test_nothing_comes_back_from_another_key_or_no_folder(tmp_path: Path) -> None:
    made = a_comparison({"top": [0.1]}, pair=None)["top"]
    save_measured(made, tmp_path / "work", "key")
    assert load_measured(tmp_path / "work", "other") is None
    assert load_measured(tmp_path / "nothing", "key") is None


@pytest.mark.parametrize("damage", ["truncated", "zeroed", "garbage"])
@pytest.mark.parametrize("name", ["tensors.safetensors", "about.json", "complete"])
def test_damaged_measurements_are_set_aside_with_one_message_and_made_again(
    llama_folder: Path, tmp_path: Path, name: str, damage: str
) -> None:
    specs, prompts = [ModelSpec("a", str(llama_folder))], make_prompts(GOOD)
    (first,) = measure_all(specs, prompts, SETTINGS, tmp_path / "work")
    path = tmp_path / "work/measured-0/part-0" / name
    old = path.read_bytes()
    path.write_bytes({"truncated": old[: len(old) // 2], "zeroed": bytes(len(old))}.get(damage, b"?" * len(old)))
    with pytest.warns(UserWarning, match="set aside as damaged-part-0"):
        (again,) = measure_all(specs, prompts, SETTINGS, tmp_path / "work")
    assert torch.equal(first.reading().values, again.reading().values)
    assert (first.recall, first.examples) == (again.recall, again.examples)
    assert (tmp_path / "work/measured-0/damaged-part-0").is_dir()
