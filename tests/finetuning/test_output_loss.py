"""Losses of outputs against a plain loop over unpadded rows; what cannot be read is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnbalance.data.instructions import Instruction, InstructionSet
from attnbalance.errors import DataError, ModelError
from attnbalance.finetuning import output_loss as module
from attnbalance.finetuning.labelled_logits import answer_logits
from attnbalance.finetuning.output_loss import read_output_loss
from attnbalance.models.load import load_model

ROWS = InstructionSet(
    (
        Instruction("Say it.", "Bife is here and there.", "Bife is here."),
        Instruction("Say the other.", "Sipi"),
        Instruction("Where is Rozi?", "Rozi is\nfar away", "Rozi went far away, to Ponu."),
    )
)


def test_losses_are_those_of_a_plain_loop(long_llama_folder: Path) -> None:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(long_llama_folder),
        AutoTokenizer.from_pretrained(long_llama_folder),
    )
    for rows in (ROWS, ROWS.bare()):
        expected = []
        for row in rows.rows:
            prompt = len(tokenizer(row.prompt)["input_ids"])
            ids = [*tokenizer(row.prompt + row.output)["input_ids"], tokenizer.eos_token_id]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0]
            expected.append(float(cross_entropy(logits[prompt - 1 : -1], torch.tensor(ids[prompt:]))))
        for batch_size in (1, 3):
            losses = read_output_loss(load_model(str(long_llama_folder)), rows, batch_size=batch_size)
            assert losses.tolist() == pytest.approx(expected, abs=1e-4)  # float32, padded


def test_rows_that_cannot_be_read_and_losses_that_are_no_numbers_are_refused(long_llama_folder: Path) -> None:
    model = load_model(str(long_llama_folder))
    long = InstructionSet((*ROWS.rows, Instruction("Say it.", "Bife " * 5000)))
    with pytest.raises(DataError, match=r"can read 3 of 4 instructions; more than \d+ tokens; leave the others out"):
        read_output_loss(model, long)
    assert len(read_output_loss(model, long.usable(model.tokenizer, model.max_positions))) == 3
    with pytest.raises(DataError, match="can read 0 of 0"):
        read_output_loss(model, InstructionSet(()))
    with torch.no_grad():
        model.model.get_output_embeddings().weight[:] = float("nan")
    with pytest.raises(ModelError, match="NaN logits for answers"):
        read_output_loss(model, ROWS)


def test_losses_that_are_infinite_are_refused(long_llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(str(long_llama_folder))

    def certain(model, examples, batch_size):
        for batch in answer_logits(model, examples, batch_size):
            yield [(i, torch.full_like(logits, -math.inf).index_fill(1, torch.tensor([0]), 0.0)) for i, logits in batch]

    monkeypatch.setattr(module, "answer_logits", certain)
    with pytest.raises(ModelError, match="not finite"):
        read_output_loss(model, ROWS)
