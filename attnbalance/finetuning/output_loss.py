"""The loss of an instruction's output: how well a model predicts what it should write."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from attnbalance.arguments import expects
from attnbalance.data.instructions import InstructionSet
from attnbalance.errors import DataError, ModelError
from attnbalance.finetuning.examples import IGNORED
from attnbalance.finetuning.instruct import instruction_examples
from attnbalance.finetuning.labelled_logits import answer_logits
from attnbalance.models.hooked import HookedModel
from attnbalance.progress import progress_bar


def usable_with_input(model: HookedModel, instructions: InstructionSet) -> InstructionSet:
    """The rows with an input that the model can read with it and without it; raises `DataError` if there are none."""
    rows = instructions.with_input().usable(model.tokenizer, model.max_positions)
    rows = rows.readable(rows.bare().encodings(model.tokenizer, model.max_positions))
    if not len(rows):
        raise DataError(f"{instructions.source} has no instruction with an input that {model.name} can read")
    return rows


def least_foreseen(losses: Float[Tensor, " instruction"], share: float) -> list[int]:
    """The indices of the share of rows with the highest losses, rounded up to whole rows; of equal ones, the first."""
    count = math.ceil(Fraction(str(share)) * len(losses))  # 0.55 * 100 is a little more than 55
    return losses.sort(descending=True, stable=True).indices[:count].tolist()


@expects(model=HookedModel, instructions=InstructionSet)
def read_output_loss(
    model: HookedModel, instructions: InstructionSet, *, batch_size: int = 8, progress: bool = False
) -> Float[Tensor, " instruction"]:
    """The mean cross-entropy of each output's tokens after its prompt, in nats a token, in float32 on the CPU.

    Its exponential is the target perplexity of Goyal et al. (2024, section 3.3). The paper leaves out the input: pass
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
    losses = torch.empty(len(examples), dtype=torch.float32)
    with progress_bar("outputs", total=len(examples), unit="row", shown=progress) as bar:
        for batch in answer_logits(model, examples, batch_size):
            for i, logits in batch:
                output = [label for label in examples[i].labels if label != IGNORED]
                losses[i] = cross_entropy(logits, torch.tensor(output, device=logits.device)).cpu()
            bar.update(len(batch))
    if not losses.isfinite().all():
        raise ModelError(f"{model.name} gives losses that are not finite numbers")
    return losses
