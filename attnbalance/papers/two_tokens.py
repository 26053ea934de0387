"""A small multi-layer transformer on prompts of two tokens: the simulations of Ghosal et al. (2024), section 3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from attnbalance.errors import DivergenceError
from attnbalance.theory.triples import Examples, Triples, split_subjects

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


TOP = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
"""Shares of the held-out subjects, the most popular first."""


@dataclass(frozen=True)
class Sizes:
    """The transformer, its pretraining (AdamW, linear decay) and its finetuning (AdamW, constant rate)."""

    layers: int = 2
    d_model: int = 64
    heads: int = 4
    batch_size: int = 128
    learning_rate: float = 1e-3
    finetuning_rate: float = 3e-4
    finetuning_steps: int = 800
    observations: int = 8


def pretrain(world: Triples, steps: int, seed: int, sizes: Sizes) -> LlamaForCausalLM:
    """A Llama trained on statements (s, r) -> a of a world of one run, s by popularity (section 3.1).

    Only the answer has a loss; the relation that follows a subject is random.
    """
    model = _llama(world.tokens, seed, sizes)
    generator = torch.Generator().manual_seed(seed)
    rates = [sizes.learning_rate * (1 - t / steps) for t in range(steps)]
    _train(model, lambda: world.drawn(sizes.batch_size, [generator]), rates, lambda _: None)
    return model


def finetune(
    model: LlamaForCausalLM, world: Triples, split: str, seed: int, sizes: Sizes
) -> dict[str, list[list[float]] | list[int]]:
    """Train a model in place on prompts (s, p_r) -> a of a split's subjects; return observations of its held-out facts.

    The keys are "steps"; "accuracy", by fifth of the popularity of all subjects; "accuracy of top", of the most popular
    of the held-out subjects, by `TOP`; and "subject attention" (mean over heads), by layer. They are observed before
    training and `observations` times during it.
    """
    chosen = split_subjects(world, split, [seed])
    train, heldout = world.of(chosen.trained), world.of(chosen.heldout)
    generator, every = torch.Generator().manual_seed(seed), max(1, sizes.finetuning_steps // sizes.observations)
    values: dict = {"steps": [], "accuracy": [], "accuracy of top": [], "subject attention": []}
    rank = heldout.subject[0].unique(return_inverse=True)[1]  # the most popular subject has the lowest token
    most = [rank < max(1, round(share * (int(rank.max()) + 1))) for share in TOP]

    def observe(step: int) -> None:
        if step % every == 0:
            right, attention = read(model, heldout)
            fifth = heldout.subject[0] * 5 // world.subjects
            values["steps"].append(step)
            values["accuracy"].append([float(right[fifth == k].double().mean()) for k in range(5)])
            values["accuracy of top"].append([float(right[chosen].double().mean()) for chosen in most])
            values["subject attention"].append(attention.mean(0).tolist())

    def batch() -> Examples:
        return train.take(torch.randint(train.subject.shape[1], (1, sizes.batch_size), generator=generator))

    observe(0)
    _train(model, batch, [sizes.finetuning_rate] * sizes.finetuning_steps, observe)
    return values


@torch.no_grad()
def read(model: LlamaForCausalLM, asked: Examples) -> tuple[Tensor, Float[Tensor, "example layer"]]:
    """For each prompt of one run, whether arg max gives its answer, and each layer's attention on the subject."""
    output = model(_ids(model, asked), output_attentions=True)
    rows = torch.stack([layer[:, :, -1, 0].mean(1) for layer in output.attentions], dim=1)
    return (output.logits[:, -1].argmax(-1).cpu() == asked.answer[0]), rows.cpu()


def _train(
    model: LlamaForCausalLM, batch: Callable[[], Examples], rates: list[float], observe: Callable[[int], None]
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step, rate in enumerate(rates, 1):
        optimizer.param_groups[0]["lr"] = rate
        asked = batch()
        loss = cross_entropy(model(_ids(model, asked)).logits[:, -1], asked.answer[0].to(model.device))
        if not bool(loss.isfinite()):
            raise DivergenceError(
                f"training diverged at step {step} with learning rate {rate:g}; lower the learning rate"
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        observe(step)


def _ids(model: LlamaForCausalLM, asked: Examples) -> Tensor:
    return torch.stack([asked.subject[0], asked.query[0]], dim=1).to(model.device)


def _llama(tokens: int, seed: int, sizes: Sizes) -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokens,
        hidden_size=sizes.d_model,
        intermediate_size=4 * sizes.d_model,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        max_position_embeddings=8,
    )
    config._attn_implementation = "eager"  # returns attention maps
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return LlamaForCausalLM(config)
