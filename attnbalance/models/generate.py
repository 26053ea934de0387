"""Greedy answers to prompts, batched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from attnbalance.errors import DataError, ModelError
from attnbalance.models.forward import base_of, evaluating
from attnbalance.models.hooked import HookedModel
from attnbalance.prompts import Prompt
from attnbalance.tokens import batches, check_lengths, encode, pad


class _RefuseNaN(LogitsProcessor):
    """Stops generation where logits are NaN, since their argmax would pass for an answer."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """The scores as they are."""
        if bool(scores.isnan().any()):
            raise ModelError(f"{self.name} gives NaN logits while answering; try --dtype float32")
        return scores


@contextmanager
def _only(base: PreTrainedModel, settings: GenerationConfig) -> Iterator[None]:
    """The model with these generation settings alone: transformers fills what is not set from the model's own."""
    own = base.generation_config
    base.generation_config = settings
    try:
        yield
    finally:
        base.generation_config = own


@torch.no_grad()
def generate(
    model: HookedModel, prompts: Sequence[Prompt], *, max_new_tokens: int, batch_size: int, progress: bool = False
) -> list[str]:
    """The text that the model puts behind each prompt, greedily, without special tokens, in the order of the prompts.

    The model's own generation settings (sampling, penalties, lengths) are set aside, except its end-of-sequence tokens.
    """
    from tqdm import tqdm

    if not prompts:
        raise DataError("expected at least one prompt, got none")
    encodings = encode(prompts, model.tokenizer)
    check_lengths(encodings, model.max_positions, extra=max_new_tokens)
    base = base_of(model.model)
    stop = getattr(base.generation_config, "eos_token_id", None)
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=model.pad_id,
        eos_token_id=stop if stop is not None else model.tokenizer.eos_token_id,
    )
    answers = [""] * len(encodings)
    bar = tqdm(total=len(prompts), desc="answers", unit="prompt", disable=not progress, leave=False)
    with evaluating(model.model), _only(base, settings), bar:
        for group in batches(encodings, batch_size):
            batch = pad([encodings[i] for i in group], model.pad_id)
            found = base.generate(
                input_ids=batch.input_ids.to(model.device),
                attention_mask=(batch.attention_mask != 0).long().to(model.device),
                generation_config=settings,
                logits_processor=LogitsProcessorList([_RefuseNaN(model.name)]),
            )
            texts = model.tokenizer.batch_decode(found[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
            for i, text in zip(group, texts, strict=True):
                answers[i] = text
            bar.update(len(group))
    return answers
