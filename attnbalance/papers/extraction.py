"""One cell of Figure 2 of Xu & Chen (2025): pretrain, finetune on several shares, measure accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnbalance.papers.small_gpt2 import IGNORED, Training, make_gpt2, next_token, train_gpt2, weighted_loss
from attnbalance.theory.acquisition import Setting, Stages, acquire, doubling, extract
from attnbalance.theory.sentences import Samples, Sentences, Split, make_sentences

PARTS = ("train", "frequent", "rare", "test")


def run(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The gap between pretraining loss and entropy, and the accuracies during finetuning for each share and rank.

    `settings["architecture"]` is "one-layer" or "GPT-2". All shares are tested on the same pairs, those after the share
    `settings["spared"]`, so they differ only in the finetuned pairs.
    """
    return _one_layer(settings) if settings["architecture"] == "one-layer" else _gpt2(settings)


def curve_name(share: float, rank: str = "full") -> str:
    """The key of a share's and rank's accuracies in the result of `run`."""
    return f"share {share:g}, {rank}"


def one_layer_setting(settings: Mapping[str, Any], **more: Any) -> Setting:
    """The theory's setting for a cell: sizes, rates and steps from its `settings`, `more` as given, in float32."""
    return Setting(
        pairs=settings["pairs"],
        universe=settings["universe"],
        neurons=settings["neurons"],
        stages=Stages(tuple(settings["rates"]), tuple(settings["stage_steps"])),
        rate=settings["tuning_rate"],
        steps=settings["tuning_steps"],
        dtype=torch.float32,
        **more,
    )


def _one_layer(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    world = {name: settings[name] for name in ("frequent", "multiplicity", "spared")}
    setting = one_layer_setting(settings, **world)
    acquired = acquire(setting, [settings["seed"]])
    values: dict[str, Any] = {"gap": float(acquired.model.loss(acquired.samples)) - acquired.sentences.entropy}
    for share in settings["shares"]:
        for rank in settings["ranks"]:
            path = extract(acquired, replace(setting, share=share, rank_one=rank == "rank 1"), doubling(setting.steps))
            curve = {name: [_number(x) for x in path.values[name][:, 0]] for name in PARTS}
            values[curve_name(share, rank)] = {"steps": list(path.steps)} | curve
    return values


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
    torch.nn.Module.to(model, device)  # type checkers reject transformers' wrapped method
    ids, labels, weights = (x.to(device) for x in written(sentences))
    model = train_gpt2(model, ids, labels, weights, Training(settings["steps"], settings["rate"], weight_decay=0.1))
    with torch.no_grad():
        values: dict[str, Any] = {"gap": float(weighted_loss(model, ids, labels, weights)) - sentences.entropy}
    for share in settings["shares"]:
        split = sentences.split(share, settings["spared"])
        values[curve_name(share)] = _tuned(model, split, settings, device)
    return values


def written(
    sentences: Sentences, run: int = 0
) -> tuple[Int[Tensor, "sentence 4"], Int[Tensor, "sentence 4"], Float[Tensor, " sentence"]]:
    """The sentences (c, s, phrase, a) of a run, labels of phrase and answer, and weights (K times for rare pairs)."""
    samples, pairs = sentences.pretraining(), sentences.pairs
    ids = torch.cat([samples.tokens[run, pairs:], samples.target[run, pairs:].argmax(-1)[:, None]], dim=1)
    labels = ids.clone()
    labels[:, :2] = IGNORED
    return ids, labels, samples.weight[run, pairs:]


def _tuned(model: Any, split: Split, settings: Mapping[str, Any], device: str) -> dict[str, list[Any]]:
    ids = torch.cat([split.train.tokens[0], split.train.target[0].argmax(-1)[:, None]], dim=1).to(device)
    labels = ids.clone()
    labels[:, :-1] = IGNORED
    observed, curve = set(doubling(settings["tuning_steps"])), {name: [] for name in ("steps", *PARTS)}

    def observe(step: int, tuned: Any) -> None:
        if step in observed:
            curve["steps"].append(step)
            for name, value in _accuracies(tuned, split, device).items():
                curve[name].append(value)

    observe(0, model)
    training = Training(settings["tuning_steps"], settings["tuning_rate"])
    train_gpt2(model, ids, labels, torch.ones(len(ids), device=device), training, observe)
    return curve


def _accuracies(model: Any, split: Split, device: str) -> dict[str, float | None]:
    def hits(samples: Samples) -> Sequence[bool]:
        return (next_token(model, samples.tokens[0].to(device)).cpu() == samples.target[0].argmax(-1)).tolist()

    right = {name: hits(getattr(split, name)) for name in ("train", "frequent", "rare")}
    right["test"] = [*right["frequent"], *right["rare"]]
    return {name: sum(answers) / len(answers) if answers else None for name, answers in right.items()}
