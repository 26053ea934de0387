"""Parts of real facts to finetune on: the splits, what a cell asks, claims worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnbalance.data.facts import Fact, FactSet
from attnbalance.papers.figure import CellResult
from attnbalance.papers.finetuned import BASE, LOSS
from attnbalance.papers.ghosal_fig5 import FIGURES, SUBSETS, _split, best_popular, common_relations
from attnbalance.papers.sources import Sources

(FIG5,) = FIGURES


def test_parts_of_popqa_share_their_held_out_facts_and_differ_in_popularity(popqa: Path) -> None:
    settings = {"facts": f"popqa:{popqa}", "seed": 0, "tested": None, "limit": 2000}
    splits = {name: _split(settings | {"split": name}) for name in SUBSETS}
    assert len({json.dumps([fact.subject for fact in split.heldout]) for split in splits.values()}) == 1
    heldout = {fact.subject for fact in splits["top"].heldout}
    sizes = {name: len({f.subject for f in (*split.train, *split.validation)}) for name, split in splits.items()}
    for name, share in (("top-30", 0.3), ("top", 0.5), ("top-70", 0.7), ("random", 0.5), ("bottom", 0.5)):
        assert sizes[name] / sizes["whole"] == pytest.approx(share, abs=0.02)
        assert not heldout & {fact.subject for fact in splits[name].train}

    def popularities(name: str) -> list[float]:
        return [fact.popularity or 0 for fact in (*splits[name].train, *splits[name].validation)]

    assert min(popularities("top")) >= max(popularities("bottom"))
    assert min(popularities("top-30")) >= min(popularities("top")) >= min(popularities("top-70"))
    assert min(popularities("random")) < max(popularities("bottom")) < max(popularities("random"))


def test_relations_with_fewer_than_20_facts_are_left_out() -> None:
    facts = [Fact(f"A{i}", "many", ("x",)) for i in range(20)] + [Fact(f"B{i}", "few", ("x",)) for i in range(19)]
    assert {fact.relation for fact in common_relations(FactSet(tuple(facts)))} == {"many"}


def _facts(folder: Path) -> str:
    path = folder / "facts.jsonl"
    rows = [
        {"subject": f"Land {i}", "relation": relation, "answers": [f"City {i % 9}"], "popularity": i}
        for relation in ("capital", "port")
        for i in range(80)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_cells_run_and_become_panels_and_claims_that_do_not_count(stories: Path, tmp_path: Path) -> None:
    cells = FIG5.cells("tiny", range(2), Sources(_facts(tmp_path), str(stories)))
    assert len({cell.name for cell in cells}) == len(cells) == 2 * (1 + len(SUBSETS))
    run = [cell for cell in cells if cell.settings["seed"] == 0]
    values = {cell.settings["split"]: json.loads(json.dumps(FIG5.run(cell.settings))) for cell in run}
    assert {len(values[name]["outputs"]) for name in SUBSETS} == {20}
    assert values["whole"]["trained on"] > values["top-70"]["trained on"] > values["top-30"]["trained on"]
    results = [CellResult(cell.settings, values[cell.settings["split"]]) for cell in cells]
    drawn, points = FIG5.panels(results)
    assert [series.label for series in drawn.series] == [f"FT-{name}" for name in SUBSETS]
    assert len(points.series[0].x) == 3 + len(SUBSETS)
    assert not any(claim.scored for claim in FIG5.claims(results))


def _measured(right: list[int]) -> dict[str, Any]:
    """Ten tested facts, most popular first."""
    return {"right": {"containment": right}, "popularity": list(range(10, 0, -1)), LOSS: 1.0}


def hand_made(scale: str = "paper", parameters: int = 7_000_000_000) -> list[CellResult]:
    no = _measured([0] * 10)
    rates = {"top-30": 6, "top": 7, "top-70": 5, "random": 6, "bottom": 3, "whole": 6}
    base = {"zero-shot": no, "few-shot": no, "constant answer": no, "parameters": parameters, "chat": False}
    return [
        CellResult({"split": name, "seed": seed, "model": "a/m", "scale": scale}, values)
        for seed in (0, 1)
        for name, values in {BASE: base, **{n: _measured([1] * k + [0] * (10 - k)) for n, k in rates.items()}}.items()
    ]


def test_claims_are_the_hand_worked_differences_in_the_papers_setting() -> None:
    claims = FIG5.claims(hand_made())
    values = [claim.values for claim in claims]
    # bottom answers the most popular tenth as top does: the gap there is 0
    assert values == [pytest.approx((x, x)) for x in (0.4, 0.3, -0.1, 0.1, 0.4)]
    assert [claim.verdict for claim in claims] == ["seen", "seen", "opposite", "seen", "seen"]
    assert all(claim.scored for claim in claims)
    for other in (hand_made("small"), hand_made(parameters=135_000_000)):
        assert not any(claim.scored for claim in FIG5.claims(other))


def test_the_best_popular_part_is_chosen_on_the_other_seeds() -> None:
    results = hand_made()
    for result in results:  # top-30 is best in seed 0, top in seed 1: each is measured with the other's choice
        if result.settings["split"] in ("top-30", "top"):
            best = (result.settings["split"] == "top-30") == (result.settings["seed"] == 0)
            result.values["right"]["containment"] = [1] * (9 if best else 2) + [0] * (1 if best else 8)
    assert best_popular(results) == (0.2, 0.2)
