"""Shapes are checked by beartype while tests run; nothing reaches the network."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
os.environ.setdefault("MPLBACKEND", "agg")

import pytest
import torch
from jaxtyping import install_import_hook

TYPED = (
    "attnbalance.data.batches",
    "attnbalance.data.tokens",
    "attnbalance.models.bridge",
    "attnbalance.models.bridge_weights",
    "attnbalance.models.eager_reference",
    "attnbalance.models.interventions",
    "attnbalance.models.forward",
    "attnbalance.models.generate",
    "attnbalance.models.hooked",
    "attnbalance.models.norms",
    "attnbalance.models.pattern_rows",
    "attnbalance.models.residual_parts",
    "attnbalance.models.shared_prefixes",
    "attnbalance.models.weight_roles",
    "attnbalance.models.weights",
    "attnbalance.readings",
    "attnbalance.finetuning.choice_answers",
    "attnbalance.finetuning.evaluation",
    "attnbalance.finetuning.examples",
    "attnbalance.finetuning.labelled_logits",
    "attnbalance.finetuning.objectives",
    "attnbalance.finetuning.output_loss",
    "attnbalance.finetuning.parameters",
    "attnbalance.finetuning.ranking",
    "attnbalance.finetuning.finetune",
    "attnbalance.finetuning.watched_facts",
    "attnbalance.papers.directors",
    "attnbalance.papers.small_gpt2",
    "attnbalance.papers.standard_layer",
    "attnbalance.papers.two_tokens",
    "attnbalance.theory",
)
"""Modules with tensors in their signatures; attnbalance.models.rows is left out, since it is traced and compiled."""

install_import_hook(list(TYPED), "beartype.beartype")
torch.set_num_threads(1)  # models this small lose more by waiting for a second thread than they gain

import torch
from tiny import FACTS, tiny_model, tiny_tokenizer

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SHARED = Path(__file__).parents[1] / "../shared"


def _shared(name: str) -> Path:
    path = (SHARED / name).resolve()
    if not path.exists():
        pytest.skip(f"{name} is not beside this checkout")
    return path


@pytest.fixture(scope="session")
def stories() -> Path:
    """The folder of stories260K, a small trained Llama with grouped heads; skips where it is absent."""
    return _shared("models/stories260K_hf")


@pytest.fixture(scope="session")
def popqa() -> Path:
    """PopQA's own table; skips where it is absent."""
    return _shared("data/popqa/popQA.tsv")


@pytest.fixture(scope="session")
def world_facts() -> Path:
    """Goyal et al.'s world facts; skips where they are absent."""
    return _shared("data/context_parametric_inversion/world_facts.json")


@pytest.fixture(scope="session")
def mmlu() -> Path:
    """MMLU's history files; skips where they are absent."""
    return _shared("data/mmlu")


@pytest.fixture(scope="session")
def squad() -> Path:
    """SQuAD's published development questions; skips where they are absent."""
    return _shared("data/squad/dev-v1.1.rebuilt.json")


@pytest.fixture(scope="session")
def entity_questions() -> Path:
    """EntityQuestions' folder; skips where it is absent."""
    return _shared("data/entityquestions")


@pytest.fixture(scope="session")
def lre() -> Path:
    """The folder of Hernandez et al.'s relations; skips where it is absent."""
    return _shared("data/lre_relations")


def _saved(family: str, folder: Path) -> Path:
    tiny_model(family).save_pretrained(folder)
    tiny_tokenizer("bos").save_pretrained(folder)
    return folder


@pytest.fixture
def llama_folder(tmp_path: Path) -> Path:
    """A tiny random Llama with a byte-level tokenizer, as an ordinary checkpoint folder."""
    return _saved("llama", tmp_path / "llama")


@pytest.fixture(scope="session")
def long_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama of 512 positions, with room for few-shot examples and contexts."""
    folder = tmp_path_factory.mktemp("long") / "model"
    model = tiny_model("llama")
    model.config.max_position_embeddings = 512
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def gpt2_folder(tmp_path: Path) -> Path:
    """A tiny random GPT-2 with the same tokenizer, as an ordinary checkpoint folder."""
    return _saved("gpt2", tmp_path / "gpt2")


@pytest.fixture
def facts_file(tmp_path: Path) -> Path:
    """The facts of `tiny` as a user's own file."""
    path = tmp_path / "facts.jsonl"
    path.write_text("".join(json.dumps(fact.as_dict()) + "\n" for fact in FACTS))
    return path


@pytest.fixture
def lora_folder(tmp_path: Path) -> Path:
    """A LoRA adapter for `llama_folder` with random weights that change what it attends to."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(tiny_model("llama"), config).save_pretrained(tmp_path / "lora")
    return tmp_path / "lora"


@pytest.fixture(scope="module")  # playwright runs an event loop, in which other tests could start none
def browser() -> Iterator[Browser]:
    """Chromium; tests are skipped where there is none."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs Chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()
