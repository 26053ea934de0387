"""Thoughts of models that think before they answer: they are too long for the tokens that an answer gets."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

from attnbalance.data.prompts import Prompt

THOUGHTS = re.compile(
    r"</?(\w+:)?(think|thinking|thought|reasoning)>|\[/?THINK\]|<\|START_THINKING\|>|^analysis(?=[A-Z])"
)
"""What models put around their thoughts; gpt-oss says "analysis" before them."""

OPEN = re.compile(r"(<(\w+:)?think>|\[THINK\])\s*$")
"""The end of a prompt whose chat template has begun the thoughts."""


def warn_of_thoughts(prompts: Sequence[Prompt], outputs: Sequence[str]) -> None:
    """Warn of answers that hold a model's thoughts; `outputs` with their special tokens, which may mark these."""
    thinking = sum(
        bool(OPEN.search(prompt.text) or THOUGHTS.search(output))
        for prompt, output in zip(prompts, outputs, strict=True)
    )
    if thinking:
        warnings.warn(
            f"{thinking} of {len(outputs)} answers hold the model's thoughts (<think>), scored as its answer; ask "
            "without a chat template, or pass a tokenizer whose chat template leaves them out",
            stacklevel=3,
        )
