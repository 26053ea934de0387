"""Settings of trainers: followed as the model and the trainer themselves follow them, or refused by name."""

from __future__ import annotations

import copy
import functools
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from peft import AdaLoraConfig, KasaConfig, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from peft.tuners.lora.config import BdLoraConfig
from tiny import FACTS, GROUPED, tiny_config, tiny_model, tiny_tokenizer
from trainers import assert_close
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

from attnbalance.errors import DataError, ModelError
from attnbalance.finetuning.adapters import add_lora
from attnbalance.finetuning.examples import QUERY, SPAN, collate, make_examples
from attnbalance.finetuning.parameters import select_weights, train_only
from attnbalance.finetuning.trainer import ObjectiveMixin, ObjectiveTrainer

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
ROUTED = {
    "mixtral": lambda: transformers.MixtralConfig(**GROUPED, **EXPERTS),
    "gpt_oss": lambda: tiny_config("gpt_oss", output_router_logits=True, router_aux_loss_coef=0.5),
    "jetmoe": lambda: transformers.JetMoeConfig(
        vocab_size=420,
        hidden_size=32,
        num_hidden_layers=2,
        num_key_value_heads=2,
        kv_channels=8,
        intermediate_size=48,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        aux_loss_coef=0.5,
    ),
}
"""Families of mixtures of experts whose routers have a balancing loss; JetMoE's has a coefficient of another name."""


TOKENIZER = tiny_tokenizer("bos")


def routed(family="mixtral"):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(ROUTED[family]())


def settings(folder, kind=TrainingArguments, **changes):
    usual = {
        "output_dir": str(folder / "work"),
        "max_steps": 3,
        "per_device_train_batch_size": 4,
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
        "bf16": False,
    }
    return kind(**(usual | changes))


def some_examples(count=24):
    examples = make_examples(FACTS, TOKENIZER)
    return [examples[i % len(examples)] for i in range(count)]


def made(folder, objective="2*ce", model=None, kind=ObjectiveTrainer, args=None, **options):
    usual = {"train_dataset": some_examples(), "processing_class": TOKENIZER}
    model = tiny_model("llama") if model is None else model
    args = settings(folder) if args is None else args
    return kind(model=model, args=args, objective=objective, **(usual | options))


def plain_batch(examples):
    return {name: part for name, part in collate(examples).items() if name != QUERY and not name.startswith(SPAN)}


# A router's balancing loss --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ROUTED)
@pytest.mark.parametrize("objective", ["2*ce", "2*ce + 0.000001*barrier"])
def test_a_routers_balancing_loss_is_added_as_the_models_own_forward_pass_does(tmp_path, family, objective):
    model, examples = routed(family), some_examples(5)
    trainer = made(tmp_path, objective, model, train_dataset=examples)
    loss = trainer.compute_loss(model.train(), collate(examples))
    inputs = plain_batch(examples)
    with torch.no_grad():
        both = model(**inputs).loss
        alone = model(**inputs, output_router_logits=False).loss
    assert float(both - alone) > 0.1
    # float32 sums of the same numbers; a barrier is some nats, so that 0.000001 of it is below the tolerance
    assert float(loss) == pytest.approx(float(2 * alone + (both - alone)), rel=1e-5)


def test_a_routers_balancing_loss_is_averaged_over_the_batches_of_a_step(tmp_path):
    model, examples = routed(), some_examples(8)
    twin = copy.deepcopy(model)
    trainer = made(
        tmp_path,
        model=model,
        train_dataset=examples,
        args=settings(tmp_path, gradient_accumulation_steps=2, max_steps=1),
    )
    trainer.train()
    halves = [plain_batch(examples[:4]), plain_batch(examples[4:])]
    tokens = sum(int((half["labels"] != -100).sum()) for half in halves)
    loss = torch.zeros(())
    for half in halves:
        output = twin.train()(**half, output_router_logits=True)
        logits, labels = output.logits[:, :-1].flatten(0, 1), half["labels"][:, 1:].flatten()
        loss = loss + 2 * torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / tokens
        loss = loss + 0.5 * output.aux_loss / 2
    loss.backward()
    for name, parameter in twin.named_parameters():
        step = torch.zeros_like(parameter) if parameter.grad is None else 0.05 * parameter.grad
        # one step at a rate of 0.05, float32
        torch.testing.assert_close(model.get_parameter(name), parameter - step, rtol=0, atol=1e-6, msg=name)


def test_evaluations_of_rows_about_no_fact_report_the_routers_balancing_loss(tmp_path):
    model, rows = routed(), [replace(example, prompt=None, spans={}) for example in some_examples(4)]
    metrics = made(tmp_path, "ce", model, eval_dataset=rows).evaluate()
    with torch.no_grad():
        output = model.eval()(**plain_batch(rows))
    assert output.aux_loss > 0.1
    assert metrics["eval_loss"] == pytest.approx(float(output.loss), rel=1e-5)
    assert metrics["eval_objective"] == pytest.approx(float(output.loss - 0.5 * output.aux_loss), rel=1e-5)


def test_a_model_that_asks_for_no_balancing_loss_gets_none(tmp_path):
    model, examples = routed(), some_examples(5)
    model.config.output_router_logits = False
    trainer = made(tmp_path, model=model, train_dataset=examples)
    with torch.no_grad():
        assert float(trainer.compute_loss(model.train(), collate(examples))) == pytest.approx(
            2 * float(model(**plain_batch(examples)).loss), rel=1e-5
        )


def test_a_balancing_loss_without_a_coefficient_is_refused(tmp_path):
    model = routed()
    del model.router_aux_loss_coef
    with pytest.raises(ModelError, match="MixtralForCausalLM has output_router_logits=True, but not router_aux_loss"):
        made(tmp_path, model=model)


def test_trls_coefficient_of_the_balancing_loss_goes_before_the_models(tmp_path):
    trl = pytest.importorskip("trl")

    class Tuner(ObjectiveMixin, trl.SFTTrainer):
        """As a user would write it."""

    model, examples = routed(), some_examples(5)
    args = settings(tmp_path, trl.SFTConfig, router_aux_loss_coef=0.25, gradient_checkpointing=False)
    trainer = made(tmp_path, model=model, kind=Tuner, args=args, train_dataset=examples)
    loss = float(trainer.compute_loss(model.train(), collate(examples)))
    with torch.no_grad():
        both, alone = (model(**plain_batch(examples), output_router_logits=asked) for asked in (True, False))
    assert loss == pytest.approx(2 * float(alone.loss) + 0.25 * float(both.aux_loss), rel=1e-5)


def test_a_balancing_loss_that_trl_asks_for_at_each_step_is_refused(tmp_path):
    """JetMoE's configuration has no coefficient, so that trl leaves its setting alone."""
    trl = pytest.importorskip("trl")

    class Tuner(ObjectiveMixin, trl.SFTTrainer):
        """As a user would write it."""

    model = routed("jetmoe")
    model.config.output_router_logits = False
    args = {"kind": Tuner, "model": model}
    asking, not_asking = (
        settings(tmp_path, trl.SFTConfig, router_aux_loss_coef=coefficient, gradient_checkpointing=False)
        for coefficient in (0.5, 0.0)
    )
    with pytest.raises(ModelError, match="only with output_router_logits=True"):
        made(tmp_path, args=asking, **args)
    made(tmp_path, args=not_asking, **args)


# Losses and batches of the trainer's own ------------------------------------------------------------------------------


def summed(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return 3 * torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="mean")


@pytest.mark.parametrize(
    ("setting", "options", "name"),
    [
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor=0.1"),
        ({}, {"compute_loss_func": summed}, "compute_loss_func"),
    ],
)
def test_a_loss_of_the_trainers_own_is_refused_beside_an_objective_and_followed_without(
    tmp_path, setting, options, name
):
    with pytest.raises(ModelError, match=f"objective '2\\*ce' would ignore {name}; leave them out, or train on"):
        made(tmp_path, args=settings(tmp_path, **setting), **options)
    examples, models, losses = some_examples(), [tiny_model("llama"), tiny_model("llama")], []
    for kind, model in zip((ObjectiveTrainer, Trainer), models, strict=True):
        more = options if kind is ObjectiveTrainer else options | {"data_collator": plain_batch}
        trainer = kind(
            model=model,
            args=settings(tmp_path, **setting),
            train_dataset=examples,
            eval_dataset=examples[:6],
            processing_class=TOKENIZER,
            **more,
        )
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for parameter, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=0, atol=1e-7)


class Tripled(Trainer):
    """The commonest way to change a trainer's loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        result: Any = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return (3 * result[0], result[1]) if return_outputs else 3 * result


class Behind(ObjectiveMixin, Tripled):
    """Its loss is the objective's, where there is one."""


class Before(Tripled, ObjectiveMixin, Trainer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Its loss is three times the objective's."""


def test_a_compute_loss_behind_the_mixin_is_refused_beside_an_objective_and_followed_without_and_before_it(tmp_path):
    def run(kind, **options):
        model = tiny_model("llama")
        usual = {"train_dataset": some_examples(), "eval_dataset": some_examples()[:6], "processing_class": TOKENIZER}
        trainer = kind(model=model, args=settings(tmp_path), **usual | options)
        trainer.train()
        return {name: p.detach() for name, p in model.named_parameters()}, trainer.evaluate()["eval_loss"]

    message = "objective '2\\*ce' would ignore Tripled.compute_loss \\(list Tripled before ObjectiveMixin\\)"
    with pytest.raises(ModelError, match=message):
        run(Behind, objective="2*ce")
    weights, loss = run(Tripled, data_collator=plain_batch)
    for kind in (Behind, Before):
        ours, own_loss = run(kind, objective="ce")
        assert_close(ours, weights)
        assert own_loss == pytest.approx(loss, rel=1e-5)
    assert_close(run(Before, objective="2*ce")[0], run(ObjectiveTrainer, objective="6*ce")[0])


@pytest.mark.parametrize(
    "method",
    [
        functools.wraps(Trainer.compute_loss)(lambda self, *args, **kwargs: 3 * Trainer.compute_loss(self, *args)),
        functools.partialmethod(Trainer.compute_loss),
    ],
)
def test_a_compute_loss_that_wraps_the_trainers_own_is_no_plain_one(tmp_path, method):
    kind = type("Wrapped", (ObjectiveMixin, type("Mine", (Trainer,), {"compute_loss": method})), {})
    with pytest.raises(ModelError, match="would ignore Mine.compute_loss"):
        kind(model=tiny_model("llama"), args=settings(tmp_path), train_dataset=some_examples(), objective="2*ce")


def test_a_trainer_that_inherits_the_loss_of_transformers_trains_as_it(tmp_path):
    kind = type("Tuner", (ObjectiveMixin, transformers.Seq2SeqTrainer), {})
    models = [tiny_model("llama"), tiny_model("llama")]
    arguments = settings(tmp_path, transformers.Seq2SeqTrainingArguments), settings(tmp_path)
    for trainer, args, model in zip((kind, ObjectiveTrainer), arguments, models, strict=True):
        trainer(model=model, args=args, train_dataset=some_examples(), objective="2*ce").train()
    assert_close(*(dict(model.named_parameters()) for model in models), 0)


@pytest.mark.parametrize("own", ["loss_function", "adalora"])
def test_plain_evaluation_reports_the_loss_that_a_model_brings(tmp_path, own):
    """The oracle is transformers' own trainer with the same model and rows."""

    def model():
        base = tiny_model("llama")
        if own == "loss_function":
            base.loss_function = lambda *tensors, **settings: 3 * ForCausalLMLoss(*tensors, **settings)
            return base
        torch.manual_seed(0)
        config = AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], total_step=10, orth_reg_weight=5.0)
        return get_peft_model(base, config)

    rows, losses = some_examples(), []
    for kind, more in ((ObjectiveTrainer, {"objective": "ce"}), (Trainer, {"data_collator": collate})):
        trainer = kind(
            model=model(), args=settings(tmp_path), train_dataset=rows, eval_dataset=rows, processing_class=TOKENIZER,
            **more,
        )  # fmt: skip
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_loss_of_the_models_own_is_refused_beside_an_objective(tmp_path):
    model = tiny_model("llama")
    model.loss_function = lambda logits, labels, vocab_size, **more: logits.sum()
    with pytest.raises(ModelError, match="a loss_function of the model's own"):
        made(tmp_path, model=model)
    model = tiny_model("llama")
    model.z_loss_coefficient = 0.1  # as Bamba's
    with pytest.raises(ModelError, match="z_loss_coefficient"):
        made(tmp_path, model=model)


@pytest.mark.parametrize("objective", ["ce", "2*ce"])
@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy=group_by_length"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True"),
        ({"packing": True, "packing_strategy": "wrapped"}, "packing=True"),
        ({"eval_packing": True}, "eval_packing=True"),
        ({"padding_free": True, "max_length": None}, "padding_free=True"),
        ({"pad_to_multiple_of": 8}, "pad_to_multiple_of=8"),
        ({"shuffle_dataset": True}, "shuffle_dataset=True"),
        ({"completion_only_loss": False}, "completion_only_loss=False"),
        ({"eos_token": "<pad>"}, "eos_token=<pad>"),
        ({"label_names": ["foo"]}, r"label_names=\['foo'\]"),
        ({"max_length": 20}, r"max_length=20 \(an example has \d\d tokens\)"),
    ],
)
def test_settings_of_batches_that_examples_do_not_follow_are_refused(tmp_path, objective, setting, name):
    trl = pytest.importorskip("trl")

    class Tuner(ObjectiveMixin, trl.SFTTrainer):
        """As a user would write it."""

    args = settings(tmp_path, trl.SFTConfig, gradient_checkpointing=False, **setting)
    with pytest.raises(ModelError, match=f"training on examples, .*would ignore {name}"):
        made(tmp_path, objective, kind=Tuner, args=args)


@pytest.mark.parametrize("objective", ["ce", "2*ce"])
def test_a_function_that_would_format_examples_is_refused(tmp_path, objective):
    trl = pytest.importorskip("trl")

    class Tuner(ObjectiveMixin, trl.SFTTrainer):
        """As a user would write it."""

    args = settings(tmp_path, trl.SFTConfig, gradient_checkpointing=False)
    with pytest.raises(ModelError, match="training on examples, .*would ignore formatting_func; leave them out"):
        made(tmp_path, objective, kind=Tuner, args=args, formatting_func=str)


@pytest.mark.parametrize("objective", ["ce", "2*ce"])
def test_a_seq2seq_trainer_that_would_generate_from_examples_is_refused(tmp_path, objective):
    class Tuner(ObjectiveMixin, Seq2SeqTrainer):
        """As a user would write it."""

    made(tmp_path, objective, kind=Tuner, args=settings(tmp_path, Seq2SeqTrainingArguments)).train()
    args = settings(tmp_path, Seq2SeqTrainingArguments, predict_with_generate=True)
    with pytest.raises(ModelError, match="training on examples, .*would ignore predict_with_generate=True"):
        made(tmp_path, objective, kind=Tuner, args=args)


def test_trls_chat_template_is_refused_with_examples(tmp_path):
    trl = pytest.importorskip("trl")
    path = tmp_path / "chat.jinja"
    path.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")

    class Tuner(ObjectiveMixin, trl.SFTTrainer):
        """As a user would write it."""

    args = settings(tmp_path, trl.SFTConfig, chat_template_path=str(path), gradient_checkpointing=False)
    with pytest.raises(ModelError, match="training on examples, .*would ignore chat_template_path="):
        made(tmp_path, "ce", kind=Tuner, args=args)


def test_trls_other_loss_is_refused_beside_an_objective(tmp_path):
    trl = pytest.importorskip("trl")

    class Tuner(ObjectiveMixin, trl.SFTTrainer):
        """As a user would write it."""

    args = settings(tmp_path, trl.SFTConfig, loss_type="dft", gradient_checkpointing=False)
    with pytest.raises(ModelError, match="would ignore loss_type=dft"):
        made(tmp_path, kind=Tuner, args=args)
    made(tmp_path, "ce", kind=Tuner, args=args).train()


@pytest.mark.parametrize(
    "collator",
    [
        plain_batch,
        transformers.DataCollatorWithFlattening(),
        transformers.DataCollatorForLanguageModeling(TOKENIZER, False),
    ],
)
def test_collators_that_do_more_than_pad_are_refused_with_examples(tmp_path, collator):
    with pytest.raises(ModelError, match=f"would ignore data_collator={type(collator).__name__}"):
        made(tmp_path, "ce", data_collator=collator)


def test_a_collator_that_pads_may_stay(tmp_path):
    for collator in (transformers.DataCollatorForSeq2Seq(TOKENIZER), transformers.default_data_collator, None):
        batch = made(tmp_path, data_collator=collator).data_collator(some_examples(4))
        for name, expected in collate(some_examples(4)).items():
            assert torch.equal(batch[name], expected)


@pytest.mark.parametrize(
    ("setting", "options", "name"),
    [
        ({"eval_do_concat_batches": False}, {}, "eval_do_concat_batches=False"),
        ({"batch_eval_metrics": True}, {}, "batch_eval_metrics=True"),
        ({}, {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}, "preprocess_logits"),
    ],
)
def test_settings_of_metrics_that_what_is_watched_does_not_follow_are_refused(tmp_path, setting, options, name):
    with pytest.raises(ModelError, match=f"would ignore {name}.*pass your own compute_metrics"):
        made(tmp_path, args=settings(tmp_path, **setting), eval_dataset=some_examples(4), **options)


@pytest.mark.parametrize("name", ["objective", "eval_objective", "eval_a_shortcut_rate"])
def test_the_best_checkpoint_is_the_one_with_the_lowest_objective(tmp_path, name):
    """Transformers takes every metric but a "loss" for better when higher: it would load the worst one."""
    with pytest.raises(
        ModelError, match=f"metric_for_best_model='{name}' is better when lower; pass greater_is_better"
    ):
        made(tmp_path, args=settings(tmp_path, metric_for_best_model=name), eval_dataset=some_examples(4))
    for right in ({"metric_for_best_model": name, "greater_is_better": False}, {"metric_for_best_model": "accuracy"}):
        made(tmp_path, args=settings(tmp_path, **right), eval_dataset=some_examples(4))


def test_optimizers_that_step_in_the_backward_pass_are_refused_where_gradients_are_changed(tmp_path):
    with pytest.raises(ModelError, match="optim=lomo takes its step inside the backward pass"):
        made(tmp_path, "ce + weight-anchor", args=settings(tmp_path, optim="lomo"))
    model = tiny_model("gpt2")
    frozen = train_only(model, select_weights(model, "q"))
    with pytest.raises(ModelError, match="optim=galore_adamw_layerwise takes its step"):
        made(tmp_path, "ce", model, args=settings(tmp_path, optim="galore_adamw_layerwise"), frozen=frozen)


def test_weights_that_are_to_be_trained_in_part_are_not_trained_whole(tmp_path):
    model = tiny_model("llama")
    frozen = train_only(model, select_weights(model, "q@1.0"))
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.q_proj\.weight is to be trained in part.*as frozen="):
        made(tmp_path, "ce", model)
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.q_proj\.weight is to be trained in part"):
        made(tmp_path, "ce", copy.deepcopy(model))
    made(tmp_path, "ce", model, frozen=frozen)
    assert not train_only(model, select_weights(model, "q@1"))  # whole matrices need nothing
    made(tmp_path, "ce", model)
    lora, frozen = add_lora(model, select_weights(model, "q@1.0"), 2, 4)
    with pytest.raises(ModelError, match=r"lora_B\.default\.weight is to be trained in part"):
        made(tmp_path, "ce", lora)
    made(tmp_path, "ce", lora, frozen=frozen)
    with torch.no_grad():  # as after training: the rows of the other heads of W_Q stay zero
        for name, parameter in lora.named_parameters():
            if ".lora_B." in name:
                parameter[:8] = 1.0
    lora.save_pretrained(tmp_path / "part")
    again = PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "part", is_trainable=True)
    with pytest.warns(UserWarning, match=r"lora_B\.default\.weight has zeros as if it was trained for a part"):
        made(tmp_path, "ce", again)


def test_the_frozen_weights_of_an_earlier_choice_are_refused(tmp_path):
    model = tiny_model("llama")
    earlier = train_only(model, select_weights(model, "q@1.1"))
    train_only(model, select_weights(model, "q@0.0"))
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.q_proj\.weight is to be trained in part"):
        made(tmp_path, "ce", model, frozen=earlier)
    train_only(model, select_weights(model, "all"))
    made(tmp_path, "ce", model)


def adapted(**options):
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "k_proj"], **options)
    return get_peft_model(tiny_model("llama"), config)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora"])
@pytest.mark.parametrize("objective", ["kl(question)", "ce + state-anchor(question)", "ce + weight-anchor"])
def test_adapters_that_change_the_base_are_refused_where_it_is_compared_with(tmp_path, start, objective):
    with pytest.raises(ModelError, match=f"init_lora_weights='{start}' changes its weights"):
        made(tmp_path, model=adapted(init_lora_weights=start), objective=objective)


@pytest.mark.parametrize("objective", ["kl(question)", "state-anchor(question)", "ce + weight-anchor"])
def test_adapters_that_cut_the_bases_weights_are_refused_where_it_is_compared_with(tmp_path, objective):
    with pytest.raises(ModelError, match="kasa_config cuts small singular values off its weights"):
        made(tmp_path, model=adapted(kasa_config=KasaConfig()), objective=objective)


@pytest.mark.parametrize("start", [True, "gaussian", "orthogonal", "mica"])
def test_other_starts_leave_the_base_as_it_is(tmp_path, start):
    model, examples = adapted(init_lora_weights=start), some_examples(4)
    trainer = made(tmp_path, model=model, eval_dataset=examples, objective="state-anchor(question)")
    # the base is at its own states: only the adapter's product, 0 up to rounding, could move it
    assert trainer.evaluate()["eval_objective"] < 1e-6
    made(tmp_path, model=adapted(init_lora_weights="pissa"), objective="ce + floor")  # compares with no base


def test_adapters_with_a_loss_of_their_own_are_refused_beside_an_objective(tmp_path):
    config = AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "k_proj"], total_step=10)
    model = get_peft_model(tiny_model("llama"), config)
    with pytest.raises(ModelError, match="would leave out the loss that ADALORA adapters add"):
        made(tmp_path, model=model, objective="ce + floor")


@pytest.mark.parametrize("objective", ["ce + weight-anchor", "ce + project"])
def test_rules_for_gradients_are_refused_where_an_adapter_is_more_than_lora(tmp_path, objective):
    with pytest.raises(ModelError, match="the adapter is LORA with use_dora"):
        made(tmp_path, model=adapted(use_dora=True), objective=objective)
    blocks = BdLoraConfig(target_modules_bd_a=["q_proj", "k_proj"], target_modules_bd_b=[], nblocks=2)
    with pytest.raises(ModelError, match="the adapter is LORA with use_bdlora"):
        made(tmp_path, model=adapted(use_bdlora=blocks), objective=objective)
    with pytest.raises(ModelError, match="the adapter is LORA with use_qalora;"):
        made(tmp_path, model=adapted(use_qalora=True, qalora_group_size=4), objective=objective)
    with pytest.raises(ModelError, match="the adapter is LORA with kasa_config|but kasa_config cuts small"):
        made(tmp_path, model=adapted(kasa_config=KasaConfig()), objective=objective)
    with pytest.raises(ModelError, match="of which modules_to_save trains a copy"):
        config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["v_proj"], modules_to_save=["q_proj"])
        made(tmp_path, model=get_peft_model(tiny_model("llama"), config), objective=objective)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True, "lora_dropout": 0.1, "bias": "all", "rank_pattern": {"q_proj": 2}},
        {"init_lora_weights": "orthogonal", "alpha_pattern": {"k_proj": 3}, "layers_to_transform": [1]},
        {"trainable_token_indices": [5], "target_parameters": None, "exclude_modules": ["v_proj"]},
    ],
)
def test_rules_for_gradients_hold_for_every_plain_lora(tmp_path, settings):
    assert made(tmp_path, model=adapted(**settings), objective="ce + weight-anchor").train().training_loss > 0


def test_examples_that_a_model_reads_otherwise_beside_shorter_ones_are_refused(tmp_path):
    rotation = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24}
    rotation |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = transformers.Phi3Config(
        **GROUPED, rope_parameters=rotation, original_max_position_embeddings=24, pad_token_id=None
    )
    examples = make_examples(FACTS, TOKENIZER)
    longest = max(len(example.ids) for example in examples)
    short = [example for example in examples if len(example.ids) < 24]
    assert short
    assert longest >= 24

    def trainer(data, objective="floor"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        args = settings(tmp_path)
        return ObjectiveTrainer(
            model=model, args=args, train_dataset=data, processing_class=TOKENIZER, objective=objective
        )

    trained = trainer(short)
    for use in (trained.evaluate, trained.predict):
        with pytest.raises(DataError, match="texts of 24 tokens or more otherwise"):
            use(examples)
    with pytest.raises(DataError, match=rf"texts of 24 tokens or more otherwise .* the longest example has {longest};"):
        trainer(examples)
    plain = trainer(short, "ce")  # nothing of it is read, so the model is not hooked
    for use in (plain.evaluate, plain.predict):
        use(short)
        with pytest.raises(DataError, match=f"with {longest} tokens, reaches it, as no other did; pass all data as"):
            use(examples)


def test_examples_are_refused_with_adapters_that_put_tokens_before_the_prompt(tmp_path):
    """Without evaluation data and with `ce`, nothing else hooks the model."""
    settings_of_tokens = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ModelError, match="of type PROMPT_TUNING, which puts tokens before the prompt"):
        made(tmp_path, model=get_peft_model(tiny_model("llama"), settings_of_tokens), objective="ce")


def test_rows_of_eager_attention_are_refused_where_they_would_come_after_dropout(tmp_path):
    for rate in (0.1, 0.0):
        model = tiny_model("bloom")
        model.config.attention_dropout = rate
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            if rate:
                with pytest.raises(
                    ModelError, match=r"rows after dropout in training; .* set attention_dropout=0.1 to 0"
                ):
                    made(tmp_path, model=model, objective="ce + barrier")
            else:
                made(tmp_path, model=model, objective="ce + barrier")
