"""The small Llama on prompts of two tokens, against transformers run one prompt at a time."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch

from attnbalance.errors import DivergenceError
from attnbalance.papers.two_tokens import TOP, Sizes, finetune, pretrain, read
from attnbalance.theory.triples import make_triples, split_subjects

TINY = Sizes(layers=1, d_model=16, heads=2, batch_size=32, learning_rate=0.01, finetuning_steps=4, observations=2)
WORLD = {"subjects": 40, "relations": 2, "answers": 6}


def test_what_is_read_is_what_transformers_gives_one_prompt_at_a_time() -> None:
    world = make_triples([3], **WORLD)
    model, asked = pretrain(world, 40, 3, TINY), world.examples(asked=True)
    right, attention = read(model, asked)
    for i in (0, 7, 79):
        ids = torch.tensor([[int(asked.subject[0, i]), int(asked.query[0, i])]])
        output = model(ids, output_attentions=True)
        assert bool(right[i]) == (int(output.logits[0, -1].argmax()) == int(asked.answer[0, i]))
        assert float(attention[i, 0]) == pytest.approx(
            float(output.attentions[0][0, :, 1, 0].mean().detach()), abs=1e-6
        )


def test_pretraining_stores_facts_and_the_same_seed_gives_the_same_model() -> None:
    world = make_triples([0], **WORLD)
    facts = world.examples()
    models = [pretrain(world, steps, 0, TINY) for steps in (1, 300, 300)]
    untrained, trained, again = (float(read(model, facts)[0].double().mean()) for model in models)
    assert trained > max(0.7, untrained + 0.2)
    assert trained == again
    assert torch.equal(models[1].lm_head.weight, models[2].lm_head.weight)


def test_finetuning_observes_heldout_facts_by_popularity_and_leaves_other_prompts_subjects_out() -> None:
    world = make_triples([1], **WORLD)
    model = pretrain(world, 100, 1, TINY)
    values = finetune(model, world, "top", 1, TINY)
    assert values["steps"] == [0, 2, 4]
    assert np.shape(values["accuracy"]) == (3, 5)
    assert np.shape(values["subject attention"]) == (3, 1)
    heldout = world.of(split_subjects(world, "top", [1]).heldout)
    right = read(model, heldout)[0].double()
    by_fifth = [float(right[heldout.subject[0] * 5 // 40 == k].mean()) for k in range(5)]
    assert values["accuracy"][-1] == pytest.approx(by_fifth)
    held = sorted(set(heldout.subject[0].tolist()))  # 20 subjects; a lower token is a more popular one
    for share, accuracy in zip(TOP, values["accuracy of top"][-1], strict=True):
        chosen = [int(subject) in held[: round(20 * share)] for subject in heldout.subject[0]]
        assert accuracy == pytest.approx(float(right[torch.tensor(chosen)].mean()))


def test_a_rate_that_diverges_is_reported() -> None:
    wild = Sizes(**(asdict(TINY) | {"learning_rate": 1e30}))
    with pytest.raises(DivergenceError, match="diverged at step"):
        pretrain(make_triples([0], **WORLD), 20, 0, wild)
