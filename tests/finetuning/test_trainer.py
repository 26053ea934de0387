"""Objectives in a Trainer: the same step however it is divided, what is watched, and what is refused."""

import os
import socket
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launched import BATCH, STEPS
from safetensors.torch import load_file
from tiny import FACTS, eager, tiny_model, tiny_tokenizer
from transformers import ProcessorMixin, Trainer, TrainerCallback, TrainingArguments

from attnbalance.data.prompts import make_prompts
from attnbalance.data.tokens import as_chat
from attnbalance.errors import DataError, ModelError
from attnbalance.finetuning import base_targets
from attnbalance.finetuning.examples import IGNORED, TARGET, as_examples, collate, examples_of, make_examples
from attnbalance.finetuning.objectives.base_model import base_is_kept
from attnbalance.finetuning.objectives.targets import add_targets
from attnbalance.finetuning.parameters import select_weights, train_only
from attnbalance.finetuning.trainer import ObjectiveMixin, ObjectiveTrainer

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


def trained(folder, objective=EVERYTHING, family="llama", model=None, data=None, frozen=None, **changes):
    model = tiny_model(family) if model is None else model
    trainer = ObjectiveTrainer(
        model=model,
        args=arguments(folder, **changes),
        train_dataset=some_examples() if data is None else data,
        processing_class=tiny_tokenizer("bos"),
        objective=objective,
        frozen=frozen,
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


@pytest.mark.parametrize(
    ("objective", "kind"),
    [(EVERYTHING, ""), (EVERYTHING, "fsdp"), ("floor(0.9)", ""), ("state-anchor(statement)", "")],
)
def test_two_processes_do_what_one_does(tmp_path, objective, kind):
    script = str(Path(__file__).parents[1] / "launched.py")
    here = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")  # no name to look up
    launch = [sys.executable, "-m", "torch.distributed.run", *here, "--nproc-per-node=2", script]
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    settings = os.environ | {"GLOO_SOCKET_IFNAME": loopback, "CUDA_VISIBLE_DEVICES": ""}  # FSDP takes a GPU it sees
    subprocess.run([sys.executable, script, str(tmp_path / "one"), objective], env=settings, check=True)
    subprocess.run([*launch, str(tmp_path / "two"), objective, kind], env=settings, check=True)
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
    frozen = train_only(model, select_weights(model, "mlp@1"))  # above the last attention layer
    with pytest.raises(ModelError, match="nothing that is trained moves them"):
        trained(tmp_path, ROW, model=model, frozen=frozen)


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
    with pytest.raises(DataError, match=r"tokens of the relation in every prompt.*\{relation\}"):
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


def numbers_of_the_base(loader):
    """Every target that a loader gives, by name."""
    batches = list(loader)
    return {name: [batch[name] for batch in batches] for name in batches[0] if name.startswith(TARGET)}


@pytest.mark.parametrize("adapter", [False, True])
def test_evaluation_holds_the_model_to_the_base_before_and_after_training(tmp_path, adapter):
    model, examples = tiny_model("llama"), make_examples(FACTS, tiny_tokenizer("bos"))
    if adapter:
        model = lora(model)
    trainer = made(tmp_path, model, EVERYTHING, eval_dataset=examples)
    seen = []
    trainer.add_callback(_Sees(lambda loader: seen.append(numbers_of_the_base(loader))))
    before = numbers_of_the_base(trainer.get_eval_dataloader(trainer.eval_dataset))  # as evaluate() asks for it
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    alone = numbers_of_the_base(trainer.get_eval_dataloader())
    for numbers in (*seen, alone):
        assert numbers.keys() == before.keys()
        for name, batches in numbers.items():
            assert all(torch.equal(*pair) for pair in zip(batches, before[name], strict=True)), name
    assert len(seen) == 2


class _Sees(TrainerCallback):
    """Passes on the loader that each evaluation used."""

    def __init__(self, action):
        self.action = action

    def on_evaluate(self, args, state, control, eval_dataloader=None, **kwargs):
        self.action(eval_dataloader)


def lora(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))


def test_a_model_that_left_its_base_no_longer_agrees_with_it(tmp_path):
    # as the objective falls to zero only where nothing has changed, evaluating against oneself would show zero
    examples = make_examples(FACTS, tiny_tokenizer("bos"))
    model = tiny_model("llama")
    trainer = made(tmp_path, model, "kl(question)", eval_dataset=examples, train_dataset=examples)
    start = trainer.evaluate()["eval_objective"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    assert trainer.evaluate()["eval_objective"] > start + 0.01


def test_new_examples_are_refused_once_the_base_was_replaced_before_any_step(tmp_path):
    first, second = some_examples()[:4], some_examples()[4:8]
    model = tiny_model("llama")
    trainer = made(tmp_path, model, eval_dataset=first)
    with torch.no_grad():
        next(model.parameters()).mul_(1.2)
    with pytest.raises(ModelError, match="for 4 new examples, but the base's own weights have been trained"):
        trainer.evaluate(second)
    trainer.train()
    trainer.state.global_step = 0  # as a second call of train() begins
    with pytest.raises(ModelError, match="for 4 new examples, but the base's own weights have been trained"):
        trainer.evaluate(second)


def test_other_data_are_evaluated_while_there_is_a_base(tmp_path):
    first, second = some_examples()[:4], some_examples()[4:8]
    trainer = made(tmp_path, eval_dataset=first)
    expected = numbers_of_the_base(trainer.get_eval_dataloader(second))
    trainer.train()
    assert numbers_of_the_base(trainer.get_test_dataloader(second)).keys() == expected.keys()
    for ask in (trainer.evaluate, trainer.predict):
        with pytest.raises(ModelError, match="for 1 new examples, but the base's own weights have been trained"):
            ask([*first, replace(second[0])])
    adapted = made(tmp_path, lora(tiny_model("llama")), eval_dataset=first)
    adapted.train()
    found = numbers_of_the_base(adapted.get_eval_dataloader(second))
    for name, batches in found.items():
        for batch, other in zip(batches, expected[name], strict=True):
            torch.testing.assert_close(batch, other, rtol=0, atol=1e-6)  # the same sums with an adapter beside them


def test_the_base_is_asked_once_for_each_example(tmp_path, monkeypatch):
    asked = []

    def counting(examples, *rest, **settings):
        asked.append(len(examples))
        return add_targets(examples, *rest, **settings)

    monkeypatch.setattr(base_targets, "add_targets", counting)
    examples = make_examples(FACTS, tiny_tokenizer("bos"))
    trainer = made(tmp_path, train_dataset=examples, eval_dataset={"a": examples[:4], "b": examples[4:]})
    trainer.evaluate()
    trainer.evaluate(examples[:4])
    trainer.predict(trainer.train_dataset)
    assert asked == [len(examples)]


@pytest.mark.parametrize(("trained_parts", "kept"), [("lora", True), ("lora and a norm", False), ("all", False)])
def test_the_base_is_kept_where_only_adapters_learn(trained_parts, kept):
    model = tiny_model("llama")
    if trained_parts != "all":
        model = lora(model)
    if trained_parts == "lora and a norm":
        next(p for name, p in model.named_parameters() if "layernorm" in name).requires_grad_(True)
    assert base_is_kept(model) is kept


def test_evaluation_data_that_are_no_examples_are_refused(tmp_path):
    rows = [{"input_ids": [1, 2], "labels": [1, 2]}]
    with pytest.raises(DataError, match="hold examples and dicts"):
        made(tmp_path, eval_dataset=rows)
    trainer = made(tmp_path)
    with pytest.raises(DataError, match="evaluation data dicts"):
        trainer.evaluate(rows)
    examples = make_examples(FACTS, tiny_tokenizer("bos"))
    assert len(trainer.predict(examples).predictions) == len(examples)


def test_a_stream_of_rows_trains_on_plain_cross_entropy_and_on_nothing_else(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        """Rows that come one after the other, their number unknown."""

        def __iter__(self):
            for one in some_examples():
                yield {"input_ids": torch.tensor(one.ids[:12]), "labels": torch.tensor(one.ids[:12])}

    models = [tiny_model("llama"), tiny_model("llama")]
    for kind, model in zip((ObjectiveTrainer, Trainer), models, strict=True):
        kind(model=model, args=arguments(tmp_path), train_dataset=Stream()).train()
    one, other = (dict(model.named_parameters()) for model in models)
    assert_close(one, other, 0.0)
    with pytest.raises(DataError, match="needs a list of examples .*, got a Stream, which has no length"):
        made(tmp_path, train_dataset=Stream())


def test_a_trainer_that_only_evaluates_needs_no_training_data(tmp_path):
    examples = make_examples(FACTS, tiny_tokenizer("bos"))
    alone = made(tmp_path, train_dataset=None, eval_dataset=examples).evaluate()
    beside = made(tmp_path, eval_dataset=examples).evaluate()
    assert alone["eval_objective"] == beside["eval_objective"]


@pytest.mark.parametrize("objective", ["ce", "ce + kl(statement)"])
def test_examples_beside_rows_are_refused(tmp_path, objective):
    rows = [{"input_ids": list(one.ids), "labels": list(one.labels)} for one in some_examples()]
    with pytest.raises(DataError, match="hold examples and dicts"):
        made(tmp_path, objective=objective, train_dataset=rows, eval_dataset=some_examples())
    with pytest.raises(DataError, match="hold examples and dicts"):
        made(tmp_path, objective=objective, eval_dataset={"a": some_examples(), "b": rows})
    with pytest.raises(DataError, match="hold examples and dicts"):
        made(tmp_path, objective=objective, train_dataset=[*some_examples(), rows[0]])


def test_trls_trainer_evaluates_several_sets_of_examples(tmp_path):
    trl = pytest.importorskip("trl")

    class Tuner(ObjectiveMixin, trl.SFTTrainer):
        """As a user would write it."""

    examples = make_examples(FACTS, tiny_tokenizer("bos"))
    sets = {"first": examples[:4], "second": examples[4:]}
    trainer = Tuner(
        model=tiny_model("llama"),
        args=trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none"),
        train_dataset=examples,
        eval_dataset=sets,
        processing_class=tiny_tokenizer("bos"),
        objective="ce + kl(statement)",
    )
    found, plain = trainer.evaluate(), made(tmp_path, eval_dataset=sets).evaluate()
    for name in ("eval_first_objective", "eval_second_objective"):
        assert found[name] == pytest.approx(plain[name], rel=1e-6)


@pytest.mark.parametrize("objective", ["ce", "ce + barrier", "kl(statement)"])
def test_a_trainer_without_a_tokenizer_says_what_it_needs(tmp_path, objective):
    with pytest.raises(DataError, match="pass processing_class=tokenizer"):
        made(tmp_path, objective=objective, eval_dataset=some_examples(), processing_class=None)
    trained_on_ce = made(tmp_path, objective="ce", processing_class=None)
    trained_on_ce.train()


def test_a_processor_lends_its_tokenizer(tmp_path):
    class Processor(ProcessorMixin):
        """A tokenizer in a frame, as models of several kinds of input have it."""

        def __init__(self, tokenizer):
            self.tokenizer = tokenizer

    framed = made(tmp_path, processing_class=Processor(tiny_tokenizer("bos")))
    for one, other in zip(framed.train_dataset, made(tmp_path).train_dataset, strict=True):
        for name, expected in other.targets.items():
            torch.testing.assert_close(one.targets[name], expected, rtol=0, atol=0)


@pytest.mark.parametrize("objective", [ROW, "ce + project"])
def test_a_loss_can_be_computed_without_gradients(tmp_path, objective):
    model = tiny_model("llama").train()
    trainer, batch = made(tmp_path, model, objective), collate(some_examples()[:4])
    expected = float(trainer.compute_loss(model, batch).detach())
    with torch.no_grad():
        assert float(trainer.compute_loss(model, batch)) == pytest.approx(expected, rel=1e-6)


def test_a_loss_of_rows_alone_is_finite_where_the_family_masks_vocabulary_entries(tmp_path):
    model = tiny_model("llama").train()
    trainer, batch = made(tmp_path, model, "barrier"), collate(some_examples()[:4])
    expected = float(trainer.compute_loss(model, dict(batch)).detach())

    def masked(module, inputs, logits):
        return logits.masked_fill(torch.arange(logits.shape[-1]) == 7, -torch.inf)

    handle = model.lm_head.register_forward_hook(masked)
    loss = trainer.compute_loss(model, dict(batch))
    handle.remove()
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)  # rows do not see logits
    assert all(part.grad is not None and part.grad.isfinite().all() for part in model.parameters())


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


def test_recommended_on_all_weights_warns_where_nobody_asked_for_that(tmp_path):
    model = tiny_model("llama")
    with pytest.warns(UserWarning, match="meant for the attention weights, but all weights are trained"):
        made(tmp_path, model, "recommended")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*meant for the attention weights")
        made(tmp_path, lora(tiny_model("llama")), "recommended")
        made(tmp_path, model, "recommended", frozen=train_only(model, select_weights(model, "all")))
        made(tmp_path, tiny_model("llama"), "ce")
