"""Objectives in a Trainer: short trainings of tiny models, and how two of them are compared."""

from launched import BATCH, STEPS
from tiny import FACTS, tiny_model, tiny_tokenizer
from transformers import TrainingArguments

from attnbalance.finetuning.examples import make_examples
from attnbalance.finetuning.trainer import ObjectiveTrainer

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


def made(folder, model=None, objective="ce + kl(statement)", **options):
    trainer = {"train_dataset": some_examples(), "processing_class": tiny_tokenizer("bos")} | options
    model = tiny_model("llama") if model is None else model
    settings = trainer.pop("args", arguments(folder))
    return ObjectiveTrainer(model=model, args=settings, objective=objective, **trainer)


def lora(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))
