"""`attnbalance salience`: what models store about subjects, layer by layer, and how it goes with popularity."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnbalance.errors import DataError
from attnbalance.facts import FactSet
from attnbalance.measure import How, ModelSpec, load_spec, settings, usable_prompts
from attnbalance.models.bridge import bridge_of
from attnbalance.outputs import MARKER, as_folder, close_work, is_finished, read_json, replacing, write_json, write_text
from attnbalance.prompts import Prompt
from attnbalance.readings.contrast import make_contrasts
from attnbalance.readings.curves import Curve, layer_curve
from attnbalance.readings.intervals import Interval, rank_correlations, share_interval
from attnbalance.readings.ledger import read_ledger
from attnbalance.readings.reading import Reading
from attnbalance.readings.relevance import read_relevance
from attnbalance.readings.salience import SUBJECTS, read_mlp_salience, read_stored_answers, read_value_salience
from attnbalance.report import wording
from attnbalance.report.figures import draw_layers, save
from attnbalance.report.sentence import FEW
from attnbalance.report.tables import write_readings
from attnbalance.results import write_marker

KIND = "salience"
TOP = (1, 3)


@dataclass(frozen=True)
class Salience:
    """What was read of one model: readings, and the share of answers stored among the first of `TOP`, with control."""

    label: str
    readings: tuple[Reading, ...]
    stored: dict[int, tuple[Interval, Interval]]

    def correlations(self, reading: Reading, prompts: Sequence[Prompt], seed: int) -> list[Interval] | None:
        """Spearman's correlation of each layer's sum over heads with popularity, over prompts where it is known.

        The intervals hold for all layers together (Bonferroni). None where no popularity is known.
        """
        known = [i for i, prompt in enumerate(prompts) if prompt.fact.popularity is not None]
        if not known:
            return None
        values = reading.values[known].double().sum(-1).numpy()
        popularity = [prompts[i].fact.popularity for i in known]
        subjects = [prompts[i].fact.subject for i in known]
        confidence = 1 - 0.05 / len(reading.layers)
        return rank_correlations(values, np.asarray(popularity, float), subjects, confidence=confidence, seed=seed)


def salience(
    specs: Sequence[ModelSpec],
    facts: FactSet,
    how: How,
    out: str | Path,
    *,
    skip_bad: bool = False,
    command: str = "",
    progress: bool = False,
) -> str:
    """Read what each model stores of the facts and write the folder `out`, whole; returns the answer in words.

    Writes salience.json, salience.parquet, salience.png, popularity.png and prompts.jsonl. A folder that is finished
    with the same settings, facts and weights is left as it is. Raises `AttnBalanceError` for whatever cannot be read,
    asked or written.
    """
    out = as_folder(out)
    if not specs:
        raise DataError("expected at least one LABEL=MODEL to read, got none")
    config = settings(specs, facts, how, skip_bad)
    if not is_finished(out, KIND, config):
        prompts, dropped = usable_prompts(facts, specs, how, skip_bad, contrasted=True)
        found = [_read(spec, prompts, how, progress) for spec in specs]
        with replacing(out) as folder:
            folder.mkdir()
            _write(found, prompts, how.seed, folder)
            answer = " ".join(_answer(one, prompts, how.seed) for one in found)
            write_marker(folder, KIND, config, answer, command, {**facts.dropped, **dropped})
    close_work(out)
    return str(read_json(out / MARKER)["answer"])


def _read(spec: ModelSpec, prompts: Sequence[Prompt], how: How, progress: bool) -> Salience:
    model = load_spec(spec, how)
    bridged, contrasts = bridge_of(model), make_contrasts(prompts, model.tokenizer)
    ledger = read_ledger(bridged, contrasts, batch_size=how.batch_size, progress=progress)
    readings = [ledger.readout(), ledger.used()]
    readings += [read_value_salience(bridged, contrasts, at=at) for at in SUBJECTS]
    readings += [
        read_mlp_salience(bridged, contrasts, at=at, batch_size=how.batch_size) for at in ("context", *SUBJECTS)
    ]
    if model.kernel == "sdpa":
        readings.append(read_relevance(model, prompts, batch_size=how.batch_size, progress=progress).push)
    ranks = read_stored_answers(bridged, contrasts, batch_size=how.batch_size, seed=how.seed)
    subjects = [prompt.fact.subject for prompt in prompts]
    stored = {
        top: tuple(
            share_interval((rank <= top).tolist(), subjects, seed=how.seed) for rank in (ranks.rank, ranks.control)
        )
        for top in TOP
    }
    del bridged, model
    gc.collect()
    return Salience(spec.label, tuple(readings), stored)  # pyright: ignore[reportArgumentType]


def _write(found: Sequence[Salience], prompts: Sequence[Prompt], seed: int, folder: Path) -> None:
    lines = [json.dumps(prompt.as_dict(), ensure_ascii=False) + "\n" for prompt in prompts]
    write_text(folder / "prompts.jsonl", "".join(lines))
    write_json(folder / "salience.json", [_as_json(one, prompts, seed) for one in found])
    write_readings([(one.label, reading) for one in found for reading in one.readings], folder / "salience.parquet")
    names = [reading.name for reading in found[0].readings]
    means = {
        name: {
            one.label: layer_curve(reading, seed=seed)
            for one in found
            for reading in one.readings
            if reading.name == name
        }
        for name in names
    }
    _draw(means, folder / "salience.png")
    if any(prompt.fact.popularity is not None for prompt in prompts):
        correlated = {
            name: {one.label: _curve(one, r, prompts, seed) for one in found for r in one.readings if r.name == name}
            for name in names
        }
        _draw(correlated, folder / "popularity.png")


def _draw(panels: dict[str, dict[str, Curve]], path: Path) -> None:
    with replacing(path) as temporary:
        save(draw_layers(panels), temporary, format="png", dpi=150)


def _curve(one: Salience, reading: Reading, prompts: Sequence[Prompt], seed: int) -> Curve:
    """The correlations of a reading with popularity, as a curve along layers."""
    found = one.correlations(reading, prompts, seed) or []
    mean, low, high = (tuple(getattr(interval, name) for interval in found) for name in ("mean", "low", "high"))
    return Curve(reading.name, "Spearman, popularity", reading.layers, mean, low, high, len(prompts))


def _as_json(one: Salience, prompts: Sequence[Prompt], seed: int) -> dict[str, object]:
    readings = []
    for reading in one.readings:
        correlated = one.correlations(reading, prompts, seed)
        entry: dict[str, object] = {"name": reading.name, "unit": reading.unit} | layer_curve(
            reading, seed=seed
        ).as_dict()
        entry["popularity"] = None if correlated is None else [found.as_dict() for found in correlated]
        readings.append(entry)
    stored = {str(top): {"stored": a.as_dict(), "control": b.as_dict()} for top, (a, b) in one.stored.items()}
    return {"label": one.label, "readings": readings, "stored_among_first": stored}


def _answer(one: Salience, prompts: Sequence[Prompt], seed: int) -> str:
    """What was found of one model, in words."""
    stored, control = one.stored[TOP[-1]]
    text = (
        f"{one.label}: {wording.percent_interval(stored)} of answers are among the first {TOP[-1]} of their relation "
        "in what the heads could read at the subject (the same answers at other subjects: "
        f"{wording.percent_interval(control)})"
    )
    reading = one.readings[0]
    correlated = one.correlations(reading, prompts, seed)
    if correlated is None:
        return f"{text}."
    found = list(zip(reading.layers, correlated, strict=True))
    layer, most = max([pair for pair in found if pair[1].excludes_zero] or found, key=lambda pair: abs(pair[1].mean))
    if math.isnan(most.low):
        return f"{text}; {FEW} with popularity give no interval for a correlation with it."
    told = f"Spearman {most.mean:+.2f} [{most.low:+.2f}, {most.high:+.2f}] at layer {layer}"
    if not most.excludes_zero:
        return f"{text}; value salience in context does not measurably go with popularity at any layer (most: {told})."
    return f"{text}; value salience in context {'rises' if most.mean > 0 else 'falls'} with popularity ({told})."
