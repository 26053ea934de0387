"""The base model's numbers for a trainer's data: computed once for each example, however often it comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnbalance.errors import ModelError
from attnbalance.finetuning.examples import Example
from attnbalance.finetuning.objectives.base_model import base_is_kept
from attnbalance.finetuning.objectives.objective import Objective
from attnbalance.finetuning.objectives.targets import add_targets
from attnbalance.models.fingerprint import base_sums, same_sums
from attnbalance.models.hooked import HookedModel


class BaseTargets:
    """Adds targets to examples and keeps them for each example object, so that evaluations reuse them."""

    def __init__(
        self,
        objective: Objective,
        base: HookedModel,
        sums: Mapping[str, float],
        folder: str | None,
        progress: bool = False,
    ) -> None:
        """`sums` are the `base_sums` of the base before training; `folder` holds what is too large for memory."""
        self.objective, self.base, self.sums, self.folder, self.progress = objective, base, sums, folder, progress
        self.train_examples: tuple[Example, ...] = ()
        """The training examples with targets, that later examples are compared with."""
        self._by_id: dict[int, tuple[Example, Example]] = {}
        """By identity: an example, which is kept so that the identity stays its own, and the example with targets."""

    def add(self, examples: Sequence[Example], *, trained: bool, batch_size: int, seed: int) -> list[Example]:
        """The examples with targets. Raises `ModelError` for new examples if training has changed the base."""
        different = list({id(example): example for example in examples}.values())
        new = sum(id(example) not in self._by_id for example in different)
        if new:
            if not base_is_kept(self.base.model) and (trained or self._is_replaced()):
                raise ModelError(
                    f"objective {self.objective.text!r} needs the base model's numbers for {new} new examples, but the "
                    "base's own weights have been trained; pass these examples as eval_dataset when the trainer is "
                    "made (a dict for several sets), or train adapters"
                )
            among = self.train_examples
            how = {"batch_size": batch_size, "seed": seed, "among": among, "folder": self.folder}
            how |= {"progress": self.progress}
            added = add_targets(different, self.objective, self.base, **how)
            for example, with_targets in zip(different, added, strict=True):
                if id(example) not in self._by_id:
                    self._by_id[id(example)] = (example, with_targets)
                    self._by_id[id(with_targets)] = (with_targets, with_targets)
        return [self._by_id[id(example)][1] for example in examples]

    def _is_replaced(self) -> bool:
        """Whether weights of the base were replaced since the trainer was made."""
        return not same_sums(base_sums(self.base.model), self.sums)

    def set_train(self, examples: Sequence[Example]) -> None:
        """Compare later examples with these training examples, which have targets."""
        self.train_examples = tuple({id(example): example for example in examples}.values())
