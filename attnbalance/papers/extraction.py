"""One piece of work for Figure 2 of Xu & Chen (2025): pretrain, finetune on several shares, accuracy along the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnbalance.papers.small_gpt2 import IGNORED, make_gpt2, next_token, train_gpt2, weighted_loss
from attnbalance.theory.acquisition import Setting, Stages, acquire, doubling, extract
from attnbalance.theory.sentences import Samples, Sentences, Split, make_sentences

PARTS = ("train", "frequent", "rare", "test")


def run(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """How far pretraining ends above the entropy, and for each share and rank the accuracies along finetuning.

    `settings["model"]` is "one-layer" or "GPT-2". Every share is tested on the pairs that the largest does not take,
    `settings["spared"]`, so that shares differ in what was finetuned alone.
    """
    return _one_layer(settings) if settings["model"] == "one-layer" else _gpt2(settings)


def curve_name(share: float, rank: str = "full") -> str:
    """The name under which `run` gives the accuracies of a share and rank."""
    return f"share {share:g}, {rank}"


def _one_layer(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    setting = Setting(
        pairs=settings["pairs"],
        frequent=settings["frequent"],
        multiplicity=settings["multiplicity"],
        universe=settings["universe"],
        neurons=settings["neurons"],
        stages=Stages(tuple(settings["rates"]), tuple(settings["stage_steps"])),
        spared=settings["spared"],
        rate=settings["tuning_rate"],
        steps=settings["tuning_steps"],
        dtype=torch.float32,
    )
    acquired = acquire(setting, [settings["seed"]])
    found: dict[str, Any] = {"gap": float(acquired.model.loss(acquired.samples)) - acquired.sentences.entropy}
    for share in settings["shares"]:
        for rank in settings["ranks"]:
            this = Setting(**(vars(setting) | {"share": share, "rank_one": rank == "rank 1"}))
            seen = extract(acquired, this, doubling(setting.steps))
            curve = {name: [_number(x) for x in seen.values[name][:, 0]] for name in PARTS}
            found[curve_name(share, rank)] = {"steps": list(seen.steps)} | curve
    return found


def _number(x: Tensor) -> float | None:
    return None if bool(x.isnan()) else float(x)


def _gpt2(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sentences = make_sentences(
        [settings["seed"]],
        pairs=settings["pairs"],
        frequent=settings["frequent"],
        multiplicity=settings["multiplicity"],
        universe=settings["universe"],
        dtype=torch.float32,
    )
    shape = {name: settings[name] for name in ("layers", "d_model", "heads")}
    model = make_gpt2(sentences.tokens, **shape, seed=settings["seed"])
    torch.nn.Module.to(model, device)  # transformers' own method is wrapped so that type checkers lose its self
    ids, labels, weights = (x.to(device) for x in written(sentences))
    size = {"steps": settings["steps"], "rate": settings["rate"], "weight_decay": 0.1}
    model = train_gpt2(model, ids, labels, weights, **size)
    with torch.no_grad():
        found: dict[str, Any] = {"gap": float(weighted_loss(model, ids, labels, weights)) - sentences.entropy}
    for share in settings["shares"]:
        split = sentences.split(share, settings["spared"])
        found[curve_name(share)] = _tuned(model, split, settings, device)
    return found


def written(
    sentences: Sentences, run: int = 0
) -> tuple[Int[Tensor, "sentence 4"], Int[Tensor, "sentence 4"], Float[Tensor, " sentence"]]:
    """The sentences (c, s, phrase, a) of a run, labels for phrase and answer, and weights, K for a rare pair's."""
    samples, pairs = sentences.pretraining(), sentences.pairs
    ids = torch.cat([samples.tokens[run, pairs:], samples.target[run, pairs:].argmax(-1)[:, None]], dim=1)
    labels = ids.clone()
    labels[:, :2] = IGNORED
    return ids, labels, samples.weight[run, pairs:]


def _tuned(model: Any, split: Split, settings: Mapping[str, Any], device: str) -> dict[str, list[Any]]:
    ids = torch.cat([split.train.tokens[0], split.train.target[0].argmax(-1)[:, None]], dim=1).to(device)
    labels = ids.clone()
    labels[:, :-1] = IGNORED
    looks, curve = set(doubling(settings["tuning_steps"])), {name: [] for name in ("steps", *PARTS)}

    def observe(step: int, tuned: Any) -> None:
        if step in looks:
            curve["steps"].append(step)
            for name, value in _accuracies(tuned, split, device).items():
                curve[name].append(value)

    observe(0, model)
    size = {"steps": settings["tuning_steps"], "rate": settings["tuning_rate"]}
    train_gpt2(model, ids, labels, torch.ones(len(ids), device=device), **size, observe=observe)
    return curve


def _accuracies(model: Any, split: Split, device: str) -> dict[str, float | None]:
    def hits(samples: Samples) -> Sequence[bool]:
        return (next_token(model, samples.tokens[0].to(device)).cpu() == samples.target[0].argmax(-1)).tolist()

    found = {name: hits(getattr(split, name)) for name in ("train", "frequent", "rare")}
    found["test"] = [*found["frequent"], *found["rare"]]
    return {name: sum(right) / len(right) if right else None for name, right in found.items()}
