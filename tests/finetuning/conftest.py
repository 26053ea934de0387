"""Pretrained tiny bases, and trainings that die on demand."""

from __future__ import annotations

import pytest
from short_runs import TINY, WORLD, Killed
from transformers import TrainerCallback

from attnbalance.finetuning import loop
from attnbalance.finetuning.pretrain import pretrain


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def base(request, tmp_path_factory):
    return pretrain(WORLD, tmp_path_factory.mktemp("base") / request.param, architecture=request.param, recipe=TINY)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return pretrain(WORLD, tmp_path_factory.mktemp("llama") / "base", recipe=TINY)


@pytest.fixture
def kill_at(monkeypatch):
    """Makes the next trainings die at an event of a step, as often as steps are named."""

    def arrange(event: str, *steps: int) -> None:
        left = list(steps)

        def die(self, args, state, control, **kwargs):
            if left and state.global_step == left[0]:
                left.pop(0)
                raise Killed

        killer = type("Killer", (TrainerCallback,), {event: die})()
        original = loop.ObjectiveTrainer.__init__

        def with_killer(self, *args, **kwargs):
            original(self, *args, **kwargs)
            self.callback_handler.callbacks.insert(0, killer)

        monkeypatch.setattr(loop.ObjectiveTrainer, "__init__", with_killer)

    return arrange
