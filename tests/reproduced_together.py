"""A figure in the processes of a launch: `reproduced_together.py fsdp|ddp FIGURE OUT MODEL FACTS CHOICES`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from launched import leave_together
from transformers import Trainer, TrainingArguments

from attnbalance.finetuning import loop
from attnbalance.papers.reproduce import reproduce

SHARDED: list[int] = []
"""For each training the version of FSDP; 0: none."""


def _let_shard(arguments: TrainingArguments) -> TrainingArguments:
    """Accelerate shards on accelerators alone: without this it would wrap the model in DDP, and say nothing."""
    PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return arguments


def _version(trainer: Trainer) -> int:
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return plugin.fsdp_version if trainer.is_fsdp_enabled and plugin else 0


def main(kind: str, figure: str, out: str, model: str, facts: str, choices: str) -> None:
    """A figure at the tiny scale; asserts that their trainings were sharded, or were not."""
    torch.set_num_threads(1)
    if kind == "fsdp":
        make_arguments = loop._arguments
        loop._arguments = lambda *args, **kwargs: _let_shard(make_arguments(*args, **kwargs))
    check_whole = loop.check_whole
    loop.check_whole = lambda trainer: (SHARDED.append(_version(trainer)), check_whole(trainer))[1]
    answer = reproduce([figure], out, scale="tiny", seeds=2, model=model, facts=facts, choices=choices)
    assert SHARDED
    assert set(SHARDED) == {2 if kind == "fsdp" else 0}
    answers: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    assert answer.startswith("Ghosal et al. 2024: ")
    assert set(answers) == {answer}
    leave_together()


if __name__ == "__main__":
    main(*sys.argv[1:])
