"""Drift: how far a finetuned model's predictions have moved from its base's on unrelated text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attnbalance.arguments import expects
from attnbalance.errors import DataError
from attnbalance.models.forward import check_vocabulary, evaluating
from attnbalance.models.hooked import HookedModel
from attnbalance.readings.answer_tokens import check_tokenizers


@torch.no_grad()
@expects(model=HookedModel, base=HookedModel, texts=[str])
def read_drift(
    model: HookedModel, base: HookedModel, texts: Sequence[str], *, batch_size: int = 32
) -> Float[Tensor, " text"]:
    """For each text, the mean over its tokens of KL(base || model) between next-token predictions, in nats.

    0 if no prediction changed. Texts are cut at the model's positions. Raises `DataError` for no texts, an empty text,
    and models with different tokenizers.
    """
    if not texts or not all(texts):
        raise DataError(f"drift needs at least one text, and no empty text, got {len(texts)} texts")
    check_tokenizers(model.tokenizer, base.tokenizer, texts)
    drifts = []
    for start in range(0, len(texts), batch_size):
        ids = [
            torch.tensor(text[: model.max_positions])
            for text in model.tokenizer(list(texts[start : start + batch_size]), verbose=False)["input_ids"]
        ]
        if not all(len(text) for text in ids):
            raise DataError("drift needs at least one token in each text")
        batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=model.pad_id)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in ids], batch_first=True)
        before, after = (_log_probabilities(each, batch, mask) for each in (base, model))
        divergence = (before.exp() * (before - after.to(before.device))).sum(-1).cpu()
        drifts.append((divergence * mask).sum(-1) / mask.sum(-1))
    return torch.cat(drifts)


def _log_probabilities(model: HookedModel, ids: Tensor, mask: Tensor) -> Float[Tensor, "text position vocab"]:
    check_vocabulary(model.model, ids, model.name)
    with evaluating(model.model):
        output = model.model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device), use_cache=False)
    return output.logits.float().log_softmax(-1)
