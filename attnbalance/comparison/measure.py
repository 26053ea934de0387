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
from attnbalance.errors import DataError
from attnbalance.models.bridge import bridge_of
from attnbalance.models.forward import base_of
from attnbalance.models.hooked import HookedModel
from attnbalance.readings.attention import FIRST_TOKEN, REST, AttentionRows, read_attention, read_from_rows
from attnbalance.readings.reading import Reading
from attnbalance.readings.recall import recall
from attnbalance.readings.value_weighted import value_weighted_rows

EXAMPLES = 3
"""Prompts whose attention rows the report shows."""


@dataclass(frozen=True)
class Measurement:
    """A reading of attention rows that a comparison can hold.

    read: makes it of rows, given the settings' `reduce`.
    verb, complement: what a model with more of it does, with "more", "less" or "most" between the two in sentences.
    about: what it is, in the words that follow "<title> is" in a report, given the settings' `reduce`.
    weighted: whether it is of value-weighted rows, from a float32 copy of the model.
    """

    read: Callable[[AttentionRows, str], Reading]
    verb: str
    complement: str
    about: Callable[[str], str]
    weighted: bool = False


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


def _share(part: str, complement: str, tokens: str) -> Measurement:
    """The share of attention on one part of the prompt (see `AttentionRows.share`), with its tokens in words."""
    about = f"in each head the sum of the last token's attention probabilities on {tokens}, from 0 to 1."
    return Measurement(lambda rows, reduce: rows.share(part), "attends", complement, lambda _: about)


def _about_weighted(reduce: str) -> str:
    reductions = {
        "max": "in each head the longest of these vectors",
        "max-of-mean": "in each layer the greatest length, averaged over heads, for any one token",
        "sum": "in each head the sum of these vectors' lengths",
    }
    return (
        "how much the last token takes from the subject's tokens: each attention probability times the length of the "
        f"vector that the head writes for that token (Kobayashi et al. 2020); {reductions[reduce]}, in the units of "
        "the model's residual stream."
    )


_ENTROPY = (
    "how widely the last token's attention is spread in each head, in nats: 0 where one token has all of it, log n "
    "where n tokens have the same. It grows with the number of tokens of the prompt."
)

SUBJECT_ATTENTION = "subject attention"

READINGS: dict[str, Measurement] = {
    SUBJECT_ATTENTION: Measurement(
        lambda rows, reduce: rows.to("subject", reduce), "attends", "to the subject", _about_subject_attention
    ),
    "subject share": _share("subject", "to all of the subject", "all of the subject's tokens"),
    "relation share": _share("relation", "to the relation", "the relation's tokens"),
    "context share": _share("context", "to the context", "the context's tokens"),
    "first token share": _share(
        FIRST_TOKEN,
        "to the first token",
        "the prompt's first token (none if that belongs to the subject, relation or context)",
    ),
    "rest share": _share(
        REST,
        "to the rest of the prompt",
        "all tokens but the first that belong to none of subject, relation and context",
    ),
    "attention entropy": Measurement(
        lambda rows, reduce: rows.entropy(), "has", "attention entropy", lambda _: _ENTROPY
    ),
    "value-weighted subject attention": Measurement(
        lambda rows, reduce: rows.to("subject", reduce), "takes", "from the subject", _about_weighted, weighted=True
    ),
}
"""The readings that a comparison can hold, by their title (`Reading.title`)."""


def chosen_readings(further: Sequence[str] = ()) -> tuple[str, ...]:
    """The titles of a comparison's readings: subject attention, which headlines are about, and the further ones.

    Raises `DataError` for a title that is not in `READINGS`.
    """
    if isinstance(further, str):
        raise DataError(f"readings must be a list of names, got the text {further!r}")
    if unknown := [title for title in further if title not in READINGS]:
        raise DataError(f"readings must be among {', '.join(READINGS)}; got {unknown[0]!r}")
    return tuple(dict.fromkeys((SUBJECT_ATTENTION, *further)))


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
    readings: Sequence[str] = (SUBJECT_ATTENTION,),
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
    readings: the titles of what is read of attention rows, all in one pass (see `chosen_readings`).
    """
    check_labels(specs)
    examples = random.Random(settings.seed).sample(range(len(prompts)), min(EXAMPLES, len(prompts)))  # noqa: S311
    given, origin = _shortcuts(specs, prompts, shortcuts)
    keys = [_key(spec, prompts, settings, given, readings) for spec in specs]
    results = [load_measured(work / f"measured-{index}", key) for index, key in enumerate(keys)]
    models = load([spec for spec, measured in zip(specs, results, strict=True) if measured is None], settings)
    for index, spec in enumerate(specs):
        if results[index] is None:
            measured = _measure(
                next(models), spec, prompts, sorted(examples), settings, given, origin, progress, readings
            )
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
    readings: Sequence[str],
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
    readings: the titles of the readings.
    """
    prompts = PromptSet.of(prompts, model.tokenizer)
    size = settings.batch_size
    read = _read(model, prompts, settings, progress, readings)
    answers = None
    if settings.recall:
        answers = recall(model, prompts, shortcuts, scoring=settings.scoring, batch_size=size, progress=progress)
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
    return Measured(spec.label, read, answers, _examples(model, prompts.at(shown)), source)


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


def _key(
    spec: ModelSpec,
    prompts: Sequence[Prompt],
    settings: MeasureSettings,
    shortcuts: Mapping[str, Sequence[str]],
    readings: Sequence[str],
) -> str:
    """Everything that a measurement depends on, as one hash."""
    asked = [(prompt.as_dict(), settings.recall and shortcuts.get(prompt.fact.relation)) for prompt in prompts]
    parts = [asdict(spec), fingerprints(spec, settings), asdict(settings), list(readings), asked]
    text = json.dumps(parts, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
