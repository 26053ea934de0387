"""Probability of a whole answer after its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache

from attnbalance.arguments import expects
from attnbalance.data.batches import PromptBatch, in_order
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt
from attnbalance.models.forward import base_of, check_vocabulary, inputs_of
from attnbalance.models.hooked import HookedModel


@torch.no_grad()
@expects(model=HookedModel, prompts=[Prompt])
def read_answer_probability(
    model: HookedModel, prompts: Sequence[Prompt], *, batch_size: int = 32, progress: bool = False
) -> Float[Tensor, " prompt"]:
    """The log-probability, in nats, of each prompt's first answer: the sum over its tokens, in float32 on the CPU.

    What may follow the answer does not count. Raises `BadRowsError` for prompts whose end the tokenizer merges with the
    answer, and for prompts that together with it exceed the model's positions; `ModelError` for logits that are NaN or
    infinite.
    """
    asked = PromptSet.of(prompts, model.tokenizer)
    pairs = zip(asked.encodings, asked.answers.ids, strict=True)
    whole = [replace(encoding, ids=encoding.ids + answer) for encoding, answer in pairs]
    pieces, order = [], []
    base = base_of(model.model)
    for indices, batch in model.batches(whole, batch_size, bar="probabilities" if progress else None):
        check_vocabulary(model.model, batch.input_ids, model.name)
        answers = [torch.tensor(asked.answers.ids[i]) for i in indices]
        longest = max(map(len, answers))
        with model.evaluating():
            output = model.model(**inputs_of(base, batch, longest + 1))
        logits = output.logits[:, -longest - 1 :].float()  # padded on the left, so that all answers end together
        model.check_finite(batch.prompts, logits)
        log_p = logits.log_softmax(-1).cpu()
        sums = [log_p[row, -len(ids) - 1 : -1].gather(1, ids[:, None]).sum() for row, ids in enumerate(answers)]
        pieces.append(torch.stack(sums))
        order.append(indices)
    return in_order(pieces, order)


@torch.no_grad()
def probability_after(
    model: HookedModel, batch: PromptBatch, answers: Sequence[Sequence[int]], cache: DynamicCache
) -> Float[Tensor, " prompt"]:
    """The log-probability, in nats, of one answer after each prompt of a batch, in float32 on the CPU.

    As `read_answer_probability` gives it, where the prompts have been read already. Raises `ModelError` for logits that
    are NaN or infinite, and for tokens that the model does not know.

    model: the model.
    batch: prompts, padded on the left.
    answers: the tokens of an answer to each.
    cache: the keys and values of all tokens but each prompt's last; afterwards it is as before.
    """
    longest = max(map(len, answers))
    lengths = torch.tensor([len(answer) for answer in answers])
    ids = torch.tensor([[*answer, *[model.pad_id] * (longest - len(answer))] for answer in answers])
    columns = torch.arange(longest)[None]
    real = columns < lengths[:, None]
    check_vocabulary(model.model, ids, model.name)
    with_answers = replace(
        batch,
        input_ids=torch.cat([batch.input_ids, ids], dim=1),
        attention_mask=torch.cat([batch.attention_mask != 0, real], dim=1),
        position_ids=torch.cat([batch.position_ids, (batch.position_ids[:, -1:] + 1 + columns) * real], dim=1),
        spans={},
    )
    with model.evaluating():
        output = model.model(**inputs_of(base_of(model.model), with_answers, longest + 1, cache))
    cache.crop(-longest - 1)
    logits = output.logits[:, -longest - 1 : -1].float()
    model.check_finite(batch.prompts, logits)
    log_p = logits.log_softmax(-1).cpu().gather(2, ids[:, :, None])[:, :, 0]
    return log_p.masked_fill(~real, 0.0).sum(1)
