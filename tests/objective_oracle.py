"""Objectives written out by hand on plain eager attention: the oracle of their terms."""

from __future__ import annotations

from functools import cache

import torch
from tiny import FACTS, eager, tiny_model, tiny_tokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from transformers import PreTrainedModel

from attnbalance import HookedModel
from attnbalance.finetuning.examples import (
    INPUTS,
    QUERY,
    SPAN,
    TARGET,
    Example,
    collate,
    make_examples,
)
from attnbalance.finetuning.objectives.forward_pass import ForwardPass
from attnbalance.finetuning.objectives.objective import Objective
from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.finetuning.objectives.targets import add_targets
from attnbalance.models.forward import rows_of_output, states_of_output
from attnbalance.models.hooked import hook

FAMILIES = ("llama", "gpt2", "neox", "qwen3", "gemma2", "gpt_oss")


ROW_OBJECTIVES = (
    "floor(0.3)",
    "barrier",
    "balance",
    "row-anchor(question)",
    "row-anchor(statement)",
    "state-anchor(statement)",
    "state-anchor(question)",
    "kl(statement)",
    "kl(question)",
)


TEMPLATE = "What {relation} has {subject}?"
"""The subject stands among the last tokens, within the windows of gemma2 and gpt_oss; prompts differ in length."""


CHOSEN = (*FACTS[:3], FACTS[7])


def made(rows: Tensor | None = None, logits: Tensor | None = None, **more: object) -> ForwardPass:
    """Two examples of three labelled tokens; subject at position 0 (in the second: 0 and 1), relation at 2."""
    spans = {
        "subject": torch.tensor([[True, False, False, False], [True, True, False, False]]),
        "relation": torch.tensor([[False, False, True, False], [False, False, True, False]]),
    }
    logits = torch.zeros(3, 4) if logits is None else logits
    return ForwardPass(
        logits, torch.tensor([1, 2, 3]), torch.tensor([0, 0, 1]), 2, rows, None, spans, more.pop("targets", {}), **more
    )


def hand_rows() -> Tensor:
    """Rows [example 2, layer 2, head 2, position 4]."""
    first = [[[0.1, 0.2, 0.6, 0.1], [0.3, 0.3, 0.2, 0.2]], [[0.8, 0.1, 0.1, 0.0], [0.6, 0.2, 0.0, 0.2]]]
    second = [[[0.1, 0.1, 0.4, 0.4], [0.2, 0.0, 0.4, 0.4]], [[0.3, 0.3, 0.3, 0.1], [0.2, 0.2, 0.5, 0.1]]]
    return torch.tensor([first, second])


def losses(text: str, forward_pass: ForwardPass) -> list[float]:
    (term,) = parse_objective(text).terms
    return term.losses(forward_pass).tolist()


@cache
def pair(family: str) -> tuple[HookedModel, HookedModel, PreTrainedModel, PreTrainedModel]:
    """A base and a model that was moved away from it, as we hook them, and both with plain eager attention."""
    base, model = tiny_model(family), tiny_model(family)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    oracles = eager(base), eager(model)
    tokenizer = tiny_tokenizer()
    return hook(base, tokenizer, "base"), hook(model, tokenizer, "model"), *oracles


def forward(model: HookedModel, examples: list[Example]) -> ForwardPass:
    """One right-padded batch through our attention function, as the trainer runs it."""
    batch = collate(examples, model.pad_id)
    inputs = {name: batch[name] for name in INPUTS}
    asked = {QUERY: batch[QUERY], "output_attentions": True, "output_hidden_states": True, "use_cache": False}
    output = model.model(**inputs, **asked)
    example, position = (batch["labels"][:, 1:] != -100).nonzero().unbind(-1)
    return ForwardPass(
        output.logits[example, position],
        batch["labels"][example, position + 1],
        example,
        len(examples),
        rows_of_output(output, model.kernel, batch[QUERY], batch["attention_mask"] != 0),
        states_of_output(output, batch[QUERY]),
        {name.removeprefix(SPAN): part for name, part in batch.items() if name.startswith(SPAN)},
        {name.removeprefix(TARGET): part for name, part in batch.items() if name.startswith(TARGET)},
    )


def examples_for(objective: Objective, family: str) -> list[Example]:
    base = pair(family)[0]
    return add_targets(make_examples(CHOSEN, base.tokenizer, TEMPLATE), objective, base, batch_size=3)


def loss_of(text: str, model: HookedModel, examples: list[Example]) -> Tensor:
    (term,) = parse_objective(text).terms
    return term.losses(forward(model, examples)).mean()


class Plain:
    """One prompt alone through plain transformers: its last row in each layer, its states and its predictions."""

    def __init__(self, model: PreTrainedModel, text: str, subject: str, relation: str | None, answer: str) -> None:
        tokenizer = tiny_tokenizer()
        encoding = tokenizer(text)
        self.prompt = len(encoding["input_ids"])
        ids = [*tokenizer(f"{text} {answer}")["input_ids"], tokenizer.eos_token_id]
        output = model(
            input_ids=torch.tensor([ids]), output_attentions=True, output_hidden_states=True, use_cache=False
        )
        last = self.prompt - 1
        self.rows = [layer[0, :, last, : self.prompt] for layer in output.attentions]
        self.states = [layer[0, last] for layer in output.hidden_states[1:]]
        self.answer = ids[self.prompt :]
        self.logits = output.logits[0, last:-1]

        def tokens(part: str) -> list[int]:
            start = text.index(part)
            return sorted({encoding.char_to_token(c) for c in range(start, start + len(part))})

        self.subject = tokens(subject)
        self.relation = tokens(relation) if relation else []


def share(row: Tensor, positions: list[int]) -> Tensor:
    return torch.stack([row[position] for position in positions]).sum()


def by_layer(rows: list[Tensor], positions: list[int]) -> list[Tensor]:
    return [torch.stack([share(head, positions) for head in layer]).mean() for layer in rows]


def written_out(text: str, model: PreTrainedModel, base: PreTrainedModel) -> Tensor:
    """An objective over `CHOSEN`, each prompt alone, layer by layer and head by head."""
    parts: list[Tensor] = []
    for fact in CHOSEN:
        own = Plain(model, f"What {fact.relation} has {fact.subject}?", fact.subject, fact.relation, fact.answer)
        question = f"What {fact.relation} has {fact.subject}?"
        asked = question if "question" in text else f"The {fact.relation} of {fact.subject} is"
        with torch.no_grad():
            held = Plain(base, asked, fact.subject, None, fact.answer)
        subject = by_layer(own.rows, own.subject)
        if text == "floor(0.3)":
            parts.append(torch.stack([torch.relu(0.3 - own_part) for own_part in subject]).mean())
        elif text == "barrier":
            parts.append(torch.stack([-torch.log(own_part.clamp(min=1e-6)) for own_part in subject]).mean())
        elif text == "balance":
            relation = by_layer(own.rows, own.relation)
            parts.append(torch.stack([torch.relu(r - s) for r, s in zip(relation, subject, strict=True)]).mean())
        elif text == "row-anchor(question)":
            heads = [
                ((own_part - other) ** 2).sum()
                for layer, wanted in zip(own.rows, held.rows, strict=True)
                for own_part, other in zip(layer, wanted, strict=True)
            ]
            parts.append(torch.stack(heads).mean())
        elif text == "row-anchor(statement)":
            heads = [
                (share(own_part, own.subject) - share(other, held.subject)) ** 2
                for layer, wanted in zip(own.rows, held.rows, strict=True)
                for own_part, other in zip(layer, wanted, strict=True)
            ]
            parts.append(torch.stack(heads).mean())
        elif text.startswith("state-anchor"):
            ratios = [
                ((own_part - other) ** 2).sum() / (other**2).sum()
                for own_part, other in zip(own.states, held.states, strict=True)
            ]
            parts.append(torch.stack(ratios).mean())
        else:
            inner = len(own.answer) - 1  # all tokens but the end, which is learned by cross-entropy
            own_log, base_log = own.logits.log_softmax(-1), held.logits.log_softmax(-1)
            parts += list(kl_div(own_log[:inner], base_log[:inner], reduction="none", log_target=True).sum(-1))
            parts.append(cross_entropy(own.logits[inner:], torch.tensor(own.answer[inner:])))
    return torch.stack(parts).mean()


def gradients_of(loss: Tensor, model: nn.Module) -> list[Tensor]:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
