"""Pretraining in three stages and finetuning of the attention and MLP model (Xu & Chen 2025, section 4)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attnbalance.errors import DataError
from attnbalance.theory.attention_mlp import AttentionMLP, make_attention_mlp
from attnbalance.theory.dynamics import Trajectory, descend
from attnbalance.theory.sentences import Samples, Sentences, Split, make_sentences


@dataclass(frozen=True)
class Stages:
    """The learning rate and the number of steps of each of the three stages of pretraining.

    Raises `DataError` unless there are three rates > 0 and three numbers of steps >= 1.
    """

    rates: tuple[float, float, float] = (0.6, 0.3, 0.15)
    steps: tuple[int, int, int] = (50, 500, 250)

    def __post_init__(self) -> None:
        """Check the number of stages, their rates and their steps."""
        if len(self.rates) != 3 or not all(0 < rate < math.inf for rate in self.rates):
            raise DataError(f"rates must be three finite numbers > 0, got {self.rates}")
        if len(self.steps) != 3 or min(self.steps) < 1:
            raise DataError(f"steps must be three integers >= 1, got {self.steps}")

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        first, second, _ = self.steps
        return self.rates[0 if step <= first else 1 if step <= first + second else 2]

    @property
    def ends(self) -> tuple[int, int, int]:
        """The last step of each stage."""
        first, second, third = self.steps
        return first, first + second, first + second + third


@dataclass(frozen=True)
class Setting:
    """One experiment: sentences, model, pretraining and finetuning. The defaults are those of the figures.

    `frequent` is the share of frequent pairs, `multiplicity` the paper's K, `universe` M, `share` beta. Frequent pairs
    after the share `spared` are the test pairs (`Sentences.split`). `rate` and `steps` are those of finetuning.
    """

    pairs: int = 60
    frequent: float = 0.8
    multiplicity: int = 2
    universe: int = 64
    rare_phrase: str = "universal"
    context: bool = True
    neurons: int = 8
    scale: float = 4.0
    context_norm: float | tuple[float, ...] = 2.0
    spread: float = 0.01
    uniform: bool = False
    stages: Stages = Stages()
    share: float = 0.2
    spared: float | None = None
    rate: float = 0.03
    steps: int = 600
    rank_one: bool = False
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True)
class Acquired:
    """The model at the end of each stage of pretraining, and its training data."""

    sentences: Sentences
    samples: Samples
    stages: tuple[AttentionMLP, AttentionMLP, AttentionMLP]

    @property
    def model(self) -> AttentionMLP:
        """The pretrained model."""
        return self.stages[-1]

    def run(self, index: int) -> Acquired:
        """A batch that holds only this run."""
        first, second, last = (model.run(index) for model in self.stages)
        return Acquired(self.sentences.run(index), self.samples.run(index), (first, second, last))


def acquire(setting: Setting, seeds: Sequence[int]) -> Acquired:
    """Make a world and a model from each seed, and pretrain the model on the full batch."""
    sentences = make_sentences(
        seeds,
        pairs=setting.pairs,
        frequent=setting.frequent,
        multiplicity=setting.multiplicity,
        universe=setting.universe,
        rare_phrase=setting.rare_phrase,
        context=setting.context,
        dtype=setting.dtype,
    )
    model = make_attention_mlp(
        seeds,
        sentences.tokens,
        neurons=setting.neurons,
        scale=setting.scale,
        context_norm=setting.context_norm,
        spread=setting.spread,
        uniform=setting.uniform,
        dtype=setting.dtype,
    )
    samples = sentences.pretraining()
    return Acquired(sentences, samples, pretrain(model, samples, setting.stages))


def pretrain(model: AttentionMLP, samples: Samples, stages: Stages) -> tuple[AttentionMLP, AttentionMLP, AttentionMLP]:
    """Train a model in place; return a copy at each stage's end. Raises `DivergenceError` if a rate is too high."""
    copies: list[AttentionMLP] = []

    def keep() -> Mapping[str, Tensor]:
        copies.append(model.copy())
        return {}

    last = stages.ends[-1]
    descend(lambda t: model.step(samples, stages.rate(t)), keep, last, stages.ends, lambda: model.loss(samples))
    return copies[0], copies[1], copies[2]


def extract(acquired: Acquired, setting: Setting, at: Sequence[int]) -> Trajectory:
    """Finetune a copy of a pretrained model on questions at a constant rate; observe it after the steps in `at`.

    Records accuracy on the finetuned pairs ("train"), on the other frequent and the rare pairs ("frequent", "rare"), on
    these two together ("test"; NaN if there are none), and the finetuning loss in nats ("loss"). Raises `DataError` for
    an invalid rate or share, and `DivergenceError` if the rate is too high.
    """
    if not 0 < setting.rate < math.inf:
        raise DataError(f"the finetuning rate must be a finite number > 0, got {setting.rate}")
    model, split = acquired.model.copy(), acquired.sentences.split(setting.share, setting.spared)

    def step(_: int) -> Float[Tensor, " run"]:
        return model.step(split.train, setting.rate, rank_one=setting.rank_one)

    return descend(step, lambda: _accuracies(model, split), setting.steps, at, lambda: model.loss(split.train))


def _accuracies(model: AttentionMLP, split: Split) -> dict[str, Float[Tensor, " run"]]:
    accuracy = {name: model.accuracy(getattr(split, name)) for name in ("train", "frequent", "rare")}
    n = {name: len(getattr(split, name)) for name in accuracy}
    right = sum((accuracy[name].nan_to_num(0.0) * n[name] for name in ("frequent", "rare")), start=torch.zeros(()))
    return accuracy | {"test": right / (n["frequent"] + n["rare"]), "loss": model.loss(split.train)}


def doubling(last: int) -> tuple[int, ...]:
    """Steps to observe: 0, then four per doubling, and the last."""
    return tuple(sorted({0, last} | {round(2 ** (k / 4)) for k in range(4 * int(math.log2(last)) + 1)}))
