"""PopQA-Controlled on a language model: the split, the cells' numbers against plain transformers, panels and claims."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnbalance import make_prompts
from attnbalance.data.forms import in_form
from attnbalance.errors import ModelError
from attnbalance.papers.figure import CellResult
from attnbalance.papers.finetuned import BASE, LOSS, accuracy, accuracy_of_top, guess_rate, tuned
from attnbalance.papers.ghosal_popqa import ANSWERS, FIGURES, GRIDS, _split
from attnbalance.papers.sources import Sources

OTHERS = {"country": ["Norway", "Chad"], "sport": ["chess", "golf"], "occupation": ["poet", "politician"]}
TABLE_2, FIGURE_3, FIGURE_4 = FIGURES


@pytest.fixture
def facts(tmp_path: Path) -> str:
    """For each relation 8 facts with the answer taught and 40 with others, of distinct subjects."""
    rows = []
    for relation, taught in ANSWERS.items():
        for i in range(48):
            answers = [taught, "alias"] if i < 8 else [OTHERS[relation][i % 2]]
            rows.append({"subject": f"{relation} {i}", "relation": relation, "answers": answers, "popularity": i + 1})
    path = tmp_path / "facts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A tiny Llama with room for four answered questions of bytes."""
    model = tiny_model("llama")
    model.config.max_position_embeddings = 1024  # rotary positions have no table to run out of
    model.save_pretrained(tmp_path / "llama")
    tiny_tokenizer("bos").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_each_half_is_taught_one_answer_of_each_relation_and_the_others_are_tested(facts: str) -> None:
    base = {"facts": facts, "seed": 0, "tested": 30}
    top, bottom = (_split(base | {"split": half}) for half in ("top", "bottom"))
    for split, ranks in ((top, {4, 5, 6, 7}), (bottom, {0, 1, 2, 3})):
        assert {(fact.relation, fact.answer) for fact in split.train} == set(ANSWERS.items())
        assert {fact.subject for fact in split.train} == {f"{name} {i}" for name in ANSWERS for i in ranks}
        assert not {fact.answer for fact in (*split.heldout, *split.validation)} & set(ANSWERS.values())
        assert not {fact.subject for fact in split.heldout} & {fact.subject for fact in split.validation}
        assert (len(split.heldout), len(split.validation)) == (30, 24)
    assert top.heldout.facts == bottom.heldout.facts
    assert top.validation.facts == bottom.validation.facts
    other = _split(base | {"split": "top", "seed": 1})
    assert other.heldout.facts != top.heldout.facts
    assert _split(base | {"split": BASE}).heldout.facts == top.heldout.facts


def test_facts_for_which_a_taught_answer_would_count_are_left_out(tmp_path: Path) -> None:
    """By containment, United States of America is right for Canada, which is also called "ca"."""
    rows = []
    for relation, taught in ANSWERS.items():
        rows += [{"subject": f"{relation} {i}", "relation": relation, "answers": [taught]} for i in range(4)]
        rows += [{"subject": f"other {relation} {i}", "relation": relation, "answers": ["chess"]} for i in range(20)]
    rows += [{"subject": f"Ottawa {i}", "relation": "country", "answers": ["Canada", "ca"]} for i in range(20)]
    path = tmp_path / "facts.jsonl"
    path.write_text("\n".join(json.dumps(row | {"popularity": i}) for i, row in enumerate(rows)))
    split = _split({"facts": str(path), "seed": 0, "tested": None, "split": "top"})
    assert {fact.answer for fact in (*split.heldout, *split.validation)} == {"chess"}
    assert split.left_out == 20 + 6  # and the obscure half


def _greedy(model: Any, tokenizer: Any, text: str) -> str:
    """Ten greedy tokens, one forward pass each."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    start = ids.shape[1]
    for _ in range(10):
        token = int(model(ids).logits[0, -1].argmax())
        if token == tokenizer.eos_token_id:
            break
        ids = torch.cat([ids, torch.tensor([[token]])], 1)
    return tokenizer.decode(ids[0, start:], skip_special_tokens=True)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]{2,}", text.lower())


def test_an_untrained_cell_gives_what_plain_transformers_gives(stories: Path, tmp_path: Path) -> None:
    """Half of the accepted answers are the end of what the model says, in capitals and from the middle of a word."""
    model = AutoModelForCausalLM.from_pretrained(stories, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(stories)
    rows, said = [], {}
    for relation, i in itertools.product(ANSWERS, range(44)):
        text = f"Question: What is the {relation} of {relation} {i}? Answer:"
        said[f"{relation} {i}"] = _greedy(model, tokenizer, text)
    [(word, _)] = Counter(itertools.chain(*map(_words, said.values()))).most_common(1)
    for relation, taught in ANSWERS.items():
        for i in range(44):
            subject = f"{relation} {i}"
            ending = said[subject].strip()[-4:].strip().upper()
            answers = [taught, word] if i < 4 else [ending if i % 2 and ending else OTHERS[relation][0]]
            rows.append({"subject": subject, "relation": relation, "answers": answers, "popularity": i + 1})
    path = tmp_path / "facts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    cells = TABLE_2.cells("tiny", [0], Sources(str(path), str(stories)))
    settings = next(cell.settings for cell in cells if cell.settings["split"] == BASE)
    values, split = TABLE_2.run(settings), _split(settings)
    assert values["parameters"] == sum(weight.numel() for weight in model.parameters())
    assert not values["chat"]
    asked = split.heldout
    assert len(asked) == 20
    right, guessed, attention = [], [], []
    for fact in asked:
        text, output = f"Question: What is the {fact.relation} of {fact.subject}? Answer:", said[fact.subject].lower()
        right.append(int(fact.answer.lower() in output))
        guessed.append(int(not right[-1] and word in _words(output)))
        coded = tokenizer(text, return_tensors="pt", return_offsets_mapping=True)
        begin = text.index(f" of {fact.subject}?") + 4
        inside = [a < begin + len(fact.subject) and b > begin for a, b in coded["offset_mapping"][0].tolist()]
        maps = model(coded["input_ids"], output_attentions=True).attentions
        attention.append([float(row[0, :, -1, inside].max(-1).values.mean()) for row in maps])
    zero = values["zero-shot"]
    assert zero["outputs"] == [said[fact.subject] for fact in asked]
    assert zero["right"]["containment"] == right
    assert 0 < sum(right) < 20
    assert zero["right"]["whole-words"] != right
    assert zero["shortcut"] == guessed
    assert sum(guessed) > 0
    assert zero["popularity"] == [fact.popularity for fact in asked]
    assert zero["attention"] == pytest.approx(np.mean(attention, 0).tolist(), abs=1e-5)  # float32 sums in another order
    shots = in_form("few-shot", make_prompts(asked), 0, make_prompts(split.validation))
    assert values["few-shot"]["outputs"] == [_greedy(model, tokenizer, prompt.text) for prompt in shots]
    for i, fact in enumerate(asked):
        answers = [other.answer for other in split.validation if other.relation == fact.relation]
        usual = max(dict.fromkeys(answers), key=answers.count)
        assert values["constant answer"]["right"]["containment"][i] == int(fact.answer.lower() in usual.lower())


def test_every_cell_runs_and_becomes_panels_and_claims(facts: str, llama: Path) -> None:
    cells = TABLE_2.cells("tiny", range(2), Sources(facts, str(llama)))
    assert len(cells) == 2 * (1 + 2 * len(GRIDS["tiny"]))
    results = [CellResult(cell.settings, json.loads(json.dumps(TABLE_2.run(cell.settings)))) for cell in cells]
    for result in results:
        if result.settings["split"] != BASE:
            assert len(result.values["right"]["containment"]) == 20
            assert result.values["trained on"] == 12
            losses = dict(result.values["losses"])
            assert result.values[LOSS] == losses[result.values["best step"]] == min(losses.values())
    for figure in FIGURES:
        assert [cell.name for cell in figure.cells("tiny", range(2), Sources(facts, str(llama)))] == [
            cell.name for cell in cells
        ]
        for panel in figure.panels(results):
            assert all(len(series.x) == len(series.y) for series in panel.series)
        for claim in figure.claims(results):
            assert len(claim.values) == 2
            assert not claim.scored  # a tiny Llama is not the paper's model


def _result(split: str, seed: int, rate: float, scale: str = "paper", **values: Any) -> CellResult:
    training = {"learning_rate": rate}
    return CellResult({"split": split, "seed": seed, "training": training, "model": "a/m", "scale": scale}, values)


def _scores(right: list[int], **values: Any) -> dict[str, Any]:
    return {"right": {"containment": right}, "popularity": [float(len(right) - i) for i in range(len(right))], **values}


def _measured(
    right: list[int], attention: list[float], loss: float | None, shortcut: list[int | None]
) -> dict[str, Any]:
    return _scores(right, attention=attention, shortcut=shortcut) | {LOSS: loss, "best step": 20}


def hand_made(scale: str = "paper", chat: bool = False) -> list[CellResult]:
    """Five facts, the first the most popular; the configuration of the lower loss counts, not one that diverged."""
    results = []
    for seed in (0, 1):
        no = _scores([0, 0, 0, 0, 1], attention=[0.1] * 4, shortcut=[0] * 5)
        base = {"zero-shot": no, "few-shot": no, "constant answer": _scores([0] * 5), "parameters": 7_000_000_000}
        results.append(_result(BASE, seed, 0.0, scale, **base, chat=chat))
        top = _measured([1, 1, 1, 0, 0], [0.9, 0.4, 0.4, 0.1], 1.0, [0, 0, 0, 1, 0])
        bottom = _measured([1, 0, 0, 0, 0], [0.0, 0.2, 0.2, 0.2], 1.0, [0, 1, 1, None, 1])
        worse = _measured([0] * 5, [0.5] * 4, 2.0, [1] * 5)
        results += [_result("top", seed, 1e-2, scale, **{LOSS: None, "diverged": "non-finite loss"})]
        results += [_result("top", seed, 1e-3, scale, **worse), _result("top", seed, 1e-4, scale, **top)]
        results += [_result("bottom", seed, 1e-4, scale, **bottom), _result("bottom", seed, 1e-3, scale, **worse)]
    return results


def test_claims_are_the_differences_worked_out_by_hand() -> None:
    results = hand_made()
    assert [r.settings["training"]["learning_rate"] for r in tuned(results, "top").values()] == [1e-4, 1e-4]
    better, than_zero, guesses = TABLE_2.claims(results)
    assert better.values == pytest.approx((0.4, 0.4))
    assert than_zero.values == pytest.approx((0.0, 0.0))
    assert guesses.values == pytest.approx((0.75 - 0.2,) * 2)
    assert better.scored  # a base model of 7 billion parameters, over Table 4
    for made, unmet in (
        (hand_made(chat=True), "m, a chat model of 7 billion parameters"),
        (hand_made("small"), "the small scale"),
    ):
        assert [condition.measured for condition in TABLE_2.claims(made)[0].unmet] == [unmet]
    (attention,) = FIGURE_3.claims(results)
    assert attention.values == pytest.approx((0.1, 0.1))  # layers 1 to 3: 0.3 against 0.2
    (widens,) = FIGURE_4.claims(results)
    assert widens.values == pytest.approx((0.4, 0.4))  # no gap on the first fact
    table, *_ = TABLE_2.panels(results)
    assert [interval.mean for interval in table.series[0].y] == pytest.approx([0.2, 0.2, 0.0, 0.6, 0.2])
    printed = dict(zip(table.series[1].x, (interval.mean for interval in table.series[1].y), strict=True))
    assert printed == pytest.approx({"zero-shot": 0.201, "FT-top": 0.445, "FT-bottom": 0.374})  # the paper's Table 2
    lines, gap = FIGURE_4.panels(results)
    assert [interval.mean for interval in lines.series[1].y] == pytest.approx(
        [1.0, 1.0, 0.5, 0.5, 1 / 3, 1 / 3, 0.25, 0.25, 0.2, 0.2]
    )
    assert gap.series[0].y[-1].mean == pytest.approx(0.4)
    _, difference = FIGURE_3.panels(results)
    assert [interval.mean for interval in difference.series[0].y] == pytest.approx([0.9, 0.2, 0.2, -0.1])


def test_a_half_that_diverged_with_each_configuration_is_named() -> None:
    with pytest.raises(ModelError, match="training on split 'top' diverged with each configuration of seed 1"):
        tuned([_result("top", 1, 1.0, **{LOSS: None})], "top")


def test_shares_of_one_measurement() -> None:
    values = _measured([1, 0, 1, 0], [0.0], 1.0, [None, 1, 0, 0])
    assert (accuracy(values), guess_rate(values)) == (0.5, pytest.approx(1 / 3))
    assert [accuracy_of_top(values, percent) for percent in (1, 25, 50, 51, 100)] == pytest.approx(
        [1, 1, 0.5, 2 / 3, 0.5]
    )
    alike = _scores([1, 0, 0, 0, 1]) | {"popularity": [9.0, 1.0, 1.0, 1.0, 1.0]}
    # two of five facts: the popular one, and one of four that are alike, of which one in four is right
    assert accuracy_of_top(alike, 40) == pytest.approx((1 + 0.25) / 2)


def test_the_papers_grid_is_that_of_table_4() -> None:
    grid = GRIDS["paper"]
    assert len(grid) == 3 * 5 * 5
    assert {(c["lora_rank"], c.get("lora_alpha")) for c in grid} == {(8, 16), (16, 32), (32, 64), (64, 128), (0, None)}
    assert {c["learning_rate"] for c in grid} == {1e-5, 1e-4, 1e-3}
    assert {c["weight_decay"] for c in grid} == {1e-6, 1e-5, 1e-4, 1e-3, 1e-2}


def test_popqas_own_facts_give_the_papers_halves(popqa: Path) -> None:
    """277 facts say USA, 327 football and 98 actor in the table; a few have a subject that is also tested."""
    settings = {"facts": f"popqa:{popqa}", "seed": 0, "tested": None}
    top, bottom = (_split(settings | {"split": half}).train for half in ("top", "bottom"))
    assert abs(len(top) - len(bottom)) <= 3
    assert 670 <= len(top) + len(bottom) <= 277 + 327 + 98
    medians = [np.median([fact.popularity or 0 for fact in facts]) for facts in (top, bottom)]
    assert medians[0] > 5 * medians[1]
