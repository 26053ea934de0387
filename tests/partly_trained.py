"""Models of which a part is trained: what their masks say, a short training, and what it may have moved."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tiny import VOCABULARY
from torch import Tensor, nn

from attnbalance.finetuning.parameters import Chosen, FrozenWeights

Masks = Mapping[str, Tensor]


def full(chosen: Chosen, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Masks with None written out."""
    return {
        name: torch.ones(own[name].shape, dtype=torch.bool) if mask is None else mask
        for name, mask in chosen.masks.items()
    }


def train(model: nn.Module, frozen: FrozenWeights, steps: int = 50) -> None:
    """AdamW with weight decay on random data; gradients are masked, clipped, and what is not trained restored."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        ids = torch.randint(VOCABULARY, (2, 8), generator=generator)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        frozen.mask_gradients(model)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        frozen.restore(model)


def check_moved(before: Masks, after: Masks, chosen: Masks, moved: float) -> None:
    """Everything outside of `chosen` is equal to the bit; of what is inside at least a share has moved."""
    for name, was in before.items():
        mask = chosen.get(name, torch.zeros(was.shape, dtype=torch.bool))
        assert torch.equal(after[name][~mask], was[~mask]), name
        changed = (after[name] != was)[mask]
        assert not len(changed) or changed.float().mean() > moved, name
