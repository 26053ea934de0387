"""Figure 2 on a tiny transformer: its cells, panels and claims."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from attnbalance.papers.figure import CellResult
from attnbalance.papers.ghosal_fig2 import FIG2A, FIG2B, FIG2C, RATES
from attnbalance.papers.sources import Sources
from attnbalance.papers.two_tokens import TOP, Sizes

TINY = Sizes(layers=1, d_model=16, heads=2, batch_size=32, learning_rate=0.01, finetuning_steps=4, observations=2)
WORLD = {"subjects": 40, "relations": 2, "answers": 6}


@pytest.mark.parametrize("figure", [FIG2A, FIG2B, FIG2C], ids=lambda figure: figure.name)
def test_cells_become_panels_and_claims_with_one_value_a_seed(figure) -> None:
    cells = figure.cells("small", range(2), Sources())
    assert len({cell.name for cell in cells}) == len(cells)
    tiny = [asdict(replace(TINY, finetuning_rate=cell.settings["sizes"]["finetuning_rate"])) for cell in cells]
    results = [
        CellResult(cell.settings, figure.run({**cell.settings, "world": WORLD, "steps": 5, "sizes": sizes}))
        for cell, sizes in zip(cells, tiny, strict=True)
    ]
    for panel in figure.panels(results):
        assert all(len(series.x) == len(series.y) for series in panel.series)
    assert all(len(claim.values) == 2 for claim in figure.claims(results))


def test_figures_2a_to_2c_share_the_usual_pretraining() -> None:
    a, b, c = (
        {cell.name: cell for cell in figure.cells("small", range(5), Sources())} for figure in (FIG2A, FIG2B, FIG2C)
    )
    shared = {name: cell for name, cell in a.items() if cell.settings["sizes"]["finetuning_rate"] == RATES[0]}
    assert len(shared) == 5
    assert all(a[name] == b[name] == c[name] for name in shared)
    assert len(set(a) - set(b) - set(c)) == 5


def test_claims_of_figure_2_are_the_differences_they_say() -> None:
    def result(
        seed: int, *accuracy: float, alpha: float = 1.0, steps: int = 2000, stored: float = 1.0, rate: float = RATES[0]
    ) -> CellResult:
        values: dict[str, object] = {"stored": stored}
        for name, share in zip(("top", "whole", "random", "bottom"), accuracy, strict=True):
            of_top = [share + (0.1 if name == "top" and k else 0.0) for k in range(len(TOP))]
            values[name] = {"accuracy": [[0.0] * 5, [share] * 5], "accuracy of top": [of_top, of_top]}
        sizes = {"finetuning_rate": rate}
        return CellResult({"seed": seed, "alpha": alpha, "steps": steps, "sizes": sizes}, values)

    usual = [result(0, 0.7, 0.65, 0.6, 0.5), result(1, 0.8, 0.7, 0.6, 0.4)]
    fast = [result(0, 0.4, 0.4, 0.4, 0.1, rate=RATES[1]), result(1, 0.4, 0.4, 0.4, 0.2, rate=RATES[1])]
    claims = FIG2A.claims([*fast, *usual])
    assert [claim.values for claim in claims[:5]] == [
        pytest.approx(values) for values in ((0.2, 0.4), (0.1, 0.1), (0.05, 0.1), (0.05, 0.1), (0.1, 0.2))
    ]
    assert [claim.scored for claim in claims] == 2 * [True, True, False, False, False]
    assert claims[5].says == "rate 0.003: FT-top is better than FT-bottom"
    assert claims[5].values == pytest.approx((0.3, 0.2))
    stored = [result(0, 0.7, 0.6, 0.6, 0.5, stored=0.7), result(1, 0.7, 0.6, 0.6, 0.5)]
    [forgetful, *_] = FIG2A.claims([*stored, *fast])
    assert [condition.measured for condition in forgetful.unmet] == ["70.0% of the facts or more"]
    full = [result(seed, 1.0, 1.0, 1.0, 0.98) for seed in (0, 1)]
    [better, *_] = FIG2A.claims([*full, *fast])
    assert [condition.measured for condition in better.unmet] == ["98.0% answered"]  # no room for a gap
    gaps = {0.25: 0.01, 0.5: 0.02, 0.75: 0.05, 1.0: 0.1, 1.25: 0.3}
    results = [result(seed, 0.5 + gap, 0, 0, 0.5, alpha=alpha) for alpha, gap in gaps.items() for seed in (0, 1)]
    assert [claim.values for claim in FIG2B.claims(results)] == [pytest.approx((0.09, 0.09)), pytest.approx((0.2, 0.2))]
    results = [
        result(seed, 0.5 + gap, 0, 0, 0.5, steps=steps, stored=0.5 if steps < 2000 else 1.0)
        for steps, gap in ((500, 0.3), (2000, 0.2), (8000, 0.05))
        for seed in (0, 1)
    ]
    whole, later = FIG2C.claims(results)  # all facts are stored in the end
    assert (whole.values, whole.scored) == (pytest.approx((0.25, 0.25)), True)
    assert whole.says == "pretraining 16 times as long narrows the gap (500 to 8,000 steps)"
    assert (later.values, later.scored) == (pytest.approx((0.15, 0.15)), False)
