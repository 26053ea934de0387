"""The loss of an instruction's output: how well a model foresees what it should write."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from attnbalance.arguments import expects
from attnbalance.data.instructions import InstructionSet
from attnbalance.errors import DataError, ModelError
from attnbalance.finetuning.examples import IGNORED, answer_logits
from attnbalance.finetuning.instruct import instruction_examples
from attnbalance.models.hooked import HookedModel
from attnbalance.progress import progress_bar


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
    usable, examples = instruction_examples(instructions, model.tokenizer, model.max_positions)
    if not len(instructions) or len(usable) < len(instructions):
        reasons = "".join(f"; {why}" for why in usable.dropped if why not in instructions.dropped)
        raise DataError(
            f"{model.name} can read {len(usable)} of {len(instructions)} instructions{reasons}; leave the others out "
            "with `instructions.usable(model.tokenizer, model.max_positions)`"
        )
    losses = torch.empty(len(examples))
    with progress_bar("outputs", total=len(examples), unit="row", shown=progress) as bar:
        for batch in answer_logits(model, examples, batch_size):
            for i, logits in batch:
                output = [label for label in examples[i].labels if label != IGNORED]
                losses[i] = cross_entropy(logits, torch.tensor(output, device=logits.device)).cpu()
            bar.update(len(batch))
    if not losses.isfinite().all():
        raise ModelError(f"{model.name} gives losses that are not finite numbers")
    return losses
