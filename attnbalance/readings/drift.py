"""Drift: how far a finetuned model's predictions have moved from the base's on text that it was not finetuned on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attnbalance.errors import DataError
from attnbalance.models.forward import evaluating
from attnbalance.models.hooked import HookedModel
from attnbalance.readings.contrast import check_tokenizers


@torch.no_grad()
def read_drift(
    model: HookedModel, base: HookedModel, texts: Sequence[str], *, batch_size: int = 32
) -> Float[Tensor, " text"]:
    """For each text the mean over its tokens of KL(base || model), the divergence of the next token's prediction, nats.

    0 where nothing moved. Texts are cut at the model's positions. Raises `DataError` for no texts, an empty one, and
    models with different tokenizers.
    """
    check_tokenizers(model.tokenizer, base.tokenizer)
    if not texts or not all(texts):
        raise DataError(f"drift needs texts that are not empty, got {len(texts)}")
    found = []
    for start in range(0, len(texts), batch_size):
        ids = [
            torch.tensor(one[: model.max_positions])
            for one in model.tokenizer(list(texts[start : start + batch_size]), verbose=False)["input_ids"]
        ]
        if not all(len(one) for one in ids):
            raise DataError("drift needs texts with at least one token each")
        batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=model.pad_id)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
        before, after = (_log_probabilities(one, batch, mask) for one in (base, model))
        divergence = (before.exp() * (before - after.to(before.device))).sum(-1).cpu()
        found.append((divergence * mask).sum(-1) / mask.sum(-1))
    return torch.cat(found)


def _log_probabilities(model: HookedModel, ids: Tensor, mask: Tensor) -> Float[Tensor, "text position vocab"]:
    with evaluating(model.model):
        output = model.model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device), use_cache=False)
    return output.logits.float().log_softmax(-1)
