"""Watch: it changes nothing of a training, logs what readings of checkpoints say, and warns of surely lost facts."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run_in_two_processes
from safetensors.torch import load_file
from tiny import FACTS, eager, tiny_model, tiny_prompts, tiny_tokenizer
from torch.nn.functional import kl_div
from trainers import arguments, assert_close, lora
from transformers import Trainer, TrainerCallback

from attnbalance import FactSet, load_model, make_prompts, recall
from attnbalance.data.facts import Fact
from attnbalance.errors import ArgumentError, AttnBalanceError, DataError, ModelError, OutputError
from attnbalance.finetuning.examples import collate, examples_of, make_examples
from attnbalance.finetuning.trainer import ObjectiveTrainer
from attnbalance.finetuning.watch import FOLDER, Watch
from attnbalance.models.rows import IMPLEMENTATION
from attnbalance.readings.attention import read_subject_attention

ALL = FactSet(FACTS)
CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
FORGETTING = {"max_steps": 30, "learning_rate": 0.01, "optim": "adamw_torch", "max_grad_norm": 1.0}


def rows(facts=FACTS, times=4):
    examples = make_examples(facts, tiny_tokenizer("bos"))
    return [{name: part[0].tolist() for name, part in collate([e]).items() if name in KEYS} for e in examples] * times


KEYS = ("input_ids", "attention_mask", "labels")


def one_by_one(batch):
    return {name: torch.tensor([row[name] for row in batch]) for name in KEYS}


def trainer_of(folder, model=None, data=None, evaluated=None, **options):
    """A Trainer of plain cross-entropy on rows, one at a time: nothing of attnbalance is in it."""
    settings = {"max_steps": 6, "per_device_train_batch_size": 1, "logging_steps": 2} | options
    return Trainer(
        model=tiny_model("llama") if model is None else model,
        args=arguments(folder, **settings),
        train_dataset=rows() if data is None else data,
        eval_dataset=evaluated,
        data_collator=one_by_one,
        processing_class=tiny_tokenizer("bos"),
    )


def watched(folder, *args, facts=ALL, every=2, resume=None, **options):
    trainer = trainer_of(folder, *args, **options)
    trainer.add_callback(Watch(facts, trainer, every=every))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def looks(trainer):
    return {entry["step"]: entry for entry in trainer.state.log_history if "watch/accuracy" in entry}


def others(trainer):
    """What was logged beside looks and times."""
    entries = [entry for entry in trainer.state.log_history if "watch/accuracy" not in entry]
    return [
        {name: value for name, value in entry.items() if "per_second" not in name and "time" not in name}
        for entry in entries
    ]


def random_state():
    """Torch's and NumPy's; Python's is drawn from by beartype, which checks shapes while tests run."""
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()


@pytest.fixture(scope="module")
def knowing(tmp_path_factory):
    """A tiny model that answers all the facts."""
    model = tiny_model("llama")
    trainer = trainer_of(tmp_path_factory.mktemp("knowing"), model, **FORGETTING | {"max_steps": 120})
    trainer.train()
    return model.eval()


def noisy(family):
    """A model that draws random numbers in every forward pass, in evaluation as well, and drops out in training."""
    model = tiny_model(family)
    model.register_forward_pre_hook(lambda *_: torch.rand(3) if torch.rand(3).isnan().any() else None)
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("options", [{}, CHECKPOINTING, {"bf16": True}], ids=["plain", "checkpointing", "bf16"])
def test_training_is_the_same_to_the_bit_with_it_and_without_it(tmp_path, family, options):
    models, states, logs = [noisy(family), noisy(family)], [], []
    for model, run in zip(models, (trainer_of, watched), strict=True):
        trainer = run(tmp_path, model, lr_scheduler_type="linear", **options)
        if run is trainer_of:
            trainer.train()
        states.append(random_state())
        logs.append(others(trainer))
    assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))
    assert states[0] == states[1]
    assert logs[0] == logs[1]
    assert [entry["step"] for entry in logs[1]] == [2, 4, 6, 6]  # its own entries are due at the steps of the looks


def test_a_look_leaves_modes_attention_and_settings_as_they_are(tmp_path):
    model, seen = tiny_model("llama"), []
    frozen = model.model.layers[0]

    class Freeze(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            frozen.eval()

    class See(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            modes = [module.training for module in model.modules()]
            seen.append((modes, model.config._attn_implementation, model.config.use_cache, vars(model).get("forward")))

    trainer = trainer_of(tmp_path, model, bf16=True, **CHECKPOINTING)
    trainer.add_callback(Freeze())
    trainer.add_callback(See())
    trainer.add_callback(Watch(ALL, trainer, every=1))
    assert model.config._attn_implementation == "sdpa"
    trainer.add_callback(See())
    trainer.train()
    before, after = seen[::2], seen[1::2]
    assert before == after
    assert before[0][1] == "sdpa"
    assert {*before[0][0]} == {True, False}
    assert all(forward is not None for *_, forward in before)  # autocast was there, and is put back


@pytest.mark.parametrize("kind", ["plain", "bf16", "lora"])
def test_numbers_are_those_of_readings_of_the_saved_checkpoint(tmp_path, kind):
    base = tmp_path / "base"
    tiny_model("llama").save_pretrained(base)
    tiny_tokenizer("bos").save_pretrained(base)
    model = tiny_model("llama")
    if kind == "lora":
        model = lora(model)
        model.peft_config["default"].base_model_name_or_path = str(base)
    rates = {"learning_rate": 0.5} if kind == "lora" else {}
    trainer = watched(tmp_path / "run", model, save_strategy="steps", save_steps=4, bf16=kind == "bf16", **rates)
    folder = str(tmp_path / "run/work/checkpoint-4")
    loaded = load_model(str(base), adapter=folder) if kind == "lora" else load_model(folder)
    answers = recall(loaded, tiny_prompts(), ALL.most_frequent_answers())
    reading = read_subject_attention(loaded, tiny_prompts())
    entry = looks(trainer)[4]
    # the weights are the same; batches are as well: float32 to the last digits
    assert entry["watch/subject_attention"] == pytest.approx(float(reading.values.mean()), rel=1e-5)
    assert entry["watch/accuracy"] == answers.accuracy().mean
    shortcuts = answers.shortcut_rate()
    assert shortcuts is not None
    assert entry["watch/shortcut_rate"] == shortcuts.mean
    assert entry["watch/kl_from_start"] == pytest.approx(divergence_by_hand(loaded), rel=1e-4)
    assert entry["watch/subject_attention"] != looks(trainer)[2]["watch/subject_attention"]


def divergence_by_hand(loaded):
    """KL of whole distributions, prompt by prompt, between plain transformers models with eager attention."""
    total = count = 0
    base = tiny_model("llama")
    merged = copy.deepcopy(loaded.model)
    merged = merged.merge_and_unload() if hasattr(merged, "merge_and_unload") else merged
    for example in examples_of(tiny_prompts(), tiny_tokenizer("bos"), end=False):
        ids, first = torch.tensor([example.ids]), example.query
        with torch.no_grad():
            now, then = (eager(m)(ids).logits[0, first:-1].double().log_softmax(-1) for m in (merged, base))
        total += float(kl_div(now, then, reduction="sum", log_target=True))
        count += len(then)
    return total / count


def test_what_is_still_answered_is_counted_among_the_facts_known_at_the_start(tmp_path, knowing):
    others_answer = [Fact(f.subject, f.relation, ("none",), question=f.question) for f in FACTS]
    trainer = watched(
        tmp_path,
        copy.deepcopy(knowing),
        rows(others_answer),
        every=6,
        **FORGETTING,
        save_strategy="steps",
        save_steps=6,
    )
    hit = {0: recall(load_in_memory(knowing), tiny_prompts()).correct}
    for step in (6, 12, 30):
        hit[step] = recall(load_model(str(tmp_path / f"work/checkpoint-{step}")), tiny_prompts()).correct
    for step, now in hit.items():
        still = [right for right, known in zip(now, hit[0], strict=True) if known]
        assert looks(trainer)[step]["watch/still_answered"] == sum(still) / len(still)
    assert sum(hit[0]) > 0
    assert looks(trainer)[0]["watch/still_answered"] == 1
    assert looks(trainer)[30]["watch/still_answered"] < 0.5


def load_in_memory(model):
    from attnbalance.models.hooked import hook

    return hook(copy.deepcopy(model), tiny_tokenizer("bos"), "tiny")


def test_lost_answers_are_warned_of_once_and_a_kept_one_never(tmp_path, knowing):
    others_answer = [Fact(f.subject, f.relation, ("none",), question=f.question) for f in FACTS]
    with pytest.warns(UserWarning, match="still answers") as caught:
        watched(tmp_path, copy.deepcopy(knowing), rows(others_answer), **FORGETTING)
    lost = [str(w.message) for w in caught if "still answers" in str(w.message)]
    assert len(lost) == 1
    assert lost[0].startswith("At step 2, the model still answers 5 of the 8 facts that it answered at the start: 62%")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watched(tmp_path, copy.deepcopy(knowing), rows(), **FORGETTING | {"learning_rate": 1e-5})


def test_every_report_of_the_trainer_gets_the_numbers(tmp_path):
    got = []

    class Report(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            got.append((state.global_step, dict(logs)))

    trainer = trainer_of(tmp_path, save_strategy="steps", save_steps=6)
    trainer.add_callback(Report())
    trainer.add_callback(Watch(ALL, trainer, every=4))
    trainer.train()
    reported = {step: logs for step, logs in got if "watch/accuracy" in logs}
    saved = json.loads((tmp_path / "work/checkpoint-6/trainer_state.json").read_text())["log_history"]
    assert list(reported) == [0, 4, 6]  # the start, every fourth step, the last one
    assert {step: logs | {"step": step} for step, logs in reported.items()} == looks(trainer)
    assert [entry for entry in saved if "watch/accuracy" in entry] == list(looks(trainer).values())


def test_the_sample_is_drawn_by_the_seed_and_named(tmp_path, capsys):
    trainer = trainer_of(tmp_path, disable_tqdm=False, max_steps=1)
    watch = Watch(FactSet(FACTS, "nine"), trainer, limit=4, seed=3, every=5)
    assert [p.fact for p in watch.facts.prompts] == list(ALL.sample(4, 3))
    trainer.add_callback(watch)
    trainer.train()
    said = capsys.readouterr().err
    assert "Watching 4 of 9 facts (nine, seed 3), every 5 steps. The model answers 0 of them before training" in said
    kept = json.loads((tmp_path / "work" / FOLDER / "about.json").read_text())
    assert kept["prompt_ids"] == [p.prompt_id for p in make_prompts(ALL.sample(4, 3))]


def test_a_resumed_run_goes_on_with_the_numbers_of_its_first_start(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear"}
    whole = watched(tmp_path / "whole", **options)
    watched(tmp_path / "two", **options)
    resumed = watched(tmp_path / "two", resume=str(tmp_path / "two/work/checkpoint-4"), **options)
    assert looks(resumed) == looks(whole)
    assert looks(resumed)[6]["watch/kl_from_start"] > 0.1  # not the divergence from the checkpoint


def test_training_that_begins_anew_with_a_smaller_batch_is_measured_from_its_first_start(tmp_path, monkeypatch):
    """`auto_find_batch_size` keeps what steps before an out-of-memory error did to the weights."""
    model = tiny_model("llama")
    before = load_in_memory(copy.deepcopy(model))
    options = {"auto_find_batch_size": True, "per_device_train_batch_size": 4, "learning_rate": 0.01}
    trainer = trainer_of(tmp_path, model, rows(FACTS[:1], 40), **options)  # rows of one length
    trainer.add_callback(Watch(ALL, trainer, every=1))
    step, calls = Trainer.training_step, []

    def failing(self, *given, **named):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("CUDA out of memory.")
        return step(self, *given, **named)

    monkeypatch.setattr(Trainer, "training_step", failing)
    trainer.train()
    assert len(calls) == 3 + 6
    first, *_, last = looks(trainer).values()
    assert (first["step"], first["watch/kl_from_start"], last["step"]) == (0, 0.0, 6)
    rows_before, rows_after = (
        read_subject_attention(each, make_prompts(ALL)).values for each in (before, load_in_memory(model))
    )
    assert first["watch/subject_attention"] == pytest.approx(float(rows_before.mean()), abs=1e-6)
    assert last["watch/subject_attention"] == pytest.approx(float(rows_after.mean()), abs=1e-6)
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(Trainer, "training_step", lambda *given, **named: (_ for _ in ()).throw(KeyboardInterrupt))
        trainer.train()
    trainer.train()  # another training begins with the model as it is, also after one that was interrupted
    again = looks(trainer)[0]
    assert again["watch/kl_from_start"] == 0.0
    assert again["watch/subject_attention"] == pytest.approx(float(rows_after.mean()), abs=1e-6)


@pytest.mark.parametrize("change", ["other facts", "no folder", "another start"])
def test_a_resumed_run_without_the_numbers_of_its_start_is_refused(tmp_path, change):
    options = {"save_strategy": "steps", "save_steps": 2}
    watched(tmp_path, **options)
    folder, facts = tmp_path / "work" / FOLDER, ALL
    if change == "other facts":
        facts = ALL.sample(4)
    elif change == "no folder":
        folder.rename(tmp_path / "elsewhere")
    else:
        tmp_path.joinpath("work/checkpoint-2").rename(tmp_path / "checkpoint-2")
        watched(tmp_path, tiny_model("qwen2"), **options)
        tmp_path.joinpath("checkpoint-2").rename(tmp_path / "work/kept")
    checkpoint = tmp_path / "work" / ("kept" if change == "another start" else "checkpoint-2")
    with pytest.raises(OutputError, match="resumes at step 2, but .* holds no numbers of its start for these facts"):
        watched(tmp_path, facts=facts, resume=str(checkpoint), **options)


def test_logits_that_are_no_numbers_are_warned_of_and_that_look_is_left_out(tmp_path):
    model = tiny_model("llama")

    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                model.lm_head.weight.data[:] = torch.nan

    trainer = trainer_of(tmp_path, model)
    trainer.add_callback(Break())
    trainer.add_callback(Watch(ALL, trainer, every=2))
    with pytest.warns(UserWarning, match="Watch leaves out step 4: Llama.* gives NaN"):
        trainer.train()
    assert list(looks(trainer)) == [0, 2]


@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end", "on_evaluate"])
def test_where_training_stops_early_there_is_a_last_look(tmp_path, event):
    class Stop(TrainerCallback):
        pass

    def stop(self, args, state, control, **kwargs):
        if state.global_step >= 3:
            control.should_training_stop = True

    setattr(Stop, event, stop)
    evaluated = {"eval_strategy": "epoch", "evaluated": rows(FACTS[:1], 1)} if event == "on_evaluate" else {}
    trainer = trainer_of(tmp_path, None, rows(FACTS[:3]), max_steps=50, **evaluated)
    trainer.add_callback(Stop())
    trainer.add_callback(Watch(ALL, trainer, every=100))
    trainer.train()
    assert list(looks(trainer)) == [0, trainer.state.global_step]
    assert trainer.state.global_step < 50


def test_two_processes_train_as_one_does_and_the_main_one_looks(tmp_path):
    script = Path(__file__).parents[1] / "launched.py"
    run_in_two_processes(script, tmp_path / "watched", "ce", "watch")
    run_in_two_processes(script, tmp_path / "alone", "ce")
    first, second = load_file(tmp_path / "watched"), load_file(tmp_path / "alone")
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_a_trainer_with_an_objective_that_reads_attention_is_watched_as_well(tmp_path):
    weights = []
    for watches in (False, True):
        model = tiny_model("llama")
        trainer = ObjectiveTrainer(
            model=model,
            args=arguments(tmp_path, max_steps=4),
            train_dataset=make_examples(FACTS, tiny_tokenizer("bos")),
            processing_class=tiny_tokenizer("bos"),
            objective="ce + 5*barrier",
        )
        if watches:
            trainer.add_callback(Watch(ALL, trainer, every=1))
        trainer.train()
        assert model.config._attn_implementation == IMPLEMENTATION
        weights.append(dict(model.named_parameters()))
    assert_close(*weights, tolerance=0)


def test_trls_trainer_keeps_its_own_averages_between_looks(tmp_path):
    trl = pytest.importorskip("trl")
    logs, models = [], []
    for watches in (False, True):
        models.append(tiny_model("llama"))
        args = trl.SFTConfig(
            output_dir=str(tmp_path),
            max_steps=6,
            logging_steps=3,
            use_cpu=True,
            bf16=True,
            report_to="none",
            per_device_train_batch_size=2,
            save_strategy="no",
            disable_tqdm=True,
        )
        data = [{"prompt": p.text, "completion": f" {p.fact.answer}"} for p in tiny_prompts()]
        from datasets import Dataset

        trainer = trl.SFTTrainer(
            model=models[-1], args=args, train_dataset=Dataset.from_list(data), processing_class=tiny_tokenizer("bos")
        )
        if watches:
            trainer.add_callback(Watch(ALL, trainer, every=2))
        trainer.train()
        logs.append(others(trainer))
    assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))
    assert list(looks(trainer)) == [0, 2, 4, 6]
    assert "mean_token_accuracy" in logs[0][0]
    assert logs[0] == logs[1]
    assert not any("mean_token_accuracy" in entry for entry in looks(trainer).values())


def test_a_trainer_that_cannot_be_watched_is_refused_by_name(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path)
    with pytest.raises(DataError, match="expected facts to watch, got none"):
        Watch(FactSet(()), trainer)
    with pytest.raises(DataError, match="`every` must be a whole number >= 1, got 0"):
        Watch(ALL, trainer, every=0)
    with pytest.raises(ArgumentError, match="Watch: facts must be FactSet"):
        Watch(FACTS, trainer)
    with pytest.raises(ArgumentError, match="Watch: trainer must be Trainer"):
        Watch(ALL, trainer.model)
    trainer.processing_class = None
    with pytest.raises(DataError, match="pass processing_class=tokenizer"):
        Watch(ALL, trainer)
    trainer = trainer_of(tmp_path)
    for name in ("is_fsdp_enabled", "is_deepspeed_enabled"):
        with monkeypatch.context() as patched:
            patched.setattr(trainer, name, True)
            with pytest.raises(ModelError, match="FSDP, DeepSpeed and tensor"):
                Watch(ALL, trainer)
    made = Trainer(
        model_init=lambda: tiny_model("llama"),
        args=arguments(tmp_path),
        train_dataset=rows(),
        processing_class=tiny_tokenizer("bos"),
    )
    with pytest.raises(ModelError, match="pass model=, not model_init="):
        Watch(ALL, made)


def test_two_watches_and_a_model_that_was_replaced_are_refused_before_the_first_step(tmp_path):
    trainer = trainer_of(tmp_path)
    first, second = Watch(ALL, trainer), Watch(ALL, trainer)
    trainer.add_callback(first)
    trainer.add_callback(second)
    with pytest.raises(ModelError, match="a trainer takes one Watch"):
        trainer.train()
    trainer = trainer_of(tmp_path)
    trainer.add_callback(Watch(ALL, trainer))
    trainer.model = trainer.model_wrapped = lora(trainer.model)
    with pytest.raises(AttnBalanceError, match="the trainer's model was replaced after Watch was made"):
        trainer.train()
