"""A checkpoint tells the base model of its objective, and no other model takes its place unnoticed."""

from __future__ import annotations

import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import FACTS, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, TrainingArguments

from attnbalance.errors import ModelError
from attnbalance.finetuning.bases import FILE
from attnbalance.finetuning.examples import make_examples
from attnbalance.finetuning.trainer import ObjectiveTrainer


def made(folder, model, steps=2, rate=1e-6, objective="ce + kl(question)"):
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=2,
        per_device_train_batch_size=4,
        learning_rate=rate,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    return ObjectiveTrainer(
        model=model,
        args=arguments,
        train_dataset=make_examples(FACTS, tiny_tokenizer("bos")),
        processing_class=tiny_tokenizer("bos"),
        objective=objective,
    )


@pytest.mark.parametrize("objective", ["ce + kl(question)", "ce + 0.1*weight-anchor"])
def test_training_goes_on_from_a_checkpoint_with_the_base_and_not_with_the_checkpoint_itself(tmp_path, objective):
    made(
        tmp_path, tiny_model("llama"), objective=objective
    ).train()  # two steps at a rate of 1e-6, which no sample of weights need show
    checkpoint = tmp_path / "checkpoint-2"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(checkpoint|which base).*")
        made(tmp_path, tiny_model("llama"), 4, objective=objective).train(resume_from_checkpoint=True)
    assert (tmp_path / "checkpoint-4" / FILE).read_text() == (checkpoint / FILE).read_text()
    with pytest.warns(UserWarning, match="that is a checkpoint that was finetuned from another model"):
        reloaded = made(tmp_path, AutoModelForCausalLM.from_pretrained(checkpoint), 6, objective=objective)
    for where in (True, str(checkpoint)):
        with pytest.raises(ModelError, match="with another base model than it began with"):
            reloaded.train(resume_from_checkpoint=where)


def test_an_objective_without_a_base_takes_any_checkpoint(tmp_path):
    made(tmp_path, tiny_model("llama"), objective="ce + barrier").train()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(checkpoint|which base).*")
        made(tmp_path, model, 4, objective="ce + barrier").train(resume_from_checkpoint=True)


@pytest.mark.parametrize("first", ["ce", "ce + barrier"])
def test_a_checkpoint_of_training_without_a_base_is_no_silent_base_either(tmp_path, first):
    made(tmp_path, tiny_model("llama"), objective=first).train()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    with pytest.warns(UserWarning, match="that is a checkpoint that was finetuned from another model"):
        made(tmp_path / "next", model)


@pytest.mark.parametrize("first", ["ce", "ce + kl(question)"])
def test_an_object_that_an_earlier_trainer_trained_is_no_silent_base(tmp_path, first):
    model = tiny_model("llama")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(earlier trainer).*")
        made(tmp_path, model, objective=first)
        made(tmp_path, model).train()  # not trained in between
        made(tmp_path / "ce", model, objective="ce")  # needs no base
    with pytest.warns(UserWarning, match="this LlamaForCausalLM object as its base, but that has changed since an ear"):
        made(tmp_path / "next", model)


def test_a_trained_adapter_leaves_its_base_as_it_was(tmp_path):
    model = get_peft_model(tiny_model("llama"), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    made(tmp_path, model, rate=1e-2).train()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(earlier trainer).*")
        made(tmp_path / "next", model)


def test_adapters_that_are_temporarily_merged_are_refused_and_left_merged(tmp_path):
    model = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["v_proj"], init_lora_weights=False))
    model.add_adapter("new", LoraConfig(target_modules=["q_proj"]))
    model.set_adapter("new")
    model.merge_adapter(adapter_names=["default"])
    ids = torch.tensor([[5, 6, 7]])
    before = model.eval()(input_ids=ids).logits.detach()
    with pytest.raises(ModelError, match=r"adapters are temporarily merged into it; make them part of it"):
        made(tmp_path, model)
    assert torch.equal(model.eval()(input_ids=ids).logits, before)


def test_an_adapters_base_is_the_model_without_it_however_the_adapter_is_loaded(tmp_path):
    torch.manual_seed(0)
    settings = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["lm_head"], use_dora=True)
    made(tmp_path, get_peft_model(tiny_model("llama"), settings), rate=1e-2).train()
    loaded = PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "checkpoint-2", is_trainable=True)
    made(tmp_path, loaded, 4).train(resume_from_checkpoint=True)
    other = tiny_model("llama")
    other.lm_head.weight.data[0, 0] += 1e-3
    with pytest.raises(ModelError, match="with another base model than it began with"):
        made(tmp_path, get_peft_model(other, settings), 6).train(resume_from_checkpoint=True)


def test_a_checkpoint_that_tells_nothing_of_its_base_is_gone_on_from_with_a_warning(tmp_path):
    made(tmp_path, tiny_model("llama")).train()
    (tmp_path / "checkpoint-2" / FILE).unlink()
    with pytest.warns(UserWarning, match="does not say which base model"):
        made(tmp_path, tiny_model("llama"), 4).train(resume_from_checkpoint=True)
