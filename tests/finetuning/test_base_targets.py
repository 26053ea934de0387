"""The base's numbers for a trainer's data: the same before and after training, asked once, refused once it is gone."""

from dataclasses import replace

import pytest
import torch
from tiny import FACTS, tiny_model, tiny_tokenizer
from trainers import EVERYTHING, lora, made, some_examples
from transformers import TrainerCallback

from attnbalance.errors import ModelError
from attnbalance.finetuning import base_targets
from attnbalance.finetuning.examples import TARGET, make_examples
from attnbalance.finetuning.objectives.targets import add_targets


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
    targets = numbers_of_the_base(adapted.get_eval_dataloader(second))
    for name, batches in targets.items():
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
    for example, other in zip(adapted.train_dataset, plain.train_dataset, strict=True):
        for name in other.targets:
            torch.testing.assert_close(example.targets[name], other.targets[name], rtol=0, atol=1e-6)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert not torch.allclose(before, tiny_model("llama")(input_ids=ids).logits)
