"""Terms that hold the model to the base model's attention rows and residual stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attnbalance.data.prompt_sets import PromptSet
from attnbalance.finetuning.examples import INPUTS, POSITIONS, Example
from attnbalance.finetuning.objectives.base_model import BaseModel
from attnbalance.finetuning.objectives.forward_pass import ForwardPass
from attnbalance.finetuning.objectives.objective import CHOICES, SUBJECT_ROWS, Needs, Targets, Term, TermKind
from attnbalance.models.forward import states_of_output
from attnbalance.readings.attention import read_attention

BATCHES = 16
"""Batches whose rows are in memory at once."""


def row_anchor(forward: ForwardPass, term: Term) -> Float[Tensor, " example"]:
    """`row-anchor(FORM)`: squared distance of each head's row from the base model's, mean over layers and heads.

    The term fixes where the model looks, not what it finds there: with changed values, the same row gives other
    answers.

    question: the whole row, on the same prompt. Other forms: only the subject's share of the row, the part that two
        prompts have in common, compared with its value for the same fact in that form.
    """
    if term.argument == "question":
        base = forward.target(f"{term.key}{POSITIONS}")
        return (forward.needed_rows - base).square().sum(-1).mean((-1, -2))
    return (forward.share("subject") - forward.target(term.key)).square().mean((-1, -2))


def make_rows(term: Term, examples: Sequence[Example], base: BaseModel) -> Iterator[tuple[int, Targets]]:
    """The base's row for each example, or the subject's share of it."""
    prompts, size = base.ask(str(term.argument), examples), BATCHES * base.batch_size
    for start in range(0, len(prompts), size):
        rows = read_attention(base.hooked, prompts[start : start + size], batch_size=base.batch_size)
        if term.argument == "question":
            lengths = [len(tokens) for tokens in rows.tokens]
            whole = zip(rows.values, lengths, strict=True)
            targets = [{f"{term.key}{POSITIONS}": row[..., :length].clone()} for row, length in whole]
        else:
            targets = [{term.key: share} for share in rows.to("subject", "sum").values]
        yield from enumerate(targets, start)


def state_anchor(forward: ForwardPass, term: Term) -> Float[Tensor, " example"]:
    """`state-anchor(FORM)`: the last prompt token's residual stream against the base's at the last token of FORM.

    Squared distance relative to the base's squared length, mean over layers: hint-based distillation (Romero et al.
    2015), from another prompt instead of another model. Attention moves information to the last token. The term asks it
    to move, layer by layer, what it moves in the form that the base knows. This target says far more about each fact
    than the answer does. Like `kl`, it teaches what the base holds to be true, and nothing new.
    """
    base = forward.target(term.key).float()
    distance = (forward.needed_states.float() - base).square().sum(-1)
    return (distance / base.square().sum(-1).clamp(min=1e-6)).mean(-1)


def make_states(term: Term, examples: Sequence[Example], base: BaseModel) -> Iterator[tuple[int, Targets]]:
    """The base's residual stream at the last token of each example's fact in the term's form."""
    hooked = base.hooked
    encodings = PromptSet.of(base.ask(str(term.argument), examples), hooked.tokenizer).encodings
    with hooked.evaluating():
        for indices, batch in hooked.batches(encodings, base.batch_size, padding_side="right"):
            inputs = {name: getattr(batch, name).to(hooked.device) for name in INPUTS}
            inputs["attention_mask"] = inputs["attention_mask"].long()
            with torch.no_grad():
                outputs = hooked.model(**inputs, use_cache=False, output_hidden_states=True)
            states = states_of_output(outputs, batch.query_index.to(hooked.device)).cpu()
            yield from ((i, {term.key: state}) for i, state in zip(indices, states, strict=True))


ROW_ANCHOR = TermKind("row-anchor", row_anchor, SUBJECT_ROWS, make_rows, choices=CHOICES)
STATE_ANCHOR = TermKind("state-anchor", state_anchor, Needs(states=True), make_states, choices=CHOICES)
