"""Finetuning: what is written, what is trained, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from short_runs import FACTS, SHORT, SPLIT, TINY, WORLD, assert_equal_weights, short, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnbalance.data.facts import Fact, FactSet
from attnbalance.errors import DataError, ModelError, OutputError
from attnbalance.files.outputs import MARKER, read_json
from attnbalance.finetuning import callbacks
from attnbalance.finetuning.examples import IGNORED, collate, make_examples
from attnbalance.finetuning.finetune import finetune
from attnbalance.finetuning.pretrain import pretrain
from attnbalance.finetuning.splits import split_facts
from attnbalance.models.fingerprint import fingerprint


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_run_is_its_best_checkpoint(base, tmp_path, lora_rank):
    run = finetune(base, SPLIT, tmp_path / "run", short(lora_rank=lora_rank))
    assert list(run.validation_loss) == [2, 4, 6, 7] == list(run.checkpoints)
    assert run.best_step == min(run.validation_loss, key=run.validation_loss.__getitem__)
    assert_equal_weights(run.path, run.checkpoints[run.best_step])
    assert run.heldout.facts == SPLIT.heldout.facts
    assert run.train.facts == SPLIT.train.facts
    assert run.shortcuts == SPLIT.train.most_frequent_answers()
    assert not [p for p in run.path.rglob("*") if p.suffix in (".pt", ".pth", ".bin")]
    assert not list(tmp_path.glob(".*"))
    marker = read_json(run.path / MARKER)
    assert marker["base_fingerprint"] == fingerprint(AutoModelForCausalLM.from_pretrained(base))
    assert all(read_json(path / MARKER)["step"] == step for step, path in run.checkpoints.items())


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_validation_loss_is_the_mean_over_answer_tokens(llama, tmp_path, lora_rank):
    run = finetune(llama, SPLIT, tmp_path / "run", short(lora_rank=lora_rank, batch_size=3))
    kind = AutoPeftModelForCausalLM if lora_rank else AutoModelForCausalLM
    examples = make_examples(SPLIT.validation.facts, AutoTokenizer.from_pretrained(llama))
    for step, folder in run.checkpoints.items():
        batch = collate(examples)
        with torch.no_grad():
            logits = kind.from_pretrained(folder)(**{k: v for k, v in batch.items() if k != "labels"}).logits
        labels = batch["labels"][:, 1:]
        mean = torch.nn.functional.cross_entropy(logits[:, :-1].mT, labels, ignore_index=IGNORED)
        assert run.validation_loss[step] == pytest.approx(float(mean), rel=1e-5)


def test_a_finished_folder_is_returned_without_loading_torch(llama, tmp_path):
    run = finetune(llama, SPLIT, tmp_path / "run", short())
    code = f"""
import sys
from attnbalance.finetuning.pretrain import Recipe, pretrain
from attnbalance.finetuning.splits import split_facts
from attnbalance.finetuning.finetune import finetune
from attnbalance.finetuning.settings import FinetuneSettings
from attnbalance.data.statements import World
from attnbalance.data.synthetic import synthetic_facts
facts = synthetic_facts(0, subjects=40, relations=2, answers=4)
recipe = Recipe(layers=1, d_model=16, heads=2, vocabulary=400, steps=7, batch_size=8)
pretrain(World(facts), {str(llama)!r}, recipe=recipe)
finetune({str(llama)!r}, split_facts(facts, "top"), {str(run.path)!r}, FinetuneSettings(**{SHORT!r}))
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_a_process_killed_at_the_very_end_left_is_cleared(llama, tmp_path):
    run = finetune(llama, SPLIT, tmp_path / "run", short())
    left = tmp_path / ".run.partial"
    left.mkdir()
    assert finetune(llama, SPLIT, tmp_path / "run", short()) == run
    assert not left.exists()


def test_questions_longer_than_the_model_are_refused(llama, tmp_path):
    long = Fact("word " * 600, "sport", ("golf",), 1.0)
    with pytest.raises(DataError, match="has 512 positions"):
        finetune(llama, replace(SPLIT, train=FactSet((long,))), tmp_path / "run", short())


def test_a_folder_made_with_other_settings_is_refused(llama, tmp_path):
    finetune(llama, SPLIT, tmp_path / "run", short())
    with pytest.raises(OutputError, match="seed is 0 there, 1 here"):
        finetune(llama, SPLIT, tmp_path / "run", short(seed=1))
    with pytest.raises(OutputError, match="split is 'top' there, 'bottom' here"):
        finetune(llama, split_facts(FACTS, "bottom"), tmp_path / "run", short())
    with pytest.raises(OutputError, match="architecture is 'llama' there, 'gpt2' here"):
        pretrain(WORLD, llama, architecture="gpt2", recipe=TINY)


def test_what_is_not_chosen_stays_as_it_was_in_the_base(base, tmp_path):
    run = finetune(base, SPLIT, tmp_path / "run", short(train="qk", weight_decay=0.1))
    before, after = weights(base), weights(run.path)
    assert before.keys() == after.keys()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    fused = [name for name in moved if "c_attn" in name]
    assert all("q_proj" in name or "k_proj" in name or name in fused for name in moved)
    assert len(moved) == 2
    for name in fused:  # queries, keys and values stand side by side in GPT-2
        width = before[name].shape[-1] // 3
        assert torch.equal(before[name][..., 2 * width :], after[name][..., 2 * width :])
    assert run.trained.startswith("Trained: qk, ")


def test_the_recommended_objective_trains_attention_and_watches_what_it_does(base, tmp_path):
    run = finetune(base, SPLIT, tmp_path / "run", short(objective="recommended"))
    assert run.config["train"] == "attention"
    before, after = weights(base), weights(run.path)
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert moved
    assert all("attn" in name for name in moved)
    assert [entry["step"] for entry in run.trajectory] == list(run.validation_loss) == [2, 4, 6, 7]
    assert all(len(entry["subject_attention"]) == TINY.layers for entry in run.trajectory)
    assert {"objective", "answer_loss", "accuracy"} <= run.trajectory[0].keys()
    assert min(run.validation_loss.values()) < run.validation_loss[2]


def test_an_interrupt_names_the_model_that_is_left(llama, tmp_path, monkeypatch):
    def interrupted(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(callbacks.StopEarly, "on_step_end", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt, match="usable model") as caught:
        finetune(llama, SPLIT, tmp_path / "run", short())
    named = str(caught.value).split(", ")[1]
    assert named.endswith("checkpoint-4")
    AutoModelForCausalLM.from_pretrained(named)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "ce + kll"}, "There are ce; kl"),
        ({"train": "kq"}, "no part 'kq'"),
        ({"train": "qk@7"}, "layers 0 to 0"),
        ({"curriculum": "easy"}, "no curriculum 'easy'"),
        ({"objective": "ce + balance"}, "tokens of the relation in every prompt"),
        ({"gradient_rank": 0}, "`gradient_rank` must be a whole number >= 1, got 0"),
    ],
)
def test_what_cannot_be_trained_is_refused_and_leaves_nothing(llama, tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        finetune(llama, SPLIT, tmp_path / "run", short(**changes))
    assert not list(tmp_path.iterdir())


def test_lora_leaves_the_base_alone_and_adapts_every_linear_layer(base, tmp_path):
    run = finetune(base, SPLIT, tmp_path / "run", short(lora_rank=2))
    settings = json.loads((run.path / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base)
    linear = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    wanted = linear if base.name == "llama" else ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj")
    adapted = {name.split(".lora_")[0] for name in weights(run.path)}
    assert all(any(name.endswith(end) for name in adapted) for end in wanted)
    assert len(adapted) == len(wanted)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"steps": 0}, DataError, "`steps` must be a whole number >= 1, got 0"),
        ({"learning_rate": 0.0}, DataError, "`learning_rate` must be a finite number > 0"),
        ({"batch_size": 8, "accumulate": 3}, DataError, "`batch_size` must be a multiple of `accumulate`, got 8 and 3"),
        ({"template": "{nothing}"}, DataError, "field {nothing}"),
    ],
)
def test_impossible_settings_are_refused(llama, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        finetune(llama, SPLIT, tmp_path / "run", short(**changes))


def test_models_that_cannot_be_finetuned_are_refused(llama, tmp_path):
    with pytest.raises(ModelError, match="no model folder at .*nowhere"):
        finetune(tmp_path / "nowhere", SPLIT, tmp_path / "run", short())
    run = finetune(llama, SPLIT, tmp_path / "adapter", short(lora_rank=2))
    with pytest.raises(ModelError, match="is an adapter; merge it"):
        finetune(run.path, SPLIT, tmp_path / "run", short())


def test_a_base_whose_sampling_settings_cannot_be_saved_keeps_its_token_ids_alone(llama, tmp_path):
    vicuna = Path(shutil.copytree(llama, tmp_path / "base"))
    own = read_json(vicuna / "generation_config.json")
    (vicuna / "generation_config.json").write_text(json.dumps(own | {"temperature": 0.9, "top_p": 0.6}))
    run = finetune(vicuna, SPLIT, tmp_path / "run", short())
    kept = read_json(run.path / "generation_config.json")
    assert own["eos_token_id"] == kept["eos_token_id"]
    assert not kept.keys() & {"temperature", "top_p"}


def test_an_empty_validation_part_is_refused(llama, tmp_path):
    with pytest.raises(DataError, match="got none"):
        finetune(llama, replace(SPLIT, validation=FactSet(())), tmp_path / "run", short())
