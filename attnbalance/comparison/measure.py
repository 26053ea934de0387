"""Measuring several models on the same prompts, one after the other, each part saved as soon as it is measured."""

from __future__ import annotations

import gc
import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from attnbalance.comparison.comparison import ExampleRow, Measured
from attnbalance.comparison.known_readings import READINGS, SUBJECT_ATTENTION
from attnbalance.comparison.parts import load_whole, part_of, ranges_of_parts
from attnbalance.comparison.saved import load_measured, save_measured
from attnbalance.comparison.specs import MeasureSettings, ModelSpec, check_labels, fingerprints, load_each
from attnbalance.data.facts import FactSet
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt
from attnbalance.files.processes import processes
from attnbalance.models.bridge import bridge_of
from attnbalance.models.forward import base_of
from attnbalance.models.hooked import HookedModel
from attnbalance.progress import progress_bar
from attnbalance.readings.attention import AttentionRows, read_attention, read_from_rows
from attnbalance.readings.reading import Reading
from attnbalance.readings.recall import recall
from attnbalance.readings.value_weighted import value_weighted_rows
from attnbalance.report.wording import listed

EXAMPLES = 3
"""Prompts whose attention rows the report shows."""


@dataclass(frozen=True)
class _Plan:
    """What is measured of every model.

    prompts: all prompts.
    parts: the indices of each part's prompts.
    shown: the indices of those whose attention rows are kept.
    settings: how models are asked and read.
    shortcuts: each relation's shortcut answers.
    origin: which facts the shortcuts are from.
    readings: the titles of the readings.
    """

    prompts: Sequence[Prompt]
    parts: Sequence[range]
    shown: Sequence[int]
    settings: MeasureSettings
    shortcuts: Mapping[str, Sequence[str]]
    origin: str
    readings: Sequence[str]

    def keys(self, spec: ModelSpec) -> list[str]:
        """Everything that the measurement of each part depends on, as one hash."""
        asked = [
            (prompt.as_dict(), self.settings.recall and self.shortcuts.get(prompt.fact.relation))
            for prompt in self.prompts
        ]
        about = [asdict(spec), fingerprints(spec, self.settings), asdict(self.settings), list(self.readings), asked]
        text = json.dumps(about, ensure_ascii=False, sort_keys=True)
        whole = hashlib.sha256(text.encode()).hexdigest()
        return [f"{whole}-{index}" for index in range(len(self.parts))]


def measure_all(
    specs: Sequence[ModelSpec],
    prompts: Sequence[Prompt],
    settings: MeasureSettings,
    work: Path,
    shortcuts: Mapping[str, Sequence[str]] | None = None,
    progress: bool = False,
    load: Callable[[Sequence[ModelSpec], MeasureSettings], Iterator[HookedModel]] = load_each,
    readings: Sequence[str] = (SUBJECT_ATTENTION,),
    shared: bool = False,
) -> tuple[Measured, ...]:
    """Measure each model on the prompts.

    specs: the models.
    prompts: the same for all models (see `usable_prompts`).
    settings: how models are asked and read.
    work: folder of measurements, by parts of the prompts; those of the same weights, prompts and settings are read from
        it, not repeated.
    shortcuts: each relation's most frequent training answer, for all labels, so that shortcut rates can be compared.
        By default those that the first model made by `finetune` recorded; without one, the most frequent answers of
        the prompts' facts. `Measured.source` says which.
    progress: show progress bars.
    load: gives the models of specs in turn; each is used until the next is asked for.
    readings: the titles of what is read of attention rows, all in one pass (see `chosen_readings`).
    shared: share the work with the other processes of `accelerate launch`, which all call this with the same arguments.
        The main one returns what was measured, the others nothing.
    """
    check_labels(specs)
    shown = random.Random(settings.seed).sample(range(len(prompts)), min(EXAMPLES, len(prompts)))  # noqa: S311
    given, origin = _shortcuts(specs, prompts, shortcuts)
    parts = ranges_of_parts(len(prompts), settings.batch_size)
    plan = _Plan(prompts, parts, sorted(shown), settings, given, origin, readings)
    folders, keys = [work / f"measured-{i}" for i in range(len(specs))], [plan.keys(spec) for spec in specs]
    index, count = (processes().process_index, processes().num_processes) if shared else (0, 1)
    missing = [
        [part for part in range(len(parts)) if (i * len(parts) + part) % count == index and _is_missing(*where, part)]
        for i, where in enumerate(zip(folders, keys, strict=True))
    ]
    models = load([spec for spec, indices in zip(specs, missing, strict=True) if indices], settings)
    for spec, folder, own, indices in zip(specs, folders, keys, missing, strict=True):
        if indices:
            own_keys = {part: own[part] for part in indices}
            _measure_parts(next(models), spec, plan, own_keys, folder, progress and index == 0)
            gc.collect()
    if shared:
        processes().wait_for_everyone()
    if index:
        return ()
    return tuple(load_whole(*where) for where in zip(folders, keys, strict=True))


def _is_missing(folder: Path, keys: Sequence[str], part: int) -> bool:
    return load_measured(part_of(folder, part), keys[part]) is None


def _measure_parts(
    model: HookedModel, spec: ModelSpec, plan: _Plan, keys: Mapping[int, str], folder: Path, progress: bool
) -> None:
    """Measure some parts of one model, named with their keys, and save each."""
    prompts = PromptSet.of(plan.prompts, model.tokenizer)
    if plan.settings.recall:
        _ = prompts.answers.lengths  # of all at once: what it warns of is counted over all
    bar = progress_bar(f"parts of {spec.label}", items=keys.items(), unit="part", shown=progress and len(keys) > 1)
    for index, key in bar:
        save_measured(
            _measure(model, spec, plan, prompts.at(plan.parts[index]), plan.parts[index], progress),
            part_of(folder, index),
            key,
        )


def _shortcuts(
    specs: Sequence[ModelSpec], prompts: Sequence[Prompt], given: Mapping[str, Sequence[str]] | None
) -> tuple[dict[str, list[str]], str]:
    """Each relation's shortcut answers, and which facts they are from."""
    if given is not None:
        return {relation: list(answers) for relation, answers in given.items()}, "the training facts"
    for spec in specs:
        if isinstance(shortcuts := spec.run.get("shortcuts"), dict) and shortcuts:
            tied = spec.run.get("tied_relations")
            return shortcuts, f"the training facts of {spec.label}{_ties(tied if isinstance(tied, list) else ())}"
    asked = FactSet(tuple(prompt.fact for prompt in prompts))
    shortcuts = {relation: list(answers) for relation, answers in asked.most_frequent_answers().items()}
    return shortcuts, f"the facts asked about{_ties(asked.tied_relations())}"


def _ties(relations: Sequence[str]) -> str:
    """Relations of which several answers are the most frequent, in brackets; empty if there are none."""
    if not relations:
        return ""
    return f" (of {listed(relations)}, several answers are equally frequent, and the first in the alphabet counts)"


def _measure(
    model: HookedModel, spec: ModelSpec, plan: _Plan, prompts: PromptSet, part: range, progress: bool
) -> Measured:
    """Measure one model on the prompts of one part."""
    settings = plan.settings
    read = _read(model, prompts, settings, progress, plan.readings)
    answers = None
    if settings.recall:
        how = {"scoring": settings.scoring, "batch_size": settings.batch_size, "progress": progress}
        answers = recall(model, prompts, plan.shortcuts, **how)
    source: dict[str, object] = {
        "model": spec.model,
        "adapter": spec.adapter,
        "type": type(base_of(model.model)).__name__,
        "dtype": model.dtype,
        "kernel": model.kernel,
        "tokens_sha256": _tokens_hash(prompts),
        "subject_tokens": fmean(len(encoding.spans["subject"]) for encoding in prompts.encodings),
        "shortcuts_from": plan.origin if settings.recall else None,
        "made_by": dict(spec.run) or None,
    }
    shown = [i - part.start for i in plan.shown if i in part]
    return Measured(spec.label, read, answers, _examples(model, prompts.at(shown)) if shown else (), source)


def _read(
    model: HookedModel, prompts: PromptSet, settings: MeasureSettings, progress: bool, titles: Sequence[str]
) -> tuple[Reading, ...]:
    """The readings of these titles: all of the model's own rows in one pass, those of weighted rows in another."""

    def reader(title: str) -> Callable[[AttentionRows], Reading]:
        return lambda rows: READINGS[title].read(rows, settings.reduce)

    read = dict[str, Reading]()
    for weighted in (True, False):  # a family that has no weighted rows is refused first
        if readers := {title: reader(title) for title in titles if READINGS[title].weighted == weighted}:
            rows = value_weighted_rows(bridge_of(model)) if weighted else None
            size = settings.batch_size
            read |= read_from_rows(model, prompts, readers, rows=rows, batch_size=size, progress=progress)
    return tuple(read[title] for title in titles)


def _tokens_hash(prompts: PromptSet) -> str:
    """A hash of all prompts' tokens and spans, which models with the same tokenizer share."""
    tokens = [(encoding.ids, sorted(encoding.spans.items())) for encoding in prompts.encodings]
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def _examples(model: HookedModel, prompts: Sequence[Prompt]) -> tuple[ExampleRow, ...]:
    rows = read_attention(model, prompts)
    return tuple(
        ExampleRow(
            prompt.prompt_id,
            rows.tokens[i],
            tuple(rows.spans["subject"][i, : len(rows.tokens[i])].tolist()),
            tuple(map(tuple, rows.values[i, :, :, : len(rows.tokens[i])].mean(dim=1).tolist())),
        )
        for i, prompt in enumerate(prompts)
    )
