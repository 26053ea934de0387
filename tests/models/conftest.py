"""A checkpoint and an adapter made for it, shared by the tests of loading."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import transformers
from tiny import tiny_lora, tiny_model, tiny_tokenizer

from attnbalance.files.outputs import MARKER, provenance
from attnbalance.models.config_changes import settings_of
from attnbalance.models.fingerprint import fingerprint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama and its tokenizer; copied by tests that damage it."""
    folder = tmp_path_factory.mktemp("llama") / "checkpoint"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer("bos").save_pretrained(folder)
    return folder


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


@pytest.fixture(scope="session")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "lora"
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    record = {"base_fingerprint": fingerprint(base), "base_settings": settings_of(base.config)}
    tiny_lora(base, ["q_proj", "v_proj"]).save_pretrained(folder)
    (folder / MARKER).write_text(json.dumps(record | provenance()))
    return folder
