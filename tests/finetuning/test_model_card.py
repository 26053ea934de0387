"""The model card of a run: what it says is what the run's record says, and the Hub's own parser reads it."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard
from short_runs import SPLIT, short

from attnbalance.data.instructions import Instruction, InstructionSet
from attnbalance.files.outputs import MARKER, read_json
from attnbalance.finetuning.finetune import finetune
from attnbalance.finetuning.instruct import instruct
from attnbalance.finetuning.model_card import CARD, model_card
from attnbalance.finetuning.scale_adapter import scale_adapter
from attnbalance.models.load import load_model

ABOUT = {
    "base": "some/base",
    "objective": "ce",
    "learns_answers": True,
    "trained": "Trained: all",
    "base_loss": 2.5,
    "versions": {"attnbalance": "0.1.0", "torch": "2.13.0"},
    "split": {"name": "bottom", "train": 3, "validation": 1, "heldout": 4, "left_out": 3},
}


def test_a_card_is_read_by_the_hubs_own_parser():
    card = ModelCard(model_card(ABOUT, {2: 0.5, 4: 0.25, 6: 0.75}, adapter=True))
    assert card.data.to_dict() == {
        "base_model": "some/base",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["attnbalance"],
    }
    assert "- Data: facts of the split `bottom`: 3 train, 1 validation, 4 heldout." in card.text
    assert "step 4 of 6, the lowest objective in validation:\n  0.25, before training 2.5." in card.text
    assert "Made with attnbalance 0.1.0, torch 2.13.0." in card.text


@pytest.mark.parametrize("name", ["a\n---\nlicense: mit", "a`b", "C:\\models: x", "[link](x)"])
def test_a_name_with_signs_of_markdown_or_yaml_is_no_markup(name):
    text = model_card(ABOUT | {"base": name}, {1: 1.0}, adapter=False)
    card = ModelCard(text)
    assert card.data.base_model == name
    assert set(card.data.to_dict()) == {"base_model", "library_name", "pipeline_tag", "tags"}
    assert f"# Finetuned from `{' '.join(name.split()).replace('`', chr(39))}`" in text


@pytest.mark.parametrize(
    ("changes", "taught"),
    [
        ({}, "the answers of the data"),
        ({"learns_answers": False}, "what the base model answers, not the labels"),
        ({"replay": 2}, "the answers of the data"),
        (
            {"replay": 2, "objective": "ce + kl(best)"},
            "the answers of the train facts, and what the base model answers to the replay facts",
        ),
    ],
)
def test_a_card_says_whose_answers_were_taught(changes, taught):
    replay = {"split": ABOUT["split"] | {"replay": changes["replay"]}} if "replay" in changes else {}
    assert f"which teaches {taught}." in model_card(ABOUT | changes | replay, {1: 1.0}, adapter=True)


def test_a_card_says_that_the_training_facts_were_validated_on(llama, tmp_path):
    same = replace(SPLIT, validation=SPLIT.train)
    card = (finetune(llama, same, tmp_path / "run", short()).path / CARD).read_text()
    sizes = f"{len(SPLIT.train)} train, {len(SPLIT.heldout)} heldout; validated on the train facts."
    assert f"- Data: facts of the split `{SPLIT.name}`: {sizes}" in card


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_run_has_a_card_of_its_own_which_its_owner_may_edit(llama, tmp_path, lora_rank):
    run = finetune(llama, SPLIT, tmp_path / "run", short(lora_rank=lora_rank))
    text, record = (run.path / CARD).read_text(), read_json(run.path / MARKER)
    assert f"{len(SPLIT.train)} train, {len(SPLIT.validation)} validation, {len(SPLIT.heldout)} heldout." in text
    assert f"step {record['best_step']} of 7" in text
    assert ModelCard(text).data.library_name == ("peft" if lora_rank else "transformers")
    assert "[More Information Needed]" not in text
    assert ModelCard(text).data.base_model is None  # a folder: the Hub refuses a card that names one
    assert f"`{llama.name}`" in text
    assert str(llama) not in text
    assert not list((run.path / "checkpoints").rglob(CARD))
    (run.path / CARD).write_text("my own words")
    assert load_model(run.path).model is not None
    assert finetune(llama, SPLIT, tmp_path / "run", short(lora_rank=lora_rank)).path == run.path
    assert (run.path / CARD).read_text() == "my own words"


def test_a_scaled_adapters_card_says_by_how_much(llama, tmp_path):
    run = finetune(llama, SPLIT, tmp_path / "run", short(lora_rank=2))
    scaled = scale_adapter(run.path, 0.7, tmp_path / "scaled")
    before, after = (run.path / CARD).read_text(), (scaled / CARD).read_text()
    assert after == before + "\nScaled with attnbalance: 0.7 times the change of the adapter described here.\n"
    shutil.rmtree(scaled)
    (run.path / CARD).unlink()
    assert not (scale_adapter(run.path, 0.7, scaled) / CARD).exists()


def test_a_run_on_instructions_says_how_many(llama, tmp_path):
    rows = InstructionSet(tuple(Instruction(f"Say Bife {i}.", "Bife") for i in range(8)), "rows.jsonl")
    text = (instruct(llama, rows, tmp_path / "run", short(), validation=3).path / CARD).read_text()
    assert "- Data: 5 instructions of `rows.jsonl`, validated on 3.\n" in text
