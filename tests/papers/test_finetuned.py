"""A language model finetuned on some facts and asked about others: what a cell holds, against a run made by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from attnbalance import FinetuneSettings, finetune, load_facts, load_model, make_prompts, recall, split_facts
from attnbalance.papers.figure import CellResult
from attnbalance.papers.finetuned import BASE, accuracy, ask_untrained, cell_workload, run_finetuning, tuned
from attnbalance.papers.sources import Sources


def test_a_cell_holds_the_run_that_its_settings_describe(llama_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "facts.jsonl"
    rows = [{"subject": f"Town {i}", "relation": "country", "answers": ["a" if i % 3 else "b"]} for i in range(30)]
    path.write_text("\n".join(map(json.dumps, rows)))
    split = split_facts(load_facts(path), "whole")
    training = {"steps": 4, "batch_size": 4, "checkpoint_every": 2, "learning_rate": 1e-2}
    settings = {"seed": 3, "training": training, "new tokens": 10, **Sources(model=str(llama_folder)).of_model()}
    values = run_finetuning(settings, split)
    run = finetune(llama_folder, split, tmp_path / "run", FinetuneSettings(**training, seed=3))
    assert values["validation loss"] == pytest.approx(run.validation_loss[run.best_step], abs=1e-6)
    assert values["best step"] == run.best_step
    said = recall(
        load_model(run.path), make_prompts(split.heldout), run.shortcuts, scoring="containment", max_new_tokens=10
    )
    assert values["outputs"] == list(said.outputs)
    assert values["right"]["containment"] == list(map(int, said.correct))
    assert values["losses"] == [[step, pytest.approx(loss, abs=1e-6)] for step, loss in run.validation_loss.items()]
    assert accuracy(values) == sum(said.correct) / len(said.correct)


def test_the_untrained_model_is_asked_in_the_dtype_of_the_finetuned_one(
    long_llama_folder: Path, tmp_path: Path
) -> None:
    """A base stored in bfloat16: answers and attention are those of the same values stored in float32."""
    path, stored = tmp_path / "facts.jsonl", dict[str, str]()
    rows = [{"subject": f"Town {i}", "relation": "country", "answers": ["a" if i % 3 else "b"]} for i in range(100)]
    path.write_text("\n".join(map(json.dumps, rows)))
    model = AutoModelForCausalLM.from_pretrained(long_llama_folder).bfloat16()
    for dtype in (torch.bfloat16, torch.float32):
        folder = shutil.copytree(long_llama_folder, tmp_path / str(dtype))
        model.to(dtype).save_pretrained(folder)
        stored[str(dtype)] = str(folder)
    split = split_facts(load_facts(path), "whole")
    asked = [
        ask_untrained({"seed": 0, "training": {"steps": 1}, "new tokens": 10, **Sources(model=each).of_model()}, split)
        for each in stored.values()
    ]
    assert asked[0] == asked[1]


def test_training_that_diverges_is_a_result_without_a_loss(llama_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "facts.jsonl"
    rows = [{"subject": f"Town {i}", "relation": "country", "answers": ["a"]} for i in range(20)]
    path.write_text("\n".join(map(json.dumps, rows)))
    training = {"steps": 4, "batch_size": 4, "checkpoint_every": 2, "learning_rate": 1e30}
    settings = {"seed": 0, "training": training, "new tokens": 10, **Sources(model=str(llama_folder)).of_model()}
    values = run_finetuning(settings, split_facts(load_facts(path), "whole"))
    assert values["validation loss"] is None
    assert "lower the learning rate" in values["diverged"]


def test_what_a_cell_will_read_is_counted_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "facts.jsonl"
    rows = [{"subject": f"Town {i}", "relation": "country", "answers": ["a"]} for i in range(200)]
    path.write_text("\n".join(map(json.dumps, rows)))
    split = split_facts(load_facts(path), "whole")
    settings = {"seed": 0, "split": "whole", "training": {"steps": 6, "batch_size": 4, "checkpoint_every": 2}}
    work = cell_workload(lambda _: split, settings | {"new tokens": 10})
    assert (work.steps, work.batch_size, len(work.trained)) == (6, 4, len(split.train))
    assert set(work.trained) == {f"{prompt.text} a" for prompt in make_prompts(split.train)}
    tested, validated = len(split.heldout), len(split.validation)
    assert [(len(texts), new, times) for texts, new, times in work.read] == [
        (validated, 0, 4),  # before training and at three checkpoints
        (tested, 10, 1),  # answers
        (tested, 0, 1),  # attention
    ]
    untrained = cell_workload(lambda _: split, settings | {"split": BASE, "new tokens": 10})
    assert (untrained.steps, untrained.trained) == (0, ())
    assert [(len(texts), new) for texts, new, _ in untrained.read] == [(tested, 10), (tested, 0)] * 2
    assert all(text.count("Answer:") == 5 for text in untrained.read[2][0])  # four answered questions before its own


def test_of_equal_losses_the_first_configuration_counts() -> None:
    results = [
        CellResult({"split": "top", "seed": seed, "k": k}, {"validation loss": loss})
        for seed, k, loss in ((1, 0, 2.0), (0, 1, 1.0), (0, 2, 1.0), (1, 3, 1.0))
    ]
    assert [result.settings["k"] for result in tuned(results, "top").values()] == [1, 3]
