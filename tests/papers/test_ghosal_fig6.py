"""Figure 6: a cell's values against dense gradient descent, and the claims."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from attnbalance.papers.figure import CellResult
from attnbalance.papers.ghosal_fig6 import FIG6, OBSERVED, REGIMES, SKEWED
from attnbalance.papers.sources import Sources
from attnbalance.theory.attention_only import AttentionOnly, attention_only
from attnbalance.theory.triples import make_triples, split_subjects

WORLD = {"subjects": 20, "relations": 2, "answers": 6}


def test_a_cell_is_what_dense_gradient_descent_gives() -> None:
    settings = {"seed": 4, "regime": "attention fast", "world": WORLD} | REGIMES["attention fast"] | {"steps": 20}
    values = FIG6.run(settings)
    world = make_triples([4], **WORLD)
    model, generator = attention_only(world.tokens, [4]), torch.Generator().manual_seed(4)
    for _ in range(20):
        slope = model.gradient(world.drawn(8, [generator]))
        model = AttentionOnly(model.W_V + 200 * slope.W_V, model.W_KQ)
    chosen = split_subjects(world, "bottom", [4])
    train, heldout = world.of(chosen.trained), world.of(chosen.heldout)
    for _ in range(3):
        slope = model.gradient(train)
        model = AttentionOnly(model.W_V + 20 * slope.W_V, model.W_KQ + 40 * slope.W_KQ)
    index = OBSERVED.index(3)
    bottom = values["bottom"]
    assert bottom["steps"] == list(OBSERVED)
    # 23 steps with rates of up to 200 in float64
    assert bottom["subject attention"][index] == pytest.approx(float(model.attention(heldout).mean()), abs=1e-8)
    assert bottom["accuracy"][index] == pytest.approx(float(model.correct(heldout).double().mean()))
    even = torch.full_like(heldout.weight, 0.5)
    assert bottom["accuracy at even attention"][index] == float(model.correct(heldout, even).double().mean())
    usual = {query: Counter(train.answer[train.query == query].tolist()) for query in heldout.query[0].tolist()}
    given = zip(heldout.query[0].tolist(), model.logits(heldout)[0].argmax(-1).tolist(), strict=True)
    commonest = {query: min(count, key=lambda token: (-count[token], token)) for query, count in usual.items()}
    matches = [commonest[query] == answer for query, answer in given]
    assert bottom["usual answers"][index] == pytest.approx(sum(matches) / len(matches))
    assert bottom["salience"][index] == pytest.approx(float(model.salience(heldout).mean()), abs=1e-7)


def test_cells_become_panels_and_claims_with_one_value_a_seed() -> None:
    cells = FIG6.cells("small", range(2), Sources())
    assert len({cell.name for cell in cells}) == len(cells) == 2 * len(REGIMES)
    results = [CellResult(cell.settings, FIG6.run({**cell.settings, "world": WORLD, "steps": 10})) for cell in cells]
    for panel in FIG6.panels(results):
        assert [series.label for series in panel.series] == ["FT-top", "FT-bottom"]
        assert all(series.x == OBSERVED and len(series.y) == len(OBSERVED) for series in panel.series)
    claims = FIG6.claims(results)
    assert all(len(claim.values) == 2 for claim in claims)
    ends = {
        split: [result.values[split]["subject attention"][-1] for result in results[:2]] for split in ("top", "bottom")
    }
    assert claims[1].values == pytest.approx([1 - share for share in ends["bottom"]])
    assert claims[3].values == pytest.approx([a - b for a, b in zip(ends["top"], ends["bottom"], strict=True)])
    courses = [result.values["bottom"]["accuracy"] for result in results[:2]]
    highest = [max(range(len(OBSERVED)), key=other.__getitem__) for other in courses[::-1]]  # on the other seed
    assert claims[2].values == pytest.approx([row[k] - row[-1] for row, k in zip(courses, highest, strict=True)])
    by_regime = claims[1 : 1 + 4 * len(REGIMES)]
    assert [claim.says.split(":")[0] for claim in by_regime[::4]] == list(REGIMES)
    pairs = [results[k : k + 2] for k in range(0, 10, 2)]
    relation = [[each.values["bottom"]["relation attention"][-1] for each in pair] for pair in pairs]
    best = [max(range(5), key=lambda k, other=other: relation[k][other]) for other in (1, 0)]  # on the other seed
    assert claims[0].values == pytest.approx([relation[k][seed] for seed, k in enumerate(best)])
    assert {claim.scored for claim in (claims[0], *by_regime[4:])} == {False}
    usual = [[each.values[split]["usual answers"] for each in pairs[1]] for split in ("bottom", "top")]
    skewed = [claim.values for claim in claims if claim.says.startswith(SKEWED) and "usual" in claim.says]
    assert skewed == [
        pytest.approx([course[-1] - course[0] for course in usual[0]]),
        pytest.approx([own[-1] - top[-1] for own, top in zip(*usual, strict=True)]),
    ]


def test_no_regime_is_scored_since_the_paper_names_no_learning_rates() -> None:
    def result(regime: str, seed: int, stated: float) -> CellResult:
        names = ("accuracy", "accuracy at even attention", "subject attention", "relation attention", "usual answers")
        course = {name: [0.5] * len(OBSERVED) for name in names}
        return CellResult({"regime": regime, "seed": seed}, {"stated": stated, "top": course, "bottom": course})

    for stated, unmet in ((0.995, 1), (0.98, 2)):
        claims = FIG6.claims([result(regime, seed, stated) for regime in REGIMES for seed in (0, 1)])
        own = [claim for claim in claims if claim.says.startswith("one rate: FT-")]
        assert [claim.verdict for claim in own] == ["absent"] * 4
        assert not any(claim.scored for claim in claims)
        assert {len(claim.unmet) for claim in claims if claim.place} == {unmet}


def test_facts_with_skewed_answers_are_no_setting_of_the_papers() -> None:
    settings = {"seed": 0, "world": {"subjects": 200, "relations": 2, "answers": 10}}
    values = FIG6.run({**settings, "regime": SKEWED, **REGIMES[SKEWED], "steps": 5})
    share = 1 / sum(1 / k for k in range(1, 6))  # of the first of five answers with Zipf frequencies: 0.44
    # 200 facts of held-out subjects: a standard error of 0.035
    assert values["top"]["accuracy of the usual answers"] == pytest.approx(share, abs=0.12)
