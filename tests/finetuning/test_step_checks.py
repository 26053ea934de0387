"""Checks of a training step: a loss without the objective, and one that is not finite, are refused."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model
from trainers import arguments, assert_close, made, some_examples
from transformers import Trainer

from attnbalance.errors import DivergenceError, ModelError
from attnbalance.finetuning.examples import collate
from attnbalance.finetuning.parameters import select_weights, train_only
from attnbalance.finetuning.trainer import ObjectiveMixin, ObjectiveTrainer


class Own(Trainer):
    """Its loss takes no notice of any other."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"], labels=inputs["labels"])
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Before(Own, ObjectiveMixin, Trainer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Leaves the objective out."""


@pytest.mark.parametrize("place", ["class", "object"])
def test_a_loss_that_leaves_the_objective_out_is_refused_at_the_first_step(tmp_path, place):
    model = tiny_model("llama")
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    kind = Before if place == "class" else ObjectiveTrainer
    trainer = kind(model=model, args=arguments(tmp_path), train_dataset=some_examples(), objective="2*ce")
    if place == "object":
        trainer.compute_loss = lambda model, inputs, **others: Own.compute_loss(trainer, model, inputs)
    with pytest.raises(ModelError, match=f"{kind.__name__}.compute_loss leaves out the objective '2\\*ce'"):
        trainer.train()
    assert_close(dict(model.named_parameters()), start, 0)


def test_a_loss_of_the_users_own_is_followed_where_there_is_no_other_objective(tmp_path):
    models, usual = [tiny_model("llama"), tiny_model("llama")], {"train_dataset": some_examples()}
    Before(model=models[0], args=arguments(tmp_path), objective="ce", **usual).train()
    Own(model=models[1], args=arguments(tmp_path), data_collator=lambda batch: collate(batch, 0), **usual).train()
    assert_close(*(dict(model.named_parameters()) for model in models), 0)


class OwnStep(ObjectiveTrainer):
    """A training step that computes the objective, and leaves out what ObjectiveMixin does to gradients."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model.train(), self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


class CallingStep(ObjectiveTrainer):
    """A training step that calls ObjectiveMixin's."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs, num_items_in_batch)


class AtFirst(OwnStep):
    """A training step that calls ObjectiveMixin's at the first step alone."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        step = OwnStep.training_step if self.state.global_step else ObjectiveTrainer.training_step
        return step(self, model, inputs, num_items_in_batch)


def test_a_training_step_that_leaves_out_the_mixins_is_refused_where_something_is_lost(tmp_path):
    def of(kind, objective, frozen=None, gradient_rank=None):
        model = tiny_model("llama")
        held = None if frozen is None else train_only(model, select_weights(model, frozen))
        how = {"objective": objective, "frozen": held, "gradient_rank": gradient_rank}
        kind(model=model, args=arguments(tmp_path), train_dataset=some_examples(), **how).train()
        return dict(model.named_parameters())

    for how in (("ce", "q@1.0"), ("ce", None, 1), ("2*ce",)):
        with pytest.raises(ModelError, match=r"OwnStep.training_step leaves out that of ObjectiveMixin"):
            of(OwnStep, *how)
        assert_close(of(CallingStep, *how), of(ObjectiveTrainer, *how), 0)
    assert_close(of(OwnStep, "ce"), of(ObjectiveTrainer, "ce"), 0)
    with pytest.raises(ModelError, match=r"AtFirst.training_step leaves out that of ObjectiveMixin"):
        of(AtFirst, "2*ce")


def test_a_loss_that_is_not_finite_names_its_step_and_batch(tmp_path):
    model = tiny_model("llama")
    trainer = made(tmp_path, model, objective="ce")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(DivergenceError, match="the training loss is nan at step 1, in the batch that begins with"):
        trainer.train()


def test_a_loss_that_is_not_finite_in_another_process_ends_this_one_too(tmp_path, monkeypatch):
    trainer = made(tmp_path, tiny_model("llama"), objective="ce")
    other = torch.tensor([0], dtype=torch.int32)
    monkeypatch.setattr(trainer.accelerator, "gather", lambda finite: torch.cat([finite, other]))
    with pytest.raises(DivergenceError, match="the training loss is not finite at step 1, in another process; lower"):
        trainer.train()
