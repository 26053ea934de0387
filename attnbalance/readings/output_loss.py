"""The loss of an instruction's output: how well a model foresees what it should write."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from attnbalance.arguments import expects
from attnbalance.data.batches import batches, in_order
from attnbalance.data.instructions import InstructionSet, TokenPair
from attnbalance.errors import DataError, ModelError
from attnbalance.models.forward import check_vocabulary, evaluating
from attnbalance.models.hooked import HookedModel


@torch.no_grad()
@expects(model=HookedModel, instructions=InstructionSet)
def read_output_loss(
    model: HookedModel, instructions: InstructionSet, *, batch_size: int = 8, progress: bool = False
) -> Float[Tensor, " instruction"]:
    """The mean cross-entropy of each output's tokens after its prompt, in nats a token, in float32 on the CPU.

    Its exponential is the target perplexity of Goyal et al. (2024, section 3.3), there without the input: read
    `instructions.bare()` for that. The end of the sequence counts, as it does in training. Raises `DataError` for no
    instructions and for rows that the model cannot read (leave them out with `InstructionSet.usable`), and `ModelError`
    for losses that are NaN or infinite.
    """
    from tqdm import tqdm

    encodings = instructions.encodings(model.tokenizer, model.max_positions)
    encoded = [pair for pair in encodings if not isinstance(pair, str)]
    if not encodings or len(encoded) < len(encodings):
        first = next((f": {reason}" for reason in encodings if isinstance(reason, str)), "")
        raise DataError(
            f"{model.name} can read {len(encoded)} of {len(encodings)} instructions{first}; leave the others out with "
            "`instructions.usable(model.tokenizer, model.max_positions)`"
        )
    losses, order = list[Tensor](), list[list[int]]()
    lengths = [len(prompt) + len(output) for prompt, output in encoded]
    with tqdm(total=len(encoded), desc="outputs", unit="row", disable=not progress, leave=False) as bar:
        for indices in batches(lengths, batch_size, model.alike_from):
            losses.append(_losses(model, [encoded[i] for i in indices]))
            order.append(indices)
            bar.update(len(indices))
    return in_order(losses, order)


def _losses(model: HookedModel, rows: list[TokenPair]) -> Float[Tensor, " instruction"]:
    """The mean loss of each row's output in one forward pass, padded on the right."""
    ids = [torch.tensor(prompt + output) for prompt, output in rows]
    batch = pad_sequence(ids, batch_first=True, padding_value=model.pad_id)
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    check_vocabulary(model.model, batch, model.name)
    with evaluating(model.model):
        logits = model.model(
            input_ids=batch.to(model.device), attention_mask=mask.to(model.device), use_cache=False
        ).logits
    means = []
    for row, (prompt, output) in enumerate(rows):
        predicted = logits[row, len(prompt) - 1 : len(prompt) + len(output) - 1].float()
        means.append(cross_entropy(predicted, torch.tensor(output, device=predicted.device)).cpu())
    losses = torch.stack(means)
    if not losses.isfinite().all():
        raise ModelError(f"{model.name} gives losses that are not finite numbers")
    return losses
