"""Figure 2 on a tiny transformer: what a cell holds, against transformers' own numbers, and what is made of cells."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch

from attnbalance.errors import DivergenceError
from attnbalance.papers.figure import CellResult
from attnbalance.papers.ghosal_fig2 import FIG2A, FIG2B, FIG2C
from attnbalance.papers.two_tokens import Sizes, finetune, pretrain, read
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
    found = finetune(model, world, "top", 1, TINY)
    assert found["steps"] == [0, 2, 4]
    assert np.shape(found["accuracy"]) == (3, 5)
    assert np.shape(found["subject attention"]) == (3, 1)
    heldout = world.of(split_subjects(world, "top", [1]).heldout)
    right = read(model, heldout)[0].double()
    by_fifth = [float(right[heldout.subject[0] * 5 // 40 == k].mean()) for k in range(5)]
    assert found["accuracy"][-1] == pytest.approx(by_fifth)


def test_a_rate_that_diverges_is_reported() -> None:
    wild = Sizes(**(asdict(TINY) | {"learning_rate": 1e30}))
    with pytest.raises(DivergenceError, match="diverged at step"):
        pretrain(make_triples([0], **WORLD), 20, 0, wild)


@pytest.mark.parametrize("figure", [FIG2A, FIG2B, FIG2C], ids=lambda figure: figure.name)
def test_cells_become_panels_and_claims_with_one_value_a_seed(figure) -> None:
    cells = figure.cells("small", range(2), "popqa")
    assert len({cell.name for cell in cells}) == len(cells)
    results = [
        CellResult(one.settings, figure.run({**one.settings, "world": WORLD, "steps": 5, "sizes": asdict(TINY)}))
        for one in cells
    ]
    for panel in figure.panels(results):
        assert all(len(series.x) == len(series.y) for series in panel.series)
    assert all(len(claim.values) == 2 for claim in figure.claims(results))


def test_figures_2a_to_2c_share_the_usual_pretraining() -> None:
    a, b, c = ({cell.name: cell for cell in figure.cells("small", range(5), "")} for figure in (FIG2A, FIG2B, FIG2C))
    assert set(a) == set(a) & set(b) & set(c)
    assert all(a[name] == b[name] == c[name] for name in a)


def test_claims_of_figure_2_are_the_differences_they_say() -> None:
    def result(seed: int, top: float, whole: float, random: float, bottom: float, alpha: float = 1.0) -> CellResult:
        accuracy = {"top": top, "whole": whole, "random": random, "bottom": bottom}
        values = {name: {"accuracy": [[0.0] * 5, [share] * 5]} for name, share in accuracy.items()}
        return CellResult({"seed": seed, "alpha": alpha, "steps": 500}, values)

    claims = FIG2A.claims([result(0, 0.7, 0.65, 0.6, 0.5), result(1, 0.8, 0.7, 0.6, 0.4)])
    assert [claim.values for claim in claims] == [
        pytest.approx(values) for values in ((0.05, 0.1), (0.05, 0.1), (0.1, 0.2), (0.2, 0.4))
    ]
    gaps = {0.25: 0.01, 0.5: 0.02, 1.0: 0.1, 1.5: 0.2, 2.0: 0.3}
    results = [result(seed, 0.5 + gap, 0, 0, 0.5, alpha) for alpha, gap in gaps.items() for seed in (0, 1)]
    assert [claim.values for claim in FIG2B.claims(results)] == [pytest.approx((0.09, 0.09)), pytest.approx((0.2, 0.2))]
