"""The figures of Goyal et al. (2024) on tiny worlds: cells, panels and claims."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from attnbalance.papers.figure import ABSENT, OPPOSITE, SEEN, CellResult, PaperFigure
from attnbalance.papers.goyal import FIGURES, GOYAL_PROP1, GOYAL_THM1
from attnbalance.papers.goyal_runs import (
    ARMS,
    EXACT,
    FILTERED,
    LEADING,
    LIMITS,
    PLAIN,
    RATES,
    TRAINED,
    WORLDS,
)
from attnbalance.papers.sources import Sources

TINY = {"points": 3, "tests": 2, "subjects": 20, "answers": 30, "steps": 40}
SEEDS = (0, 1, 2)


def tiny(figure: PaperFigure) -> list[CellResult]:
    results = []
    for cell in figure.cells("small", SEEDS, Sources()):
        settings = json.loads(json.dumps({**cell.settings, **TINY}))
        results.append(CellResult(settings, json.loads(json.dumps(figure.run(settings)))))
    return results


@pytest.fixture(scope="module")
def results() -> Mapping[str, list[CellResult]]:
    return {figure.name: tiny(figure) for figure in FIGURES}


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_cells_have_names_of_their_own_and_settings_that_json_holds(scale: str) -> None:
    cells = [cell for figure in FIGURES for cell in figure.cells(scale, (0, 1), Sources())]
    assert len({cell.name for cell in cells}) == len(cells) == 2 * (len(WORLDS) + len(ARMS + LIMITS + TRAINED))
    for cell in cells:
        assert json.loads(json.dumps(dict(cell.settings))) == dict(cell.settings)
        assert cell.settings["seed"] in (0, 1)


@pytest.mark.parametrize("figure", FIGURES)
def test_panels_and_claims_have_one_value_a_seed(figure: PaperFigure, results: Mapping[str, list[CellResult]]) -> None:
    panels, claims = figure.panels(results[figure.name]), figure.claims(results[figure.name])
    assert len(panels) == (3 if figure is GOYAL_PROP1 else 4)
    for panel in panels:
        assert panel.series
        for line in panel.series:
            assert len(line.x) == len(line.y) > 3
            assert {interval.n for interval in line.y} == {len(SEEDS)}
    assert len({claim.says for claim in claims}) == len(claims)
    assert {len(claim.values) for claim in claims} == {len(SEEDS)}


def test_seeds_differ_and_one_seed_repeats_itself(results: Mapping[str, list[CellResult]]) -> None:
    for figure in FIGURES:
        first, *others = [result for result in results[figure.name] if result.settings["arm"] == PLAIN]
        assert json.loads(json.dumps(figure.run(first.settings))) == first.values
        assert all(other.values != first.values for other in others)


def test_claims_do_not_depend_on_the_order_of_results(results: Mapping[str, list[CellResult]]) -> None:
    for figure in FIGURES:
        whole = results[figure.name]
        assert figure.claims(whole[::-1]) == figure.claims(whole)


def test_the_pull_changes_sign_at_eta_star_and_not_before(results: Mapping[str, list[CellResult]]) -> None:
    for result in results[GOYAL_PROP1.name]:
        if result.settings["arm"] == LEADING and result.values["balance"] is None:
            continue  # contexts lose score from the start
        assert [balance > 0 for balance in result.values["balance"]] == [rate < 1 for rate in RATES]
        assert result.values["theta_S"] == pytest.approx([-pull for pull in result.values["theta_C"]], abs=1e-10)


def test_a_claim_is_opposite_where_what_it_says_is(results: Mapping[str, list[CellResult]]) -> None:
    original = results[GOYAL_THM1.name]
    renamed = {PLAIN: FILTERED, FILTERED: PLAIN}
    arms = [renamed.get(result.settings["arm"], result.settings["arm"]) for result in original]
    swapped = [
        replace(result, settings={**result.settings, "arm": arm}) for result, arm in zip(original, arms, strict=True)
    ]
    before, after = ({claim.says: claim for claim in GOYAL_THM1.claims(chosen)} for chosen in (original, swapped))
    says = "Training on C points only mitigates the inversion"
    assert (before[says].verdict, after[says].verdict) == (SEEN, OPPOSITE)
    assert max(after[says].values) < 0 < min(before[says].values)


def test_arms_are_compared_over_the_same_steps_each_for_as_long_as_it_lasts() -> None:
    plain, filtered = [0.2, 0.9, 0.6, 0.5], [0.2, 0.4, 0.8, 0.7]
    rows = {PLAIN: plain, FILTERED: filtered}
    made_up = [
        CellResult({"seed": seed, "arm": arm}, {"M_C": rows.get(arm, plain), "attention": plain, "steps": [0, 1, 3, 9]})
        for seed in SEEDS
        for arm in ARMS + LIMITS + TRAINED
    ]
    claims = {claim.says: claim for claim in GOYAL_THM1.claims(made_up)}
    # plain's peak is step 1: two steps of 0.6 and six of 0.5, against two of 0.8 and six of 0.7
    expected = (2 * 0.8 + 6 * 0.7) / 8 - (2 * 0.6 + 6 * 0.5) / 8
    assert claims["Training on C points only mitigates the inversion"].values == pytest.approx([expected] * 3)
    assert claims["Training attention only mitigates the inversion"].values == pytest.approx([0.0] * 3)


def test_a_run_without_eta_star_is_outside_the_theorem(results: Mapping[str, list[CellResult]]) -> None:
    whole = [result for result in results[GOYAL_PROP1.name] if result.settings["arm"] == EXACT]
    others = [result for result in results[GOYAL_PROP1.name] if result.settings["arm"] != EXACT]
    without = replace(whole[0], values={**whole[0].values, "leap": None, "balance": None})
    remembering = replace(whole[0], values={**whole[0].values, "M_C": 0.6})
    for changed, measured in ((without, "in 2 of 3 runs"), (remembering, "M_C before training at most 0.6")):
        claims = [claim for claim in GOYAL_PROP1.claims([changed, *whole[1:], *others]) if claim.place == "Theorem 1"]
        assert [[condition.measured for condition in claim.unmet] for claim in claims] == [[measured]] * 2
    assert all(result.values["M_C"] == result.values["leap"][0] for result in whole)


def test_no_fall_is_claimed_where_m_c_only_rises() -> None:
    rising = {"M_C": [0.1, 0.2, 0.3], "attention": [0.1, 0.2, 0.3], "steps": [0, 1, 2]}
    made_up = [CellResult({"seed": seed, "arm": arm}, rising) for seed in SEEDS for arm in ARMS + LIMITS + TRAINED]
    claims = {claim.says: claim for claim in GOYAL_THM1.claims(made_up)}
    assert claims["M_C rises at first"].values == pytest.approx([0.2] * 3)
    fall = claims["Context-parametric inversion: M_C falls afterwards"]
    assert (fall.values, fall.verdict) == ((0.0,) * 3, ABSENT)


def test_the_theorems_large_steps_raise_m_c_and_lower_it_again(results: Mapping[str, list[CellResult]]) -> None:
    claims = {claim.says: claim for claim in GOYAL_PROP1.claims(results[GOYAL_PROP1.name])}
    for says in ("One large step raises M_C in conflicts", "The second large step lowers M_C again"):
        assert min(claims[says].values) > 0
        assert claims[says].scored
    leaps = [result.values["leap"] for result in results[GOYAL_PROP1.name] if result.settings["arm"] != LEADING]
    assert len(leaps) == 2 * len(SEEDS)
    assert all(before < 0.5 and before < once > twice for before, once, twice in leaps)


def test_proposition_1_is_judged_where_all_is_as_printed(results: Mapping[str, list[CellResult]]) -> None:
    claims = {claim.says: claim for claim in GOYAL_PROP1.claims(results[GOYAL_PROP1.name])}
    printed = [claim for claim in claims.values() if claim.place == "Proposition 1"]
    assert all(claim.scored for claim in printed)
    assert [printed[0].verdict, printed[2].verdict] == [SEEN, SEEN]
    assert "by far" in printed[1].says
    assert max(printed[1].values) < min(printed[0].values)
    for result in results[GOYAL_PROP1.name]:
        failed = {name[:12] for name, met in result.values["assumptions"].items() if not met}
        expected = {"Assumption 5", "Assumption 6"} if result.settings["arm"] == PLAIN else set()
        assert failed & {"Assumption 5", "Assumption 6"} == expected
