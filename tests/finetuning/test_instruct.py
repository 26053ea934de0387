"""Instruction runs: the rows that are learned against plain tokenization, losses against a plain loop, refusals."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from short_runs import Killed, assert_equal_weights, short
from tiny import GROUPED, TOKENIZERS, tiny_tokenizer, without_bytes
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, Phi3Config

from attnbalance.data.instructions import Instruction, InstructionSet
from attnbalance.errors import DataError, OutputError
from attnbalance.files.outputs import read_json
from attnbalance.finetuning.instruct import instruct, instruction_examples
from attnbalance.finetuning.runs import load_run

ROWS = InstructionSet(
    tuple(
        Instruction(f"Say {a} after {b}.", f"{b}, then\n{a}", f"{a} is here." if (i + j) % 3 else "")
        for i, a in enumerate(("Bife", "Sipi", "Rozi", "Tele"))
        for j, b in enumerate(("Ponu", "Keva", "Neta"))
    )
)


def validated_and_trained(rows, validation):
    """The rows by the hash of their prompts: the first are validated on."""
    hashed = sorted(rows, key=lambda row: hashlib.sha256(row.prompt.encode()).hexdigest())
    return hashed[:validation], hashed[validation:]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_rows_are_tokenized_as_the_prompt_and_then_the_output_with_an_end(kind):
    tokenizer = tiny_tokenizer(kind)
    usable, examples = instruction_examples(ROWS, tokenizer, None)
    assert (usable, len(examples)) == (ROWS, len(ROWS))
    for row, example in zip(ROWS.rows, examples, strict=True):
        prompt, whole = tokenizer([row.prompt, row.prompt + row.output], return_offsets_mapping=True)["input_ids"]
        if kind == "eos":  # this one ends each text itself
            prompt, whole = prompt[:-1], whole[:-1]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        assert whole[: len(prompt)] == prompt
        assert list(example.ids) == whole + end
        assert list(example.labels) == [-100] * len(prompt) + whole[len(prompt) :] + end
        assert example.prompt is None


def test_losses_are_those_of_plain_transformers_and_fall(llama, tmp_path):
    run = instruct(llama, ROWS, tmp_path / "run", short(steps=30, checkpoint_every=30), validation=3)
    tokenizer = AutoTokenizer.from_pretrained(llama)
    validated, _ = validated_and_trained(ROWS.rows, 3)

    def loss(folder):
        model, total, tokens = AutoModelForCausalLM.from_pretrained(folder), 0.0, 0
        for row in validated:
            prompt = len(tokenizer(row.prompt)["input_ids"])
            ids = torch.tensor([*tokenizer(row.prompt + row.output)["input_ids"], tokenizer.eos_token_id])
            with torch.no_grad():
                logits = model(ids[None]).logits[0, prompt - 1 : -1]
            total += float(cross_entropy(logits, ids[prompt:], reduction="sum"))
            tokens += len(ids) - prompt
        return total / tokens

    assert run.base_loss == pytest.approx(loss(llama), rel=1e-5)
    assert run.validation_loss[30] == pytest.approx(loss(run.path), rel=1e-5)
    assert run.validation_loss[30] < 0.7 * (run.base_loss or math.nan)
    [last] = run.trajectory
    assert last["answer_loss"] == pytest.approx(run.validation_loss[30], rel=1e-5)
    assert not {"accuracy", "shortcut_rate"} & last.keys()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_one_step_is_adamw_on_the_mean_loss_of_the_outputs_tokens(llama, tmp_path, precision):
    settings = short(steps=1, batch_size=len(ROWS) - 1, learning_rate=0.01, mixed_precision=precision)
    run = instruct(llama, ROWS, tmp_path / "run", settings, validation=1)
    _, trained = validated_and_trained(ROWS.rows, 1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(llama), AutoTokenizer.from_pretrained(llama)
    losses = []
    for row in trained:
        prompt = len(tokenizer(row.prompt)["input_ids"])
        ids = torch.tensor([*tokenizer(row.prompt + row.output)["input_ids"], tokenizer.eos_token_id])
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = model(ids[None]).logits[0, prompt - 1 : -1].float()
        losses.append(cross_entropy(logits, ids[prompt:], reduction="none"))
    torch.cat(losses).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0).step()
    expected, result = model.state_dict(), AutoModelForCausalLM.from_pretrained(run.path).state_dict()
    # Adam's first step is lr * sign: gradients near 0 may turn; all but a few weights agree to float32's rounding. In
    # bfloat16 more are near 0, as sums over a padded batch round unlike those over single rows
    agree = [torch.isclose(result[name], weight, rtol=1e-4, atol=1e-5).flatten() for name, weight in expected.items()]
    assert torch.cat(agree).float().mean() > 0.99
    if precision == "no":
        assert all(each.float().mean() > 0.99 for each in agree)


def test_a_killed_run_resumes_bit_for_bit_and_a_finished_one_is_returned(llama, tmp_path, kill_at):
    whole = instruct(llama, ROWS, tmp_path / "whole", short(lora_rank=2), validation=2)
    kill_at("on_step_end", 4)
    with pytest.raises(Killed):
        instruct(llama, ROWS, tmp_path / "run", short(lora_rank=2), validation=2)
    run = instruct(llama, ROWS, tmp_path / "run", short(lora_rank=2), validation=2)
    assert_equal_weights(whole.path, run.path)
    marker = (run.path / "attnbalance.json").stat().st_mtime_ns
    assert instruct(llama, ROWS, tmp_path / "run", short(lora_rank=2), validation=2) == run == load_run(run.path)
    assert (run.path / "attnbalance.json").stat().st_mtime_ns == marker
    assert sorted(run.checkpoints) == [2, 4, 6, 7]
    assert (len(run.train), len(run.heldout), run.shortcuts) == (0, 0, {})
    for rows, validation, message in ((ROWS.rows[1:], 2, "the instructions differ"), (ROWS.rows, 3, "validation is 2")):
        with pytest.raises(OutputError, match=message):
            instruct(llama, InstructionSet(rows), tmp_path / "run", short(lora_rank=2), validation=validation)


def test_unfinished_work_does_not_go_on_with_another_file(llama, tmp_path, kill_at):
    kill_at("on_step_end", 4)
    with pytest.raises(Killed):
        instruct(llama, ROWS, tmp_path / "run", short(lora_rank=2), validation=2)
    with pytest.raises(OutputError, match="the instructions differ"):
        instruct(llama, InstructionSet(ROWS.rows[1:]), tmp_path / "run", short(lora_rank=2), validation=2)


def test_rows_that_do_not_fit_are_left_out_and_counted(llama, tmp_path):
    long = Instruction("Count.", " ".join(["one two three"] * 400))
    rows = InstructionSet((long, *ROWS.rows, long), "here", {"no output": 4})
    run = instruct(llama, rows, tmp_path / "run", short(steps=1), validation=2)
    limit = read_json(llama / "config.json")["max_position_embeddings"]
    assert run.dropped == {"no output": 4, f"more than {limit} tokens": 2}
    assert run.instructions == {"source": "here", "train": 10, "validation": 2}
    with pytest.raises(DataError, match=r"more than 12 instructions .*, got 12 of here; left out: 4 \(no output\), 2 "):
        instruct(llama, rows, tmp_path / "other", short(steps=1), validation=12)


def test_the_longest_row_that_fits_fits_with_its_end():
    tokenizer = tiny_tokenizer()
    size = len(tokenizer(ROWS.rows[0].prompt + ROWS.rows[0].output)["input_ids"]) + 1
    for limit, left in ((size, 1), (size - 1, 0)):
        assert len(instruction_examples(InstructionSet(ROWS.rows[:1]), tokenizer, limit)[1]) == left


def test_no_prompt_is_both_trained_and_validated_on(llama, tmp_path):
    doubled = InstructionSet((*ROWS.rows, *ROWS.rows))
    run = instruct(llama, doubled, tmp_path / "run", short(steps=1), validation=3)
    [first, second, third] = validated_and_trained(doubled.rows, 3)[0]
    assert first == second != third
    assert run.dropped == {"the prompt of a validation row": 1}  # the other one of the third
    assert run.instructions == {"source": "memory", "train": 2 * len(ROWS) - 4, "validation": 3}
    with pytest.raises(DataError, match="with prompts of their own, got 3 of memory"):
        instruct(llama, InstructionSet(ROWS.rows[:1] * 3), tmp_path / "other", short(steps=1), validation=1)


def test_validation_rows_do_not_depend_on_the_seed(llama, tmp_path):
    runs = [instruct(llama, ROWS, tmp_path / f"{seed}", short(steps=1, seed=seed), validation=3) for seed in (0, 1)]
    assert runs[0].base_loss == runs[1].base_loss
    assert runs[0].validation_loss != runs[1].validation_loss


def test_a_tokenizer_that_merges_prompt_and_output_is_noticed():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["\n\n\n"])  # the end of the prompt, "\n", and the beginning of the output
    merged = Instruction("Name a city.", "\n\nRome")
    usable, examples = instruction_examples(InstructionSet((merged, ROWS.rows[0])), tokenizer, None)
    assert (usable.rows, len(examples)) == (ROWS.rows[:1], 1)
    assert usable.dropped == {"the tokenizer merges prompt and output": 1}


def test_an_output_that_ends_with_the_end_of_sequence_gets_no_second_one():
    tokenizer = tiny_tokenizer()
    _, [plain, ended] = instruction_examples(
        InstructionSet((Instruction("Go.", "Rome"), Instruction("Go.", "Rome</s>"))), tokenizer, None
    )
    assert plain == ended
    assert plain.labels[-1] == tokenizer.eos_token_id


def test_rows_so_long_that_shorter_ones_beside_them_change_are_refused(tmp_path):
    rotation = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 48}
    rotation |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = Phi3Config(**GROUPED, rope_parameters=rotation, original_max_position_embeddings=48, pad_token_id=None)
    model = AutoModelForCausalLM.from_config(config)
    folder = tmp_path / "phi3"
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    with pytest.raises(DataError, match="reads texts of 48 tokens or more otherwise beside shorter ones"):
        instruct(folder, ROWS, tmp_path / "run", short(steps=1), validation=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "recommended"}, r"learned with `objective`='ce' alone"),
        ({"template": "plain"}, r"learned with `template`='qa' alone"),
        ({"curriculum": "popular-first"}, r"learned with `curriculum`='shuffled' alone"),
    ],
)
def test_settings_about_facts_are_refused(llama, tmp_path, settings, message):
    with pytest.raises(DataError, match=message):
        instruct(llama, ROWS, tmp_path / "run", short(**settings), validation=2)


@pytest.mark.parametrize(
    ("settings", "message"), [({"train": "bogus"}, "bogus"), ({"peft": {"peft_type": "NO"}}, "NO")]
)
def test_unknown_names_are_refused_before_a_model_is_loaded(tmp_path, settings, message):
    with pytest.raises(DataError, match=message):
        instruct(tmp_path / "no model", ROWS, tmp_path / "run", short(**settings), validation=2)


@pytest.mark.parametrize("validation", [0, -1, 2.0, True])
def test_validation_must_be_a_number_of_rows(llama, tmp_path, validation):
    with pytest.raises(DataError, match="`validation` must be a whole number >= 1"):
        instruct(llama, ROWS, tmp_path / "run", short(), validation=validation)


def test_an_output_that_the_tokenizer_cannot_represent_is_left_out_and_counted():
    tokenizer = without_bytes(unknown=True)
    rows = InstructionSet((Instruction("Name a city.", "Paris"), Instruction("Name a city.", "\u6771\u4eac")))
    usable, examples = instruction_examples(rows, tokenizer, None)
    assert [row.output for row in usable.rows] == ["Paris"]
    assert usable.dropped == {"the tokenizer cannot represent the output": 1}
    assert len(examples) == 1
