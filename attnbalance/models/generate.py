"""Greedy answers to prompts, batched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from attnbalance.errors import DataError, ModelError
from attnbalance.models.edits import Edit, edited
from attnbalance.models.forward import base_of, check_vocabulary, evaluating
from attnbalance.models.hooked import HookedModel
from attnbalance.prompts import Prompt
from attnbalance.tokens import batches, check_lengths, encode, pad


class _RefuseNaN(LogitsProcessor):
    """Stops generation where logits are NaN, since their argmax would pass for an answer."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
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


def _stops(model: HookedModel) -> list[int]:
    """The ids that end an answer: the model's own and the tokenizer's end of sequence, which finetuning teaches."""
    own = getattr(base_of(model.model).generation_config, "eos_token_id", None)
    found = [*(own if isinstance(own, list) else [own]), model.tokenizer.eos_token_id]
    return sorted({i for i in found if isinstance(i, int)})


@torch.no_grad()
def generate(
    model: HookedModel,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    batch_size: int,
    edit: Edit | None = None,
    progress: bool = False,
) -> list[str]:
    """The text that the model puts behind each prompt, greedily, without special tokens, in the order of the prompts.

    The model's own generation settings (sampling, penalties, lengths) are set aside; an answer ends at the model's
    end-of-sequence tokens and at the tokenizer's. `edit` changes the attention row of each prompt's last token.
    """
    from tqdm import tqdm

    if not prompts or max_new_tokens < 1:
        raise DataError(f"expected at least one prompt and one token to generate, got {len(prompts)}, {max_new_tokens}")
    encodings = encode(prompts, model.tokenizer)
    check_lengths(encodings, model.max_positions, extra=max_new_tokens)
    base = base_of(model.model)
    stops = _stops(model)
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=model.pad_id,
        eos_token_id=stops or None,
    )
    answers = [""] * len(encodings)
    bar = tqdm(total=len(prompts), desc="answers", unit="prompt", disable=not progress, leave=False)
    with evaluating(model.model), _only(base, settings), bar:
        for group in batches(encodings, batch_size):
            batch = pad([encodings[i] for i in group], model.pad_id)
            check_vocabulary(model.model, batch.input_ids, model.name)
            with nullcontext() if edit is None else edited(model, edit(batch)):
                found = base.generate(  # pyright: ignore[reportCallIssue]
                    input_ids=batch.input_ids.to(model.device),
                    attention_mask=(batch.attention_mask != 0).long().to(model.device),
                    generation_config=settings,
                    logits_processor=LogitsProcessorList([_RefuseNaN(model.name)]),
                )
            for i, ids in zip(group, found[:, batch.input_ids.shape[1] :].tolist(), strict=True):
                end = next((place for place, token in enumerate(ids) if token in stops), len(ids))
                answers[i] = str(model.tokenizer.decode(ids[:end], skip_special_tokens=True))
            bar.update(len(group))
    return answers
