"""Measuring several models on the same prompts, one after the other, each saved as soon as it is measured."""

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
from attnbalance.comparison.saved import load_measured, save_measured
from attnbalance.comparison.specs import MeasureSettings, ModelSpec, check_labels, fingerprints, load_each
from attnbalance.data.facts import FactSet
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt
from attnbalance.models.forward import base_of
from attnbalance.models.hooked import HookedModel
from attnbalance.readings.attention import read_attention, read_subject_attention
from attnbalance.readings.reading import Reading
from attnbalance.readings.recall import recall

EXAMPLES = 3
"""Prompts whose attention rows the report shows."""


@dataclass(frozen=True)
class Measurement:
    """A reading that every comparison holds.

    read: measures it on prompts; the arguments are model, prompts, settings, and whether to show progress.
    verb, complement: what a model with more of it does, with "more", "less" or "most" between the two in sentences.
    about: what it is, in the words that follow "<title> is" in a report, given the settings' `reduce`.
    """

    read: Callable[[HookedModel, Sequence[Prompt], MeasureSettings, bool], Reading]
    verb: str
    complement: str
    about: Callable[[str], str]


def _read_subject_attention(
    model: HookedModel, prompts: Sequence[Prompt], settings: MeasureSettings, progress: bool
) -> Reading:
    size = settings.batch_size
    return read_subject_attention(model, prompts, reduce=settings.reduce, batch_size=size, progress=progress)


def _about_subject_attention(reduce: str) -> str:
    reductions = {
        "max": "in each head the largest attention probability on any one of them",
        "max-of-mean": "in each layer the largest attention probability, averaged over heads, on any one of them",
        "sum": "in each head the sum of the attention probabilities on all of them",
    }
    return (
        "how much the last token of the prompt, from which the answer is given, attends to the subject's tokens: "
        f"{reductions[reduce]}, from 0 to 1. A model that looks away from the subject can still guess what kind of "
        "answer is wanted, but not which one."
    )


READINGS: dict[str, Measurement] = {
    "subject attention": Measurement(_read_subject_attention, "attends", "to the subject", _about_subject_attention),
}
"""The readings of a comparison by their title (`Reading.title`). Headlines are about the first one."""


def reading_words(title: str) -> tuple[str, str]:
    """Verb and complement of a reading in sentences, for a title that is not in `READINGS` too.

    >>> "{} more {}".format(*reading_words("subject attention"))
    'attends more to the subject'
    """
    entry = READINGS.get(title)
    return (entry.verb, entry.complement) if entry else ("has", title)


def measure_all(
    specs: Sequence[ModelSpec],
    prompts: Sequence[Prompt],
    settings: MeasureSettings,
    work: Path,
    shortcuts: Mapping[str, Sequence[str]] | None = None,
    progress: bool = False,
    load: Callable[[Sequence[ModelSpec], MeasureSettings], Iterator[HookedModel]] = load_each,
) -> tuple[Measured, ...]:
    """Measure each model on the prompts.

    specs: the models.
    prompts: the same for all models (see `usable_prompts`).
    settings: how models are asked and read.
    work: folder of measurements; those of the same weights, prompts and settings are read from it, not repeated.
    shortcuts: each relation's most frequent training answer, for all labels, so that shortcut rates can be compared.
        By default those that the first model made by `finetune` recorded; without one, the most frequent answers of
        the prompts' facts. `Measured.source` says which.
    progress: show progress bars.
    load: gives the models of specs in turn; each is used until the next is asked for.
    """
    check_labels(specs)
    examples = random.Random(settings.seed).sample(range(len(prompts)), min(EXAMPLES, len(prompts)))  # noqa: S311
    given, origin = _shortcuts(specs, prompts, shortcuts)
    keys = [_key(spec, prompts, settings, given) for spec in specs]
    results = [load_measured(work / f"measured-{index}", key) for index, key in enumerate(keys)]
    models = load([spec for spec, measured in zip(specs, results, strict=True) if measured is None], settings)
    for index, spec in enumerate(specs):
        if results[index] is None:
            measured = _measure(next(models), spec, prompts, sorted(examples), settings, given, origin, progress)
            save_measured(measured, work / f"measured-{index}", keys[index])
            results[index] = measured
            gc.collect()
    return tuple(measured for measured in results if measured is not None)


def _shortcuts(
    specs: Sequence[ModelSpec], prompts: Sequence[Prompt], given: Mapping[str, Sequence[str]] | None
) -> tuple[dict[str, list[str]], str]:
    """Each relation's shortcut answers, and which facts they are from."""
    if given is not None:
        return {relation: list(answers) for relation, answers in given.items()}, "the training facts"
    recorded = [(spec.label, spec.run.get("shortcuts")) for spec in specs]
    known = [(label, shortcuts) for label, shortcuts in recorded if isinstance(shortcuts, dict)]
    if known:
        return known[0][1], f"the training facts of {known[0][0]}"
    asked = FactSet(tuple(prompt.fact for prompt in prompts)).most_frequent_answers()
    return {relation: list(answers) for relation, answers in asked.items()}, "the facts asked about"


def _measure(
    model: HookedModel,
    spec: ModelSpec,
    prompts: Sequence[Prompt],
    shown: Sequence[int],
    settings: MeasureSettings,
    shortcuts: Mapping[str, Sequence[str]],
    origin: str,
    progress: bool,
) -> Measured:
    """Measure one model.

    model: the model.
    spec: its label and where it is from.
    prompts: all prompts.
    shown: the indices of those whose attention rows are kept.
    settings: how it is asked and read.
    shortcuts: each relation's shortcut answers.
    origin: which facts the shortcuts are from.
    progress: show progress bars.
    """
    prompts = PromptSet.of(prompts, model.tokenizer)
    readings = tuple(entry.read(model, prompts, settings, progress) for entry in READINGS.values())
    answers = None
    if settings.recall:
        size, scoring = settings.batch_size, settings.scoring
        answers = recall(model, prompts, shortcuts, scoring=scoring, batch_size=size, progress=progress)
    source: dict[str, object] = {
        "model": spec.model,
        "adapter": spec.adapter,
        "type": type(base_of(model.model)).__name__,
        "dtype": str(base_of(model.model).dtype).removeprefix("torch."),
        "kernel": model.kernel,
        "tokens_sha256": _tokens_hash(prompts),
        "subject_tokens": fmean(len(encoding.spans["subject"]) for encoding in prompts.encodings),
        "shortcuts_from": origin if settings.recall else None,
        "made_by": dict(spec.run) or None,
    }
    return Measured(spec.label, readings, answers, _examples(model, prompts.at(shown)), source)


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


def _key(
    spec: ModelSpec, prompts: Sequence[Prompt], settings: MeasureSettings, shortcuts: Mapping[str, Sequence[str]]
) -> str:
    """Everything that a measurement depends on, as one hash."""
    asked = [(prompt.as_dict(), settings.recall and shortcuts.get(prompt.fact.relation)) for prompt in prompts]
    parts = [asdict(spec), fingerprints(spec, settings), asdict(settings), list(READINGS), asked]
    text = json.dumps(parts, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
