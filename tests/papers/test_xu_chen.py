"""Figures 2 and 6 of Xu & Chen (2025): their cells, and their claims on made-up results."""

from __future__ import annotations

import json
from typing import Any

import pytest

from attnbalance.papers import xu_chen
from attnbalance.papers.extraction import curve_name
from attnbalance.papers.figure import CellResult
from attnbalance.papers.sources import Sources

FIGURES = {figure.name: figure for figure in xu_chen.FIGURES}


def test_cells_have_names_of_their_own_and_settings_that_json_holds() -> None:
    for figure in xu_chen.FIGURES:
        for scale in ("small", "paper"):
            cells = figure.cells(scale, (0, 1), Sources())
            assert len({cell.name for cell in cells}) == len(cells)
            assert all(json.loads(json.dumps(cell.settings)) == cell.settings for cell in cells)
            assert {cell.settings["seed"] for cell in cells} == {0, 1}


def made_up(accuracy: Any) -> list[CellResult]:
    """Results of Figure 2's cells whose accuracies are a function of model, K, M and share, halved with more pairs."""
    results = []
    for cell in FIGURES["xu-chen-fig2"].cells("small", (0, 1, 2), Sources()):
        s, values = cell.settings, {"gap": 0.0}
        for share in s["shares"]:
            top = accuracy(s["architecture"], s["multiplicity"], s["universe"], share) + 0.001 * s["seed"]
            top /= 2 if s["pairs"] == 150 else 1
            curve = {name: [0.0, top, 0.0] for name in ("train", "frequent", "rare", "test")}
            values[curve_name(share)] = {"steps": [0, 1, 2]} | curve
        results.append(CellResult(s, values))
    return results


def test_trends_of_figure_2_are_read_off_its_sweeps() -> None:
    results = made_up(lambda model, K, M, share: K / 10 + share - M / 1000 if model == "GPT-2" else 0.3)
    claims = FIGURES["xu-chen-fig2"].claims(results)
    assert [claim.verdict for claim in claims] == ["absent"] * 3 + ["seen"] * 4
    assert not any(claim.scored for claim in claims)  # at the small scale
    assert [condition.measured for condition in claims[3].unmet] == ["2 and 4", "60"]
    assert claims[6].place == ""
    assert claims[3].values == pytest.approx((0.3,) * 3)
    assert claims[4].values == pytest.approx((0.45,) * 3)
    assert claims[5].values == pytest.approx((0.112,) * 3)
    assert claims[6].values == pytest.approx((0.056,) * 3)
    assert claims[6].says == f"{claims[5].says}, with K = 1 and 150 pairs"
    panels = FIGURES["xu-chen-fig2"].panels(results)
    assert [panel.series[0].x for panel in panels] == [(1, 2, 4), (0.05, 0.2, 0.5), (16, 64, 128), (16, 64, 128)]
    assert panels[0].series[3].y[-1].mean == pytest.approx(0.4 + 0.2 - 0.064 + 0.001)
    assert [series.label for series in panels[3].series] == ["GPT-2", "GPT-2, frequent", "GPT-2, rare"]
    assert panels[3].series[0].y[-1].mean == pytest.approx((0.1 + 0.2 - 0.128 + 0.001) / 2)


def test_what_is_lost_by_the_end_uses_the_other_seeds_best_step() -> None:
    curves = [{"test": [0.0, 0.9, 0.5]}, {"test": [0.0, 0.8, 0.6]}, {"test": [0.0, 0.4, 0.7]}]
    assert xu_chen.lost_by_the_end(curves) == pytest.approx((0.5 - 0.5, 0.8 - 0.6, 0.4 - 0.7))


def test_steps_are_judged_for_each_model_and_rank() -> None:
    results = []
    for cell in FIGURES["xu-chen-steps"].cells("small", (0, 1), Sources()):
        curves = {
            curve_name(0.2, rank): {"steps": [0, 1, 2], "test": [0.0, 1.0, 0.5]} for rank in cell.settings["ranks"]
        }
        results.append(CellResult(cell.settings, curves))
    claims = FIGURES["xu-chen-steps"].claims(results)
    assert [claim.values for claim in claims] == [(0.5, 0.5)] * 3 + [(0.0, 0.0)]
    assert all(claim.verdict == "seen" for claim in claims)
    assert len(FIGURES["xu-chen-steps"].panels(results)) == 2
