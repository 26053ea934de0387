"""Finetuning and pretraining: what is written, that a killed run ends with the same weights, and what is refused."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from attnbalance.errors import DataError, ModelError, OutputError
from attnbalance.facts import Fact, FactSet
from attnbalance.finetune import loop
from attnbalance.finetune.examples import IGNORED, collate, make_examples
from attnbalance.finetune.pretrain import Recipe, pretrain
from attnbalance.finetune.runs import load_run
from attnbalance.finetune.splits import split_facts
from attnbalance.finetune.trainer import finetune
from attnbalance.models.fingerprint import fingerprint
from attnbalance.outputs import MARKER, read_json
from attnbalance.worlds.statements import World
from attnbalance.worlds.synthetic import synthetic_facts

FACTS = synthetic_facts(0, subjects=40, relations=2, answers=4)
WORLD = World(FACTS)
TINY = Recipe(layers=1, d_model=16, heads=2, vocabulary=400, steps=7, batch_size=8)
SPLIT = split_facts(FACTS, "top")
SHORT: dict[str, Any] = {"steps": 7, "batch_size": 8, "checkpoint_every": 2, "patience": None, "learning_rate": 1e-2}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def base(request, tmp_path_factory):
    return pretrain(WORLD, tmp_path_factory.mktemp("base") / request.param, architecture=request.param, recipe=TINY)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return pretrain(WORLD, tmp_path_factory.mktemp("llama") / "base", recipe=TINY)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(iter(folder.glob("*.safetensors"))))


def assert_equal_weights(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the package may catch it."""


@pytest.fixture
def kill_at(monkeypatch):
    """Makes the next trainings die at an event of a step, as often as steps are named."""

    def arrange(event: str, *steps: int) -> None:
        left = list(steps)

        def die(self, args, state, control, **kwargs):
            if left and state.global_step == left[0]:
                left.pop(0)
                raise Killed

        killer = type("Killer", (TrainerCallback,), {event: die})()
        original = loop.ObjectiveTrainer.__init__

        def with_killer(self, *args, **kwargs):
            original(self, *args, **kwargs)
            self.callback_handler.callbacks.insert(0, killer)

        monkeypatch.setattr(loop.ObjectiveTrainer, "__init__", with_killer)

    return arrange


def test_a_pretrained_folder_is_an_ordinary_checkpoint(base):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    marker = read_json(base / MARKER)
    assert marker["kind"] == "pretrain"
    assert marker["config"]["recipe"]["steps"] == 7
    assert [step for step, _ in marker["training_loss"]] == [2, 4, 6]
    assert not [p for p in base.rglob("*") if p.suffix in (".pt", ".pth", ".bin")]
    assert not list(base.parent.glob(".*"))


def test_pretraining_starts_near_the_uniform_loss_and_learns(tmp_path):
    out = pretrain(WORLD, tmp_path / "out", recipe=replace(TINY, steps=30, learning_rate=2e-2))
    loss = [value for _, value in read_json(out / MARKER)["training_loss"]]
    assert loss[-1] < 0.7 * loss[0] < math.log(400)


@pytest.mark.parametrize("steps", [(1,), (2,), (3, 5), (7,)])
@pytest.mark.parametrize("event", ["on_step_end", "on_save"])
def test_a_killed_pretraining_ends_with_the_same_weights(llama, tmp_path, kill_at, event, steps):
    kill_at(event, *steps)
    died = 0
    while not (tmp_path / "again").exists():
        try:
            pretrain(WORLD, tmp_path / "again", recipe=TINY)
        except Killed:
            died += 1
    assert died >= (event == "on_step_end")
    assert_equal_weights(llama, tmp_path / "again")


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_run_is_its_best_checkpoint(base, tmp_path, lora_rank):
    run = finetune(base, SPLIT, tmp_path / "run", lora_rank=lora_rank, **SHORT)
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
    run = finetune(llama, SPLIT, tmp_path / "run", lora_rank=lora_rank, **{**SHORT, "batch_size": 3})
    kind = AutoPeftModelForCausalLM if lora_rank else AutoModelForCausalLM
    examples = make_examples(SPLIT.validation.facts, AutoTokenizer.from_pretrained(llama))
    for step, folder in run.checkpoints.items():
        batch = collate(examples)
        with torch.no_grad():
            logits = kind.from_pretrained(folder)(**{k: v for k, v in batch.items() if k != "labels"}).logits
        labels = batch["labels"][:, 1:]
        mean = torch.nn.functional.cross_entropy(logits[:, :-1].mT, labels, ignore_index=IGNORED)
        assert run.validation_loss[step] == pytest.approx(float(mean), rel=1e-5)


ANCHORED = {"objective": "recommended", "weight_decay": 0.1, "curriculum": "popular-first"}
"""Settings that need the base model and its numbers again when a run goes on."""


@pytest.mark.parametrize(
    ("changes", "event", "steps"),
    [
        ({}, "on_step_end", (3, 6)),
        ({}, "on_save", (4,)),
        ({"lora_rank": 2}, "on_save", (2, 6)),
        (ANCHORED, "on_step_end", (3, 6)),
        (ANCHORED | {"lora_rank": 2, "train": "qk@0.1"}, "on_step_end", (5,)),
        ({"objective": "ce + project + 0.1*weight-anchor + row-anchor(statement)"}, "on_step_end", (5,)),
        ({"gradient_rank": 1, "train": "qk"}, "on_step_end", (3,)),
    ],
)
def test_a_killed_finetuning_ends_with_the_same_weights(base, tmp_path, kill_at, changes, event, steps):
    whole = finetune(base, SPLIT, tmp_path / "whole", **SHORT, **changes)
    kill_at(event, *steps)
    for _ in steps:
        with pytest.raises(Killed):
            finetune(base, SPLIT, tmp_path / "again", **SHORT, **changes)
        assert not (tmp_path / "again").exists()
    again = finetune(base, SPLIT, tmp_path / "again", **SHORT, **changes)
    assert again.validation_loss == whole.validation_loss
    assert again.trajectory == whole.trajectory
    for step in whole.checkpoints:
        assert_equal_weights(whole.checkpoints[step], again.checkpoints[step])


def test_a_run_killed_after_it_stopped_early_does_not_go_on(llama, tmp_path, kill_at):
    early = SHORT | {"patience": 1, "learning_rate": 0.3, "checkpoint_every": 1, "steps": 20}
    whole = finetune(llama, SPLIT, tmp_path / "whole", **early)
    last = max(whole.validation_loss)
    assert last < 20
    assert last == whole.best_step + 1
    kill_at("on_train_end", last)
    with pytest.raises(Killed):
        finetune(llama, SPLIT, tmp_path / "again", **early)
    assert finetune(llama, SPLIT, tmp_path / "again", **early).validation_loss == whole.validation_loss


SCRIPT = """
import sys
from attnbalance.finetune.pretrain import Recipe, pretrain
from attnbalance.worlds.statements import World
from attnbalance.worlds.synthetic import synthetic_facts
recipe = Recipe(layers=1, d_model=16, heads=2, vocabulary=400, steps=60, batch_size=8)
pretrain(World(synthetic_facts(0, subjects=40, relations=2, answers=4)), sys.argv[1], recipe=recipe)
"""


def test_a_process_killed_by_signal_goes_on_from_its_checkpoint(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "out")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob(".out.partial/checkpoint-*/model.safetensors")) and process.poll() is None:
        time.sleep(0.001)  # until the first checkpoint is being written
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    recipe = replace(TINY, steps=60)
    resumed, whole = (pretrain(WORLD, tmp_path / name, recipe=recipe) for name in ("out", "whole"))
    assert_equal_weights(resumed, whole)


def test_a_finished_folder_is_returned_without_loading_torch(llama, tmp_path):
    run = finetune(llama, SPLIT, tmp_path / "run", **SHORT)
    code = f"""
import sys
from attnbalance.finetune.pretrain import Recipe, pretrain
from attnbalance.finetune.splits import split_facts
from attnbalance.finetune.trainer import finetune
from attnbalance.worlds.statements import World
from attnbalance.worlds.synthetic import synthetic_facts
facts = synthetic_facts(0, subjects=40, relations=2, answers=4)
recipe = Recipe(layers=1, d_model=16, heads=2, vocabulary=400, steps=7, batch_size=8)
pretrain(World(facts), {str(llama)!r}, recipe=recipe)
finetune({str(llama)!r}, split_facts(facts, "top"), {str(run.path)!r}, **{SHORT!r})
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_a_process_killed_at_the_very_end_left_is_cleared(llama, tmp_path):
    run = finetune(llama, SPLIT, tmp_path / "run", **SHORT)
    left = tmp_path / ".run.partial"
    left.mkdir()
    assert finetune(llama, SPLIT, tmp_path / "run", **SHORT) == run
    assert not left.exists()


def test_questions_longer_than_the_model_are_refused(llama, tmp_path):
    long = Fact("word " * 600, "sport", ("golf",), 1.0)
    with pytest.raises(DataError, match="has 512 positions"):
        finetune(llama, replace(SPLIT, train=FactSet((long,))), tmp_path / "run", **SHORT)


def test_a_folder_made_with_other_settings_is_refused(llama, tmp_path):
    finetune(llama, SPLIT, tmp_path / "run", **SHORT)
    with pytest.raises(OutputError, match="seed is 0 there, 1 here"):
        finetune(llama, SPLIT, tmp_path / "run", seed=1, **SHORT)
    with pytest.raises(OutputError, match="split is 'top' there, 'bottom' here"):
        finetune(llama, split_facts(FACTS, "bottom"), tmp_path / "run", **SHORT)
    with pytest.raises(OutputError, match="architecture is 'llama' there, 'gpt2' here"):
        pretrain(WORLD, llama, architecture="gpt2", recipe=TINY)


def test_what_is_not_chosen_stays_as_it_was_in_the_base(base, tmp_path):
    run = finetune(base, SPLIT, tmp_path / "run", train="qk", weight_decay=0.1, **SHORT)
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
    run = finetune(base, SPLIT, tmp_path / "run", objective="recommended", **SHORT)
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

    monkeypatch.setattr(loop._StopEarly, "on_step_end", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt, match="usable model") as caught:
        finetune(llama, SPLIT, tmp_path / "run", **SHORT)
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
        ({"objective": "ce + balance"}, "place of the relation"),
        ({"gradient_rank": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_trained_is_refused_and_leaves_nothing(llama, tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        finetune(llama, SPLIT, tmp_path / "run", **SHORT, **changes)
    assert not list(tmp_path.iterdir())


def test_lora_leaves_the_base_alone_and_adapts_every_linear_layer(base, tmp_path):
    run = finetune(base, SPLIT, tmp_path / "run", lora_rank=2, **SHORT)
    settings = json.loads((run.path / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base)
    linear = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    wanted = linear if base.name == "llama" else ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj")
    adapted = {name.split(".lora_")[0] for name in weights(run.path)}
    assert all(any(name.endswith(end) for name in adapted) for end in wanted)
    assert len(adapted) == len(wanted)


def test_early_stopping_by_hand():
    losses = {10: 3.0, 20: 2.0, 30: 2.5, 40: 2.0}
    assert loop.stops(losses, 2)
    assert not loop.stops(losses, 3)
    assert not loop.stops(losses, None)
    assert not loop.stops({}, 1)


def test_a_loss_that_is_no_number_names_its_step(llama, tmp_path):
    with pytest.raises(ModelError, match=r"(loss is nan|loss is inf|no finite numbers).* step"):
        finetune(llama, SPLIT, tmp_path / "run", **{**SHORT, "learning_rate": 1e38})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"steps": 0}, DataError, "steps 0"),
        ({"learning_rate": 0.0}, DataError, "learning rate is above 0"),
        ({"batch_size": 8, "accumulate": 3}, DataError, "cannot be shared"),
        ({"template": "{nothing}"}, DataError, "field {nothing}"),
    ],
)
def test_impossible_settings_are_refused(llama, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        finetune(llama, SPLIT, tmp_path / "run", **{**SHORT, **changes})


def test_models_that_cannot_be_finetuned_are_refused(llama, tmp_path):
    with pytest.raises(ModelError, match="no model folder at .*nowhere"):
        finetune(tmp_path / "nowhere", SPLIT, tmp_path / "run", **SHORT)
    run = finetune(llama, SPLIT, tmp_path / "adapter", lora_rank=2, **SHORT)
    with pytest.raises(ModelError, match="is an adapter; merge it"):
        finetune(run.path, SPLIT, tmp_path / "run", **SHORT)


def test_a_base_whose_sampling_settings_cannot_be_saved_keeps_its_token_ids_alone(llama, tmp_path):
    vicuna = Path(shutil.copytree(llama, tmp_path / "base"))
    own = read_json(vicuna / "generation_config.json")
    (vicuna / "generation_config.json").write_text(json.dumps(own | {"temperature": 0.9, "top_p": 0.6}))
    run = finetune(vicuna, SPLIT, tmp_path / "run", **SHORT)
    kept = read_json(run.path / "generation_config.json")
    assert own["eos_token_id"] == kept["eos_token_id"]
    assert not kept.keys() & {"temperature", "top_p"}


def test_an_empty_validation_part_is_refused(llama, tmp_path):
    with pytest.raises(DataError, match="got none"):
        finetune(llama, replace(SPLIT, validation=FactSet(())), tmp_path / "run", **SHORT)


def test_parts_of_a_batch_add_up_to_the_batch(llama, tmp_path):
    whole = finetune(llama, SPLIT, tmp_path / "whole", **SHORT)
    parts = finetune(llama, SPLIT, tmp_path / "parts", accumulate=4, **SHORT)
    for name, value in weights(whole.path).items():
        torch.testing.assert_close(value, weights(parts.path)[name], rtol=1e-3, atol=1e-4)


def test_a_folder_without_a_run_is_refused(llama, tmp_path):
    for path, held in ((llama, "the result of `pretrain`"), (tmp_path, f"no {MARKER}"), (tmp_path / "x", "nothing")):
        with pytest.raises(ModelError, match=held):
            load_run(path)


def test_impossible_models_are_refused(tmp_path):
    with pytest.raises(DataError, match="no architecture 'rnn'"):
        pretrain(WORLD, tmp_path / "out", architecture="rnn", recipe=TINY)
    with pytest.raises(DataError, match="multiple of twice"):
        pretrain(WORLD, tmp_path / "out", recipe=replace(TINY, heads=3))
