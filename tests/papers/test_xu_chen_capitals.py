"""Capitals on a language model: the split, what a cell asks and how it is scored, claims worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnbalance import make_prompts
from attnbalance.papers.figure import CellResult
from attnbalance.papers.finetuned import BASE, LOSS
from attnbalance.papers.sources import Sources, facts_of
from attnbalance.papers.xu_chen_capitals import FIGURES, TEMPLATE, _split

(TABLE,) = FIGURES


def test_popqas_capitals_are_halved_and_a_fifth_is_tested(popqa: Path) -> None:
    settings = {"facts": f"popqa:{popqa}", "seed": 0, "tested": None}
    top, bottom = (_split(settings | {"split": half}) for half in ("top", "bottom"))
    assert top.heldout.facts == bottom.heldout.facts
    facts = facts_of(settings, ["capital"])
    assert len(facts) == 622  # the table's 645 rows, those of one name merged
    assert abs(len(top.heldout) - 622 / 5) <= 1
    assert abs(len(top.train) + len(top.validation) - len(bottom.train) - len(bottom.validation)) <= 3
    least = min(fact.popularity or 0 for fact in (*top.train, *top.validation))
    assert least >= max(fact.popularity or 0 for fact in (*bottom.train, *bottom.validation))
    assert {fact.relation for fact in top.heldout} == {"capital"}
    assert _split(settings | {"split": "top", "seed": 1}).heldout.facts != top.heldout.facts


def _facts(folder: Path) -> str:
    path = folder / "facts.jsonl"
    rows = [{"subject": f"Land {i}", "relation": "capital", "answers": [f"City {i}"]} for i in range(160)]
    path.write_text("\n".join(json.dumps(row | {"popularity": i}) for i, row in enumerate(rows)))
    return str(path)


def test_the_untrained_model_is_asked_as_in_appendix_l(stories: Path, tmp_path: Path) -> None:
    """Outputs against plain transformers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(stories), AutoTokenizer.from_pretrained(stories)
    cells = TABLE.cells("tiny", [0], Sources(_facts(tmp_path), str(stories)))
    settings = next(cell.settings for cell in cells if cell.settings["split"] == BASE)
    values, asked = TABLE.run(settings)["zero-shot"], _split(settings).heldout
    assert len(asked) == 20
    for fact, said in list(zip(asked, values["outputs"], strict=True))[:5]:
        ids = tokenizer(f"Question: Where is the capital of {fact.subject}? Answer:", return_tensors="pt")["input_ids"]
        whole = model.generate(ids, max_new_tokens=10, do_sample=False)
        assert said == tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)
    assert make_prompts(asked, TEMPLATE)[0].text == f"Question: Where is the capital of {asked[0].subject}? Answer:"


def test_every_cell_runs_and_becomes_panels_and_claims(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config.max_position_embeddings = 1024  # room for four answered questions of bytes
    model.save_pretrained(tmp_path / "llama")
    tiny_tokenizer("bos").save_pretrained(tmp_path / "llama")
    cells = TABLE.cells("tiny", range(2), Sources(_facts(tmp_path), str(tmp_path / "llama")))
    assert len(cells) == 2 * 3
    assert len({cell.name for cell in cells}) == len(cells)
    results = [CellResult(cell.settings, json.loads(json.dumps(TABLE.run(cell.settings)))) for cell in cells]
    for result in results:
        assert result.settings["split"] == BASE or result.values["trained on"] == 58  # of 128, a half without its tenth
    assert [panel.title for panel in TABLE.panels(results)] == ["exact matches", "F1"]
    for panel, numbers in zip(TABLE.panels(results), ([0.2636, 0.2093], [0.2868, 0.2274]), strict=True):
        ours, printed = panel.series
        assert len(ours.x) == len(ours.y) == 5
        assert printed.x == ("FT-top", "FT-bottom")
        assert [interval.mean for interval in printed.y] == pytest.approx(numbers)  # the paper's Section 7.1
    assert not any(claim.scored for claim in TABLE.claims(results))  # a tiny Llama is not the paper's model


def _measured(matches: list[int], f1: list[float]) -> dict[str, Any]:
    return {"right": {"exact-match": matches, "containment": [1] * len(matches)}, "f1": f1, LOSS: 1.0}


def hand_made(scale: str, parameters: int) -> list[CellResult]:
    no = _measured([0, 0, 0, 0], [0.0, 0.0, 0.0, 0.4])
    base = {"zero-shot": no, "few-shot": no, "constant answer": no, "parameters": parameters, "chat": False}
    parts = {
        BASE: base,
        "top": _measured([1, 1, 1, 0], [1.0, 1.0, 1.0, 0.0]),
        "bottom": _measured([1, 0, 0, 0], [1.0, 0.5, 0.0, 0.5]),
    }
    return [
        CellResult({"split": split, "seed": seed, "model": "a/m", "scale": scale}, values)
        for seed in (0, 1)
        for split, values in parts.items()
    ]


def test_claims_are_differences_of_exact_matches_and_f1_in_the_papers_setting() -> None:
    matches, f1 = TABLE.claims(hand_made("paper", 1_240_000_000))
    assert (matches.values, f1.values) == (pytest.approx((0.5, 0.5)), pytest.approx((0.25, 0.25)))
    assert matches.scored
    assert f1.scored
    assert matches.printed == "26.36% against 20.93%"
    assert {claim.place for claim in (matches, f1)} == {"Section 7.1, table"}
    for scale, parameters in (("small", 1_240_000_000), ("paper", 135_000_000)):
        assert not any(claim.scored for claim in TABLE.claims(hand_made(scale, parameters)))
    means = [[interval.mean for interval in panel.series[0].y] for panel in TABLE.panels(hand_made("paper", 10**9))]
    np.testing.assert_allclose(means, [[0, 0, 0, 0.75, 0.25], [0.1, 0.1, 0.1, 0.75, 0.5]])
