"""What a reader must know before trusting a headline: training facts asked, few subjects, models of two dtypes."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path

from attnbalance.comparison.specs import MeasureSettings, ModelSpec
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt
from attnbalance.data.sources.table_files import read_rows
from attnbalance.files.outputs import MARKER, read_json
from attnbalance.files.seals import SCALED
from attnbalance.finetuning.runs import FACTS, KIND
from attnbalance.models.load import load_limits
from attnbalance.report.wording import listed

SUBJECTS = 20
"""Least number of subjects whose intervals are trusted (see `benchmarks/intervals.py`)."""


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

    A fact is a training fact if the run's file of them, or of replayed ones, has its subject and relation.
    """
    asked = [_name(prompt.fact.subject, prompt.fact.relation) for prompt in prompts]
    counts = {spec.label: sum(map(_trained(spec).__contains__, asked)) for spec in specs}
    seen = [f"{label} was finetuned on the facts of {n:,} of these {len(asked):,}" for label, n in counts.items() if n]
    return listed(seen) if seen else ""


def _trained(spec: ModelSpec) -> set[tuple[str, str]]:
    """The (subject, relation) pairs that a model was trained on, in its own run and in those that it began from.

    A checkpoint's run is one of the folders above it; that of a scaled adapter is the one that it was scaled from.
    """
    facts, seen, left = set[tuple[str, str]](), set[Path](), [spec.model, spec.adapter or spec.model]
    while left:
        folder = Path(left.pop()).absolute()
        for path in {folder, *folder.parents[:2]} - seen:
            seen.add(path)
            record = read_json(path / MARKER)
            if record.get("kind") == SCALED:
                left.append(record["config"]["adapter"])
            elif record.get("kind") == KIND:
                if isinstance(base := record.get("base"), str):
                    left.append(base)
                files = [path / FACTS[part] for part in ("train", "replay")]
                rows = [row for file in files if file.is_file() for row in read_rows(file)]
                facts |= {
                    _name(row["subject"], row["relation"]) for row in rows if {"subject", "relation"} <= row.keys()
                }
    return facts


def _name(subject: object, relation: object) -> tuple[str, str]:
    return unicodedata.normalize("NFC", str(subject)), unicodedata.normalize("NFC", str(relation))
