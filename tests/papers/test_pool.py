"""Processes that run cells: workers share the cores, and those of one launch give what one process gives."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import invented_sources
import pytest
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from commands import run_in_two_processes
from doc_pages import blocks

from attnbalance.errors import DataError
from attnbalance.papers import pool
from attnbalance.papers.reproduce import reproduce

ROOT = Path(__file__).parents[2]


def sharded(folder: Path) -> dict[str, str]:
    """The environment that accelerate makes of the page's configuration, in full precision."""
    (page,) = blocks(ROOT / "docs" / "how-to" / "several-gpus.md", "yaml")
    (folder / "fsdp.yaml").write_text(yaml.safe_dump(yaml.safe_load(page) | {"mixed_precision": "no"}))
    arguments = launch_command_parser().parse_args(["--config_file", str(folder / "fsdp.yaml"), "script.py"])
    return prepare_multi_gpu_env(_validate_launch_command(arguments)[0])


def values(out: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text())["values"] for path in (out / "cells").iterdir()}


def close_to(value: Any) -> Any:
    """Equal but for the order of float32 sums: 3e-6 was seen where losses are about 6."""
    if isinstance(value, dict):
        return {key: close_to(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [close_to(inner) for inner in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


@pytest.mark.parametrize(("kind", "figure"), [("fsdp", "ghosal-table2"), ("ddp", "ghosal-table3")])
def test_two_processes_of_a_launch_train_each_cell_together_and_give_what_one_gives(
    kind: str, figure: str, long_llama_folder: Path, tmp_path: Path
) -> None:
    facts, choices = (f"{getattr(invented_sources, name)(tmp_path)}" for name in ("popqa_table", "choices"))
    sources = {"model": str(long_llama_folder), "facts": f"popqa:{facts}", "choices": choices}
    environment = sharded(tmp_path) if kind == "fsdp" else {}
    script = ROOT / "tests" / "reproduced_together.py"
    run_in_two_processes(script, kind, figure, tmp_path / "two", *sources.values(), environment=environment)
    reproduce([figure], tmp_path / "one", scale="tiny", seeds=2, **sources)
    alone, together = values(tmp_path / "one"), values(tmp_path / "two")
    assert sum("validation loss" in cell for cell in alone.values()) >= 4
    assert together == close_to(alone)
    assert (tmp_path / "two" / f"{figure}.png").is_file()


def test_workers_are_refused_in_processes_of_a_launch_and_are_one_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "processes", lambda: type("Two", (), {"num_processes": 2}))
    pool.check_workers(1)
    with pytest.raises(DataError, match="`workers` must be 1 for 2 processes that train each cell together, got 3"):
        pool.check_workers(3)
    assert pool.usual_workers() == 1
    monkeypatch.undo()
    pool.check_workers(3)
    assert pool.usual_workers() == (torch.cuda.device_count() or min(4, os.cpu_count() or 1))


def test_workers_share_the_cores() -> None:
    with pool.started_pool(2) as started:
        threads = [started.submit(torch.get_num_threads).result(timeout=120) for _ in range(4)]
    assert set(threads) == {max(1, (os.cpu_count() or 1) // 2)}
