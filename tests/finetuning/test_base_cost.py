"""What is said before the base is asked: the number of prompts that its forward passes then hold."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FACTS, tiny_model, tiny_tokenizer
from trainers import arguments, lora, made, some_examples

from attnbalance import Fact
from attnbalance.finetuning.examples import REPLAYED, make_examples


def counting(model: Any) -> dict[str, int]:
    """Counts the rows of the model's forward passes: prompts, and beginnings that are read once for several of them."""
    rows = {"prompts": 0, "prefixes": 0}

    def count(_: object, args: tuple, inputs: dict[str, Any]) -> None:
        begins = inputs.get("use_cache") and inputs.get("past_key_values") is None
        rows["prefixes" if begins else "prompts"] += len(inputs["input_ids"])

    model.register_forward_pre_hook(count, with_kwargs=True)
    return rows


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "objective", ["ce + kl(statement)", "weighted-ce(relevance) + row-anchor(question)", "ce + kl(best)"]
)
@pytest.mark.parametrize("tested", [0, 4])
@pytest.mark.parametrize("replayed", [0, 5])
def test_as_many_prompts_are_asked_as_were_announced(
    objective: str, tested: int, replayed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = [Fact(fact.subject, "is", fact.answers, None, fact.question) for fact in FACTS]
    data = make_examples(facts, tiny_tokenizer("bos"))
    data[:replayed] = [replace(example, targets={REPLAYED: torch.tensor(True)}) for example in data[:replayed]]
    settings, rows = arguments(tmp_path, disable_tqdm=False), []
    for text in ("ce + floor", objective):  # the first asks no base: only the checks of the model's rows
        model = tiny_model("llama")
        model.config.max_position_embeddings = 512  # for few-shot
        rows.append(counting(model))
        made(tmp_path, model, text, args=settings, train_dataset=data * 2, eval_dataset=data[:tested] or None)
    said = re.search(
        r"the base is asked ([0-9,]+) prompts \(([0-9.]+) for each fact\), about \d+ s\.", capsys.readouterr().err
    )
    assert said is not None
    timed = min(len(data), settings.per_device_eval_batch_size)
    assert int(said[1]) == rows[1]["prompts"] - rows[0]["prompts"] - timed
    assert float(said[2]) == pytest.approx(int(said[1]) / len(data), abs=0.05)


def test_nothing_is_said_without_bars_or_without_a_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path, lora(tiny_model("llama")), "kl(statement)", train_dataset=some_examples())
    made(tmp_path, objective="ce + floor", args=arguments(tmp_path, disable_tqdm=False), train_dataset=some_examples())
    assert "the base is asked" not in capsys.readouterr().err
