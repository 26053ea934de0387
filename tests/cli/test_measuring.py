"""`curve` from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import run_command
from tiny import SIZES, tiny_model, tiny_tokenizer
from transformers import OPTConfig, OPTForCausalLM


def test_curve_prints_the_answer_and_where_the_report_is(
    llama_folder: Path, lora_folder: Path, facts_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    models = (f"a={llama_folder}", f"b={llama_folder}+{lora_folder}")
    code, text = run_command("curve", *models, "--facts", facts_file, "--recall", "--out", out)
    assert code == 0, text
    assert "already finished" not in text
    assert json.loads((out / "attnbalance.json").read_text())["answer"] in text.replace("\n", " ")
    assert str(out / "report.html") in text
    recall = json.loads((out / "recall.json").read_text())
    assert [entry["label"] for entry in recall] == ["a", "b"]
    code, text = run_command("curve", *models, "--facts", facts_file, "--recall", "--out", out)
    assert (code, "already finished with these settings; nothing was computed again" in text) == (0, True), text
    assert {"accuracy", "low", "high", "n", "shortcut_rate", "by_popularity"} <= set(recall[0])


def test_trajectory_prints_the_answer_and_refuses_what_is_no_run(
    llama_folder: Path, lora_folder: Path, facts_file: Path, tmp_path: Path
) -> None:
    for step in (1, 2):
        shutil.copytree(lora_folder, tmp_path / "run" / f"checkpoint-{step}")
    out = tmp_path / "out"
    asked = ("--base", llama_folder, "--facts", facts_file, "--out", out)
    code, text = run_command("trajectory", tmp_path / "run" / "checkpoint-*", *asked)
    assert code == 0, text
    assert json.loads((out / "attnbalance.json").read_text())["answer"] in text.replace("\n", " ")
    assert "from step 0 to step 2" in text.replace("\n", " ")
    assert str(out / "report.html") in text
    code, text = run_command("trajectory", tmp_path / "nowhere", *asked)
    assert (code, "Traceback" in text) == (2, False)
    assert "no checkpoints at" in text.replace("\n", " ")
    code, text = run_command("trajectory", tmp_path / "run", *asked, "--reduce", "mean")
    assert code == 2
    assert "--reduce must be one of" in text.replace("\n", " ")


def test_curve_and_trajectory_measure_further_readings_and_name_them_where_one_is_unknown(
    llama_folder: Path, lora_folder: Path, facts_file: Path, tmp_path: Path
) -> None:
    for step in (1, 2):
        shutil.copytree(lora_folder, tmp_path / "run" / f"checkpoint-{step}")
    commands = {
        "curve": (f"a={llama_folder}",),
        "trajectory": (tmp_path / "run", "--base", llama_folder),
    }
    for name, models in commands.items():
        out = tmp_path / name
        asked = (name, *models, "--facts", facts_file, "--out", out, "--readings")
        code, text = run_command(*asked, "rest share, entropy")
        assert code == 2
        assert "must be among subject attention, subject share," in text.replace("\n", " ")
        assert "attention entropy, value-weighted subject attention; got 'entropy'" in text.replace("\n", " ")
        assert not out.exists()
        code, text = run_command(*asked, "rest share, attention entropy")
        assert code == 0, text
        read = [entry["name"] for entry in json.loads((out / "curves.json").read_text())["further"]]
        assert read == ["rest share", "attention entropy"]


def test_knowledge_prints_the_answer_and_where_the_table_is(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config.max_position_embeddings = 512
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    facts = tmp_path / "facts.jsonl"
    rows = [{"subject": f"Town {i}", "relation": "country", "answers": ["Italy"]} for i in range(5)]
    facts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    asked = ("knowledge", f"tiny={tmp_path / 'model'}", "--facts", facts, "--out", out)
    code, text = run_command(*asked)
    assert code == 0, text
    assert "Of these 5 facts tiny knows 0.0%" in text.replace("\n", " ")
    assert str(out / "table.md") in text
    assert run_command(*asked)[0] == 0
    facts.write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    code, text = run_command("knowledge", f"tiny={tmp_path / 'model'}", "--facts", facts, "--out", tmp_path / "few")
    assert code == 2
    assert "relation with fewer than five subjects" in text.replace("\n", " ")
    assert "Traceback" not in text


def test_a_scoring_without_answers_is_refused(tmp_path: Path) -> None:
    facts = tmp_path / "facts.jsonl"
    facts.write_text(json.dumps({"subject": "Rome", "relation": "country", "answers": ["Italy"]}) + "\n")
    asked = ("curve", "a=nowhere", "--facts", facts, "--out", tmp_path / "out", "--scoring", "containment")
    code, text = run_command(*asked)
    assert code == 2
    assert "scoring 'containment' does nothing without answers" in text.replace("\n", " ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["salience", "explain", "curve"])
def test_models_that_cannot_be_taken_apart_give_one_message(tmp_path: Path, command: str) -> None:
    facts = tmp_path / "facts.jsonl"
    rows = [{"subject": f"Town {i}", "relation": "country", "answers": [("Italy", "Chad")[i % 2]]} for i in range(6)]
    facts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "do_layer_norm_before": False}
    sizes = {name: size for name, size in SIZES.items() if name != "initializer_range"} | special
    for seed, label in enumerate("ab"):
        torch.manual_seed(seed)
        OPTForCausalLM(OPTConfig(**sizes, ffn_dim=48, word_embed_proj_dim=16)).save_pretrained(tmp_path / label)
        tiny_tokenizer().save_pretrained(tmp_path / label)
    models = (f"{label}={tmp_path / label}" for label in "ab")
    further = ("--readings", "value-weighted subject attention") if command == "curve" else ()
    code, text = run_command(command, *models, "--facts", facts, "--out", tmp_path / "out", *further)
    assert code == 2, text
    assert "its unembedding reads 16 numbers" in text.replace("\n", " ")
