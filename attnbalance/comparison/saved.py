"""Measurements kept in a work folder, so that an interrupted run does not repeat them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from attnbalance.comparison.comparison import ExampleRow, Measured
from attnbalance.files.kept_tensors import ABOUT, keep, kept
from attnbalance.readings.reading import Reading
from attnbalance.readings.recall import Recall

LABELS = ("name", "unit", "layers", "prompt_ids", "subjects")
"""The fields of a `Reading` that JSON holds; its values are a tensor file."""


def save_measured(measured: Measured, folder: Path, key: str) -> None:
    """Write what was measured of a model, whole or not at all, under the key of all that it depends on."""
    about = {
        "label": measured.label,
        "readings": [{name: getattr(reading, name) for name in LABELS} for reading in measured.readings],
        "recall": None if measured.recall is None else asdict(measured.recall),
        "examples": [asdict(example) for example in measured.examples],
        "source": dict(measured.source),
    }
    keep(folder, key, about, {str(i): reading.values for i, reading in enumerate(measured.readings)})


def load_measured(folder: Path, key: str) -> Measured | None:
    """What was measured under this key; None if nothing was. A damaged folder is set aside with a warning."""
    saved = kept(folder, key)
    if saved is None:
        return None
    about, values = saved
    readings = tuple(_reading(labels, values[str(i)]) for i, labels in enumerate(about["readings"]))
    answers = about["recall"] and Recall.from_json(about["recall"], folder / ABOUT)
    return Measured(about["label"], readings, answers, tuple(map(_example, about["examples"])), about["source"])


def _reading(labels: Mapping[str, Any], values: Tensor) -> Reading:
    layers, prompt_ids, subjects = (tuple(labels[name]) for name in LABELS[2:])
    return Reading(labels["name"], labels["unit"], values, layers, prompt_ids, subjects)


def _example(saved: Mapping[str, Any]) -> ExampleRow:
    tokens, in_subject = tuple(saved["tokens"]), tuple(saved["in_subject"])
    return ExampleRow(saved["prompt_id"], tokens, in_subject, tuple(map(tuple, saved["weights"])))
