"""`attnbalance scale-adapter`: what it writes is an adapter like any other."""

from __future__ import annotations

from pathlib import Path

import torch
from commands import run_command
from safetensors.torch import load_file


def test_a_run_is_scaled_and_then_measured_like_any_adapter(
    llama_folder: Path, tmp_path: Path, facts_file: Path
) -> None:
    run, half = tmp_path / "a run", tmp_path / "half"
    options = ("--split", "whole", "--steps", 2, "--batch-size", 4, "--lora-rank", 2, "--out", run)
    assert run_command("finetune", llama_folder, "--facts", facts_file, *options)[0] == 0
    code, text = run_command("scale-adapter", run, 0.5, "--out", half)
    assert code == 0, text
    assert f"changes the weights 0.5 times as much as {run}" in text
    assert f"'finetuned={run}'" in text
    _, text = run_command("scale-adapter", run, 0.5, "--out", half)
    assert "already finished" in text
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (run, half))
    assert all(torch.equal(after[name], before[name] / 2 if "lora_B" in name else before[name]) for name in before)
    models = (f"base={llama_folder}", f"half={half}")
    code, text = run_command("curve", *models, "--facts", run / "heldout.jsonl", "--out", tmp_path / "out")
    assert code == 0, text
    for arguments, said in (((run, 0), "`factor` must be"), ((llama_folder, 0.5), "no adapter_config.json")):
        code, text = run_command("scale-adapter", *arguments, "--out", tmp_path / "bad")
        assert (code, said in text, "Traceback" in text) == (2, True, False), text
