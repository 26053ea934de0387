"""`attnbalance explain`: two checkpoints, the same facts, and why some of them were lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from attnbalance.errors import AttnBalanceError, ModelError
from attnbalance.facts import FactSet
from attnbalance.measure import How, ModelSpec, load_spec, measure_all, settings, usable_prompts
from attnbalance.models.bridge import bridge_of
from attnbalance.models.edits import Edit
from attnbalance.models.hooked import HookedModel
from attnbalance.models.parts import changed_parts, check_shapes, weight_parts
from attnbalance.outputs import MARKER, as_folder, close_work, is_finished, open_work, read_json, replacing, write_json
from attnbalance.prompts import Prompt
from attnbalance.readings.causal import arms
from attnbalance.readings.change import read_change
from attnbalance.readings.compare import Comparison
from attnbalance.readings.contrast import check_tokenizers, make_contrasts
from attnbalance.readings.explanation import Check, Explanation, make_check
from attnbalance.readings.recall import Recall, recall
from attnbalance.readings.salience import read_stored_answers
from attnbalance.report.explanation import explanation_json, headline, write_changes, write_page
from attnbalance.report.figures import draw_causes, save
from attnbalance.report.tables import write_readings
from attnbalance.results import write_marker, write_numbers

KIND = "explain"


def explain(
    before: ModelSpec,
    after: ModelSpec,
    facts: FactSet,
    how: How,
    out: str | Path,
    *,
    skip_bad: bool = False,
    command: str = "",
    progress: bool = False,
) -> str:
    """Explain what became of facts between two checkpoints of one model; writes the folder `out`, returns the answer.

    Measures curves and answers of both, splits the change of every answer's contrast by cause and place, tries the
    causal checks in both directions, and looks for hidden answers. A folder that is finished with the same settings is
    left as it is; a killed run goes on with what it had not yet measured. Raises `AttnBalanceError` for models of
    different shapes or tokenizers and for whatever cannot be read, asked or written.
    """
    out, specs, how = as_folder(out), (before, after), replace(how, recall=True)
    config = settings(specs, facts, how, skip_bad)
    if not is_finished(out, KIND, config):
        prompts, dropped = usable_prompts(facts, specs, how, skip_bad, contrasted=True)
        work = open_work(out, KIND, config)
        try:
            found = _explain(specs, prompts, how, work, {**facts.dropped, **dropped}, progress)
        except AttnBalanceError:
            if not any(work.glob("measured-*")):
                close_work(out)
            raise
        with replacing(out) as folder:
            folder.mkdir()
            _write(found, folder, config, command)
    close_work(out)
    return str(read_json(out / MARKER)["answer"])


def _explain(
    specs: Sequence[ModelSpec],
    prompts: Sequence[Prompt],
    how: How,
    work: Path,
    dropped: dict[str, int],
    progress: bool,
) -> Explanation:
    models = first, second = [load_spec(spec, how) for spec in specs]
    check_shapes(first, second)
    check_tokenizers(first.tokenizer, second.tokenizer)
    if not changed_parts(first, second, weight_parts(first)):
        raise ModelError(
            f"{first.name} and {second.name} have the same weights: nothing changed that could be explained"
        )
    measured = measure_all(specs, prompts, how, work, progress=progress)
    pair = (specs[0].label, specs[1].label)
    comparison = Comparison(measured, tuple(prompts), how.reduce, pair, dropped, how.seed)
    contrasts = make_contrasts(prompts, first.tokenizer)
    change = read_change(first, second, contrasts, batch_size=how.batch_size, progress=progress)
    stored = {
        label: read_stored_answers(bridge_of(model), contrasts, batch_size=how.batch_size, seed=how.seed)
        for label, model in zip(pair, models, strict=True)
    }
    checks = {
        label: _checks(model, other, prompts, comparison, label, how, work / f"checks-{i}", progress)
        for i, (label, model, other) in enumerate(zip(pair, models, models[::-1], strict=True))
    }
    return Explanation(comparison, change, checks, stored, contrasts.ambiguous)


def _checks(
    model: HookedModel,
    other: HookedModel,
    prompts: Sequence[Prompt],
    comparison: Comparison,
    label: str,
    how: How,
    work: Path,
    progress: bool,
) -> list[Check]:
    """All causal checks of one model against the other; answers that were asked before are read from `work`."""
    from tqdm import tqdm

    answers_of = {one.label: one.recall for one in comparison.measured if one.recall}
    plain, known = answers_of.pop(label), next(iter(answers_of.values()))

    def ask(which: HookedModel, asked: Sequence[Prompt], edit: Edit | None) -> Recall:
        return recall(which, asked, batch_size=how.batch_size, edit=edit)

    done: list[Check] = []
    planned = list(arms(model, other, prompts, ask, seed=how.seed))
    for i, arm in enumerate(tqdm(planned, desc=f"checks of {label}", disable=not progress, leave=False)):
        path = work / f"{i}.json"
        saved = read_json(path)
        if saved.get("name") == arm.name:
            answers = Recall(**{name: tuple(column) for name, column in saved["recall"].items()})
        else:
            answers = arm.ask()
            write_json(path, {"name": arm.name, "recall": asdict(answers)})
        done.append(make_check(arm, answers, plain, known, done, how.seed))
    return done


def _write(found: Explanation, folder: Path, config: dict[str, object], command: str) -> None:
    """Write an explanation into a folder, each file whole, attnbalance.json with the answer last."""
    write_numbers(found.comparison, folder)
    write_json(folder / "explain.json", explanation_json(found))
    write_changes(found, folder / "changes.parquet")
    change = found.change
    write_readings([(found.labels[1], one) for one in (change.looked, change.readout)], folder / "edges.parquet")
    with replacing(folder / "causes.png") as path:
        save(draw_causes(found), path, format="png", dpi=150)
    write_page(found, folder / "report.html", command=command)
    write_marker(folder, KIND, config, headline(found), command, found.comparison.dropped)
