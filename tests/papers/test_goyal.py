"""The figures of Goyal et al. (2024) on tiny worlds, and their numbers against the model written out naively."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from attnbalance.papers.figure import REVERSED, SEEN, CellResult, PaperFigure
from attnbalance.papers.goyal import FIGURES, GOYAL_PROP1, GOYAL_THM1
from attnbalance.papers.goyal_runs import (
    ARMS,
    ATTENTION_ONLY,
    AUGMENTED,
    DOUBLED,
    FILTERED,
    LEAD,
    LIMITS,
    PLAIN,
    RATES,
    RECALLED,
    WEAK,
    WEAK_LEAD,
    make_world,
    training_points,
)
from attnbalance.theory.context_points import CONFLICT, COUNTERFACTUAL, CRITICAL, OVERLAPPING, RECALL
from tests.theory.dense_context import dense_attention, dense_descent, dense_logits

TINY = {"points": 3, "tests": 2, "subjects": 20, "answers": 30, "steps": 40}
SEEDS = (0, 1, 2)


def tiny(figure: PaperFigure, **changed: float) -> list[CellResult]:
    found = []
    for cell in figure.cells("small", SEEDS, ""):
        settings = json.loads(json.dumps({**cell.settings, **TINY, **changed}))
        found.append(CellResult(settings, json.loads(json.dumps(figure.run(settings)))))
    return found


@pytest.fixture(scope="module")
def results() -> Mapping[str, list[CellResult]]:
    return {figure.name: tiny(figure) for figure in FIGURES}


def settings_of(figure: PaperFigure, arm: str, **changed: float) -> dict[str, Any]:
    return next({**c.settings, **TINY, **changed} for c in figure.cells("small", [4], "") if c.settings["arm"] == arm)


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_cells_have_names_of_their_own_and_settings_that_json_holds(scale: str) -> None:
    cells = [cell for figure in FIGURES for cell in figure.cells(scale, (0, 1), "")]
    assert len({cell.name for cell in cells}) == len(cells) == 2 * (1 + len(ARMS + LIMITS))
    for cell in cells:
        assert json.loads(json.dumps(dict(cell.settings))) == dict(cell.settings)
        assert cell.settings["seed"] in (0, 1)


@pytest.mark.parametrize("figure", FIGURES)
def test_panels_and_claims_have_one_value_a_seed(figure: PaperFigure, results: Mapping[str, list[CellResult]]) -> None:
    panels, claims = figure.panels(results[figure.name]), figure.claims(results[figure.name])
    assert len(panels) == 3
    for panel in panels:
        assert panel.series
        for line in panel.series:
            assert len(line.x) == len(line.y) > 3
            assert {interval.n for interval in line.y} == {len(SEEDS)}
    assert len({claim.says for claim in claims}) == len(claims)
    assert {len(claim.values) for claim in claims} == {len(SEEDS)}


def test_seeds_differ_and_one_seed_repeats_itself(results: Mapping[str, list[CellResult]]) -> None:
    for figure in FIGURES:
        first, *others = [one for one in results[figure.name] if one.settings["arm"] == PLAIN]
        assert json.loads(json.dumps(figure.run(first.settings))) == first.values
        assert all(one.values != first.values for one in others)


def test_claims_do_not_depend_on_the_order_of_results(results: Mapping[str, list[CellResult]]) -> None:
    for figure in FIGURES:
        found = results[figure.name]
        assert figure.claims(found[::-1]) == figure.claims(found)


def test_arms_train_on_what_they_say() -> None:
    points = make_world(settings_of(GOYAL_THM1, PLAIN), -1.0)[1]
    counts = {
        PLAIN: {CRITICAL: 3, OVERLAPPING: 3},
        ATTENTION_ONLY: {CRITICAL: 3, OVERLAPPING: 3},
        AUGMENTED: {CRITICAL: 3, OVERLAPPING: 3, COUNTERFACTUAL: 1},
        FILTERED: {CRITICAL: 3},
        RECALLED: {CRITICAL: 3, OVERLAPPING: 3, RECALL: 3},
        DOUBLED: {CRITICAL: 6, OVERLAPPING: 3},
    }
    tests = points.of(CONFLICT)
    for arm, expected in counts.items():
        some = training_points(points, arm)
        assert {kind: some.kinds.count(kind) for kind in set(some.kinds)} == expected
        assert not some.repeated
        assert not set(some.subject.tolist()) & set(tests.subject.tolist())
        assert not set(some.context.tolist()) & {*tests.context.tolist(), *tests.stored.tolist()}


@pytest.mark.parametrize("arm", [PLAIN, ATTENTION_ONLY, RECALLED])
def test_m_c_is_what_the_naive_model_has_after_a_step_of_its_gradient(arm: str) -> None:
    settings = settings_of(GOYAL_THM1, arm, steps=1)
    found = GOYAL_THM1.run(settings)
    assert found["steps"] == [0, 1]
    model, points = make_world(settings, -2.0)
    tests, rate = points.of(CONFLICT), settings["learning_rate"]
    for step in found["steps"]:
        shares, looked = [], []
        for c, s, a in zip(tests.context.tolist(), tests.subject.tolist(), tests.stored.tolist(), strict=True):
            odds = dense_logits(model, model.W_V[0], model.W_KQ[0], c, s).exp()
            shares.append(float(odds[c] / (odds[c] + odds[a])))
            looked.append(float(dense_attention(model, model.W_KQ[0], c, s)[1][0]))
        # sums of some 60 products in float64
        assert found["M_C"][step] == pytest.approx(sum(shares) / len(shares), abs=1e-10)
        assert found["attention"][step] == pytest.approx(sum(looked) / len(looked), abs=1e-10)
        by_V, by_KQ = dense_descent(model, training_points(points, arm))
        W_V = model.W_V if arm == ATTENTION_ONLY else model.W_V + rate * by_V
        model = replace(model, W_V=W_V, W_KQ=model.W_KQ + rate * by_KQ)


def test_the_pull_turns_at_eta_star_and_not_before(results: Mapping[str, list[CellResult]]) -> None:
    for one in results[GOYAL_PROP1.name]:
        assert [balance > 0 for balance in one.values["balance"]] == [rate < 1 for rate in RATES]
        assert one.values["theta_S"] == pytest.approx([-pull for pull in one.values["theta_C"]], abs=1e-10)


def test_a_claim_is_reversed_where_what_it_says_is(results: Mapping[str, list[CellResult]]) -> None:
    found = results[GOYAL_THM1.name]
    swapped = {PLAIN: FILTERED, FILTERED: PLAIN}
    other = [
        replace(one, settings={**one.settings, "arm": swapped.get(one.settings["arm"], one.settings["arm"])})
        for one in found
    ]
    before, after = ({claim.says: claim for claim in GOYAL_THM1.claims(some)} for some in (found, other))
    says = "Training on C points only mitigates it"
    assert (before[says].verdict, after[says].verdict) == (SEEN, REVERSED)
    assert after[says].values == tuple(-value for value in before[says].values)


def test_losses_by_the_peak_are_zero_where_nothing_falls() -> None:
    rising = {"M_C": [0.1, 0.2, 0.3], "attention": [0.1, 0.2, 0.3], "steps": [0, 1, 2]}
    found = [CellResult({"seed": seed, "arm": arm}, rising) for seed in SEEDS for arm in ARMS + LIMITS]
    claims = {claim.says: claim.values for claim in GOYAL_THM1.claims(found)}
    assert claims["M_C rises at first"] == pytest.approx([0.2] * 3)
    assert claims["Context-parametric inversion: M_C falls afterwards"] == pytest.approx(
        [-0.01] * 3
    )  # less the least that counts


@pytest.mark.parametrize(("arm", "leads"), [(PLAIN, LEAD), (WEAK, WEAK_LEAD)])
def test_worlds_are_near_assumption_6_and_memory_leads_as_it_should(arm: str, leads: tuple[float, float]) -> None:
    model, points = make_world(settings_of(GOYAL_THM1, arm), -2.0)
    known, values = points.of(OVERLAPPING), model.values[0]
    memory, context = values[known.stored, known.subject], values[known.context, known.context]
    chance = values[known.context[0], known.context[1]]
    lead = (memory - context) / (context - chance)
    # noise of 0.1 nats in each, over a context's lead of some 3 nats: the mean of three may be off by 0.1
    assert leads[0] - 0.1 < float(lead.mean()) < leads[1] + 0.1
    assert float(memory.std()) > 0
    assert float(context.std()) > 0
