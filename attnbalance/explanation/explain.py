"""`attnbalance explain`: two checkpoints, the same facts, and why some of them were lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from attnbalance.arguments import expects
from attnbalance.comparison.caveats import caveats
from attnbalance.comparison.compare import write_curves, write_numbers
from attnbalance.comparison.comparison import Comparison
from attnbalance.comparison.known_readings import chosen_readings
from attnbalance.comparison.measure import measure_all
from attnbalance.comparison.specs import MeasureSettings, ModelSpec, load_spec, refuse_changed, results_config
from attnbalance.comparison.usable_prompts import usable_prompts
from attnbalance.data.facts import FactSet
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt, hash_prompts
from attnbalance.errors import ModelError
from attnbalance.explanation.conclude import conclude
from attnbalance.explanation.conclusions import Explanation
from attnbalance.explanation.figures import draw_causes
from attnbalance.explanation.page import write_page
from attnbalance.explanation.sentences import headline
from attnbalance.explanation.tables import explanation_json, write_changes
from attnbalance.files.outputs import as_folder, check_saved, read_saved, replacing, write_json, write_saved
from attnbalance.files.result_folder import ResultFolder
from attnbalance.models.bridge import bridge_of
from attnbalance.models.hooked import HookedModel
from attnbalance.models.interventions import Edit
from attnbalance.models.weights import changed_parts, check_shapes, weight_parts
from attnbalance.progress import progress_bar
from attnbalance.readings.answer_checks import check_answers_alike, check_tokens
from attnbalance.readings.answer_tokens import AnswerTokens, make_answer_tokens
from attnbalance.readings.change import Change, read_change
from attnbalance.readings.direct_attribution import read_direct_attribution
from attnbalance.readings.recall import Recall, recall
from attnbalance.readings.salience import read_readout_ranks
from attnbalance.readings.steering import Treatment, treatments
from attnbalance.report.figures import save
from attnbalance.report.readings_table import write_readings

KIND = "explain"


@expects()
def explain(
    before: ModelSpec,
    after: ModelSpec,
    facts: FactSet,
    settings: MeasureSettings,
    out: str | Path,
    *,
    skip_bad: bool = False,
    command: str = "",
    progress: bool = False,
) -> str:
    """Explain what became of facts between two checkpoints of one model: writes the folder `out`, returns the answer.

    Measures the attention and answers of both, splits the change of every answer's margin by cause and component, makes
    the causal checks in both directions, and looks for hidden answers. A folder that is finished with the same settings
    is left unchanged; an interrupted run resumes.

    Args:
        before: The first checkpoint.
        after: The second checkpoint, of the same shape and with the same tokenizer.
        facts: The facts to ask.
        settings: How to ask and measure.
        out: The folder to write.
        skip_bad: Whether to drop and count facts that cannot be asked, instead of raising.
        command: The command line, for the report.
        progress: Whether to show progress bars.

    Raises `AttnBalanceError` for models of different shapes or tokenizers, and for everything that cannot be read,
    asked or written.
    """
    out, specs, settings = as_folder(out), (before, after), replace(settings, recall=True)
    config = results_config(specs, facts, settings, skip_bad, chosen_readings())
    results = ResultFolder(out, KIND, config, command)
    if not results.is_finished():
        prompts, dropped = usable_prompts(facts, specs, settings, skip_bad, need_answer_tokens=True)
        with results.working() as work:
            explanation, change = _explain(specs, prompts, settings, work, {**facts.dropped, **dropped}, progress)
            answer, dropped = headline(explanation), explanation.comparison.dropped
            refuse_changed(results.config, specs, settings)
            with results.writing(work, answer=answer, dropped=dropped) as folder:
                _write(explanation, change, folder, command)
    return results.close()


def _explain(
    specs: Sequence[ModelSpec],
    prompts: Sequence[Prompt],
    settings: MeasureSettings,
    work: Path,
    dropped: dict[str, int],
    progress: bool,
) -> tuple[Explanation, Change]:
    models = first, second = [load_spec(spec, settings) for spec in specs]
    answer_tokens = _check_pair(first, second, prompts)
    measured = measure_all(specs, prompts, settings, work, progress=progress)
    labels = before, after = specs[0].label, specs[1].label
    pair, caveat = (after, before), caveats(specs, prompts, {before: first.dtype, after: second.dtype})
    comparison = Comparison(measured, tuple(prompts), settings.reduce, pair, dropped, settings.seed, caveat)
    change = read_change(first, second, answer_tokens, batch_size=settings.batch_size, progress=progress)
    ranks = {
        label: read_readout_ranks(bridge_of(model), answer_tokens, batch_size=settings.batch_size, seed=settings.seed)
        for label, model in zip(labels, models, strict=True)
    }
    answers = {}
    for i, (label, model, other) in enumerate(zip(labels, models, models[::-1], strict=True)):
        with_bar = f"checks of {label}" if progress else None
        asked = PromptSet.of(prompts, model.tokenizer)
        answers[label] = _ask(model, other, asked, settings, work / f"checks-{i}", with_bar)
    read_only = {label: model.read_only for label, model in zip(labels, models, strict=True) if model.read_only}
    return conclude(comparison, change, ranks, answers, answer_tokens.ambiguous, read_only), change


def _check_pair(first: HookedModel, second: HookedModel, prompts: Sequence[Prompt]) -> AnswerTokens:
    """The prompts' answer tokens; raises, before hours of work, for two models whose change cannot be explained."""
    check_shapes(first, second)
    answer_tokens = make_answer_tokens(prompts, first.tokenizer)
    check_answers_alike(answer_tokens, second.tokenizer)
    if not changed_parts(first, second, weight_parts(first)):
        raise ModelError(f"{first.name} and {second.name} have the same weights: there is no change to explain")
    for model in (first, second):
        check_tokens(answer_tokens, model.model, model.name)
    read_direct_attribution(bridge_of(first), answer_tokens.at([0]))
    return answer_tokens


def _ask(
    model: HookedModel,
    other: HookedModel,
    prompts: Sequence[Prompt],
    settings: MeasureSettings,
    work: Path,
    bar: str | None,
) -> list[tuple[Treatment, Recall]]:
    """A model's answers under all treatments against the other one; those to the same prompts are read from `work`.

    `bar` is the title of a progress bar.
    """
    texts = hash_prompts(prompts)

    def ask(asked: HookedModel, prompts: Sequence[Prompt], edit: Edit | None) -> Recall:
        return recall(asked, prompts, scoring=settings.scoring, batch_size=settings.batch_size, edit=edit)

    answered: list[tuple[Treatment, Recall]] = []
    planned = list(treatments(model, other, prompts, ask, seed=settings.seed))
    for i, treatment in enumerate(progress_bar(bar or "", items=planned, shown=bar is not None)):
        path = work / f"{i}.json"
        saved = read_saved(path)
        asked = {"model": model.name, "name": treatment.name, "prompts_sha256": texts}
        if saved and all(saved.get(what) == value for what, value in asked.items()):
            check_saved(path, saved, path, recall=dict)
            answers = Recall.from_json(saved["recall"], path)
        else:
            answers = treatment.ask()
            write_saved(path, asked | {"recall": asdict(answers)})
        answered.append((treatment, answers))
    return answered


def _write(explanation: Explanation, change: Change, folder: Path, command: str) -> None:
    """Write an explanation into a folder, each file whole."""
    write_numbers(explanation.comparison, folder)
    write_curves(explanation.comparison, folder)
    write_json(folder / "explain.json", explanation_json(explanation))
    write_changes(explanation, folder / "changes.parquet")
    after = explanation.labels[1]
    write_readings([(after, change.by_attention), (after, change.by_readout)], folder / "edges.parquet")
    with replacing(folder / "causes.png") as path:
        save(draw_causes(explanation), path, format="png", dpi=150)
    write_page(explanation, folder / "report.html", command=command)
