"""The folder of results of a comparison: prompts, curves, readings, recall, figure and report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from attnbalance.arguments import expects
from attnbalance.comparison.caveats import caveats
from attnbalance.comparison.comparison import Comparison
from attnbalance.comparison.known_readings import chosen_readings
from attnbalance.comparison.measure import measure_all
from attnbalance.comparison.page import write_report
from attnbalance.comparison.sentences import headline
from attnbalance.comparison.specs import MeasureSettings, ModelSpec, refuse_changed, results_config
from attnbalance.comparison.tables import curves_json, differences_json, recall_json
from attnbalance.comparison.usable_prompts import usable_prompts
from attnbalance.data.facts import FactSet
from attnbalance.errors import DataError
from attnbalance.files.outputs import as_folder, replacing, write_json, write_json_lines
from attnbalance.files.processes import by_main_process
from attnbalance.files.result_folder import ResultFolder
from attnbalance.report.figures import draw_curves, save
from attnbalance.report.readings_table import write_readings

KIND = "curve"


@expects()
def compare(
    specs: Sequence[ModelSpec],
    facts: FactSet,
    settings: MeasureSettings,
    out: str | Path,
    *,
    readings: Sequence[str] = (),
    skip_bad: bool = False,
    command: str = "",
    progress: bool = False,
    shared: bool = False,
) -> str:
    """Measure models on questions about facts and write the folder `out`; returns the report's first sentence.

    A folder that is finished with the same settings, facts, weights, readings and version is left as it is. An
    interrupted run is resumed at the prompts that it had not yet measured. Raises `AttnBalanceError` for facts, models
    and folders that cannot be used.

    specs: the models; the report is about the second minus the first.
    facts: what to ask about.
    settings: how models are asked and read.
    out: the folder to write, all at once.
    readings: what to measure besides subject attention: "subject share", "relation share", "context share", "first
        token share", "rest share" (see `AttentionRows.share`), "attention entropy" (see `AttentionRows.entropy`),
        "value-weighted subject attention" (see `read_value_weighted_attention`; it takes a float32 copy of each model).
    skip_bad: drop facts that cannot be asked, instead of raising.
    command: the command line that the report names.
    progress: show progress bars.
    shared: share the prompts with the other processes of `accelerate launch`. All of them must call this with the same
        arguments; they wait for each other.
    """
    out = as_folder(out)
    if not specs:
        raise DataError("expected at least one LABEL=MODEL to measure, got none")
    titles = chosen_readings(readings)
    config = results_config(specs, facts, settings, skip_bad, titles)
    results = ResultFolder(out, KIND, config, command)
    if not results.is_finished():
        prompts, dropped = usable_prompts(facts, specs, settings, skip_bad)
        pair = (specs[1].label, specs[0].label) if len(specs) > 1 else None
        dropped = {**facts.dropped, **dropped}
        with results.working(shared) as work:
            measured = measure_all(specs, prompts, settings, work, progress=progress, readings=titles, shared=shared)

            def write() -> None:
                caveat = caveats(specs, prompts, {each.label: str(each.source["dtype"]) for each in measured})
                comparison = Comparison(measured, tuple(prompts), settings.reduce, pair, dropped, settings.seed, caveat)
                refuse_changed(results.config, specs, settings)
                with results.writing(work, answer=headline(comparison), dropped=dropped) as folder:
                    write_results(comparison, folder, title="Attention to the subject", command=command)

            by_main_process(write, shared)
    return results.close()


def write_results(comparison: Comparison, folder: Path, *, title: str, command: str, about: str = "") -> None:
    """Write a comparison into an existing folder, each file whole; for the rest see `write_report`."""
    write_numbers(comparison, folder)
    if comparison.pair is not None:
        write_json(folder / "differences.json", differences_json(comparison))
    write_curves(comparison, folder)
    write_report(comparison, folder / "report.html", title=title, about=about, command=command)


def write_numbers(comparison: Comparison, folder: Path) -> None:
    """Write a comparison's prompts, curves, readings and answers."""
    write_json_lines(folder / "prompts.jsonl", (prompt.as_dict() for prompt in comparison.prompts))
    write_json(folder / "curves.json", curves_json(comparison))
    readings = [(measured.label, reading) for measured in comparison.measured for reading in measured.readings]
    write_readings(readings, folder / "readings.parquet")
    if any(measured.recall for measured in comparison.measured):
        write_json(folder / "recall.json", recall_json(comparison))
        write_json_lines(folder / "answers.jsonl", _answers(comparison))


def write_curves(comparison: Comparison, folder: Path) -> None:
    """Write the figure of a comparison's curves, one line a model."""
    with replacing(folder / "curves.png") as path:
        save(draw_curves(comparison.all_curves()), path, format="png", dpi=150)


def _answers(comparison: Comparison) -> Iterator[dict[str, object]]:
    """Each model's answer to each prompt."""
    names = ("label", "prompt_id", "output", "correct", "shortcut")
    for measured in comparison.measured:
        if recall := measured.recall:
            for answer in zip(recall.prompt_ids, recall.outputs, recall.correct, recall.shortcut, strict=True):
                yield dict(zip(names, (measured.label, *answer), strict=True))
