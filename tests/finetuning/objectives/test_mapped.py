"""Numbers in files that are mapped into memory: they are the same numbers, and leave nothing behind."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from base_oracle import base
from tiny import FACTS

from attnbalance.errors import OutputError
from attnbalance.finetuning.examples import make_examples
from attnbalance.finetuning.objectives import mapped
from attnbalance.finetuning.objectives.mapped import collected
from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.finetuning.objectives.targets import add_targets

TENSORS = {
    "wide": torch.randn(3, 5).T,  # not contiguous
    "half": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
    "number": torch.tensor(7.25, dtype=torch.float64),
    "flags": torch.tensor([True, False, True]),
    "ids": torch.arange(9)[::2],
    "none": torch.zeros(0, 4),
}


def files_in_memory(folder: Path) -> int:
    """Files of a folder that this process has mapped, whether or not they still have a name."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum(f"{folder}/.base-" in line for line in lines)


def test_numbers_in_files_are_the_same_and_the_files_go_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [sum(tensor.nbytes for tensor in TENSORS.values())] * 5
    monkeypatch.setattr(mapped, "IN_MEMORY", 2 * sizes[0] - 1)  # two at a time, and the last stays in memory
    given = {index: {name: tensor.clone() for name, tensor in TENSORS.items()} for index in (4, 2, 0, 1, 3)}
    kept = collected(iter(given.items()), tmp_path)
    assert kept.keys() == given.keys()
    for index, tensors in given.items():
        for name, tensor in tensors.items():
            assert kept[index][name].dtype == tensor.dtype
            assert torch.equal(kept[index][name], tensor), name
    assert kept[3]["wide"] is given[3]["wide"]
    assert kept[4]["wide"] is not given[4]["wide"]
    assert files_in_memory(tmp_path) == 2
    assert not list(tmp_path.iterdir())
    del kept
    gc.collect()
    assert files_in_memory(tmp_path) == 0


def test_targets_in_files_are_those_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "kl(best) + row-anchor(question) + row-anchor(statement) + state-anchor + weighted-ce(relevance)"
    model = base()[0]
    examples = make_examples(FACTS, model.tokenizer)
    expected = add_targets(examples, parse_objective(text), model, batch_size=2)
    monkeypatch.setattr(mapped, "IN_MEMORY", 0)
    monkeypatch.setattr("attnbalance.finetuning.objectives.anchors.BATCHES", 1)
    folder = tmp_path / "new" / "folder"
    given = add_targets(examples, parse_objective(text), model, batch_size=2, folder=folder)
    assert files_in_memory(folder) > 1
    for one, other in zip(given, expected, strict=True):
        assert one.targets.keys() == other.targets.keys()
        for name, tensor in other.targets.items():
            # rows come from batches of other lengths: float32 sums over another number of masked positions
            torch.testing.assert_close(one.targets[name], tensor, rtol=0, atol=1e-6, msg=name)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(mapped, "IN_MEMORY", 0)
    with pytest.raises(OutputError, match=f"cannot write {tmp_path}/file"):
        collected([(0, {"number": torch.ones(3)})], tmp_path / "file")
