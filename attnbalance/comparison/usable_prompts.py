"""The prompts that every model of a comparison can be asked, checked before any model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attnbalance.comparison.specs import MeasureSettings, ModelSpec
from attnbalance.data.batches import check_lengths
from attnbalance.data.facts import FactSet
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import make_prompts
from attnbalance.data.scoring import check_scoring
from attnbalance.data.tokens import as_chat
from attnbalance.data.usable_facts import without_bad
from attnbalance.errors import ModelError
from attnbalance.models.load import load_limits
from attnbalance.readings.answer_tokens import make_answer_tokens
from attnbalance.readings.recall import answer_budgets


def usable_prompts(
    facts: FactSet,
    specs: Sequence[ModelSpec],
    settings: MeasureSettings,
    skip_bad: bool,
    need_answer_tokens: bool = False,
    budgets: Callable[[PromptSet], Sequence[int]] = answer_budgets,
) -> tuple[PromptSet, dict[str, int]]:
    """The prompts that every model can be asked, and the number of facts dropped, by reason.

    Each prompt is checked with every model's tokenizer and number of positions, so that all models get the same
    prompts. Models with the same tokenizer share the prompts' tokens. Raises `DataError` if no fact is left.

    facts: what to ask about.
    specs: the models; only their tokenizers and configurations are read.
    settings: template, chat template, scoring, and whether answers are generated.
    skip_bad: drop facts that cannot be asked; otherwise the first reason raises `BadRowsError`.
    budgets: how many tokens may be generated after each prompt, where answers are.
    need_answer_tokens: each answer also needs another answer of its relation (see `make_answer_tokens`).
    """
    limits = [load_limits(spec.model, settings.tokenizer, settings.trust_remote_code, spec.adapter) for spec in specs]
    check_scoring(settings.scoring)

    def make(kept: FactSet) -> PromptSet:
        prompts = make_prompts(kept, settings.template)
        if settings.chat:
            rendered = [as_chat(prompts, tokenizer) for tokenizer, _ in limits]
            texts = [[(prompt.text, prompt.answer_space) for prompt in chat] for chat in rendered]
            if any(other != texts[0] for other in texts[1:]):
                raise ModelError("models with different chat templates cannot share prompts; measure each alone")
            prompts = rendered[0]
        encoded = PromptSet.of(prompts, limits[0][0])
        for tokenizer, positions in limits:
            encoded = PromptSet.of(encoded, tokenizer)
            check_lengths(encoded.encodings, positions, extra=budgets(encoded) if settings.recall else ())
            if need_answer_tokens:
                make_answer_tokens(encoded, tokenizer)
        return encoded

    return without_bad(facts, make, skip_bad)
