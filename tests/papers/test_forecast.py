"""What figures will cost: counted by hand, against what a run really reads, and without writing anything."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from attnbalance.errors import DataError
from attnbalance.papers.figure import Workload
from attnbalance.papers.forecast import RATE, forecast, parameters, table, tokens_of
from attnbalance.papers.reproduce import figures, reproduce


@pytest.fixture
def facts(tmp_path: Path) -> str:
    path = tmp_path / "facts.jsonl"
    rows = [{"subject": f"Land {i}", "relation": "capital", "answers": [f"City {i}"]} for i in range(160)]
    path.write_text("\n".join(json.dumps(row | {"popularity": i}) for i, row in enumerate(rows)))
    return str(path)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_parameters_are_those_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert parameters(str(tmp_path)) == (sum(weight.numel() for weight in loaded.parameters()), 4)
    loaded.bfloat16().save_pretrained(tmp_path / "half")
    assert parameters(str(tmp_path / "half"))[1] == 2


def test_tokens_are_counted_by_hand() -> None:
    tokenizer = tiny_tokenizer()
    texts = ("Oslo is a city", "Rome")
    long, short = (len(tokenizer(text)["input_ids"]) for text in texts)
    assert long > short
    work = Workload(steps=3, batch_size=4, trained=texts, read=((texts, 10, 2), (texts[1:], 0, 5)))
    trained, read = tokens_of(work, tokenizer)
    assert trained == 3 * 4 * (long + short) / 2
    assert read == 2 * (long + short + 2 * 10) + 5 * short
    assert tokens_of(replace(work, steps=0, trained=(), read=()), tokenizer) == (0, 0)


def test_a_forecast_counts_cells_and_operations_and_writes_nothing(stories: Path, facts: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    (capitals, simulation) = forecast(
        ["xu-chen-capitals", "goyal-prop1"], tmp_path / "out", scale="tiny", seeds=2, facts=facts, model=str(stories)
    )
    assert sorted(tmp_path.rglob("*")) == before
    assert (simulation.figure, simulation.trained_tokens) == ("goyal-prop1", None)
    assert capitals.cells == capitals.left == 2 * (1 + 2)  # seeds x (untrained, two halves at one rate)
    assert capitals.trained_tokens is not None
    assert capitals.read_tokens is not None
    size, width = parameters(str(stories))
    assert width == 4
    assert capitals.memory == 16 * size  # weight, gradient and two moments in float32
    operations = size * (6 * capitals.trained_tokens + 2 * capitals.read_tokens)
    assert capitals.gpu_hours == pytest.approx(operations / RATE / 3600)
    shown = table([capitals, simulation]).splitlines()
    assert shown[2].startswith("| xu-chen-capitals | 6 | 6 |")
    assert "GB" in shown[2]
    assert shown[3].startswith("| goyal-prop1 |")
    assert shown[3].endswith("|  |  |  |  |")


def test_a_forecast_is_near_what_a_run_reads_and_finished_cells_are_not_counted(
    stories: Path, facts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {"facts": facts, "model": str(stories)}
    (expected,) = forecast(["xu-chen-capitals"], tmp_path / "out", scale="tiny", seeds=2, **sources)
    trained, own = [0], LlamaForCausalLM.forward

    def counting(model, input_ids=None, **kwargs):
        if model.training and torch.is_grad_enabled():
            trained[0] += int(kwargs["attention_mask"].sum())
        return own(model, input_ids, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", counting)
    reproduce(["xu-chen-capitals"], tmp_path / "out", scale="tiny", seeds=2, **sources)
    # 2 steps of 4 facts are drawn in each fit, so their mean length is not that of all; no end of sequence is counted
    assert trained[0] == pytest.approx(expected.trained_tokens, rel=0.2)
    (after,) = forecast(["xu-chen-capitals"], tmp_path / "out", scale="tiny", seeds=2, **sources)
    assert (after.cells, after.left, after.trained_tokens) == (6, 0, None)
    (more,) = forecast(["xu-chen-capitals"], tmp_path / "out", scale="tiny", seeds=3, **sources)
    assert (more.cells, more.left) == (9, 3)


def test_what_is_missing_is_said_as_by_a_run(tmp_path: Path) -> None:
    for call in (forecast, reproduce):
        with pytest.raises(DataError, match="a pretrained language model is needed"):
            call(["ghosal-fig5"], tmp_path / "out")
        with pytest.raises(DataError, match="no figure 'x'"):
            call(["x"], tmp_path / "out")
    both = forecast(["ghosal-fig5", "goyal-prop1"], tmp_path / "new")
    assert [(each.figure, each.cells > 0) for each in both] == [("ghosal-fig5", False), ("goyal-prop1", True)]
    shown = table(both).splitlines()
    assert len(shown) == 5
    assert shown[2].startswith("| goyal-prop1 |")
    assert shown[4].startswith("ghosal-fig5 is not run: a pretrained language model is needed")


def test_every_figure_of_a_language_model_has_a_forecast() -> None:
    assert all((figure.workload is None) == ("model" not in figure.needs) for figure in figures().values())
