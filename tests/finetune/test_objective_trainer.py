"""Objectives in a Trainer: the same step however it is divided, what is watched, and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launched import BATCH, STEPS
from safetensors.torch import load_file
from tiny import FACTS, eager, tiny_model, tiny_tokenizer
from transformers import EvalPrediction, TrainingArguments

from attnbalance.errors import DataError, ModelError
from attnbalance.finetune.examples import IGNORED, as_examples, examples_of, make_examples
from attnbalance.finetune.objective_trainer import ObjectiveMixin, ObjectiveTrainer, watched_means
from attnbalance.finetune.parameters import choose, train_only
from attnbalance.prompts import make_prompts
from attnbalance.tokens import as_chat

EVERYTHING = "ce + 0.5*barrier + row-anchor(statement) + state-anchor(statement) + kl(statement) + floor(0.9)"
ROW = "ce + 5*barrier"
TOLERANCE = 1e-6
"""Of weights after three steps of gradient descent at a rate of 0.05: float32 sums of many terms in another order."""


def arguments(folder, **changes):
    usual = {
        "output_dir": str(folder / "work"),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": 4,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    return TrainingArguments(**(usual | changes))


def some_examples(template="qa"):
    examples = make_examples(FACTS, tiny_tokenizer("bos"), template)
    return [examples[i % len(examples)] for i in range(STEPS * BATCH)]


def trained(folder, objective=EVERYTHING, family="llama", model=None, data=None, guard=None, **changes):
    model = tiny_model(family) if model is None else model
    trainer = ObjectiveTrainer(
        model=model,
        args=arguments(folder, **changes),
        train_dataset=some_examples() if data is None else data,
        processing_class=tiny_tokenizer("bos"),
        objective=objective,
        guard=guard,
    )
    trainer.train()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_close(a, b, tolerance=TOLERANCE):
    assert a.keys() == b.keys()
    worst = max(float((a[name] - b[name]).abs().max()) for name in a)
    assert worst <= tolerance, worst


@pytest.mark.parametrize("objective", [EVERYTHING, "ce + project + 0.1*weight-anchor"])
@pytest.mark.parametrize(("size", "parts"), [(4, 2), (1, 8)])
def test_accumulating_a_batch_in_parts_changes_nothing(tmp_path, objective, size, parts):
    whole = trained(tmp_path, objective)
    split = trained(tmp_path, objective, per_device_train_batch_size=size, gradient_accumulation_steps=parts)
    assert_close(whole, split)


def test_training_on_another_objective_ends_elsewhere(tmp_path):
    one, other = trained(tmp_path, "ce"), trained(tmp_path, ROW)
    assert max(float((one[name] - other[name]).abs().max()) for name in one) > 1e-3


@pytest.mark.parametrize("kind", ["", "fsdp"])
def test_two_processes_do_what_one_does(tmp_path, kind):
    script = str(Path(__file__).parents[1] / "launched.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    subprocess.run([sys.executable, script, str(tmp_path / "one"), EVERYTHING], check=True, capture_output=True)
    subprocess.run([*launch, str(tmp_path / "two"), EVERYTHING, kind], check=True, capture_output=True)
    assert_close(load_file(tmp_path / "one"), load_file(tmp_path / "two"))


def test_cross_entropy_beside_another_term_is_the_trainers_own(tmp_path):
    own = trained(tmp_path, "ce")
    with_others = trained(tmp_path, "ce + 1e-12*floor(0.01)")
    assert_close(own, with_others)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_checkpointing_gradients_changes_nothing(tmp_path, family):
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    assert_close(trained(tmp_path, ROW, family), trained(tmp_path, ROW, family, **options))


def test_a_regulariser_without_a_gradient_is_refused(tmp_path):
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ModelError, match="use_reentrant=False"):
        trained(tmp_path, ROW, **options)
    model = tiny_model("llama")
    guard = train_only(model, choose(model, "mlp@1"))  # above the last attention layer
    with pytest.raises(ModelError, match="nothing that is trained moves it"):
        trained(tmp_path, ROW, model=model, guard=guard)


def test_a_compiled_model_trains_the_same(tmp_path):
    compiled = trained(tmp_path, ROW, torch_compile=True, torch_compile_backend="aot_eager")
    plain = trained(tmp_path, ROW)
    assert_close({name.removeprefix("_orig_mod."): value for name, value in compiled.items()}, plain, 1e-5)


def test_sixteen_bits_train(tmp_path):
    found = trained(tmp_path, EVERYTHING, bf16=True)
    assert all(bool(value.isfinite().all()) for value in found.values())


def test_what_is_watched_is_what_a_naive_loop_sees(tmp_path):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("bos")
    examples = make_examples(FACTS, tokenizer)
    trainer = ObjectiveTrainer(
        model=model,
        args=arguments(tmp_path),
        train_dataset=examples,
        eval_dataset=examples,
        processing_class=tokenizer,
        objective="2*ce",
    )
    found = trainer.evaluate()
    reference, losses, right, attention = eager(tiny_model("llama")), [], [], []
    for example in examples:
        output = reference(input_ids=torch.tensor([example.ids]), output_attentions=True)
        labels = torch.tensor(example.labels)
        places = (labels != IGNORED).nonzero()[:, 0]
        predictions = output.logits[0, places - 1].log_softmax(-1)
        losses.append(-predictions[torch.arange(len(places)), labels[places]])
        right.append(bool((predictions.argmax(-1) == labels[places]).all()))
        rows = torch.stack([layer[0, :, example.query] for layer in output.attentions])
        attention.append(rows[:, :, list(example.spans["subject"])].amax(-1).mean(-1))
    mean = float(torch.cat(losses).mean())
    assert found["eval_answer_loss"] == pytest.approx(mean, rel=1e-5)
    assert found["eval_objective"] == pytest.approx(2 * mean, rel=1e-5)
    assert found["eval_accuracy"] == pytest.approx(sum(right) / len(right))
    for layer, value in enumerate(torch.stack(attention).mean(0).tolist()):
        assert found[f"eval_subject_attention/{layer}"] == pytest.approx(value, rel=1e-5)


def test_rows_tokenized_elsewhere_train_as_our_own(tmp_path):
    own = some_examples()
    rows = [{"input_ids": one.ids, "labels": one.labels} for one in own]
    facts = [one.prompt.fact for one in own if one.prompt]
    found = as_examples(rows, facts, tiny_tokenizer("bos"))
    assert_close(trained(tmp_path, ROW), trained(tmp_path, ROW, data=found), 0.0)


def test_trls_trainer_takes_chats_with_an_objective(tmp_path):
    trl = pytest.importorskip("trl")

    class ChatTrainer(ObjectiveMixin, trl.SFTTrainer):
        """As a user would write it."""

    tokenizer, options = tiny_tokenizer("chat"), {"dataset_kwargs": {"skip_prepare_dataset": True}, "bf16": False}
    chats = examples_of(as_chat(make_prompts(FACTS, "plain"), tokenizer), tokenizer)
    settings = arguments(tmp_path).to_dict()
    names = ("output_dir", "max_steps", "learning_rate", "optim", "max_grad_norm", "use_cpu", "report_to")
    settings = {name: settings[name] for name in names} | {"save_strategy": "no", "lr_scheduler_type": "constant"}
    settings |= {"per_device_train_batch_size": len(chats), "train_sampling_strategy": "sequential"}
    models = [tiny_model("llama"), tiny_model("llama")]
    for model, kind, more in ((models[0], ChatTrainer, options), (models[1], ObjectiveTrainer, {})):
        config = (trl.SFTConfig if kind is ChatTrainer else TrainingArguments)(**settings, **more)
        trainer = kind(
            model=model,
            args=config,
            train_dataset=chats,
            eval_dataset=chats,
            processing_class=tokenizer,
            objective="ce + barrier + kl(question)",
        )
        trainer.train()
        assert trainer.evaluate()["eval_subject_attention/0"] > 0
    assert_close(*(dict(model.named_parameters()) for model in models))


def test_data_that_an_objective_cannot_use_is_refused(tmp_path):
    rows = [{"input_ids": list(one.ids), "labels": list(one.labels)} for one in some_examples()]
    with pytest.raises(DataError, match="make_examples or as_examples"):
        trained(tmp_path, ROW, data=rows)
    with pytest.raises(DataError, match=r"place of the relation .*\{relation\}"):
        trained(tmp_path, "ce + balance")


def made(folder, model=None, objective="ce + kl(statement)", **options):
    trainer = {"train_dataset": some_examples(), "processing_class": tiny_tokenizer("bos")} | options
    model = tiny_model("llama") if model is None else model
    settings = trainer.pop("args", arguments(folder))
    return ObjectiveTrainer(model=model, args=settings, objective=objective, **trainer)


def test_any_sequence_of_examples_is_trained_and_evaluated_on(tmp_path):
    examples = make_examples(FACTS, tiny_tokenizer("bos"))
    part = torch.utils.data.Subset(examples, [0, 2, 4, 6])
    trainer = made(tmp_path, train_dataset=part, eval_dataset={"a": examples[4:], "b": examples[:2]})
    assert [one.prompt for one in trainer.train_dataset] == [examples[i].prompt for i in (0, 2, 4, 6)]
    found = trainer.evaluate()
    assert {"eval_a_objective", "eval_b_objective"} <= found.keys()
    alone = made(tmp_path, eval_dataset=examples[:2])
    assert alone.evaluate()["eval_objective"] == pytest.approx(found["eval_b_objective"], rel=1e-6)
    assert alone.evaluate(examples[4:])["eval_objective"] == pytest.approx(found["eval_a_objective"], rel=1e-6)


def test_evaluation_data_that_are_no_examples_are_refused(tmp_path):
    rows = [{"input_ids": [1, 2], "labels": [1, 2]}]
    with pytest.raises(DataError, match="evaluation data holds dicts"):
        made(tmp_path, eval_dataset=rows)
    trainer = made(tmp_path)
    with pytest.raises(DataError, match="evaluation data holds dicts"):
        trainer.evaluate(rows)
    examples = make_examples(FACTS, tiny_tokenizer("bos"))
    assert len(trainer.predict(examples).predictions) == len(examples)


def test_metrics_of_ones_own_get_the_models_logits(tmp_path):
    seen, examples = [], make_examples(FACTS, tiny_tokenizer("bos"))

    def metrics(prediction):
        seen.append(prediction.predictions.shape)
        return {}

    made(tmp_path, eval_dataset=examples, compute_metrics=metrics).evaluate()
    assert seen == [(len(FACTS), max(len(one.ids) for one in examples), 420)]


def test_parts_of_an_adapter_that_were_frozen_stay_so(tmp_path):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model("llama"), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    made(tmp_path, model)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if "lora_B" in name
    }


@pytest.mark.parametrize("native", [True, False])
def test_the_base_is_the_model_without_its_adapter(tmp_path, native):
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = tiny_model("llama")
    if native:
        model.add_adapter(settings)
    else:
        model = get_peft_model(model, settings)
    ids = torch.tensor([[1, 2, 3]])
    before = model(input_ids=ids).logits
    adapted, plain = made(tmp_path, model), made(tmp_path)
    for one, other in zip(adapted.train_dataset, plain.train_dataset, strict=True):
        for name in other.targets:
            torch.testing.assert_close(one.targets[name], other.targets[name], rtol=0, atol=1e-6)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert not torch.allclose(before, tiny_model("llama")(input_ids=ids).logits)


def test_a_shortcut_that_cannot_be_told_gives_no_rate():
    def rows(*shortcuts):
        columns = [[1.0, 1.0, right, shortcut, 1.0, 0.0, 0.5] for right, shortcut in shortcuts]
        return watched_means(EvalPrediction(predictions=torch.tensor(columns).numpy(), label_ids=None))

    nan = float("nan")
    assert "shortcut_rate" not in rows((1.0, 0.0), (0.0, nan))
    assert "shortcut_rate" not in rows((1.0, 0.0))
    assert rows((0.0, 1.0), (0.0, 0.0), (0.0, nan), (1.0, 0.0))["shortcut_rate"] == 0.5


def test_ways_of_training_that_would_do_less_than_asked_are_refused(tmp_path):
    with pytest.raises(ModelError, match="bf16 instead of fp16"):
        made(tmp_path, objective="ce + weight-anchor", args=arguments(tmp_path, fp16=True))
    with pytest.raises(ModelError, match="model_init="):
        ObjectiveTrainer(
            args=arguments(tmp_path),
            model_init=lambda: tiny_model("llama"),
            train_dataset=some_examples(),
            processing_class=tiny_tokenizer("bos"),
            objective="ce + barrier",
        )


def test_a_loss_that_is_no_number_names_the_batch(tmp_path):
    with pytest.raises(ModelError, match="at step 2, in the batch that begins with .*Liechtenstein"):
        trained(tmp_path, "ce + kl(question)", learning_rate=1e38)
