"""The benchmarks that can be made small run to their end; the others have fixed shapes, and take minutes."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

import pytest

from attnbalance.finetuning.objectives import mapped

FACTS = """subject,relation,answers
Oslo,country,Norway
Paris,country,France
Rome,country,Italy
Peru,capital,Lima
Lionel Messi,sport,football
"""

SMALL = ["--rounds", "1", "--prompts", "8", "--shots", "1", "--lengths", "12"]

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(
    ("name", "options", "last"),
    [
        ("base_numbers", ["--facts", "80", "--in-memory-mib", "1"], "in memory"),
        ("intervals", ["--trials", "2"], "Spearman"),
        ("mixed_precision", ["MODEL", "--rounds", "2", "--lengths", "8", "12"], "LoRA     12"),
        ("own_facts", ["FACTS", "OUT"], "905 facts"),
        ("reading", ["--model", "MODEL", *SMALL], "16"),
        ("theory", ["--tokens", "60", "--repeats", "1", "--runs", "1"], "512"),
        ("trajectory", ["MODEL", "FACTS", "--facts", "3", "--checkpoints", "2"], '{"threads": 1'),
    ],
)
def test_a_benchmark_runs_and_prints_its_last_line(
    name: str,
    options: list[str],
    last: str,
    llama_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = tmp_path / "facts.csv"
    facts.write_text(FACTS)
    files = {"MODEL": str(llama_folder), "FACTS": str(facts), "OUT": str(tmp_path / "own.jsonl")}
    monkeypatch.setattr(sys, "argv", [name, *(files.get(option, option) for option in options)])
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(logging, "disable", lambda level: None)  # it would hold for the tests that follow
    monkeypatch.setattr(mapped, "IN_MEMORY", mapped.IN_MEMORY)  # likewise
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    assert not module.main()
    assert capsys.readouterr().out.splitlines()[-1].strip().startswith(last)
