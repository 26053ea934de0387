"""One cell of Figure 2 of Xu & Chen (2025), against the theory's own model and a loop over steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

from attnbalance.papers.extraction import curve_name, run, written
from attnbalance.papers.small_gpt2 import IGNORED, make_gpt2
from attnbalance.theory.acquisition import Setting, Stages, acquire, extract
from attnbalance.theory.sentences import CONTEXT, make_sentences

DATA = {"pairs": 6, "frequent": 0.5, "spared": 0.5, "multiplicity": 2, "universe": 4, "seed": 3}
ONE_LAYER = DATA | {"architecture": "one-layer", "neurons": 3, "rates": [0.1, 0.1, 0.1], "stage_steps": [3, 3, 3]}
ONE_LAYER |= {"tuning_rate": 0.1, "tuning_steps": 4, "shares": [0.4], "ranks": ["full", "rank 1"]}
GPT2 = DATA | {"architecture": "GPT-2", "layers": 1, "d_model": 16, "heads": 2, "rate": 1e-2, "steps": 5}
GPT2 |= {"tuning_rate": 1e-3, "tuning_steps": 4, "shares": [0.4], "ranks": ["full"]}


def test_a_cell_of_the_one_layer_model_is_what_the_theory_gives() -> None:
    values = run(ONE_LAYER)
    setting = Setting(
        pairs=6, frequent=0.5, multiplicity=2, universe=4, neurons=3, stages=Stages((0.1, 0.1, 0.1), (3, 3, 3)),
        share=0.4, spared=0.5, rate=0.1, steps=4, dtype=torch.float64,
    )  # fmt: skip
    acquired = acquire(setting, [3])
    gap = float(acquired.model.loss(acquired.samples)) - acquired.sentences.entropy
    assert values["gap"] == pytest.approx(gap, abs=1e-5)  # the cell works in float32
    for rank in ("full", "rank 1"):
        expected = extract(acquired, replace(setting, rank_one=rank == "rank 1"), (4,)).values["test"][-1, 0]
        assert values[curve_name(0.4, rank)]["test"][-1] == pytest.approx(float(expected), abs=1e-6)
        assert values[curve_name(0.4, rank)]["steps"] == [0, 1, 2, 3, 4]


def train(model: GPT2LMHeadModel, ids: Tensor, first: int, weights: Tensor, steps: int, rate: float) -> Iterator[None]:
    """AdamW on the tokens from `first` on, one sentence at a time; yields after each step."""
    decay = 0.1 if first == 2 else 0.0  # only pretraining, whose loss begins at the phrase, decays weights
    matrices = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(matrices, lr=rate, weight_decay=decay)
    for _ in range(steps):
        loss = torch.zeros(())
        for row, weight in zip(ids, weights, strict=True):
            log_p = model(input_ids=row[None]).logits[0].log_softmax(-1)
            for position in range(first, ids.shape[1]):
                loss = loss - weight * log_p[position - 1, row[position]]
        optimizer.zero_grad()
        (loss / weights.sum() / (ids.shape[1] - first)).backward()
        optimizer.step()
        yield


def test_a_cell_of_gpt2_is_what_training_on_single_sentences_gives() -> None:
    values = run(GPT2)
    sentences = make_sentences([3], pairs=6, frequent=0.5, multiplicity=2, universe=4, dtype=torch.float32)
    model = make_gpt2(sentences.tokens, layers=1, d_model=16, heads=2, seed=3)
    ids, _, weights = written(sentences)
    for _ in train(model, ids, 2, weights, 5, 1e-2):
        pass
    split = sentences.split(0.4, 0.5)
    asked = {name: getattr(split, name) for name in ("train", "frequent", "rare")}

    def accuracies() -> dict[str, float]:
        right = {name: [] for name in asked}
        for name, part in asked.items():
            for tokens, target in zip(part.tokens[0], part.target[0], strict=True):
                right[name].append(int(model(input_ids=tokens[None]).logits[0, -1].argmax() == target.argmax()))
        right["test"] = right["frequent"] + right["rare"]
        return {name: sum(hits) / len(hits) for name, hits in right.items()}

    expected = [accuracies()]
    questions = torch.cat([split.train.tokens[0], split.train.target[0].argmax(-1)[:, None]], dim=1)
    for _ in train(model, questions, 3, torch.ones(len(questions)), 4, 1e-3):
        expected.append(accuracies())
    curve = values[curve_name(0.4)]
    assert curve["steps"] == [0, 1, 2, 3, 4]
    for name in ("train", "frequent", "rare", "test"):
        assert curve[name] == [accuracy[name] for accuracy in expected]


def test_sentences_are_written_out_with_labels_for_phrase_and_answer() -> None:
    sentences = make_sentences([0], pairs=4, frequent=0.5, multiplicity=3, universe=4, dtype=torch.float32)
    ids, labels, weights = written(sentences)
    expected = [
        [CONTEXT, sentences.subject + pair, phrase, sentences.answer + pair]
        for pair in range(4)
        for phrase in (sentences.frequent[0, pair].tolist() if pair < 2 else [int(sentences.rare[0, pair - 2])])
    ]
    assert ids.tolist() == expected
    assert labels.tolist() == [[IGNORED, IGNORED, *row[2:]] for row in expected]
    # a rare pair has one sentence, which counts as much as the three of a frequent pair
    assert (weights / weights[0]).tolist() == pytest.approx([1.0] * 6 + [3.0] * 2)
