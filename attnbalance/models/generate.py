"""Greedy answers to prompts, batched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from attnbalance.data.batches import PromptBatch
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt
from attnbalance.errors import DataError, ModelError
from attnbalance.models.forward import base_of, check_vocabulary, evaluating
from attnbalance.models.hooked import HookedModel
from attnbalance.models.interventions import Edit, edited


class _RefuseNaN(LogitsProcessor):
    """Stops generation at NaN logits, whose argmax would pass for an answer."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores as they are."""
        if bool(scores.isnan().any()):
            raise ModelError(f'{self.name} gives NaN logits while answering; try `dtype="float32"`')
        return scores


@contextmanager
def _only(base: PreTrainedModel, settings: GenerationConfig) -> Iterator[None]:
    """The model with only these generation settings: transformers fills what is not set from the model's own."""
    own = base.generation_config
    base.generation_config = settings
    try:
        yield
    finally:
        base.generation_config = own


def _stops(model: HookedModel) -> list[int]:
    """The ids that end an answer: the model's own, and the tokenizer's end of sequence, which finetuning teaches."""
    own = getattr(base_of(model.model).generation_config, "eos_token_id", None)
    ids = [*(own if isinstance(own, list) else [own]), model.tokenizer.eos_token_id]
    return sorted({i for i in ids if isinstance(i, int)})


@torch.no_grad()
def generate(
    model: HookedModel,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int | Sequence[int],
    batch_size: int,
    edit: Edit | None = None,
    progress: bool = False,
) -> list[str]:
    """The text that the model generates after each prompt, greedily, without special tokens, in order of the prompts.

    An answer ends at the model's end-of-sequence tokens and at the tokenizer's. The model's own generation settings
    (sampling, penalties, lengths) are not used.

    Arguments:
        model: the model that answers.
        prompts: what it is asked.
        max_new_tokens: the longest answer in tokens, one number for all prompts or one for each.
        batch_size: the number of prompts that are answered at once.
        edit: what to do with the attention row of each prompt's last token; by default nothing.
        progress: whether to show a progress bar.
    """
    budgets = _budgets(max_new_tokens, len(prompts))
    encodings = PromptSet.of(prompts, model.tokenizer).encodings
    bar = "answers" if progress else None
    answers = [""] * len(encodings)
    with evaluating(model.model):
        for indices, batch in model.batches(encodings, batch_size, budgets=budgets, bar=bar):
            longest = max(budgets[i] for i in indices)
            for i, ids in zip(indices, _continuations(model, batch, longest, edit), strict=True):
                answers[i] = _text(model, ids[: budgets[i]])  # others of the batch may have more
    return answers


def _budgets(max_new_tokens: int | Sequence[int], prompts: int) -> list[int]:
    """The longest answer to each prompt in tokens; raises `DataError` for no prompts, and for no token for one."""
    budgets = [max_new_tokens] * prompts if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if not prompts or len(budgets) != prompts or min(budgets) < 1:
        raise DataError(
            f"expected at least one prompt and one token to generate for each, got {prompts} prompts and tokens "
            f"from {min(budgets, default=0)} for {len(budgets)} prompts"
        )
    return budgets


def _continuations(model: HookedModel, batch: PromptBatch, longest: int, edit: Edit | None) -> list[list[int]]:
    """At most `longest` tokens that the model puts after each prompt, not yet cut at the end of the answer."""
    check_vocabulary(model.model, batch.input_ids, model.name)
    base = base_of(model.model)
    settings = GenerationConfig(
        max_new_tokens=longest, do_sample=False, pad_token_id=model.pad_id, eos_token_id=_stops(model) or None
    )
    with _only(base, settings), nullcontext() if edit is None else edited(model, edit(batch)):
        output = base.generate(  # pyright: ignore[reportCallIssue]
            input_ids=batch.input_ids.to(model.device),
            attention_mask=(batch.attention_mask != 0).long().to(model.device),
            generation_config=settings,
            logits_processor=LogitsProcessorList([_RefuseNaN(model.name)]),
        )
    return output[:, batch.input_ids.shape[1] :].tolist()


def _text(model: HookedModel, ids: list[int]) -> str:
    """An answer's text, up to its end."""
    stops = _stops(model)
    end = next((index for index, token in enumerate(ids) if token in stops), len(ids))
    return str(model.tokenizer.decode(ids[:end], skip_special_tokens=True))
