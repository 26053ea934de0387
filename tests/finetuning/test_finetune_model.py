"""One finetuning: what is trained, what is measured at each checkpoint, and what is written."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from short_runs import SPLIT, TINY, assert_equal_weights, short, weights, without_record
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnbalance.data.facts import Fact, FactSet
from attnbalance.errors import DataError, ModelError
from attnbalance.files.outputs import MARKER, read_json, write_json
from attnbalance.finetuning import callbacks, loop
from attnbalance.finetuning.examples import IGNORED, collate, make_examples
from attnbalance.finetuning.finetune import finetune
from attnbalance.models.fingerprint import fingerprint
from attnbalance.models.load import load_model


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_run_is_its_best_checkpoint(base, tmp_path, lora_rank):
    run = finetune(base, SPLIT, tmp_path / "run", short(lora_rank=lora_rank))
    assert list(run.validation_loss) == [2, 4, 6, 7] == list(run.checkpoints)
    assert run.best_step == min(run.validation_loss, key=run.validation_loss.__getitem__)
    assert_equal_weights(run.path, run.checkpoints[run.best_step])
    assert run.heldout.facts == SPLIT.heldout.facts
    assert run.train.facts == SPLIT.train.facts
    assert run.shortcuts == SPLIT.train.most_frequent_answers()
    assert read_json(run.path / MARKER)["tied_relations"] == list(SPLIT.train.tied_relations())
    assert not [p for p in run.path.rglob("*") if p.suffix in (".pt", ".pth", ".bin")]
    assert not list(tmp_path.glob(".*"))
    marker = read_json(run.path / MARKER)
    assert marker["base_fingerprint"] == fingerprint(AutoModelForCausalLM.from_pretrained(base))
    assert all(read_json(path / MARKER)["step"] == step for step, path in run.checkpoints.items())


def test_an_adapter_is_refused_once_its_bases_configuration_was_edited(llama, tmp_path):
    base = without_record(llama, tmp_path / "base")
    run = finetune(base, SPLIT, tmp_path / "run", short(lora_rank=2))
    config = base / "config.json"
    assert load_model(run.path).model is not None
    config.write_text(config.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 500.0'))
    for folder in (run.path, *run.checkpoints.values()):
        with pytest.raises(ModelError, match=r"other settings .*rope_parameters.rope_theta was 10000.0, is 500.0\."):
            load_model(folder)


def test_steps_that_end_before_all_training_facts_are_read_are_warned_of(llama, tmp_path):
    with pytest.warns(UserWarning, match=f"1 steps of 8 facts read 8 of {len(SPLIT.train)} training facts; the others"):
        finetune(llama, SPLIT, tmp_path / "run", short(steps=1))


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_validation_loss_is_the_mean_over_answer_tokens(llama, tmp_path, lora_rank):
    run = finetune(llama, SPLIT, tmp_path / "run", short(lora_rank=lora_rank, batch_size=3))
    kind = AutoPeftModelForCausalLM if lora_rank else AutoModelForCausalLM
    examples = make_examples(SPLIT.validation.facts, AutoTokenizer.from_pretrained(llama))
    for step, folder in run.checkpoints.items():
        batch = collate(examples)
        with torch.no_grad():
            logits = kind.from_pretrained(folder)(**{k: v for k, v in batch.items() if k != "labels"}).logits
        labels = batch["labels"][:, 1:]
        mean = torch.nn.functional.cross_entropy(logits[:, :-1].mT, labels, ignore_index=IGNORED)
        assert run.validation_loss[step] == pytest.approx(float(mean), rel=1e-5)


@pytest.mark.parametrize("decay", [False, True])
def test_the_learning_rate_is_constant_or_falls_linearly(llama, tmp_path, decay):
    """Three steps on one batch against a plain loop of torch, whose rate is set by hand."""
    facts = FactSet(SPLIT.train.facts[:4])
    split = replace(SPLIT, train=facts, validation=facts)
    run = finetune(llama, split, tmp_path / "run", short(steps=3, batch_size=4, decay=decay))
    model = AutoModelForCausalLM.from_pretrained(llama)
    batch = collate(make_examples(facts.facts, AutoTokenizer.from_pretrained(llama)))
    labels, optimizer = batch.pop("labels")[:, 1:], torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for rate in (1e-2, 1e-2 * 2 / 3, 1e-2 / 3) if decay else (1e-2,) * 3:
        optimizer.param_groups[0]["lr"] = rate
        loss = torch.nn.functional.cross_entropy(model(**batch).logits[:, :-1].mT, labels, ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    expected, result = model.state_dict(), AutoModelForCausalLM.from_pretrained(run.checkpoints[3]).state_dict()
    # Adam's steps are near rate * sign: where gradients are near 0, rounding turns some of them
    near = [torch.isclose(result[name], weight, rtol=0, atol=1e-4).flatten() for name, weight in expected.items()]
    assert torch.cat(near).float().mean() > 0.99


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_bases_loss_is_the_mean_over_answer_tokens_before_training(llama, tmp_path, lora_rank):
    run = finetune(llama, SPLIT, tmp_path / "run", short(lora_rank=lora_rank))
    batch = collate(make_examples(SPLIT.validation.facts, AutoTokenizer.from_pretrained(llama)))
    labels = batch.pop("labels")[:, 1:]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(llama)(**batch).logits
    mean = torch.nn.functional.cross_entropy(logits[:, :-1].mT, labels, ignore_index=IGNORED)
    assert run.base_loss == pytest.approx(float(mean), rel=1e-5)


@pytest.mark.parametrize("objective", ["recommended", "ce + 0.5*kl(statement) + row-anchor"])
def test_the_bases_loss_is_the_objective_that_chooses_the_best_checkpoint(llama, tmp_path, objective):
    run = finetune(llama, SPLIT, tmp_path / "run", short(objective=objective, learning_rate=1e-30))  # nothing moves
    assert list(run.validation_loss.values()) == pytest.approx([run.base_loss] * 4, rel=1e-6)
    assert all(entry["step"] > 0 for entry in run.trajectory)


def test_measuring_the_base_draws_no_random_number(llama, tmp_path, monkeypatch):
    config = read_json(without_record(llama, tmp_path / "base") / "config.json")
    write_json(tmp_path / "base/config.json", config | {"attention_dropout": 0.5})
    run = finetune(tmp_path / "base", SPLIT, tmp_path / "run", short())
    other_seed = finetune(tmp_path / "base", SPLIT, tmp_path / "seed", short(seed=1))
    assert run.validation_loss != other_seed.validation_loss
    monkeypatch.setattr(callbacks.LogBaseObjective, "on_train_begin", lambda *_, **__: None)
    unmeasured = finetune(tmp_path / "base", SPLIT, tmp_path / "unmeasured", short())
    assert run.base_loss is not None
    assert unmeasured.base_loss is None
    assert_equal_weights(run.path, unmeasured.path)
    assert run.validation_loss == unmeasured.validation_loss


def test_a_base_whose_objective_is_not_finite_is_refused(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(loop._Trainer, "validation_objective", lambda _: math.nan)
    with pytest.raises(ModelError, match="base's objective on the validation examples must be finite, got nan"):
        finetune(llama, SPLIT, tmp_path / "run", short())


def test_questions_longer_than_the_model_are_refused(llama, tmp_path):
    long = Fact("word" + " word" * 600, "sport", ("golf",), 1.0)
    with pytest.raises(DataError, match="1 of 1 prompts are longer than the model's 512 positions"):
        finetune(llama, replace(SPLIT, train=FactSet((long,))), tmp_path / "run", short())


def test_what_is_not_chosen_stays_as_it_was_in_the_base(base, tmp_path):
    run = finetune(base, SPLIT, tmp_path / "run", short(train="qk", weight_decay=0.1))
    before, after = weights(base), weights(run.path)
    assert before.keys() == after.keys()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    fused = [name for name in moved if "c_attn" in name]
    assert all("q_proj" in name or "k_proj" in name or name in fused for name in moved)
    assert len(moved) == 2
    for name in fused:  # queries, keys and values stand side by side in GPT-2
        width = before[name].shape[-1] // 3
        assert torch.equal(before[name][..., 2 * width :], after[name][..., 2 * width :])
    assert run.trained.endswith(" tensors (qk)")


def test_an_anchored_objective_trains_attention_and_watches_what_it_does(base, tmp_path):
    anchored = short(objective="kl(statement) + state-anchor(statement)", train="attention")
    run = finetune(base, SPLIT, tmp_path / "run", anchored)
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

    monkeypatch.setattr(callbacks.StopEarly, "on_step_end", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt, match="usable model") as caught:
        finetune(llama, SPLIT, tmp_path / "run", short())
    named = str(caught.value).split(", ")[1]
    assert named.endswith("checkpoint-4")
    AutoModelForCausalLM.from_pretrained(named)


def test_lora_leaves_the_base_alone_and_adapts_every_linear_layer(base, tmp_path):
    run = finetune(base, SPLIT, tmp_path / "run", short(lora_rank=2))
    settings = json.loads((run.path / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base)
    linear = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    wanted = linear if base.name == "llama" else ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj")
    adapted = {name.split(".lora_")[0] for name in weights(run.path)}
    assert all(any(name.endswith(end) for name in adapted) for end in wanted)
    assert len(adapted) == len(wanted)


def test_a_base_whose_sampling_settings_cannot_be_saved_keeps_its_token_ids_alone(llama, tmp_path):
    vicuna = without_record(llama, tmp_path / "base")
    own = read_json(vicuna / "generation_config.json")
    (vicuna / "generation_config.json").write_text(json.dumps(own | {"temperature": 0.9, "top_p": 0.6}))
    run = finetune(vicuna, SPLIT, tmp_path / "run", short())
    kept = read_json(run.path / "generation_config.json")
    assert own["eos_token_id"] == kept["eos_token_id"]
    assert not kept.keys() & {"temperature", "top_p"}


def test_an_empty_validation_part_is_refused(llama, tmp_path):
    with pytest.raises(DataError, match="got none"):
        finetune(llama, replace(SPLIT, validation=FactSet(())), tmp_path / "run", short())


def test_bfloat16_products_of_a_float64_base_under_adapters_are_refused(llama, tmp_path):
    AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float64).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(llama).save_pretrained(tmp_path / "base")
    with pytest.raises(DataError, match="those of .*base are float64; give `dtype`"):
        finetune(str(tmp_path / "base"), SPLIT, tmp_path / "out", short(lora_rank=2, mixed_precision="bf16"))
