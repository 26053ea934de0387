"""Measuring several models on the same prompts, one after the other, each kept as soon as it is done."""

from __future__ import annotations

import gc
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from attnbalance.errors import BadRowsError, DataError, ModelError
from attnbalance.facts import FactSet
from attnbalance.models.fingerprint import files_fingerprint
from attnbalance.models.forward import base_of
from attnbalance.models.hooked import HookedModel
from attnbalance.models.load import load_limits, load_model
from attnbalance.outputs import MARKER, read_json, replacing, write_json
from attnbalance.prompts import Prompt, make_prompts
from attnbalance.readings.attention import read_attention, read_subject_attention
from attnbalance.readings.compare import ExampleRow, Measured
from attnbalance.readings.contrast import make_contrasts
from attnbalance.readings.reading import Reading
from attnbalance.readings.recall import NEW_TOKENS, Recall, recall
from attnbalance.tokens import as_chat, check_lengths, encode

EXAMPLES = 3


@dataclass(frozen=True)
class ModelSpec:
    """A model to measure, under a label: a folder or Hub id, with an adapter on top where one is named."""

    label: str
    model: str
    adapter: str | None = None

    @property
    def run(self) -> Mapping[str, object]:
        """What the model's (or adapter's) own folder says of how it was made; empty where it says nothing."""
        return read_json(Path(self.adapter or self.model) / MARKER)


@dataclass(frozen=True)
class How:
    """How models are asked and read; the same for all models of a comparison."""

    template: str = "qa"
    chat: bool = False
    reduce: str = "max"
    recall: bool = False
    batch_size: int = 32
    dtype: str | None = None
    device: str | None = None
    tokenizer: str | None = None
    trust_remote_code: bool = False
    seed: int = 0


def parse_spec(text: str) -> ModelSpec:
    """LABEL=MODEL, LABEL=MODEL+ADAPTER, or MODEL alone, whose label is its last name; raises `DataError` otherwise.

    '=' and '+' belong to a path where something of that whole name exists.
    """
    label, equals, path = text.partition("=")
    if Path(text).exists() and text:
        label, path = Path(text).resolve().name, text
    elif not equals:
        label, path = Path(text.partition("+")[0]).name, text
    if not label or not path:
        raise DataError(f"expected LABEL=MODEL or LABEL=MODEL+ADAPTER, got {text!r}")
    if Path(_home(path)).exists() or "+" not in path:
        return ModelSpec(label, _home(path))
    model, _, adapter = path.rpartition("+")
    if not model or not adapter:
        raise DataError(f"expected LABEL=MODEL+ADAPTER, got {text!r}")
    return ModelSpec(label, _home(model), _home(adapter))


def _home(path: str) -> str:
    """The path with `~` expanded, which a shell does at the beginning of a word only."""
    return str(Path(path).expanduser()) if path.startswith("~") else path


def check_labels(specs: Sequence[ModelSpec]) -> None:
    """Raise `DataError` where two models have one label."""
    twice = [label for label, count in Counter(spec.label for spec in specs).items() if count > 1]
    if twice:
        raise DataError(f"label {twice[0]!r} is used for more than one model; give each its own: LABEL=MODEL")


def load_spec(spec: ModelSpec, how: How) -> HookedModel:
    """The model of a spec, loaded as `how` says (see `load_model`)."""
    return load_model(
        spec.model,
        adapter=spec.adapter,
        tokenizer=how.tokenizer,
        dtype=how.dtype,
        device=how.device,
        trust_remote_code=how.trust_remote_code,
    )


def files_of(spec: ModelSpec, how: How) -> list[str | None]:
    """Fingerprints of all local files that a measurement of a model depends on (see `files_fingerprint`)."""
    base = read_json(Path(spec.model) / "adapter_config.json").get("base_model_name_or_path")
    return [files_fingerprint(path) for path in (spec.model, base, spec.adapter, how.tokenizer) if path]


def settings(specs: Sequence[ModelSpec], facts: FactSet, how: How, skip_bad: bool) -> dict[str, object]:
    """All that the results of a command on some models and facts depend on; raises `DataError` for a label twice."""
    check_labels(specs)
    return {
        "models": [asdict(spec) for spec in specs],
        "files": [files_of(spec, how) for spec in specs],
        "facts": facts.name,
        "facts_sha256": facts.sha256,
        "how": asdict(how),
        "skip_bad": skip_bad,
    }


def usable_prompts(
    facts: FactSet, specs: Sequence[ModelSpec], how: How, skip_bad: bool, contrasted: bool = False
) -> tuple[tuple[Prompt, ...], dict[str, int]]:
    """The prompts that every model can be asked, and the number of facts dropped, by reason.

    Checked with every tokenizer and every model's number of positions before any model is loaded, so that all models
    get the same prompts. `contrasted` also needs every answer to have another one of its relation to be set against
    (see `make_contrasts`). Without `skip_bad` the first reason raises `BadRowsError`; nothing left raises `DataError`.
    """
    named = [load_limits(spec.model, how.tokenizer, how.trust_remote_code) for spec in specs]
    room = NEW_TOKENS if how.recall else 0

    def make(some: FactSet) -> tuple[Prompt, ...]:
        prompts = make_prompts(some, how.template)
        if how.chat:
            rendered = [as_chat(prompts, tokenizer) for tokenizer, _ in named]
            if any([p.text for p in one] != [p.text for p in rendered[0]] for one in rendered[1:]):
                raise ModelError(
                    "these models have different chat templates and cannot be asked the same; measure each alone"
                )
            prompts = rendered[0]
        for tokenizer, positions in named:
            check_lengths(encode(prompts, tokenizer), positions, extra=room)
            if contrasted:
                make_contrasts(prompts, tokenizer)
        return prompts

    return without_bad(facts, make, skip_bad)


def without_bad(
    facts: FactSet, make: Callable[[FactSet], tuple[Prompt, ...]], skip_bad: bool
) -> tuple[tuple[Prompt, ...], dict[str, int]]:
    """What `make` gives for the facts, without those that it refuses where `skip_bad` is true, and their number."""
    dropped: Counter[str] = Counter()
    while len(facts):
        try:
            return make(facts), dict(dropped)
        except BadRowsError as error:
            if not skip_bad:
                raise
            dropped[error.what] += len(error.indices)
            bad = set(error.indices)
            facts = replace(facts, facts=tuple(fact for i, fact in enumerate(facts) if i not in bad))
    raise DataError(f"no usable facts are left: {dict(dropped)}")


def measure_all(
    specs: Sequence[ModelSpec],
    prompts: Sequence[Prompt],
    how: How,
    work: Path,
    shortcuts: Mapping[str, Sequence[str]] | None = None,
    progress: bool = False,
) -> tuple[Measured, ...]:
    """Measure each model on the prompts; what was measured before of the same weights and prompts is read from `work`.

    `shortcuts` gives each relation's most frequent training answer, the same for all labels, so that their rates can be
    compared: by default those that the first model made by `finetune` recorded, or else, where nothing is known of
    training, the most frequent answers of the prompts' facts. The sources of the result say which.
    """
    check_labels(specs)
    examples = random.Random(how.seed).sample(range(len(prompts)), min(EXAMPLES, len(prompts)))  # noqa: S311
    chosen = [prompts[i] for i in sorted(examples)]
    short, origin = _shortcuts(specs, prompts, shortcuts)
    measured = []
    for number, spec in enumerate(specs):
        key = _key(spec, prompts, how, short)
        folder = work / f"measured-{number}"
        one = _load(folder, key)
        if one is None:
            one = _measure(spec, prompts, chosen, how, short, origin, progress)
            _save(one, folder, key)
        measured.append(one)
    return tuple(measured)


def _shortcuts(
    specs: Sequence[ModelSpec], prompts: Sequence[Prompt], given: Mapping[str, Sequence[str]] | None
) -> tuple[dict[str, list[str]], str]:
    recorded = [(spec.label, spec.run.get("shortcuts")) for spec in specs]
    known = [(label, found) for label, found in recorded if isinstance(found, dict)]
    if given is not None:
        return {relation: list(answers) for relation, answers in given.items()}, "the training facts"
    if known:
        return known[0][1], f"the training facts of {known[0][0]}"
    asked = FactSet(tuple(prompt.fact for prompt in prompts)).most_frequent_answers()
    return {relation: list(answers) for relation, answers in asked.items()}, "the facts asked about"


def _measure(
    spec: ModelSpec,
    prompts: Sequence[Prompt],
    chosen: Sequence[Prompt],
    how: How,
    shortcuts: Mapping[str, Sequence[str]],
    origin: str,
    progress: bool,
) -> Measured:
    model = load_spec(spec, how)
    attention = read_subject_attention(model, prompts, reduce=how.reduce, batch_size=how.batch_size, progress=progress)
    answers = None
    if how.recall:
        answers = recall(
            model, prompts, shortcuts, max_new_tokens=NEW_TOKENS, batch_size=how.batch_size, progress=progress
        )
    source: dict[str, object] = {
        "model": spec.model,
        "adapter": spec.adapter,
        "type": type(base_of(model.model)).__name__,
        "dtype": str(base_of(model.model).dtype).removeprefix("torch."),
        "kernel": model.kernel,
        "shortcuts_from": origin if how.recall else None,
        "made_by": dict(spec.run) or None,
    }
    found = Measured(spec.label, attention, answers, _examples(model, chosen), source)
    del model
    gc.collect()
    return found


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


def _key(spec: ModelSpec, prompts: Sequence[Prompt], how: How, shortcuts: Mapping[str, Sequence[str]]) -> str:
    """What a measurement depends on, as one hash."""
    asked = [(prompt.as_dict(), how.recall and shortcuts.get(prompt.fact.relation)) for prompt in prompts]
    text = json.dumps([asdict(spec), files_of(spec, how), asdict(how), asked], ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _save(one: Measured, folder: Path, key: str) -> None:
    from safetensors.torch import save_file

    reading = one.attention
    about = {
        "key": key,
        "label": one.label,
        "attention": {name: getattr(reading, name) for name in ("name", "unit", "layers", "prompt_ids", "subjects")},
        "recall": None if one.recall is None else asdict(one.recall),
        "examples": [asdict(example) for example in one.examples],
        "source": dict(one.source),
    }
    with replacing(folder) as temporary:
        temporary.mkdir()
        save_file({"values": reading.values.contiguous()}, temporary / "reading.safetensors")
        write_json(temporary / "measured.json", about)


def _load(folder: Path, key: str) -> Measured | None:
    """What was measured before under this key; None where there is nothing of the kind."""
    from safetensors.torch import load_file

    about = read_json(folder / "measured.json")
    if about.get("key") != key:
        return None
    was = about["attention"]
    reading = Reading(
        was["name"],
        was["unit"],
        load_file(folder / "reading.safetensors")["values"],
        tuple(was["layers"]),
        tuple(was["prompt_ids"]),
        tuple(was["subjects"]),
    )
    examples = tuple(
        ExampleRow(e["prompt_id"], tuple(e["tokens"]), tuple(e["in_subject"]), tuple(map(tuple, e["weights"])))
        for e in about["examples"]
    )
    columns = about["recall"] and {name: tuple(column) for name, column in about["recall"].items()}
    return Measured(about["label"], reading, Recall(**columns) if columns else None, examples, about["source"])
