"""What a reader must know before trusting a headline: training facts asked, few subjects, models of two dtypes."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnbalance.comparison.specs import MeasureSettings, ModelSpec
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt
from attnbalance.data.sources.table_files import read_rows
from attnbalance.files.outputs import MARKER, read_json
from attnbalance.files.seals import CHECKPOINT, RUN, SCALED
from attnbalance.files.work import UNFINISHED
from attnbalance.finetuning.runs import CHECKPOINTS, FACTS, NONE
from attnbalance.models.fingerprint import files_fingerprint
from attnbalance.models.load import load_limits
from attnbalance.report.wording import listed

SUBJECTS = 20
"""Least number of subjects whose intervals are trusted (see `benchmarks/intervals.py`)."""

TRAINED = (RUN, CHECKPOINT, UNFINISHED + RUN)
"""The kinds of folders that hold a finetuned model, or are its run's."""
LEARNED = ("train", "replay")
"""The parts of a split whose facts are learned."""
NAME = {"subject", "relation"}


def caveats(specs: Sequence[ModelSpec], prompts: Sequence[Prompt], dtypes: Mapping[str, str], *others: str) -> str:
    """The caveats at a headline's end, and others in words; empty if there are none.

    See `seen_in_training`, `few_subjects` and `unlike_dtypes`, which takes the dtype of each model by its label.
    """
    parts = (seen_in_training(specs, prompts), few_subjects(prompts), unlike_dtypes(dtypes), *others)
    return "; ".join(part for part in parts if part)


def unlike_tokens(specs: Sequence[ModelSpec], prompts: Sequence[Prompt], settings: MeasureSettings) -> str:
    """Which models' tokenizers split the prompts differently than the first one's, in words; empty if none does."""
    limits = [load_limits(spec.model, settings.tokenizer, settings.trust_remote_code, spec.adapter) for spec in specs]
    first, *others = [PromptSet.of(prompts, tokenizer) for tokenizer, _ in limits]
    ids = [encoding.ids for encoding in first.encodings]
    unlike = [
        spec.label
        for spec, other in zip(specs[1:], others, strict=True)
        if other.encodings is not first.encodings and [encoding.ids for encoding in other.encodings] != ids
    ]
    if not unlike:
        return ""
    verb = "splits" if len(unlike) == 1 else "split"
    return f"{listed(unlike)} {verb} these prompts into different tokens than {specs[0].label}, which changes answers"


def unlike_dtypes(dtypes: Mapping[str, str]) -> str:
    """That models were read in different dtypes, whose rounding differs, in words; empty if all were read in one.

    >>> unlike_dtypes({"base": "bfloat16", "tuned": "float32"})
    'base was read in bfloat16 and tuned in float32, so small differences may be rounding (read all in float32)'
    """
    if len(set(dtypes.values())) < 2:
        return ""
    (first, dtype), *others = dtypes.items()
    clauses = listed([f"{first} was read in {dtype}", *(f"{label} in {dtype}" for label, dtype in others)])
    return f"{clauses}, so small differences may be rounding (read all in float32)"


def few_subjects(prompts: Sequence[Prompt]) -> str:
    """That the subjects are too few to trust their intervals, in words; empty from 20 subjects on."""
    n = len({prompt.fact.composed_subject for prompt in prompts})
    return f"{n} subject{'s are' if n != 1 else ' is'} too few to trust the intervals" if n < SUBJECTS else ""


def seen_in_training(specs: Sequence[ModelSpec], prompts: Sequence[Prompt]) -> str:
    """How many questions are about training facts of models that `finetune` made, in words; empty if none is.

    A fact is a training fact if the run's file of them, or of replayed ones, has its subject and relation. Models whose
    files were not found are named: a checkpoint that was copied out of its run, or whose run is not finished, and a
    model that began from one that is gone or was changed since. So are models that learned from instructions, which
    runs do not keep, unless each question comes with its context.
    """
    asked = [_name(prompt.fact.subject, prompt.fact.relation) for prompt in prompts]
    trained = {spec.label: _trained(spec) for spec in specs}
    counts = {label: sum(map(learned.facts.__contains__, asked)) for label, learned in trained.items()}
    seen = [f"{label} was finetuned on the facts of {n:,} of these {len(asked):,}" for label, n in counts.items() if n]
    unknown = [label for label, learned in trained.items() if not learned.all_known]
    missing = (
        f"training facts of {listed(unknown)} were not found, so the questions may be about them" if unknown else ""
    )
    from_memory = not all("context" in prompt.spans for prompt in prompts)
    instructed = [label for label, learned in trained.items() if learned.instructed and from_memory]
    tuned = f"{listed(instructed)} learned from instructions, which may answer these questions" if instructed else ""
    return "; ".join(part for part in (listed(seen) if seen else "", missing, tuned) if part)


@dataclass(frozen=True)
class _Learned:
    """What a model was trained on.

    facts: the (subject, relation) pairs.
    all_known: whether all files of them were found.
    instructed: whether it was also trained on instructions.
    """

    facts: set[tuple[str, str]]
    all_known: bool
    instructed: bool


def _trained(spec: ModelSpec) -> _Learned:
    """What a model was trained on in its own run and in the runs that this began from.

    The run of a scaled adapter is the one that it was scaled from. A folder that holds another model now, or other
    files beside it, does not count: its facts are missing.
    """
    facts, visited, expected, found = set[tuple[str, str]](), set[Path](), set[str](), {NONE.sha256}
    all_there, instructed = True, False
    to_visit: list[tuple[str, object]] = [(spec.model, None), (spec.adapter or _named_base(spec.model), None)]
    while to_visit:
        name, fingerprint = to_visit.pop()
        folder = Path(os.path.abspath(name))  # without "..", whose parents are others
        if not folder.is_dir():  # a file or a Hub id, unless a record names it with its whole path
            all_there &= not Path(name).is_absolute() or folder.exists()
            continue
        own = read_json(folder / MARKER)
        if fingerprint and own and files_fingerprint(folder) != fingerprint:
            all_there = False
            continue
        folders = {path for start in (folder, folder.resolve()) for path in (start, *_above(start, own.get("kind")))}
        for path in folders - visited:
            visited.add(path)
            record = read_json(path / MARKER)
            if record.get("kind") == SCALED:
                scaled = _config(record)
                if isinstance(source := scaled.get("adapter"), str):
                    to_visit.append((source, scaled.get("adapter_files")))
                else:
                    all_there = False  # which adapter it was, this record does not say
            elif record.get("kind") in TRAINED:
                if isinstance(base := record.get("base"), str):
                    to_visit.append((base, _config(record).get("model_files")))
                instructed |= "instructions_sha256" in _config(record)
                hashes = _hashes(record)
                expected |= set(hashes.values())
                for part in LEARNED:
                    if (path / FACTS[part]).is_file():
                        rows = read_rows(path / FACTS[part])
                        facts |= {_name(row["subject"], row["relation"]) for row in rows if row.keys() >= NAME}
                        found.add(hashes.get(part, NONE.sha256))
    return _Learned(facts, all_there and expected <= found, instructed)


def _above(folder: Path, kind: object) -> tuple[Path, ...]:
    """The folders above a model that may hold its run's record: of unfinished work, checkpoints lie in it directly."""
    if kind is None:
        return (*folder.parents[:2],)
    return (folder.parents[1],) if kind == CHECKPOINT and folder.parent.name == CHECKPOINTS else ()


def _named_base(model: str) -> str:
    """The base that an adapter's folder names; otherwise the model itself."""
    base = read_json(Path(model) / "adapter_config.json").get("base_model_name_or_path")
    return base if isinstance(base, str) else model


def _config(record: Mapping[str, object]) -> dict[str, object]:
    config = record.get("config")
    return config if isinstance(config, dict) else {}


def _hashes(record: Mapping[str, object]) -> dict[str, str]:
    """The hashes of the facts that a run learned, by part, as its record has them."""
    hashes = _config(record).get("facts_sha256")
    return {part: str(hashes[part]) for part in LEARNED if part in hashes} if isinstance(hashes, dict) else {}


def _name(subject: object, relation: object) -> tuple[str, str]:
    return unicodedata.normalize("NFC", str(subject)), unicodedata.normalize("NFC", str(relation))
