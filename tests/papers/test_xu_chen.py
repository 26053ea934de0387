"""Cells of the figures of Xu & Chen (2025) in miniature, and their numbers by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnbalance.errors import DataError, DivergenceError
from attnbalance.papers import architectures, xu_chen
from attnbalance.papers.extraction import curve_name, run, written
from attnbalance.papers.figure import CellResult
from attnbalance.papers.small_gpt2 import make_gpt2, next_token, train_gpt2, weighted_loss
from attnbalance.papers.standard_layer import OneLayer
from attnbalance.theory.acquisition import Setting, Stages, acquire, extract
from attnbalance.theory.sentences import make_sentences

DATA = {"pairs": 6, "frequent": 0.5, "spared": 0.5, "multiplicity": 2, "universe": 4, "seed": 3}
ONE_LAYER = DATA | {"model": "one-layer", "neurons": 3, "rates": [0.1, 0.1, 0.1], "stage_steps": [3, 3, 3]}
ONE_LAYER |= {"tuning_rate": 0.1, "tuning_steps": 4, "shares": [0.4], "ranks": ["full", "rank 1"]}
GPT2 = DATA | {"model": "GPT-2", "layers": 1, "d_model": 16, "heads": 2, "rate": 1e-2, "steps": 5}
GPT2 |= {"tuning_rate": 1e-3, "tuning_steps": 4, "shares": [0.4], "ranks": ["full"]}
FIGURES = {figure.name: figure for figure in xu_chen.FIGURES}


def test_a_cell_of_the_one_layer_model_is_what_the_theory_gives() -> None:
    found = run(ONE_LAYER)
    setting = Setting(
        pairs=6, frequent=0.5, multiplicity=2, universe=4, neurons=3, stages=Stages((0.1, 0.1, 0.1), (3, 3, 3)),
        share=0.4, spared=0.5, rate=0.1, steps=4, dtype=torch.float64,
    )  # fmt: skip
    acquired = acquire(setting, [3])
    gap = float(acquired.model.loss(acquired.samples)) - acquired.sentences.entropy
    assert found["gap"] == pytest.approx(gap, abs=1e-5)  # the cell works in float32
    for rank in ("full", "rank 1"):
        expected = extract(acquired, replace(setting, rank_one=rank == "rank 1"), (4,)).values["test"][-1, 0]
        assert found[curve_name(0.4, rank)]["test"][-1] == pytest.approx(float(expected), abs=1e-6)
        assert found[curve_name(0.4, rank)]["steps"] == [0, 1, 2, 3, 4]


def test_a_cell_of_gpt2_measures_what_its_model_says() -> None:
    found, again = run(GPT2), run(GPT2)
    assert found == again
    curve = found[curve_name(0.4)]
    assert curve["steps"] == [0, 1, 2, 3, 4]
    assert all(0 <= value <= 1 for name in ("train", "frequent", "rare", "test") for value in curve[name])


def test_weighted_loss_of_gpt2_is_that_of_single_sentences() -> None:
    sentences = make_sentences([0], pairs=4, frequent=0.5, multiplicity=3, universe=4, dtype=torch.float32)
    ids, labels, weights = written(sentences)
    model = make_gpt2(sentences.tokens, layers=1, d_model=16, heads=2).eval()
    total, mass = 0.0, 0.0
    with torch.no_grad():
        for row, weight in zip(ids, weights, strict=True):
            for place in (2, 3):  # phrase and answer
                log_p = model(input_ids=row[None, :place]).logits[0, -1].log_softmax(-1)
                total, mass = total - float(weight * log_p[row[place]]), mass + float(weight)
        # float32: sums of a few numbers of size 1
        assert float(weighted_loss(model, ids, labels, weights)) == pytest.approx(total / mass, abs=1e-5)
        expected = model(input_ids=ids[:, :2]).logits[:, -1].argmax(-1)
    assert torch.equal(next_token(model, ids[:, :2]), expected)
    assert weights[:6].tolist() == pytest.approx([float(weights[0])] * 6)
    assert float(weights[6] / weights[0]) == pytest.approx(3.0)


def test_gpt2_has_no_positions_and_learns_its_sentences() -> None:
    sentences = make_sentences([0], pairs=4, frequent=0.5, multiplicity=2, universe=3, dtype=torch.float32)
    ids, labels, weights = written(sentences)
    model = make_gpt2(sentences.tokens, layers=1, d_model=32, heads=2)
    seen: list[int] = []
    trained = train_gpt2(
        model, ids, labels, weights, steps=200, rate=5e-3, weight_decay=0.1, observe=lambda t, _: seen.append(t)
    )
    assert seen == list(range(1, 201))
    assert float(trained.transformer.wpe.weight.detach().abs().max()) == 0
    with torch.no_grad():
        before, after = (float(weighted_loss(one, ids, labels, weights)) for one in (model, trained))
        turned = trained(input_ids=ids[:, [1, 0, 2]]).logits[:, -1]
        torch.testing.assert_close(turned, trained(input_ids=ids[:, :3]).logits[:, -1], atol=1e-4, rtol=0.0)
    assert before > 2
    assert after - sentences.entropy < 0.1


def test_gpt2_refuses_what_cannot_be() -> None:
    with pytest.raises(DataError):
        make_gpt2(5, d_model=10, heads=4)
    model, ids = make_gpt2(5, layers=1, d_model=8, heads=2), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(DataError):
        train_gpt2(model, ids, ids, torch.ones(2), steps=1, rate=0.0)
    with pytest.raises(DivergenceError):
        train_gpt2(model, ids, ids, torch.full((2,), torch.inf), steps=1, rate=0.1)


def test_a_layer_reads_its_tokens_evenly_or_by_score_and_skips_empty_places() -> None:
    torch.manual_seed(0)
    layer = OneLayer(5, 4, mlp=False, uniform=True)
    x = layer.get_buffer("embedding")
    read = layer.value(layer.before(x[[1, 2]])).mean(0)
    expected = layer.readout(x[2] + layer.output(read))
    torch.testing.assert_close(layer(torch.tensor([[-1, 1, 2]]))[0], expected, atol=1e-6, rtol=0.0)
    scored = OneLayer(5, 5, mlp=True, uniform=False, identity=True)
    assert torch.equal(scored.get_buffer("embedding"), torch.eye(5))
    changed = scored(torch.tensor([[-1, 1, 2], [3, 1, 2]]))
    assert not torch.allclose(changed[0], changed[1])
    with pytest.raises(DataError):
        OneLayer(5, 4, mlp=True, uniform=False, identity=True)


def test_every_architecture_gives_its_loss_above_the_entropy() -> None:
    sizes = {"pairs": 4, "universe": 5, "seed": 0, "tuning_steps": 2, "tuning_rate": 1e-3}
    standard = sizes | {"d_model": 8, "rate": 1e-2, "steps": 3}
    simplified = sizes | {"neurons": 2, "scale_factor": 2.0, "spread": 0.1}
    simplified |= {"rates": [0.1, 0.1, 0.1], "stage_steps": [1, 1, 1]}
    for name in architectures.NAMES:
        part = simplified if name.startswith("simplified") else standard
        found = architectures.run(part | {"architecture": name, "context": name in architectures.NOISY})
        assert found["entropy"] == pytest.approx(0.8047, abs=1e-4)
        assert found["loss"] > found["entropy"]
        assert 0 <= found["accuracy"] <= 1


def test_cells_have_names_of_their_own_and_settings_that_json_holds() -> None:
    import json

    for figure in xu_chen.FIGURES:
        for scale in ("small", "paper"):
            found = figure.cells(scale, (0, 1), "")
            assert len({cell.name for cell in found}) == len(found)
            assert all(json.loads(json.dumps(cell.settings)) == cell.settings for cell in found)
            assert {cell.settings["seed"] for cell in found} == {0, 1}


def made_up(accuracy: Any) -> list[CellResult]:
    """Results of Figure 2's cells whose accuracies are a function of model, K, M and share, halved with more pairs."""
    results = []
    for cell in FIGURES["xu-chen-fig2"].cells("small", (0, 1, 2), ""):
        s, values = cell.settings, {"gap": 0.0}
        for share in s["shares"]:
            top = accuracy(s["model"], s["multiplicity"], s["universe"], share) + 0.001 * s["seed"]
            top /= 2 if s["pairs"] == 150 else 1
            curve = {name: [0.0, top, 0.0] for name in ("train", "frequent", "rare", "test")}
            values[curve_name(share)] = {"steps": [0, 1, 2]} | curve
        results.append(CellResult(s, values))
    return results


def test_trends_of_figure_2_are_read_off_its_sweeps() -> None:
    results = made_up(lambda model, K, M, share: K / 10 + share - M / 1000 if model == "GPT-2" else 0.3)
    claims = FIGURES["xu-chen-fig2"].claims(results)
    assert [claim.verdict for claim in claims] == ["not seen"] * 3 + ["seen"] * 4
    assert claims[3].values == pytest.approx((0.3,) * 3)
    assert claims[4].values == pytest.approx((0.45,) * 3)
    assert claims[5].values == pytest.approx((0.112,) * 3)
    assert claims[6].values == pytest.approx((0.056,) * 3)
    assert claims[6].says == f"{claims[5].says}, where K = 1 and pairs are 150"
    panels = FIGURES["xu-chen-fig2"].panels(results)
    assert [panel.series[0].x for panel in panels] == [(1, 2, 4), (0.05, 0.2, 0.5), (16, 64, 128), (16, 64, 128)]
    assert panels[0].series[3].y[-1].mean == pytest.approx(0.4 + 0.2 - 0.064 + 0.001)
    assert [one.label for one in panels[3].series] == ["GPT-2", "GPT-2, frequent", "GPT-2, rare"]
    assert panels[3].series[0].y[-1].mean == pytest.approx((0.1 + 0.2 - 0.128 + 0.001) / 2)


def test_what_is_lost_by_the_end_uses_the_other_seeds_best_step() -> None:
    curves = [{"test": [0.0, 0.9, 0.5]}, {"test": [0.0, 0.8, 0.6]}, {"test": [0.0, 0.4, 0.7]}]
    assert xu_chen.lost_by_the_end(curves) == pytest.approx((0.5 - 0.5, 0.8 - 0.6, 0.4 - 0.7))


def test_steps_are_judged_for_each_model_and_rank() -> None:
    results = []
    for cell in FIGURES["xu-chen-steps"].cells("small", (0, 1), ""):
        curves = {
            curve_name(0.2, rank): {"steps": [0, 1, 2], "test": [0.0, 1.0, 0.5]} for rank in cell.settings["ranks"]
        }
        results.append(CellResult(cell.settings, curves))
    claims = FIGURES["xu-chen-steps"].claims(results)
    assert [claim.values for claim in claims] == [(0.5, 0.5)] * 3 + [(0.0, 0.0)]
    assert all(claim.verdict == "seen" for claim in claims)
    assert len(FIGURES["xu-chen-steps"].panels(results)) == 2


def test_table_3_is_judged_from_its_losses() -> None:
    results = []
    for cell in FIGURES["xu-chen-table3"].cells("small", (0, 1), ""):
        name = cell.settings["architecture"]
        loss = {"attention only": 3.0, "simplified": 0.83}.get(name, 0.81)
        accuracy = 0.5 if name == architectures.FEW else 1.0
        results.append(CellResult(cell.settings, {"entropy": 0.8, "loss": loss, "accuracy": accuracy}))
    claims = FIGURES["xu-chen-table3"].claims(results)
    expected = ["seen", "seen", "reversed", "seen", "seen", "not seen", "seen", "seen", "reversed", "reversed"]
    assert [claim.verdict for claim in claims] == expected
    assert claims[7].values == pytest.approx((0.5, 0.5))
    assert [len(panel.series) for panel in FIGURES["xu-chen-table3"].panels(results)] == [2, 2]


def test_few_pairs_share_more_phrases_and_so_do_those_with_the_context_token() -> None:
    for scale in ("small", "paper"):
        for cell in FIGURES["xu-chen-table3"].cells(scale, (0,), ""):
            s = cell.settings
            few = s["context"] or s["architecture"] == architectures.FEW
            assert s["universe"] == (10 if few else 5), cell.name
