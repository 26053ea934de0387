"""Context reliance along instruction tuning: rise and fall worked by hand, claims and panels from hand-made results."""

from __future__ import annotations

from typing import Any

import pytest

from attnbalance.errors import ModelError
from attnbalance.papers.figure import CellResult
from attnbalance.papers.finetuned import BASE, LOSS
from attnbalance.papers.goyal_tuned import FIGURES, MEASURES, along, rise_and_fall
from attnbalance.papers.instructed import CRITICAL, QK, SWAPPED, UNNAMED, WHOLE, WITH_INPUT

FIG2, FIG3, FIG4, FIG4C, FIG5 = FIGURES


def measured(right: int, attention: float = 0.5) -> dict[str, Any]:
    """Of four conflicts, `right` are answered from the context."""
    return {
        "counterfactual": [1] * right + [0] * (4 - right),
        "parametric": [0] * right + [1] * (4 - right),
        "from": ["context"] * right + ["memory"] * (4 - right),
        "remembered": [1, 0, 1, 0],
        "m_c": [0.25, 0.75, 0.25, 0.75],
        "attention": [attention] * 4,
    }


def fit(arm: str, seed: int, path: list[int], loss: float = 1.0, scale: str = "paper") -> CellResult:
    values = {LOSS: loss, "steps": [50, 100, 150], "measured": [measured(n, 0.1 * n) for n in path]}
    return CellResult({"split": arm, "seed": seed, "scale": scale, "model": "a/m"}, values)


def results(scale: str = "paper", parameters: int = 7_000_000_000, chat: bool = False) -> list[CellResult]:
    base = {"start": measured(1, 0.1), "parameters": parameters, "chat": chat}
    made = [
        CellResult({"split": BASE, "seed": seed, "scale": scale, "model": "a/m"}, base | {"seed": seed})
        for seed in (0, 1)
    ]
    for seed in (0, 1):
        made += [
            fit(WHOLE, seed, [3, 4, 2], scale=scale),
            fit(WHOLE, seed, [0, 0, 0], loss=2.0, scale=scale),  # the other learning rate, whose loss is higher
            fit(UNNAMED, seed, [3, 3, 2], scale=scale),
            fit(WITH_INPUT, seed, [4, 3, 2], scale=scale),
            fit(CRITICAL, seed, [4, 4, 4], scale=scale),
            fit(SWAPPED, seed, [4, 4, 4], scale=scale),
            fit(QK, seed, [2, 2, 1], scale=scale),
        ]
    return made


def test_measures_are_shares_and_means_of_what_was_asked() -> None:
    values = measured(3, 0.2)
    by_hand = {
        "counterfactual accuracy": 0.75,
        "parametric accuracy": 0.25,
        "from the context": 0.75,
        "from memory": 0.25,
        "attention to the context": 0.2,
        "M_C": 0.5,
    }
    assert {name: measure(values) for name, measure in MEASURES.items()} == pytest.approx(by_hand)


def test_a_curve_begins_with_the_model_before_training_and_takes_the_rate_of_least_loss() -> None:
    assert along(results(), WHOLE, "counterfactual accuracy") == {
        0: [0.25, 0.25],
        50: [0.75, 0.75],
        100: [1.0, 1.0],
        150: [0.5, 0.5],
    }


def test_the_peak_is_chosen_on_the_other_seeds() -> None:
    """Seed 0 peaks at step 50, seed 1 at step 100: each is measured at the other's peak."""
    rise, fall = rise_and_fall({0: [0.1, 0.1], 50: [0.9, 0.2], 100: [0.3, 0.8], 150: [0.2, 0.4]})
    assert rise == pytest.approx((0.3 - 0.1, 0.2 - 0.1))
    assert fall == pytest.approx((0.3 - 0.2, 0.2 - 0.4))


def test_what_only_rises_or_only_falls_has_no_inversion() -> None:
    rise, fall = rise_and_fall({0: [0.1, 0.1], 50: [0.2, 0.2], 100: [0.3, 0.3]})
    assert (rise, fall) == (pytest.approx((0.2, 0.2)), (0, 0))
    rise, fall = rise_and_fall({0: [0.3, 0.3], 50: [0.2, 0.2], 100: [0.1, 0.1]})
    assert (rise, fall) == ((0, 0), pytest.approx((0.2, 0.2)))


def test_claims_are_the_hand_worked_differences() -> None:
    rise, fall, own_rise, own_fall = FIG2.claims(results())
    assert (rise.values, fall.values) == ((0.75, 0.75), (0.5, 0.5))
    assert (own_rise.values, own_fall.values) == (rise.values, fall.values)
    assert (rise.place, own_rise.place) == ("Figure 2(c)", "")
    rise, fall = FIG3.claims(results())
    assert (rise.values, fall.values) == (pytest.approx((0.3, 0.3)), pytest.approx((0.2, 0.2)))
    unnamed, with_input, critical = FIG4.claims(results())
    assert [claim.values for claim in (unnamed, with_input, critical)] == [(0.25, 0.25), (0.5, 0.5), (0.5, 0.5)]
    whole, critical = FIG4C.claims(results())
    assert [claim.values for claim in (whole, critical)] == [(0.5, 0.5), (0.5, 0.5)]
    assert [claim.place for claim in (whole, critical)] == ["Figure 4(c)"] * 2
    swapped, qk = FIG5.claims(results())
    assert [claim.values for claim in (swapped, qk)] == [(0.5, 0.5), (-0.25, -0.25)]
    assert qk.verdict == "opposite"


def test_claims_count_in_the_papers_setting_alone() -> None:
    assert all(claim.scored for figure in FIGURES for claim in figure.claims(results()) if claim.place)
    for other in (results("small"), results(parameters=135_000_000), results(chat=True)):
        assert not any(claim.scored for figure in FIGURES for claim in figure.claims(other))


def test_panels_draw_every_arm_from_step_0_on() -> None:
    assert [panel.title for panel in FIG2.panels(results())] == list(MEASURES)[:4]
    (panel,) = FIG4.panels(results())
    assert [series.label for series in panel.series] == [
        "all instructions",
        "those that name nothing tested",
        "those with an input",
        "context-critical ones",
    ]
    assert all(series.x == (0, 50, 100, 150) for series in panel.series)
    assert [interval.mean for interval in panel.series[0].y] == [0.25, 0.75, 1.0, 0.5]


def test_seeds_with_checkpoints_at_other_steps_are_refused() -> None:
    made = results()
    whole = next(result for result in made if result.settings["split"] == WHOLE)
    made[made.index(whole)] = CellResult(whole.settings, dict(whole.values) | {"steps": [50, 100]})
    with pytest.raises(ModelError, match="the seeds of all instructions have checkpoints at different steps"):
        along(made, WHOLE, "M_C")
