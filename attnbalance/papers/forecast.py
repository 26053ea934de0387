"""What figures of language models will cost, before anything is run: tokens, memory and hours of a GPU."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from attnbalance.errors import DataError
from attnbalance.files.outputs import as_folder
from attnbalance.models.config import load_config
from attnbalance.models.load import load_limits
from attnbalance.models.load_adapter import split_adapter
from attnbalance.papers.cell_files import saved_cell, sources_of
from attnbalance.papers.figure import Cell, PaperFigure, Workload
from attnbalance.papers.reproduce import check_size, chosen_figures
from attnbalance.papers.sources import model_of
from attnbalance.report.wording import markdown

SAMPLE = 200
"""Texts whose tokens are counted for a mean length, drawn by a fixed seed."""

RATE = 0.4 * 312e12
"""Operations a second: 40% of what one A100 does at most in bfloat16 (NVIDIA's data sheet)."""

FORWARD, WITH_PART, WITH_ALL = 2, 4, 6
"""Operations for each parameter and token: a forward pass; that and a backward pass to some weights or adapters, or
to all weights (Kaplan et al. 2020, section 2.1). Attention's own part, which grows with the square of the length, is
left out."""

BYTES, TRAINED_BYTES = 4, 12
"""Bytes of a weight in float32, in which models are trained without adapters, and of its gradient and Adam's two
moments."""


@dataclass(frozen=True)
class Forecast:
    """What is left to do for a figure. Tokens, memory and hours are None for a simulation."""

    figure: str
    """The figure's name."""
    cells: int
    """Cells of the figure; other figures may share some."""
    left: int
    """Cells that are not finished."""
    trained_tokens: float | None = None
    """Tokens that training reads."""
    read_tokens: float | None = None
    """Tokens that are read or generated without training."""
    memory: float | None = None
    """Bytes of the largest fit's weights, gradients and Adam's moments, without adapters; activations come on top."""
    gpu_hours: float | None = None
    """Hours of one GPU that does `RATE` operations a second."""
    missing: str = ""
    """What the figure lacks, so that it would not be run; its cells are then not listed."""


def forecast(
    names: Sequence[str], out: str | Path, *, scale: str = "small", seeds: int = 5, **sources: str | None
) -> list[Forecast]:
    """What `reproduce` with these arguments would do; nothing is written, and no weights are loaded.

    The mean lengths in a cell are taken from up to `SAMPLE` of its texts, with the model's own tokenizer and without
    padding. Raises `DataError` if every figure lacks a source, and what `reproduce` raises for its arguments and for
    sources that cannot be read.
    """
    chosen, folder = chosen_figures(names), as_folder(out)
    check_size(scale, seeds)
    given = sources_of(folder, sources)
    missing = {figure.name: given.missing(figure.needs) for figure in chosen}
    if all(missing.values()):
        raise DataError("; ".join(f"{name}: {what}" for name, what in missing.items()))
    return [
        Forecast(figure.name, 0, 0, missing=missing[figure.name])
        if missing[figure.name]
        else _forecast(figure, figure.cells(scale, range(seeds), given), folder)
        for figure in chosen
    ]


def table(forecasts: Sequence[Forecast]) -> str:
    """Forecasts as a table in Markdown, with tokens, memory and hours in three digits."""
    head = ("figure", "cells", "left", "tokens trained on", "tokens read", "memory of the largest fit", "GPU hours")
    rows = [
        (
            each.figure,
            str(each.cells),
            str(each.left),
            _in_words(each.trained_tokens),
            _in_words(each.read_tokens),
            "" if each.memory is None else f"{each.memory / 1e9:.3g} GB",
            "" if each.gpu_hours is None else f"{each.gpu_hours:.2g}",
        )
        for each in forecasts
        if not each.missing
    ]
    absent = [f"{each.figure} is not run: {each.missing}" for each in forecasts if each.missing]
    return "\n".join([markdown([head, *rows]), *([""] if absent else []), *absent])


def _forecast(figure: PaperFigure, cells: Sequence[Cell], out: Path) -> Forecast:
    left = [cell for cell in cells if not saved_cell(out, cell)]
    if figure.workload is None or not left:
        return Forecast(figure.name, len(cells), len(left))
    size, width = parameters(model_of(left[0].settings))
    tokenizer, _ = load_limits(model_of(left[0].settings))
    counted: dict[str, tuple[float, float]] = {}
    trained_tokens = read_tokens = operations = memory = 0.0
    for cell in left:
        key = _same_reading(cell.settings)
        if key not in counted:
            counted[key] = tokens_of(figure.workload(cell.settings), tokenizer)
        trained, read = counted[key]
        adapters = cell.settings["training"].get("lora_rank", 0) > 0
        every = not adapters and cell.settings["training"].get("train", "all") == "all"
        trained_tokens, read_tokens = trained_tokens + trained, read_tokens + read
        operations += size * ((WITH_ALL if every else WITH_PART) * trained + FORWARD * read)
        if trained:
            memory = max(memory, size * ((width if adapters else BYTES) + TRAINED_BYTES * every))
    return Forecast(figure.name, len(cells), len(left), trained_tokens, read_tokens, memory, operations / RATE / 3600)


def tokens_of(workload: Workload, tokenizer: PreTrainedTokenizerBase) -> tuple[float, float]:
    """The tokens that training reads, and those that are read or generated without training."""
    trained = workload.steps * workload.batch_size * _mean_length(workload.trained, tokenizer)
    read = sum(len(texts) * times * (_mean_length(texts, tokenizer) + new) for texts, new, times in workload.read)
    return trained, read


def _mean_length(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> float:
    if not texts:
        return 0.0
    chosen = texts if len(texts) <= SAMPLE else random.Random(0).sample(list(texts), SAMPLE)  # noqa: S311
    return sum(map(len, tokenizer(list(chosen), verbose=False)["input_ids"])) / len(chosen)


@lru_cache
def parameters(model: str) -> tuple[int, int]:
    """A model's number of parameters, tied ones once, and the bytes of each in its files, from its configuration."""
    config = load_config(split_adapter(model, None)[0])
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    return sum(weight.numel() for weight in empty.parameters()), dtype.itemsize


def _same_reading(settings: Mapping[str, Any]) -> str:
    """What cells have in common that read the same texts equally often: all but the rate, decay and adapter."""
    training = {
        name: value
        for name, value in settings["training"].items()
        if name not in ("learning_rate", "weight_decay", "lora_rank", "lora_alpha", "train")
    }
    return json.dumps({**settings, "training": training}, sort_keys=True)


def _in_words(number: float | None) -> str:
    if number is None:
        return ""
    sizes = ((1e12, " trillion"), (1e9, " billion"), (1e6, " million"), (1.0, ""))
    size, name = next((pair for pair in sizes if number >= pair[0]), (1.0, ""))
    return f"{number / size:,.3g}{name}" if name else f"{number:,.0f}"
