"""The training loop: killed, damaged, interrupted and full-disk runs end with the same weights."""

from __future__ import annotations

import errno
import functools
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from short_runs import SHORT, SPLIT, Killed, assert_equal_weights, short, weights
from tiny import tiny_tokenizer
from torch.distributed.fsdp import StateDictType
from transformers import LlamaForCausalLM

from attnbalance.errors import DivergenceError, ModelError, OutputError
from attnbalance.families.tiny_models import build
from attnbalance.finetuning import callbacks, loop
from attnbalance.finetuning.examples import IGNORED, Example
from attnbalance.finetuning.finetune import finetune
from attnbalance.finetuning.objectives import expression
from attnbalance.finetuning.schedule import Schedule
from attnbalance.finetuning.settings import FinetuneSettings

KEEPING = {"objective": "recommended", "weight_decay": 0.1, "curriculum": "popular-first"}
"""Settings that need the base model and its numbers again when a run goes on."""


@pytest.mark.parametrize(
    ("changes", "event", "steps"),
    [
        ({}, "on_step_end", (3, 6)),
        ({}, "on_save", (4,)),
        ({"lora_rank": 2}, "on_save", (2, 6)),
        (KEEPING, "on_step_end", (3, 6)),
        (KEEPING | {"lora_rank": 2, "train": "qk@0.1"}, "on_step_end", (5,)),
        ({"objective": "ce + project + 0.1*weight-anchor + row-anchor(statement)"}, "on_step_end", (5,)),
        ({"gradient_rank": 1, "train": "qk"}, "on_step_end", (3,)),
        (KEEPING | {"mixed_precision": "bf16"}, "on_step_end", (3, 6)),
    ],
)
def test_a_killed_finetuning_ends_with_the_same_weights(base, tmp_path, kill_at, changes, event, steps):
    whole = finetune(base, SPLIT, tmp_path / "whole", short(**changes))
    kill_at(event, *steps)
    for _ in steps:
        with pytest.raises(Killed):
            finetune(base, SPLIT, tmp_path / "again", short(**changes))
        assert not (tmp_path / "again").exists()
    again = finetune(base, SPLIT, tmp_path / "again", short(**changes))
    assert again.validation_loss == whole.validation_loss
    assert again.trajectory == whole.trajectory
    assert again.base_loss == whole.base_loss
    for step in whole.checkpoints:
        assert_equal_weights(whole.checkpoints[step], again.checkpoints[step])


def test_unfinished_training_with_other_settings_is_refused_and_kept(llama, tmp_path, kill_at):
    whole = finetune(llama, SPLIT, tmp_path / "whole", short())
    kill_at("on_step_end", 3)
    with pytest.raises(Killed):
        finetune(llama, SPLIT, tmp_path / "again", short())
    for change in ({"learning_rate": 2e-2}, {"objective": "recommended"}, {"steps": 8}):
        with pytest.raises(OutputError, match=f"unfinished work with other settings: .*{next(iter(change))} is"):
            finetune(llama, SPLIT, tmp_path / "again", short(**change))
    again = finetune(llama, SPLIT, tmp_path / "again", short())
    assert_equal_weights(whole.path, again.path)


RESUMED_FROM = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "complete")


@pytest.mark.parametrize("name", [*(f"4/{name}" for name in RESUMED_FROM), "2/model.safetensors"])
def test_damaged_unfinished_training_is_set_aside_and_made_again(llama, tmp_path, kill_at, name):
    whole = finetune(llama, SPLIT, tmp_path / "whole", short())
    kill_at("on_step_end", 5)
    with pytest.raises(Killed):
        finetune(llama, SPLIT, tmp_path / "again", short())
    path = tmp_path / ".again.partial" / f"checkpoint-{name}"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.warns(UserWarning, match="set aside as damaged-checkpoint-"):
        again = finetune(llama, SPLIT, tmp_path / "again", short())
    assert again.validation_loss == whole.validation_loss
    for step in whole.checkpoints:
        assert_equal_weights(whole.checkpoints[step], again.checkpoints[step])
    assert not list(tmp_path.glob(".*"))


def full_for_torch(*_, **__):
    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")  # seen on a full disk


def full_for_safetensors(*_, **__):
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")  # seen there too


def full_for_python(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("written_by", "fails"),
    [
        ("torch.save", full_for_torch),
        ("transformers.modeling_utils.safe_save_file", full_for_safetensors),
        ("transformers.trainer_callback.TrainerState.save_to_json", full_for_python),
        ("attnbalance.files.seals.write_json", full_for_python),
    ],
)
def test_a_disk_that_is_full_at_a_checkpoint_is_one_error_and_the_checkpoint_before_is_gone_on_from(
    llama, tmp_path, monkeypatch, kill_at, written_by, fails
):
    whole = finetune(llama, SPLIT, tmp_path / "whole", short())
    kill_at("on_step_end", 3)
    with pytest.raises(Killed):
        finetune(llama, SPLIT, tmp_path / "again", short())
    with monkeypatch.context() as full:
        full.setattr(written_by, fails)
        with pytest.raises(OutputError, match=r"cannot write .*checkpoint-4"):
            finetune(llama, SPLIT, tmp_path / "again", short())
    assert [path.name for path in tmp_path.glob(".again.partial/checkpoint-*")] == ["checkpoint-2"]
    again = finetune(llama, SPLIT, tmp_path / "again", short())
    assert_equal_weights(whole.path, again.path)


def test_gradients_with_an_infinite_norm_are_refused_as_they_would_train_nothing(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(expression, "LARGEST_WEIGHT", 1e40)
    message = (
        r"norm of the gradients must be finite, got inf at step 1; lower the learning rate, or the weights in the "
    )
    with pytest.raises(DivergenceError, match=rf"{message}objective 'ce \+ 1e\+30\*state-anchor\(statement\)'"):
        finetune(llama, SPLIT, tmp_path / "run", short(objective="ce + 1e30*state-anchor"))
    assert not (tmp_path / "run").exists()


def test_training_whose_work_was_removed_is_no_success_and_can_be_run_again(llama, tmp_path, monkeypatch):
    def removed(self, args, state, control, **kwargs):
        if state.global_step == 5:
            shutil.rmtree(tmp_path / ".run.partial")

    with monkeypatch.context() as patch:
        patch.setattr(callbacks.StopEarly, "on_step_end", removed, raising=False)
        with pytest.raises(OutputError, match="the checkpoint of step 2 in .* was removed while training ran"):
            finetune(llama, SPLIT, tmp_path / "run", short())
    assert not (tmp_path / "run").exists()
    run, whole = (finetune(llama, SPLIT, tmp_path / name, short()) for name in ("run", "whole"))
    assert_equal_weights(run.path, whole.path)


def test_a_run_killed_after_it_stopped_early_does_not_go_on(llama, tmp_path, kill_at):
    early = SHORT | {"patience": 1, "learning_rate": 0.3, "checkpoint_every": 1, "steps": 20}
    whole = finetune(llama, SPLIT, tmp_path / "whole", FinetuneSettings(**early))
    last = max(whole.validation_loss)
    assert last < 20
    assert last == whole.best_step + 1
    kill_at("on_train_end", last)
    with pytest.raises(Killed):
        finetune(llama, SPLIT, tmp_path / "again", FinetuneSettings(**early))
    assert (
        finetune(llama, SPLIT, tmp_path / "again", FinetuneSettings(**early)).validation_loss == whole.validation_loss
    )


def test_parts_of_a_batch_add_up_to_the_batch(llama, tmp_path):
    whole = finetune(llama, SPLIT, tmp_path / "whole", short())
    parts = finetune(llama, SPLIT, tmp_path / "parts", short(accumulate=4))
    for name, value in weights(whole.path).items():
        torch.testing.assert_close(value, weights(parts.path)[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("launched", [None, "no", "bf16"])
def test_mixed_precision_is_torchs_autocast_and_keeps_weights_in_float32(
    llama, tmp_path, monkeypatch, launched, lora_rank
):
    """`launched`: what `accelerate launch` was told. The tests' machine has no GPU, or hides it."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched) if launched else monkeypatch.delenv(
        "ACCELERATE_MIXED_PRECISION", raising=False
    )
    kinds = set[tuple[bool, bool, torch.dtype]]()
    own_forward = LlamaForCausalLM.forward

    @functools.wraps(own_forward)
    def watched(model, *args, **kwargs):
        output = own_forward(model, *args, **kwargs)
        if output.logits is not None:
            kinds.add((model.training, torch.is_autocast_enabled("cpu"), output.logits.dtype))
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", watched)
    runs = {}
    for precision in (None, "no", "bf16"):
        kinds.clear()
        settings = short(lora_rank=lora_rank, mixed_precision=precision)
        runs[precision] = finetune(llama, SPLIT, tmp_path / str(precision), settings)
        mixed = (precision or launched) == "bf16"
        dtype = torch.bfloat16 if mixed else torch.float32
        assert {(True, mixed, dtype), (False, mixed, dtype)} <= kinds  # training and validation
        assert {kind for kind in kinds if kind[0]} == {(True, mixed, dtype)}
        assert runs[precision].trained.endswith(", in mixed precision (bf16)") == mixed
        assert runs[precision].mixed_precision == ("bf16" if mixed else "no")
    assert_equal_weights(runs[None].path, runs[launched or "no"].path)
    exact, rounded = (weights(runs[precision].path) for precision in ("no", "bf16"))
    assert all(value.dtype == torch.float32 for value in rounded.values())
    assert any(not torch.equal(rounded[name], value) for name, value in exact.items())
    losses = [list(runs[precision].validation_loss.values()) for precision in ("no", "bf16")]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)  # products of bfloat16 are off by up to 0.4%


@pytest.mark.parametrize(("capable", "launched", "precision"), [(True, "no", "bf16"), (False, "fp16", "fp16")])
def test_a_gpu_that_can_multiplies_in_bfloat16_and_others_as_accelerate_was_told(
    monkeypatch, capable, launched, precision
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: capable)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    assert loop.precision_of(short().schedule) == precision
    assert [loop.precision_of(short(mixed_precision=given).schedule) for given in ("no", "bf16")] == ["no", "bf16"]
    assert loop.precision_of(short(dtype="float64").schedule) == "no"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_cross_entropy_on_labels_alone_trains_as_transformers_own_loss(llama, tmp_path, monkeypatch, accumulate):
    widths = list[tuple[int, int]]()
    own_forward = LlamaForCausalLM.forward

    @functools.wraps(own_forward)
    def watched(model, *args, **kwargs):
        output = own_forward(model, *args, **kwargs)
        if model.training and output.logits is not None:
            widths.append((output.logits.shape[1], kwargs["input_ids"].shape[1]))
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", watched)
    settings = short(accumulate=accumulate)
    ours = finetune(llama, SPLIT, tmp_path / "ours", settings)
    assert all(logits < tokens for logits, tokens in widths)
    widths.clear()
    monkeypatch.setattr(loop, "own_loss", lambda trainer: ["transformers' own"])
    theirs = finetune(llama, SPLIT, tmp_path / "theirs", settings)
    assert all(logits == tokens for logits, tokens in widths)
    assert len(widths) == settings.steps * accumulate
    # float32 sums in another order; Adam's first steps are as long as the rate wherever a gradient is not 0
    assert list(ours.validation_loss.values()) == pytest.approx(list(theirs.validation_loss.values()), rel=1e-4)
    assert ours.validation_loss[settings.steps] != pytest.approx(ours.base_loss, rel=1e-2)


@pytest.mark.parametrize("family", ["bart", "xlnet", "llama"])
def test_the_next_token_is_learned_also_where_a_familys_own_loss_is_of_the_same_one(family, tmp_path):
    model = build(family, near=False)
    for part in model.modules():
        for name in ("p", "dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    examples = [Example(tuple(range(5 + i, 15 + i)), (*[IGNORED] * 7, *range(12 + i, 15 + i))) for i in range(4)]
    losses = []
    for example in examples:
        with torch.no_grad():
            log_p = model(input_ids=torch.tensor([example.ids]), use_cache=False).logits[0].log_softmax(-1)
        losses += [-float(log_p[at - 1, example.ids[at]]) for at in (7, 8, 9)]
    schedule = Schedule(steps=1, batch_size=4, learning_rate=1e-3, checkpoint_every=1, seed=0)
    tokenizer = tiny_tokenizer("bos")
    log = loop.train(model, tokenizer, loop.TrainingData(examples), tmp_path / "work", schedule)
    (loss,) = [entry["loss"] for entry in log if "loss" in entry]
    assert loss == pytest.approx(sum(losses) / len(losses), abs=2e-4)  # the log has four digits


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
def test_fsdp_that_writes_parts_of_the_weights_is_refused_before_training(kind: str) -> None:
    def trainer(name: str | None, enabled: bool = True) -> SimpleNamespace:
        plugin = None if name is None else SimpleNamespace(state_dict_type=StateDictType[name])
        state = SimpleNamespace(fsdp_plugin=plugin)
        return SimpleNamespace(is_fsdp_enabled=enabled, accelerator=SimpleNamespace(state=state))

    with pytest.raises(ModelError, match=f"FSDP with {kind} writes no checkpoint .* set fsdp_state_dict_type: FULL"):
        loop.check_whole(trainer(kind))  # pyright: ignore[reportArgumentType]
    for right in (trainer("FULL_STATE_DICT"), trainer(None, enabled=False), trainer(kind, enabled=False)):
        loop.check_whole(right)  # pyright: ignore[reportArgumentType]
