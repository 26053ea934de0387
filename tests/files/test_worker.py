"""A worker's index and number, from text or from Slurm."""

from __future__ import annotations

import pytest

from attnbalance.errors import DataError
from attnbalance.files.worker import parse_worker


@pytest.mark.parametrize("worker", ["2/2", "x", "-1/2", "1", "\u00b2/3", "9" * 5000 + "/3", ""])
def test_a_worker_is_one_of_their_number(worker: str) -> None:
    with pytest.raises(DataError, match="I/N"):
        parse_worker(worker)


def test_slurms_array_index_names_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ID", "8"), ("MIN", "4"), ("STEP", "2"), ("COUNT", "3")):  # 4, 6 and 8
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    assert parse_worker(None) == (2, 3)
    monkeypatch.setenv("SLURM_ARRAY_TASK_STEP", "two")
    with pytest.raises(DataError, match="must be whole numbers"):
        parse_worker(None)
