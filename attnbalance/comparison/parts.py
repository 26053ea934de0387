"""Prompts in parts, each measured and saved on its own.

A killed run goes on at the part that it was at, several processes take turns at parts, and their numbers are those of
one process: which prompts share a part does not depend on who measures it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from attnbalance.comparison.comparison import Measured
from attnbalance.comparison.saved import load_measured
from attnbalance.errors import OutputError
from attnbalance.readings.reading import concatenate
from attnbalance.readings.recall import Recall

BATCHES = 8
"""Batches of a part, at most. A larger part pads less and reads prefixes more seldom; a smaller one loses less."""

Value = TypeVar("Value")


def ranges_of_parts(prompts: int, batch_size: int) -> list[range]:
    """The indices of each part's prompts: as few parts as `BATCHES` allows, alike in size.

    >>> ranges_of_parts(300, 32)
    [range(0, 150), range(150, 300)]
    """
    count = max(1, -(-prompts // (BATCHES * batch_size)))
    ends = [prompts * i // count for i in range(count + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def part_of(work: Path, index: int) -> Path:
    """The folder of a part in the work folder of one model."""
    return work / f"part-{index}"


def load_whole(work: Path, keys: Sequence[str]) -> Measured:
    """What was measured of one model, from its parts' folders and keys; raises `OutputError` for one that is gone."""
    parts = [load_measured(part_of(work, index), key) for index, key in enumerate(keys)]
    complete = [part for part in parts if part is not None]
    if len(complete) < len(keys):
        missing = part_of(work, parts.index(None))
        raise OutputError(f"{missing} was removed or changed while the run went on; run the same command again")
    return joined(complete)


def joined(parts: Sequence[Measured]) -> Measured:
    """What was measured of one model's prompts, part by part, as one."""
    if len(parts) == 1:
        return parts[0]
    answers = [part.recall for part in parts if part.recall is not None]
    return Measured(
        parts[0].label,
        tuple(concatenate(readings) for readings in zip(*(part.readings for part in parts), strict=True)),
        _joined_answers(answers) if answers else None,
        tuple(example for part in parts for example in part.examples),
        _joined_source(parts),
    )


def _joined_answers(parts: Sequence[Recall]) -> Recall:
    def column(values: Sequence[Sequence[Value]]) -> tuple[Value, ...]:
        return tuple(value for part in values for value in part)

    names = ("prompt_ids", "subjects", "popularity", "outputs", "f1", "shortcut")
    right = {scoring: column([part.right[scoring] for part in parts]) for scoring in parts[0].right}
    return replace(parts[0], right=right, **{name: column([getattr(part, name) for part in parts]) for name in names})


def _joined_source(parts: Sequence[Measured]) -> Mapping[str, object]:
    """The source of the first part, with the hash and the mean of all parts' tokens."""
    sources: list[Mapping[str, Any]] = [part.source for part in parts]
    hashes = "".join(source["tokens_sha256"] for source in sources)
    sizes = [len(part.readings[0].prompt_ids) for part in parts]
    lengths = [source["subject_tokens"] * size for source, size in zip(sources, sizes, strict=True)]
    tokens = hashlib.sha256(hashes.encode()).hexdigest()[:16]
    return {**sources[0], "tokens_sha256": tokens, "subject_tokens": sum(lengths) / sum(sizes)}
