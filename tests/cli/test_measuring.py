"""`curve` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

from commands import run_command


def test_curve_prints_the_answer_and_where_the_report_is(
    llama_folder: Path, lora_folder: Path, facts_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    models = (f"a={llama_folder}", f"b={llama_folder}+{lora_folder}")
    code, text = run_command("curve", *models, "--facts", facts_file, "--recall", "--out", out)
    assert code == 0, text
    assert "already finished" not in text
    assert json.loads((out / "attnbalance.json").read_text())["answer"] in text.replace("\n", " ")
    assert str(out / "report.html") in text
    recall = json.loads((out / "recall.json").read_text())
    assert [entry["label"] for entry in recall] == ["a", "b"]
    code, text = run_command("curve", *models, "--facts", facts_file, "--recall", "--out", out)
    assert (code, "already finished with these settings; nothing was computed again" in text) == (0, True), text
    assert {"accuracy", "low", "high", "n", "shortcut_rate", "by_popularity"} <= set(recall[0])
