"""Multiple-choice questions to finetune on: parts by the base's loss, what a cell holds, claims worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnbalance.data.choices import Choice
from attnbalance.data.instructions import InstructionSet
from attnbalance.finetuning.choice_answers import read_choices
from attnbalance.models.load import load_limits, load_model
from attnbalance.papers.figure import CellResult
from attnbalance.papers.finetuned import BASE, LOSS
from attnbalance.papers.ghosal_table3 import FIGURES, PARTS, halves, part_of
from attnbalance.papers.sources import Sources

(TABLE,) = FIGURES


@pytest.fixture
def sources(stories: Path, tmp_path: Path) -> Sources:
    rows = [f"Which is {'a big ' * (i % 2)}word {i}?,cat {i},dog {i},cow,{'ABC'[i % 3]}" for i in range(60)]
    (tmp_path / "words_val.csv").write_text("\n".join(rows) + "\n")
    return Sources(model=str(stories), choices=str(tmp_path))


def test_halves_share_no_question_and_parts_are_ordered_by_the_bases_loss(sources: Sources, stories: Path) -> None:
    settings = {**sources.of_choices(), "seed": 3, "tested": None, "training questions": None}
    trained, tested = halves(settings)
    assert (len(trained), len(tested)) == (30, 30)
    assert len({row.prompt for row in (*trained.rows, *tested.rows)}) == 60
    assert halves(settings | {"seed": 4})[1].rows != tested.rows
    model = load_model(stories)
    top, bottom = (part_of(name, trained, model) for name in ("top", "bottom"))
    assert {*top.rows, *bottom.rows} == set(trained.rows)
    assert max(read_choices(model, top).loss) <= min(read_choices(model, bottom).loss)
    assert part_of("whole", trained, model).rows == trained.rows


def test_cells_run_and_become_panels_and_claims_that_do_not_count(sources: Sources, stories: Path) -> None:
    cells = TABLE.cells("tiny", range(2), sources)
    assert len({cell.name for cell in cells}) == len(cells) == 2 * (1 + len(PARTS))
    values = {
        cell.settings["split"]: json.loads(json.dumps(TABLE.run(cell.settings)))
        for cell in cells
        if cell.settings["seed"] == 0
    }
    assert values["whole"]["trained on"] > values["top"]["trained on"] == values["bottom"]["trained on"]
    assert {len(values[part]["right"]) for part in PARTS} == {10}
    settings = next(cell.settings for cell in cells if cell.settings["split"] == BASE)
    trained, tested = halves(settings)
    letters = [row.answer for row in trained.rows if isinstance(row, Choice)]
    usual = max(range(3), key=letters.count)
    assert values[BASE]["constant letter"]["right"] == [
        int(row.answer == usual) for row in tested.rows if isinstance(row, Choice)
    ]
    results = [CellResult(cell.settings, values[cell.settings["split"]]) for cell in cells]
    (panel,) = TABLE.panels(results)
    assert panel.series[0].x == ("zero-shot", "constant letter", "FT-top", "FT-bottom", "FT-whole")
    assert [series.label for series in panel.series[1:]] == ["the paper, Llama-7B", "the paper, Mistral-7B"]
    printed = [[round(100 * interval.mean, 1) for interval in series.y] for series in panel.series[1:]]
    assert printed == [[61.4, 55.6, 58.8], [68.7, 59.4, 67.4]]  # as in the paper's Table 3
    claims = TABLE.claims(results)
    assert claims[1].printed == "58.8% against 55.6% (Llama-7B), 67.4% against 59.4% (Mistral-7B)"
    assert not any(claim.scored for claim in claims)


def test_questions_longer_than_the_scale_reads_are_neither_learned_nor_asked(sources: Sources) -> None:
    cells = TABLE.cells("tiny", range(2), sources)
    base, whole = (next(c.settings for c in cells if c.settings["split"] == split) for split in (BASE, "whole"))
    trained, tested = halves(base)
    tokenizer, _ = load_limits(str(sources.model))

    def lengths(questions: InstructionSet) -> list[int]:
        return [len(tokenizer(row.prompt + row.output)["input_ids"]) + 1 for row in questions.rows]  # the end

    longest = min(lengths(tested)) + 2
    few = {**base, "longest": longest}, {**whole, "longest": longest}
    shorter = [sum(length <= longest for length in lengths(part)) for part in (trained, tested)]
    assert 0 < shorter[1] < len(tested)
    assert len(TABLE.run(few[0])["zero-shot"]["right"]) == shorter[1]
    values = TABLE.run(few[1])
    assert len(values["right"]) == shorter[1]
    assert values["trained on"] == shorter[0] - max(1, round(0.1 * shorter[0]))


def test_what_a_cell_will_read_is_counted_by_hand(sources: Sources) -> None:
    assert TABLE.workload is not None
    cells = {cell.settings["split"]: cell.settings for cell in TABLE.cells("tiny", [0], sources)}
    base, whole, top = (TABLE.workload(cells[name]) for name in (BASE, "whole", "top"))
    assert [(len(texts), new, times) for texts, new, times in base.read] == [(10, 0, 1)]
    assert (base.steps, whole.steps, whole.batch_size) == (0, 2, 4)
    assert (len(whole.trained), len(top.trained)) == (30, 15)
    assert [(len(texts), times) for texts, _, times in whole.read] == [(3, 3), (10, 1)]  # a tenth, at 0, 1 and 2 steps
    assert [(len(texts), times) for texts, _, times in top.read] == [(2, 3), (10, 1), (30, 1)]  # the base ranks all
    assert all("Which is" in text and text[-2:] in (" A", " B", " C") for text in whole.trained)


def hand_made(scale: str = "paper", parameters: int = 7_000_000_000, choices: int = 4) -> list[CellResult]:
    rates = {"top": 4, "bottom": 1, "whole": 3}
    parts: dict[str, dict[str, Any]] = {
        name: {"right": [1] * count + [0] * (5 - count), LOSS: 1.0} for name, count in rates.items()
    }
    no = {"right": [0] * 5}
    base = {"zero-shot": no, "constant letter": no, "parameters": parameters, "chat": False}
    base["choices"] = [choices]
    return [
        CellResult({"split": name, "seed": seed, "model": "a/m", "scale": scale}, values)
        for seed in (0, 1)
        for name, values in {BASE: base, **parts}.items()
    ]


def test_claims_are_the_hand_worked_differences_in_the_papers_setting() -> None:
    claims = TABLE.claims(hand_made())
    assert [claim.values for claim in claims] == [pytest.approx((x, x)) for x in (0.6, 0.4, 0.2)]
    assert all(claim.scored and claim.place == "Table 3" for claim in claims)
    for other in (hand_made("small"), hand_made(parameters=135_000_000), hand_made(choices=5)):
        assert not any(claim.scored for claim in TABLE.claims(other))
