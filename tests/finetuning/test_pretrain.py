"""Pretraining: what is written, that a killed run ends with the same weights, and what is refused."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from short_runs import TINY, WORLD, Killed, assert_equal_weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnbalance.errors import DataError, OutputError
from attnbalance.files.outputs import MARKER, read_json, write_json
from attnbalance.finetuning.bases import FILE
from attnbalance.finetuning.pretrain import pretrain
from attnbalance.models.load import load_model


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
    assert not (base / FILE).exists()  # else objectives would take it for a checkpoint of its random start


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


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pretrained_folder_of_which_a_file_was_changed_is_refused_by_its_name(name, llama, tmp_path):
    out = tmp_path / "base"
    shutil.copytree(llama, out)
    content = (out / name).read_bytes()
    (out / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for opened in (lambda: pretrain(WORLD, out, recipe=TINY), lambda: load_model(out)):
        with pytest.raises(OutputError, match=f"{name} was changed; restore"):
            opened()
    (out / name).unlink()
    with pytest.raises(OutputError, match=f"{name} is gone; restore"):
        pretrain(WORLD, out, recipe=TINY)
    (out / name).write_bytes(content)
    assert pretrain(WORLD, out, recipe=TINY) == out


def test_a_pretrained_folder_of_an_older_version_is_finished(llama, tmp_path):
    out = tmp_path / "base"
    shutil.copytree(llama, out)
    record = read_json(out / MARKER)
    write_json(out / MARKER, {name: record[name] for name in record if name not in ("sha256", "files_sha256")})
    assert pretrain(WORLD, out, recipe=TINY) == out


SCRIPT = """
import sys
from attnbalance.finetuning.pretrain import Recipe, pretrain
from attnbalance.data.statements import World
from attnbalance.data.synthetic import synthetic_facts
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


def test_impossible_models_are_refused(tmp_path):
    with pytest.raises(DataError, match="no architecture 'rnn'"):
        pretrain(WORLD, tmp_path / "out", architecture="rnn", recipe=TINY)
    with pytest.raises(DataError, match="multiple of twice"):
        pretrain(WORLD, tmp_path / "out", recipe=replace(TINY, heads=3))
