"""Thoughts of models that think before they answer: they are too long for the tokens that an answer gets."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

from attnbalance.data.chat_templates import NAME, OPEN, OPENING
from attnbalance.data.prompts import Prompt

THOUGHTS = re.compile(rf"{OPENING}|</{NAME}>|\[/THINK\]|<\|channel\|>|^analysis(?=[A-Z])")
"""What models put around their thoughts; gpt-oss says "analysis" before them, and "final" before what follows them."""


def warn_of_thoughts(prompts: Sequence[Prompt], outputs: Sequence[str]) -> None:
    """Warn of answers that hold a model's thoughts; `outputs` with their special tokens, which may mark these."""
    thinking = sum(
        bool(OPEN.search(prompt.text) or THOUGHTS.search(output))
        for prompt, output in zip(prompts, outputs, strict=True)
    )
    if thinking:
        warnings.warn(
            f"{thinking} of {len(outputs)} answers hold the model's thoughts or their marks (<think>, <|channel|>), "
            "scored as its answer; ask without a chat template, or pass a tokenizer whose chat template leaves them "
            "out",
            stacklevel=3,
        )
