"""A small training in processes: `launched.py OUT OBJECTIVE [fsdp|watch|evaluated|replay]` writes the weights."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from safetensors.torch import save_file
from tiny import FACTS, tiny_model, tiny_tokenizer
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

from attnbalance.data.facts import FactSet
from attnbalance.finetuning.examples import REPLAYED, Example, make_examples
from attnbalance.finetuning.trainer import ObjectiveTrainer
from attnbalance.finetuning.watch import Watch

STEPS, BATCH = 3, 8


def leave_together() -> None:
    """End all processes of a launch at once."""
    dist.barrier()  # a process that leaves first breaks the others' connections
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo that wait for the other process may never end


def third_replayed(data: list[Example]) -> list[Example]:
    """Every third example is marked as a replayed fact."""
    return [replace(row, targets={REPLAYED: torch.tensor(i % 3 == 0)}) for i, row in enumerate(data)]


def main(out: str, objective: str, kind: str = "") -> None:
    """Three steps of plain gradient descent on batches of eight examples over all processes."""
    torch.set_num_threads(1)
    tokenizer = tiny_tokenizer("bos")
    examples = make_examples(FACTS, tokenizer)
    data = [examples[i % len(examples)] for i in range(STEPS * BATCH)]
    if kind == "replay":
        data = third_replayed(data)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    sharded = {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2, "reshard_after_forward": True}}
    arguments = TrainingArguments(
        output_dir=f"{out}.work",
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // processes,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        **(sharded if kind == "fsdp" else {}),
    )
    if kind == "fsdp":
        # Accelerate shards on accelerators alone: without this it would wrap the model in DDP, and say nothing.
        PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    model = tiny_model("llama")
    trainer = ObjectiveTrainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data if kind == "evaluated" else None,
        processing_class=tokenizer,
        objective=objective,
    )
    if kind == "evaluated":
        trainer.evaluate()
    if kind == "watch":
        trainer.add_callback(Watch(FactSet(FACTS), trainer, every=1))
    trainer.train()
    looks = sum("watch/accuracy" in entry for entry in trainer.state.log_history)
    assert looks == (STEPS + 1 if kind == "watch" and trainer.is_world_process_zero() else 0)
    assert trainer.is_fsdp_enabled == (kind == "fsdp")
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters()) == (kind == "fsdp")
    weights = {}
    for name, parameter in trainer.model_wrapped.named_parameters():  # pyright: ignore[reportOptionalMemberAccess]
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        weights[name.removeprefix("module.")] = whole.detach().clone().contiguous()
    if trainer.is_world_process_zero():
        save_file(weights, out)
    if dist.is_initialized():
        leave_together()


if __name__ == "__main__":
    main(*sys.argv[1:])
