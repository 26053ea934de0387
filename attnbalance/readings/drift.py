"""Drift: how far a finetuned model's predictions have moved from its base's on unrelated text."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from attnbalance.arguments import expects
from attnbalance.data.batches import batches, in_order
from attnbalance.data.prompt_sets import is_same
from attnbalance.errors import DataError
from attnbalance.models.forward import check_vocabulary
from attnbalance.models.hooked import HookedModel, check_apart


@torch.no_grad()
@expects(model=HookedModel, base=HookedModel, texts=[str])
def read_drift(
    model: HookedModel, base: HookedModel, texts: Sequence[str], *, batch_size: int = 32
) -> Float[Tensor, " text"]:
    """For each text, the mean over its tokens of KL(base || model) between next-token predictions, in nats.

    0 if no prediction changed. Texts are cut at the models' positions. Warns of models in different dtypes, whose
    rounding counts as drift. Raises `DataError` for no texts, an empty text,
    models with different tokenizers or numbers of tokens, and a batch size below 1; `ModelError` for two handles on one
    model object.
    """
    check_apart(model, base)
    if not texts or not all(texts):
        raise DataError(f"drift needs at least one text, and no empty text, got {len(texts)} texts")
    _check_same_tokens(model.tokenizer, base.tokenizer, texts)
    if model.dtype != base.dtype:
        warnings.warn(
            f"the model is in {model.dtype} and its base in {base.dtype}, so that their rounding counts as drift; load "
            "both with one dtype",
            stacklevel=4,
        )
    both = model.with_limits_of(base)
    tokenized = _tokenize(both, texts)
    drifts, order = list[Tensor](), list(batches([*map(len, tokenized)], batch_size, both.alike_from))
    for indices in order:
        ids = [torch.tensor(tokenized[i]) for i in indices]
        batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=model.pad_id)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in ids], batch_first=True)
        before, after = (_log_probabilities(each, batch, mask) for each in (base, model))
        if before.shape != after.shape:
            sizes = f"{after.shape[-1]} and {before.shape[-1]}"
            raise DataError(f"both models must predict over the same number of tokens, got {sizes}")
        divergence = (before.exp() * (before - after.to(before.device))).sum(-1).cpu()
        drifts.append((divergence * mask).sum(-1) / mask.sum(-1))
    return in_order(drifts, order)


def _check_same_tokens(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
    """Raise `DataError` unless two tokenizers give these texts the same ids, and an id of both is one token.

    One of them may have tokens that the other lacks: no text here holds them.
    """
    if is_same(first, second):
        return
    ids = [tokenizer(list(texts), verbose=False)["input_ids"] for tokenizer in (first, second)]
    names, others = ({index: token for token, index in each.get_vocab().items()} for each in (first, second))
    if ids[0] != ids[1] or any(names[index] != others[index] for index in names.keys() & others.keys()):
        raise DataError(
            "the two models have different tokenizers: predictions can be compared only where both give these texts "
            "the same ids, and an id is the same token in both"
        )


def _tokenize(model: HookedModel, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of each text, cut at the model's positions."""
    tokenized = model.tokenizer(list(texts), verbose=False)["input_ids"]
    if not all(tokenized):
        raise DataError("drift needs at least one token in each text")
    return [ids[: model.max_positions] for ids in tokenized]


def _log_probabilities(model: HookedModel, ids: Tensor, mask: Tensor) -> Float[Tensor, "text position vocab"]:
    check_vocabulary(model.model, ids, model.name)
    with model.evaluating():
        output = model.model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device), use_cache=False)
    return output.logits.float().log_softmax(-1)
