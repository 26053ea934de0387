"""Instruction tuning with conflicts asked on the way: what each arm trains on, and answers against transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnbalance.data.conflicts import Conflict, says
from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.instructions import Instruction, InstructionSet
from attnbalance.errors import DataError
from attnbalance.finetuning.settings import FinetuneSettings
from attnbalance.papers import instructed
from attnbalance.papers.finetuned import BASE, LOSS
from attnbalance.papers.instructed import (
    ARMS,
    CRITICAL,
    QK,
    SWAPPED,
    TRAINING,
    UNNAMED,
    WHOLE,
    WITH_INPUT,
    _asked,
    _rows,
    _with_counterfactuals,
    _within_epochs,
    instructed_cells,
    instructed_workload,
    run_instructed,
)
from attnbalance.papers.sources import Sources

LANDS = ("Onda", "Pira", "Quell", "Rumo", "Sarn", "Tolva")


@pytest.fixture
def sources(stories: Path, tmp_path: Path) -> Sources:
    conflicts = [
        {
            "context": f"They moved to Port {land}. " * (60 if land == "Tolva" else 1),
            "question": f"Where does the king of {land} live?",
            "answer": f"Port {land}",
            "memory_answer": f"Old {land} Town",
            "subject": land,
        }
        for land in LANDS
    ]
    rows = [
        {"instruction": f"Say word {i}.", "input": f"The word is cat {i}." if i % 2 else "", "output": f"cat {i}"}
        for i in range(38)
    ]
    rows += [
        {"instruction": "Where is Onda?", "input": "", "output": "Far away"},
        {"instruction": "Read it.", "input": "A ship lies at Port Pira.", "output": "Yes"},
    ]
    facts = [
        {"subject": f"Town {i}", "relation": "mayor", "answers": [f"Mister {i}"], "question": f"Who leads Town {i}?"}
        for i in range(8)
    ]
    facts.append({"subject": "Onda", "relation": "mayor", "answers": ["Mister 9"], "question": "Who leads Onda?"})
    (tmp_path / "conflicts.json").write_text(json.dumps(conflicts))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "facts.jsonl").write_text("\n".join(map(json.dumps, facts)))
    files = (str(tmp_path / name) for name in ("rows.json", "conflicts.json"))
    return Sources(str(tmp_path / "facts.jsonl"), str(stories), *files)


def settings_of(sources: Sources, arm: str, **others: Any) -> dict[str, Any]:
    cells = instructed_cells(ARMS, "tiny", [0], sources)
    return {**next(cell.settings for cell in cells if cell.settings["split"] == arm), **others}


def test_cells_differ_in_what_is_trained_and_are_shared_by_figures(sources: Sources) -> None:
    cells = instructed_cells(ARMS, "paper", range(3), sources)
    assert len({cell.name for cell in cells}) == len(cells) == 3 * (1 + 2 * len(ARMS))
    assert {cell.settings["split"] for cell in cells if "facts" in cell.settings} == {SWAPPED}
    assert {cell.settings["split"] for cell in cells if cell.settings["training"].get("train") == "qk"} == {QK}
    assert {json.dumps(dict(cell.settings)) for cell in instructed_cells((WHOLE,), "paper", range(3), sources)} < {
        json.dumps(dict(cell.settings)) for cell in cells
    }


def test_squad_has_cells_of_its_own_and_is_what_they_train_on(sources: Sources, tmp_path: Path) -> None:
    qas = [{"question": f"Which word is {i}?", "answers": [{"text": f"cat {i}"}]} for i in range(9)]
    paragraphs = [{"context": f"Here is cat {i}.", "qas": [each]} for i, each in enumerate(qas)]
    (tmp_path / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    given = replace(sources, squad=str(tmp_path / "squad.json"))
    cells = instructed_cells((WHOLE,), "tiny", [0], given, trained_on="squad")
    assert not {cell.name for cell in cells} & {cell.name for cell in instructed_cells((WHOLE,), "tiny", [0], given)}
    settings = {**cells[-1].settings, "rows": None}
    assert "instructions" not in settings
    rows = _rows(settings, _asked(settings)).rows
    assert [(row.instruction, row.input, row.output) for row in rows] == [
        (f"Which word is {i}?", f"Here is cat {i}.", f"cat {i}") for i in range(9)
    ]
    (tmp_path / "squad.json").write_text(json.dumps({"data": []}))
    with pytest.raises(DataError, match=r"squad.json was changed or moved since the cells were listed"):
        _rows(settings, _asked(settings))


def test_conflicts_too_long_for_the_model_are_left_out(sources: Sources) -> None:
    asked = _asked(settings_of(sources, BASE, asked=None))
    assert [fact.subject for fact in asked] == list(LANDS[:-1])
    assert len(_asked(settings_of(sources, BASE))) == 4


def test_each_arm_trains_on_the_rows_of_its_name(sources: Sources) -> None:
    def rows(arm: str) -> list[str]:
        settings = settings_of(sources, arm, rows=None, asked=None)
        return [row.prompt + row.output for row in _rows(settings, _asked(settings)).rows]

    every = rows(WHOLE)
    assert len(every) == 40
    assert rows(QK) == every
    assert rows(UNNAMED) == [text for text in every if "Onda" not in text and "Port Pira" not in text]
    assert rows(WITH_INPUT) == [text for text in every if "### Input:" in text]
    assert len(rows(WITH_INPUT)) == 20


def test_instructions_longer_than_the_scale_allows_are_left_out(sources: Sources, stories: Path) -> None:
    """Counted with the plain tokenizer, which adds no end of its own."""
    settings = settings_of(sources, WHOLE, rows=None)
    tokenizer = AutoTokenizer.from_pretrained(stories)
    rows = _rows(settings, _asked(settings)).rows
    lengths = [len(tokenizer(row.prompt + row.output)["input_ids"]) + 1 for row in rows]
    longest = sorted(lengths)[len(lengths) // 2]
    kept = _rows(settings | {"longest": longest}, _asked(settings)).rows
    assert kept == tuple(row for row, length in zip(rows, lengths, strict=True) if length <= longest)
    assert 0 < len(kept) < len(rows)


def test_context_critical_rows_cost_the_base_most_without_their_input(sources: Sources, stories: Path) -> None:
    """Against plain transformers, row by row."""
    settings = settings_of(sources, CRITICAL, rows=None)
    kept = {row.instruction for row in _rows(settings, _asked(settings)).rows}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(stories), AutoTokenizer.from_pretrained(stories)
    losses = dict[str, float]()
    for row in json.loads(Path(str(sources.instructions)).read_text()):
        if row["input"]:
            prompt = f"### Instruction:\n{row['instruction']}\n\n### Response:\n"
            before = tokenizer(prompt)["input_ids"]
            ids = torch.tensor([tokenizer(prompt + row["output"])["input_ids"] + [tokenizer.eos_token_id]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(before) - 1 : -1]
            losses[row["instruction"]] = float(cross_entropy(logits, ids[0, len(before) :]))
    assert kept == set(sorted(losses, key=losses.__getitem__)[-15:])  # three quarters of 20


def test_no_counterfactual_row_is_about_the_subject_of_a_tested_question() -> None:
    """The tested conflict names no subject apart from its question, as the authors' files do."""
    towns = [Fact(f"Town {letter}", "leader", (f"Mister {letter}",)) for letter in "ABCDEF"]
    question = "Who leads Town B, town c and Town X?"
    tested = Conflict(question, "r", ("Ann",), question=question, context="It is Ann.", memory_answers=("Eve",))
    plain = InstructionSet(tuple(Instruction(f"Do {i}.", "Done.") for i in range(40)))
    added = _with_counterfactuals(plain, FactSet(tuple(towns)), FactSet((tested,)), 0).rows[40:]
    assert sorted(row.instruction[-7:-1] for row in added) == ["Town A", "Town D", "Town E", "Town F"]


def test_counterfactual_rows_state_another_answer_and_nothing_that_is_tested(sources: Sources) -> None:
    settings = settings_of(sources, SWAPPED, rows=None)
    rows = _rows(settings, _asked(settings)).rows
    plain = _rows(settings | {"split": WHOLE}, _asked(settings)).rows
    assert rows[:40] == plain
    assert len(rows) == 44  # a tenth more
    for row in rows[40:]:
        number = row.instruction.removeprefix("Who leads Town ").removesuffix("?")
        assert row.output != f"Mister {number}"
        assert says(row.input, [row.output])
        assert f"Town {number}" in row.input
        assert "Onda" not in row.input
    Path(sources.facts).write_text("\n".join(Path(sources.facts).read_text().splitlines()[:2]))
    settings = settings_of(sources, SWAPPED, rows=None)
    with pytest.raises(DataError, match=r"4 counterfactual rows are needed, .* gives 2 about nothing that is tested"):
        _rows(settings, _asked(settings))


def test_names_are_answers_of_both_kinds_and_subjects_that_are_not_the_question() -> None:
    asked = {"question": "Where?", "context": "In B.", "memory_answers": ("C",)}
    conflicts = (Conflict(subject, "r", ("B",), **asked) for subject in ("A", "Where?"))
    facts = FactSet((*conflicts, Fact("D", "r", ("E",))))
    assert instructed._names(facts) == ["A", "B", "C", "D", "E"]


def test_the_model_before_training_answers_as_plain_transformers_does(sources: Sources, stories: Path) -> None:
    settings = settings_of(sources, BASE)
    values = run_instructed(settings)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(stories), AutoTokenizer.from_pretrained(stories)
    assert values["parameters"] == sum(weight.numel() for weight in model.parameters())
    for fact, hit in zip(_asked(settings), values["start"]["counterfactual"], strict=True):
        assert isinstance(fact, Conflict)
        text = f"### Instruction:\n{fact.question}\n\n### Input:\n{fact.context}\n\n### Response:\n"
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        said = tokenizer.decode(model.generate(ids, max_new_tokens=32, do_sample=False)[0, ids.shape[1] :])
        assert hit == (fact.answer in said)
    assert all(0 <= share <= 1 for share in (*values["start"]["attention"], *values["start"]["m_c"]))


def test_a_tuned_model_is_asked_at_each_checkpoint(sources: Sources) -> None:
    settings = settings_of(sources, WHOLE)
    values = run_instructed(settings)
    assert values["steps"] == [1, 2, 3]
    assert [step for step, _ in values["losses"]] == [1, 2, 3]
    assert values[LOSS] == min(loss for _, loss in values["losses"])
    start = run_instructed(settings | {"split": BASE})["start"]
    attention = [start["attention"], *(checkpoint["attention"] for checkpoint in values["measured"])]
    assert len({json.dumps(column) for column in attention}) == 4  # each step changed the model
    json.dumps(values)


def test_training_that_diverges_says_so_and_has_no_loss(sources: Sources) -> None:
    settings = settings_of(sources, WHOLE)
    settings["training"] = {**settings["training"], "learning_rate": 1e30}
    values = run_instructed(settings)
    assert values[LOSS] is None
    assert "lower the learning rate" in values["diverged"]


def test_a_file_that_is_not_there_or_was_changed_is_named(sources: Sources) -> None:
    settings = settings_of(sources, WHOLE)
    Path(str(sources.conflicts)).write_text("[]")
    with pytest.raises(DataError, match=r"conflicts.json was changed or moved since the cells were listed"):
        run_instructed(settings)
    Path(str(sources.conflicts)).unlink()
    with pytest.raises(DataError, match=r"conflicts.json, the file of conflicts, does not exist"):
        run_instructed(settings_of(sources, WHOLE))


def test_instructions_are_read_twice_at_most_and_training_is_not_stopped_early() -> None:
    training = TRAINING["paper"]  # 800 steps of 128
    assert _within_epochs(training, 52_002)["steps"] == 800
    assert _within_epochs(training, 20_679)["steps"] == 300  # 323 steps are two epochs
    assert _within_epochs(training, 100)["steps"] == 50
    assert all(FinetuneSettings(**settings).schedule.patience is None for settings in TRAINING.values())


def test_what_a_cell_will_read_is_counted_without_the_model(sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructed, "load_model", lambda *_: pytest.fail("loaded"))
    untrained = instructed_workload(settings_of(sources, BASE))
    assert (untrained.steps, len(untrained.trained)) == (0, 0)
    assert [(len(texts), new, times) for texts, new, times in untrained.read] == [(4, 32, 1), (4, 0, 3), (4, 32, 1)]
    assert "They moved to Port" in untrained.read[0][0][0]
    assert "They moved to Port" not in untrained.read[2][0][0]
    whole = instructed_workload(settings_of(sources, WHOLE))
    assert (whole.steps, whole.batch_size, len(whole.trained)) == (3, 2, 40)  # of the tiny scale; all rows
    assert [times for _, _, times in whole.read] == [3, 9, 3, 4]  # three checkpoints, and the base's validation
    assert any(text.endswith("cat 3") for text in whole.trained)
    critical = instructed_workload(settings_of(sources, CRITICAL))
    assert len(critical.trained) == int(0.75 * 20)  # of the rows with an input, which are all read once to choose
    assert (len(critical.read[-1][0]), critical.read[-1][2]) == (20, 1)
