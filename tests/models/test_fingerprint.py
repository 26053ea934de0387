"""Fingerprints tell bases apart and nothing else."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

from attnbalance.models.fingerprint import files_fingerprint, fingerprint, same_weights


def test_an_adapter_and_a_coarser_dtype_leave_the_fingerprint_and_a_changed_weight_does_not() -> None:
    model = tiny_model("llama")
    own = fingerprint(model)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert same_weights(fingerprint(tiny_model("llama").to(dtype)), own)
    config = LoraConfig(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")  # pyright: ignore[reportArgumentType]
    assert fingerprint(get_peft_model(tiny_model("llama"), config)) == own
    assert not same_weights(fingerprint(tiny_model("gpt2")), own)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    assert not same_weights(fingerprint(model), own)


def test_the_files_of_a_folder_tell_when_its_weights_were_written_anew(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    own = files_fingerprint(tmp_path)
    model.save_pretrained(tmp_path)
    assert files_fingerprint(tmp_path) == own
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    model.save_pretrained(tmp_path)
    assert files_fingerprint(tmp_path) != own
    assert files_fingerprint("owner/name") is None
