"""What is not trained stays equal to the bit, in wrapped models, with any optimizer and after an interrupt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from tempfile import mkdtemp

import pytest
import torch
from partly_trained import check_moved, full, train
from tiny import VOCABULARY
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from uneven import uneven

from attnbalance.errors import ModelError
from attnbalance.finetuning.adapters import add_lora
from attnbalance.finetuning.parameters import FrozenWeights, select_weights, train_only

IDS = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


class Wrapped(nn.Module):
    """What DDP does to names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Tensor) -> object:
        return self.module(**inputs)


def sharded(model: nn.Module) -> nn.Module:
    """By FSDP2, over one process and on the CPU: every parameter becomes a DTensor."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{mkdtemp()}/store", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.get_submodule("gpt_neox.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": Wrapped,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "ddp compiled": lambda model: torch.compile(Wrapped(model), backend="eager"),
    "fsdp2": sharded,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_the_guard_finds_parameters_in_wrapped_models(wrapping: str) -> None:
    before = uneven("neox")
    model = copy.deepcopy(before)
    chosen = select_weights(model, "qk@0.1")
    frozen = train_only(model, chosen)
    try:
        train(WRAPPINGS[wrapping](model), frozen, steps=5)
        after = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in model.named_parameters()}
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    check_moved(dict(before.named_parameters()), after, full(chosen, after), moved=0.99)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_training_that_is_taken_up_again_keeps_the_rest(lora: bool) -> None:
    before = uneven("gpt2")
    chosen = select_weights(before, "qk@0.1+o@0.1")

    def begin(seed: int) -> tuple[nn.Module, FrozenWeights]:
        torch.manual_seed(seed)
        model = copy.deepcopy(before)
        return add_lora(model, chosen, 2, 4) if lora else (model, train_only(model, chosen))

    first, frozen = begin(0)
    train(first, frozen, steps=5)
    model, frozen = begin(1)  # the guard is made first, the checkpoint loaded after it
    model.load_state_dict(first.state_dict())
    train(model, frozen, steps=5)
    own = dict(before.named_parameters())
    masks = {name: mask for name, mask in full(chosen, own).items() if not lora or mask.dim() == 2}
    after = model.merge_and_unload() if lora else model
    check_moved(own, dict(after.named_parameters()), masks, moved=0.99)


def test_a_model_without_the_guarded_parameters_is_refused() -> None:
    model = uneven("neox")
    frozen = train_only(model, select_weights(model, "qk"))
    with pytest.raises(ModelError, match=r"Linear has no parameter .*query_key_value\.weight, which is trained"):
        frozen.mask_gradients(nn.Linear(2, 2))


def test_the_norm_of_gradients_counts_what_is_trained_only() -> None:
    model = uneven("neox")
    chosen = select_weights(model, "qk@0.1")
    frozen = train_only(model, chosen)
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    masks = full(chosen, dict(model.named_parameters()))
    gradients = {name: model.get_parameter(name).grad for name in masks}
    chosen_ones = [gradient[masks[name]] for name, gradient in gradients.items() if gradient is not None]
    expected = torch.cat(chosen_ones).norm()
    frozen.mask_gradients(model)
    norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1e9)
    assert torch.allclose(norm, expected, rtol=1e-5)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adafactor, torch.optim.RMSprop])
def test_other_optimizers_and_16_bits_leave_the_rest_alone_too(optimizer: type[torch.optim.Optimizer]) -> None:
    before = uneven("neox").bfloat16()
    model = copy.deepcopy(before)
    chosen = select_weights(model, "q@0.1")
    frozen = train_only(model, chosen)
    steps = optimizer([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)
    for _ in range(3):
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        frozen.mask_gradients(model)
        steps.step()
        frozen.restore(model)
    check_moved(dict(before.named_parameters()), dict(model.named_parameters()), full(chosen, before.state_dict()), 0.5)
