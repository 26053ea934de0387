"""Objectives in a Trainer: the same step however it is divided, what is watched, and what is refused."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import run_in_two_processes
from launched import third_replayed
from safetensors.torch import load_file
from tiny import FACTS, eager, tiny_model, tiny_tokenizer
from trainers import EVERYTHING, ROW, arguments, assert_close, lora, made, some_examples, trained
from transformers import ProcessorMixin, Trainer, TrainingArguments

from attnbalance.data.prompts import make_prompts
from attnbalance.data.tokens import as_chat
from attnbalance.errors import DataError, ModelError
from attnbalance.finetuning.examples import (
    IGNORED,
    INPUTS,
    REPLAYED,
    Example,
    as_examples,
    collate,
    examples_of,
    make_examples,
)
from attnbalance.finetuning.parameters import select_weights, train_only
from attnbalance.finetuning.trainer import ObjectiveMixin, ObjectiveTrainer


@pytest.mark.parametrize("objective", [EVERYTHING, "ce + project + 0.1*weight-anchor"])
@pytest.mark.parametrize(("size", "parts"), [(4, 2), (1, 8)])
def test_accumulating_a_batch_in_parts_changes_nothing(tmp_path, objective, size, parts):
    whole = trained(tmp_path, objective)
    split = trained(tmp_path, objective, per_device_train_batch_size=size, gradient_accumulation_steps=parts)
    assert_close(whole, split)


@pytest.mark.parametrize("objective", ["ce + kl(statement)", "ce + row-anchor(statement)"])
def test_replay_in_parts_of_which_some_hold_no_new_or_no_replayed_fact_changes_nothing(tmp_path, objective):
    data = third_replayed(some_examples())
    whole = trained(tmp_path, objective, data=data)
    split = trained(tmp_path, objective, data=data, per_device_train_batch_size=1, gradient_accumulation_steps=8)
    assert_close(whole, split)
    assert max(float((whole[name] - value).abs().max()) for name, value in trained(tmp_path, objective).items()) > 1e-3


def test_training_on_another_objective_ends_elsewhere(tmp_path):
    on_ce, on_row = trained(tmp_path, "ce"), trained(tmp_path, ROW)
    assert max(float((on_ce[name] - on_row[name]).abs().max()) for name in on_ce) > 1e-3


@pytest.mark.parametrize(
    ("objective", "kind"),
    [
        (EVERYTHING, ""),
        (EVERYTHING, "fsdp"),
        ("floor(0.9)", ""),
        ("state-anchor(statement)", ""),
        ("ce + kl(statement)", "replay"),
    ],
)
def test_two_processes_do_what_one_does(tmp_path, objective, kind):
    script = Path(__file__).parents[1] / "launched.py"
    alone = [sys.executable, str(script), str(tmp_path / "one"), objective, "" if kind == "fsdp" else kind]
    subprocess.run(alone, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, check=True)
    run_in_two_processes(script, tmp_path / "two", objective, kind)
    assert_close(load_file(tmp_path / "one"), load_file(tmp_path / "two"))


@pytest.mark.parametrize("objective", ["ce", "floor(0.9)"])
def test_training_in_two_processes_after_an_evaluation_is_refused(tmp_path, objective, capfd):
    """Transformers' own trainer goes on, each process by itself."""
    with pytest.raises(subprocess.CalledProcessError):
        run_in_two_processes(Path(__file__).parents[1] / "launched.py", tmp_path / "two", objective, "evaluated")
    assert "without averaging gradients over processes" in capfd.readouterr().err


def test_cross_entropy_beside_another_term_is_the_trainers_own(tmp_path):
    own = trained(tmp_path, "ce")
    with_others = trained(tmp_path, "ce + 1e-6*floor(0.01)")
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


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize(
    "objective",
    [
        "ce",
        "kl(statement)",
        "floor(0.9)",
        "barrier",
        "row-anchor(statement)",
        "state-anchor(statement)",
        "weighted-ce",
        "ce + project + 0.1*weight-anchor",
    ],
)
def test_mixed_precision_moves_weights_as_float32_does(tmp_path, objective, family):
    """Products of bfloat16 are off by up to 0.4%; three large steps made 7% of it, on the tiny Llama's sharp loss."""
    start = {name: value.detach().clone() for name, value in tiny_model(family).named_parameters()}
    exact, mixed = (trained(tmp_path, objective, family, bf16=bf16) for bf16 in (False, True))
    moved = sum(float((exact[name] - start[name]).square().sum()) for name in start) ** 0.5
    off = sum(float((exact[name] - mixed[name]).square().sum()) for name in start) ** 0.5
    assert 0 < off < 0.1 * moved


def test_mixed_precision_is_transformers_own(tmp_path):
    """Ours computes logits for labelled tokens alone, transformers for all; twice the loss is half the rate."""
    model = tiny_model("llama")
    data, pad = some_examples(), tiny_tokenizer("bos").pad_token_id
    trainer = Trainer(
        model=model,
        args=arguments(tmp_path, bf16=True, learning_rate=0.1),
        train_dataset=data,
        data_collator=lambda examples: {name: collate(examples, pad)[name] for name in (*INPUTS, "labels")},
    )
    trainer.train()
    theirs = {name: value.detach().clone() for name, value in model.named_parameters()}
    assert_close(trained(tmp_path, "2*ce", bf16=True), theirs, 1e-3)


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
    metrics = trainer.evaluate()
    reference, losses, right, attention = eager(tiny_model("llama")), [], [], []
    for example in examples:
        output = reference(input_ids=torch.tensor([example.ids]), output_attentions=True)
        labels = torch.tensor(example.labels)
        positions = (labels != IGNORED).nonzero()[:, 0]
        predictions = output.logits[0, positions - 1].log_softmax(-1)
        losses.append(-predictions[torch.arange(len(positions)), labels[positions]])
        right.append(bool((predictions.argmax(-1) == labels[positions]).all()))
        rows = torch.stack([layer[0, :, example.query] for layer in output.attentions])
        attention.append(rows[:, :, list(example.spans["subject"])].amax(-1).mean(-1))
    mean = float(torch.cat(losses).mean())
    assert metrics["eval_answer_loss"] == pytest.approx(mean, rel=1e-5)
    assert metrics["eval_objective"] == pytest.approx(2 * mean, rel=1e-5)
    assert metrics["eval_accuracy"] == pytest.approx(sum(right) / len(right))
    for layer, value in enumerate(torch.stack(attention).mean(0).tolist()):
        assert metrics[f"eval_subject_attention/{layer}"] == pytest.approx(value, rel=1e-5)


def test_rows_tokenized_elsewhere_train_as_our_own(tmp_path):
    own = some_examples()
    rows = [{"input_ids": example.ids, "labels": example.labels} for example in own]
    facts = [example.prompt.fact for example in own if example.prompt]
    read = as_examples(rows, facts, tiny_tokenizer("bos"))
    assert_close(trained(tmp_path, ROW), trained(tmp_path, ROW, data=read), 0.0)


TOKENS, EACH = "ce + kl(statement)", "0.5*barrier + row-anchor(statement) + state-anchor(statement) + floor(0.9)"
"""Terms with a loss for each token, and for each example."""


def general_rows():
    rows = [
        {"input_ids": [5, 6, 7, 8, 9], "labels": [IGNORED] * 3 + [8, 9]},
        {"input_ids": [9, 8, 7], "labels": [9, 8, 7]},
    ]
    return as_examples(rows, [None, None], tiny_tokenizer("bos"))


def test_rows_about_no_fact_learn_their_labels_alone(tmp_path):
    model, facts, general = tiny_model("llama"), make_examples(FACTS, tiny_tokenizer("bos")), general_rows()

    def loss_of(objective, examples):
        trainer = made(tmp_path, model, objective, train_dataset=examples)
        return float(trainer.compute_loss(model, collate(trainer.train_dataset)).detach())

    plain = eager(tiny_model("llama"))
    naive = 0.0
    for row in general:
        logits = plain(torch.tensor([row.ids])).logits[0].log_softmax(-1)
        naive -= sum(float(logits[i - 1, label]) for i, label in enumerate(row.labels) if i and label != IGNORED)
    tokens, own = sum(label != IGNORED for row in facts for label in row.labels), 2 + 2
    expected = (tokens * loss_of(TOKENS, facts) + naive) / (tokens + own)
    expected += len(facts) * loss_of(EACH, facts) / (len(facts) + len(general))
    assert loss_of(f"{TOKENS} + {EACH}", [*facts[:3], *general, *facts[3:]]) == pytest.approx(expected, rel=1e-5)
    assert loss_of(f"weighted-ce + {EACH}", general + facts) > 0
    with pytest.raises(DataError, match="learns no answers, so 2 of 11 examples, which have no prompt, would not be"):
        loss_of("kl(statement)", facts + general)


@pytest.mark.parametrize("term", ["kl(question)", "row-anchor(question)", "state-anchor(question)"])
def test_terms_that_compare_with_the_base_hold_replayed_facts_alone(term, tmp_path):
    """And `kl` is their only teacher: `ce` learns the others' answers."""
    facts, model = make_examples(FACTS, tiny_tokenizer("bos")), lora(tiny_model("llama"))
    marked = {REPLAYED: torch.tensor(True)}
    mixed = [replace(example, targets=marked) if i % 2 else example for i, example in enumerate(facts)]
    learned = facts[::2] if "kl" in term else facts
    both = made(tmp_path, model, f"ce + 3*{term}", train_dataset=mixed)
    learning = made(tmp_path, model, "ce", train_dataset=learned)
    alone = made(tmp_path, model, term, train_dataset=facts[1::2])
    with torch.no_grad():  # away from the base
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.5)

    def loss(trainer, rows=None):
        return float(trainer.compute_loss(model, collate(rows or trainer.train_dataset)).detach())

    learned, held = loss(learning), 3 * loss(alone)
    assert held > 1e-3
    assert loss(both) == pytest.approx(learned + held, rel=1e-4)
    assert both.evaluate(mixed)["eval_objective"] == pytest.approx(learned + held, rel=1e-4)
    new, replayed = both.train_dataset[::2], both.train_dataset[1::2]
    both_learned = "kl" not in term
    assert loss(both, new) == pytest.approx(loss(learning, facts[::2]), rel=1e-4)
    assert loss(both, replayed) == pytest.approx(held + (loss(learning, facts[1::2]) if both_learned else 0), rel=1e-4)


def test_a_batch_without_labels_has_no_loss_that_could_be_taken_for_zero(tmp_path):
    trainer = made(tmp_path, objective="2*ce")
    batch = collate(some_examples()[:2])
    batch["labels"] = torch.full_like(batch["labels"], IGNORED)
    assert torch.isnan(trainer.compute_loss(trainer.model, batch))


def test_rows_about_no_fact_train_in_batches_of_their_own_and_are_not_watched(tmp_path):
    facts, general = make_examples(FACTS, tiny_tokenizer("bos")), general_rows()
    model = tiny_model("llama")
    data = general * 2 + facts[:4]  # a first batch without facts
    trainer = made(
        tmp_path,
        model,
        f"{TOKENS} + {EACH}",
        train_dataset=data,
        eval_dataset={"a": facts, "b": facts + general, "c": general},
    )
    metrics = trainer.evaluate()
    for name in ("accuracy", "subject_attention/0"):
        assert metrics[f"eval_a_{name}"] == metrics[f"eval_b_{name}"]
        assert f"eval_c_{name}" not in metrics
    assert metrics["eval_b_answer_loss"] != metrics["eval_a_answer_loss"]
    bare = [Example((5, 6, 7, 8), (IGNORED, IGNORED, 7, 8))] * 5  # a batch of 4 of them alone, which marks no subject
    plain = made(tmp_path, objective="ce", train_dataset=facts, eval_dataset={"a": facts, "b": facts + bare})
    metrics = plain.evaluate()
    assert metrics["eval_a_subject_attention/0"] == pytest.approx(metrics["eval_b_subject_attention/0"], rel=1e-6)
    trainer.train()
    before, after = tiny_model("llama").state_dict(), model.state_dict()
    assert all(torch.isfinite(value).all() for value in after.values())
    assert any(not torch.equal(before[name], after[name]) for name in before)


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
    rows = [{"input_ids": list(example.ids), "labels": list(example.labels)} for example in some_examples()]
    with pytest.raises(DataError, match="make_examples or as_examples"):
        trained(tmp_path, ROW, data=rows)
    with pytest.raises(DataError, match=r"tokens of the relation in every prompt.*\{relation\}"):
        trained(tmp_path, "ce + balance")


def test_any_sequence_of_examples_is_trained_and_evaluated_on(tmp_path):
    examples = make_examples(FACTS, tiny_tokenizer("bos"))
    part = torch.utils.data.Subset(examples, [0, 2, 4, 6])
    trainer = made(tmp_path, train_dataset=part, eval_dataset={"a": examples[4:], "b": examples[:2]})
    assert [example.prompt for example in trainer.train_dataset] == [examples[i].prompt for i in (0, 2, 4, 6)]
    metrics = trainer.evaluate()
    assert {"eval_a_objective", "eval_b_objective"} <= metrics.keys()
    alone = made(tmp_path, eval_dataset=examples[:2])
    assert alone.evaluate()["eval_objective"] == pytest.approx(metrics["eval_b_objective"], rel=1e-6)
    assert alone.evaluate(examples[4:])["eval_objective"] == pytest.approx(metrics["eval_a_objective"], rel=1e-6)


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
            for example in some_examples():
                yield {"input_ids": torch.tensor(example.ids[:12]), "labels": torch.tensor(example.ids[:12])}

    models = [tiny_model("llama"), tiny_model("llama")]
    for kind, model in zip((ObjectiveTrainer, Trainer), models, strict=True):
        kind(model=model, args=arguments(tmp_path), train_dataset=Stream()).train()
    assert_close(*(dict(model.named_parameters()) for model in models), 0.0)
    with pytest.raises(DataError, match="needs a list of examples .*, got a Stream, which has no length"):
        made(tmp_path, train_dataset=Stream())


@pytest.mark.parametrize("tokenizer", [None, tiny_tokenizer("bos")])
def test_a_stream_of_examples_is_refused_by_name(tmp_path, tokenizer):
    class Stream(torch.utils.data.IterableDataset):
        """Examples that come one after the other."""

        def __iter__(self):
            return iter(some_examples())

    options = {"model": tiny_model("llama"), "args": arguments(tmp_path), "processing_class": tokenizer}
    with pytest.raises(DataError, match="data hold examples in a Stream; pass them in a list"):
        ObjectiveTrainer(**options, train_dataset=Stream()).train()
    with pytest.raises(DataError, match="data hold examples in a Stream; pass them in a list"):
        ObjectiveTrainer(**options, eval_dataset=Stream()).evaluate()


def test_a_trainer_that_only_evaluates_needs_no_training_data(tmp_path):
    examples = make_examples(FACTS, tiny_tokenizer("bos"))
    alone = made(tmp_path, train_dataset=None, eval_dataset=examples).evaluate()
    beside = made(tmp_path, eval_dataset=examples).evaluate()
    assert alone["eval_objective"] == beside["eval_objective"]


@pytest.mark.parametrize("objective", ["ce", "ce + kl(statement)"])
def test_examples_beside_rows_are_refused(tmp_path, objective):
    rows = [{"input_ids": list(example.ids), "labels": list(example.labels)} for example in some_examples()]
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
    metrics, plain = trainer.evaluate(), made(tmp_path, eval_dataset=sets).evaluate()
    for name in ("eval_first_objective", "eval_second_objective"):
        assert metrics[name] == pytest.approx(plain[name], rel=1e-6)


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
    for example, other in zip(framed.train_dataset, made(tmp_path).train_dataset, strict=True):
        for name, expected in other.targets.items():
            torch.testing.assert_close(example.targets[name], expected, rtol=0, atol=0)


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
    assert seen == [(len(FACTS), max(len(example.ids) for example in examples), 420)]


def test_parts_of_an_adapter_that_were_frozen_stay_so(tmp_path):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model("llama"), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    made(tmp_path, model)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if "lora_B" in name
    }


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


def test_evaluations_that_watch_attention_need_one_model(tmp_path):
    """The model that `model_init` makes is not the one whose attention would be watched."""
    settings = {"model_init": lambda: tiny_model("llama"), "processing_class": tiny_tokenizer("bos")}
    data = {"train_dataset": some_examples(), "eval_dataset": some_examples()}
    with pytest.raises(ModelError, match="evaluations that watch attention, need one model"):
        ObjectiveTrainer(args=arguments(tmp_path), **settings, **data, objective="ce")
    ObjectiveTrainer(args=arguments(tmp_path), **settings, train_dataset=some_examples(), objective="ce").train()


@pytest.mark.parametrize("objective", ["ce", "ce + barrier"])
def test_another_attention_set_after_the_trainer_was_made_is_refused(tmp_path, objective):
    """Whole maps would be read as rows, in batches whose size happens to fit."""
    model = tiny_model("llama")
    trainer = made(tmp_path, model, objective, eval_dataset=some_examples())
    trainer.evaluate()
    model.set_attn_implementation("eager")
    with pytest.raises(ModelError, match="runs attention implementation 'eager', set after it was loaded"):
        trainer.evaluate()


def test_weights_frozen_in_one_training_may_be_trained_by_another_in_between(tmp_path):
    model = tiny_model("llama")
    frozen = {head: train_only(model, select_weights(model, f"q@0.{head}")) for head in (0, 1)}
    weight, size = model.model.layers[0].self_attn.q_proj.weight, 8
    for head in (0, 1, 0, 1):
        before = weight.detach().clone()
        model.requires_grad_(False)
        weight.requires_grad_(True)
        made(tmp_path, model, "ce", frozen=frozen[head]).train()
        moved = (weight.detach() != before).any(dim=1).view(-1, size).any(dim=1)
        assert moved.tolist() == [i == head for i in range(4)]


def test_a_loss_that_is_no_number_names_the_batch(tmp_path):
    with pytest.raises(ModelError, match="at step 2, in the batch that begins with .*Liechtenstein"):
        trained(tmp_path, "ce + kl(question)", learning_rate=1e38)
