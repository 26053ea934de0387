"""The folder of results that a comparison leaves: prompts, curves, readings, recall, figure and report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from attnbalance.errors import AttnBalanceError, DataError
from attnbalance.facts import FactSet
from attnbalance.measure import How, ModelSpec, measure_all, settings, usable_prompts
from attnbalance.outputs import (
    MARKER,
    as_folder,
    close_work,
    is_finished,
    open_work,
    provenance,
    read_json,
    replacing,
    write_json,
    write_text,
)
from attnbalance.readings.compare import Comparison
from attnbalance.report.figures import draw_curves, save
from attnbalance.report.html import write_report
from attnbalance.report.sentence import headline
from attnbalance.report.tables import curves_json, recall_json, write_readings

KIND = "curve"


def curve(
    specs: Sequence[ModelSpec],
    facts: FactSet,
    how: How,
    out: str | Path,
    *,
    skip_bad: bool = False,
    command: str = "",
    progress: bool = False,
) -> str:
    """Measure models on questions about facts and write the folder `out`, whole; returns the report's first sentence.

    The first two models are the pair whose difference the report is about. A folder that is finished with the same
    settings, facts and weights is left as it is; a killed run goes on with the models that it had not yet measured.
    Raises `AttnBalanceError` for whatever cannot be read, asked or written.
    """
    out = as_folder(out)
    if not specs:
        raise DataError("expected at least one LABEL=MODEL to measure, got none")
    config = settings(specs, facts, how, skip_bad)
    if not is_finished(out, KIND, config):
        prompts, dropped = usable_prompts(facts, specs, how, skip_bad)
        work = open_work(out, KIND, config)
        try:
            measured = measure_all(specs, prompts, how, work, progress=progress)
        except AttnBalanceError:
            if not any(work.glob("measured-*")):
                close_work(out)
            raise
        labels = tuple(one.label for one in measured)
        pair = (labels[0], labels[1]) if len(labels) > 1 else None
        comparison = Comparison(measured, prompts, how.reduce, pair, {**facts.dropped, **dropped}, how.seed)
        with replacing(out) as folder:
            folder.mkdir()
            write_results(comparison, folder, KIND, config, title="Attention to the subject", command=command)
    close_work(out)
    return str(read_json(out / MARKER)["answer"])


def write_results(
    comparison: Comparison, folder: Path, kind: str, config: Mapping[str, object], *, title: str, command: str
) -> None:
    """Write what a comparison says into a folder, each file whole, attnbalance.json with the answer last."""
    write_numbers(comparison, folder)
    write_report(comparison, folder / "report.html", title=title, command=command)
    write_marker(folder, kind, config, headline(comparison), command, comparison.dropped)


def write_marker(
    folder: Path, kind: str, config: Mapping[str, object], answer: str, command: str, dropped: Mapping[str, int]
) -> None:
    """Write attnbalance.json, which says what a folder of results holds, how it was made, and that it is whole."""
    about = {"kind": kind, "config": dict(config), "answer": answer, "command": command}
    write_json(folder / MARKER, about | {"dropped": dict(dropped)} | provenance())


def write_numbers(comparison: Comparison, folder: Path) -> None:
    """Write a comparison's prompts, curves, readings and answers, and the figure of its curves."""
    lines = [json.dumps(prompt.as_dict(), ensure_ascii=False) + "\n" for prompt in comparison.prompts]
    write_text(folder / "prompts.jsonl", "".join(lines))
    write_json(folder / "curves.json", curves_json(comparison))
    write_readings([(one.label, one.attention) for one in comparison.measured], folder / "readings.parquet")
    if any(one.recall for one in comparison.measured):
        write_json(folder / "recall.json", recall_json(comparison))
        write_text(folder / "answers.jsonl", "".join(_answers(comparison)))
    with replacing(folder / "curves.png") as path:
        save(draw_curves(comparison), path, format="png", dpi=150)


def _answers(comparison: Comparison) -> list[str]:
    """What each model said to each prompt, one JSON object a line."""
    return [
        json.dumps(
            dict(zip(("label", "prompt_id", "output", "correct", "shortcut"), row, strict=True)), ensure_ascii=False
        )
        + "\n"
        for one in comparison.measured
        if one.recall
        for row in zip(
            [one.label] * len(one.recall.outputs),
            one.recall.prompt_ids,
            one.recall.outputs,
            one.recall.correct,
            one.recall.shortcut,
            strict=True,
        )
    ]
