"""Where the contexts of conflicts say either answer, in tokens, and how much attention goes there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from attnbalance.data.conflicts import says
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import CharSpan, Prompt
from attnbalance.readings.attention import AttentionRows
from attnbalance.readings.reading import Reading
from attnbalance.readings.reliance import as_conflict

CONTEXT_ANSWER, MEMORY_ANSWER = KINDS = ("context answer", "memory answer")
"""What a context may say: its own answer, and the remembered one."""

NEIGHBOURS = 2
"""Characters on either side of a mention that show whether it is a part of a longer word or number."""


def find_mentions(prompts: PromptSet) -> dict[str, dict[str, tuple[int, ...]]]:
    """For each of `KINDS`, the tokens of all its mentions in the context, by prompt_id.

    Only prompts whose context says both answers are there. A mention is an accepted answer as it is written, in any
    case, as whole words (see `says`). Raises `BadRowsError` for mentions that their tokens do not hold (see `encode`).

    prompts: prompts about conflicts, with the span "context".
    """
    marked = [replace(prompt, spans=_spans(prompt)) for prompt in prompts]
    positions: dict[str, dict[str, tuple[int, ...]]] = {kind: {} for kind in KINDS}
    for encoding in PromptSet.of(marked, prompts.tokenizer).encodings:
        own = {
            kind: {i for role, held in encoding.spans.items() if role.startswith(kind) for i in held} for kind in KINDS
        }
        if all(own.values()):
            for kind in KINDS:
                positions[kind][encoding.prompt.prompt_id] = tuple(sorted(own[kind]))
    return positions


def to_mentions(rows: AttentionRows, kind: str, positions: Mapping[str, Sequence[int]]) -> Reading:
    """The sum of each row over the mentions of one of `KINDS`; 0 for prompts that have no positions."""
    values = torch.stack(
        [
            row[..., list(positions.get(prompt.prompt_id, ()))].sum(-1)
            for prompt, row in zip(rows.prompts, rows.values, strict=True)
        ]
    )
    return Reading.of(rows.prompts, f"{kind} attention (sum)", "probability", values, rows.layers)


def _spans(prompt: Prompt) -> dict[str, CharSpan]:
    """The characters of each mention, under its kind and a number."""
    conflict, start = as_conflict(prompt), prompt.spans["context"][0]
    return {
        f"{kind} {number}": (start + begin, start + end)
        for kind, accepted in zip(KINDS, (conflict.answers, conflict.memory_answers), strict=True)
        for number, (begin, end) in enumerate(_mentions(prompt.part("context"), accepted))
    }


def _mentions(text: str, answers: Sequence[str]) -> Iterator[CharSpan]:
    """The characters of each mention of an answer in a text."""
    for answer in answers:
        for match in re.finditer(re.escape(answer), text, re.IGNORECASE):
            start, end = match.span()
            if says(f"- {text[max(0, start - NEIGHBOURS) : end + NEIGHBOURS]} -", [answer]):
                yield start, end
