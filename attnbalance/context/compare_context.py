"""`attnbalance context`: whether models answer knowledge conflicts from the context or from memory."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from attnbalance.arguments import expects
from attnbalance.comparison.caveats import caveats, unlike_tokens
from attnbalance.comparison.specs import MeasureSettings, ModelSpec, load_spec, refuse_changed, results_config
from attnbalance.comparison.usable_prompts import usable_prompts
from attnbalance.context.figures import draw_reliance
from attnbalance.context.saved import load_reliance, save_reliance
from attnbalance.context.tables import answer, as_json, attention_curves, lines, table
from attnbalance.data.conflicts import Conflict
from attnbalance.data.facts import FactSet
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import hash_prompts, make_prompts
from attnbalance.data.scoring import WHOLE_WORDS
from attnbalance.data.tokens import as_chat
from attnbalance.errors import DataError
from attnbalance.files.outputs import as_folder, replacing, write_json, write_json_lines, write_text
from attnbalance.files.result_folder import ResultFolder
from attnbalance.readings.read_reliance import read_reliance, reliance_budgets
from attnbalance.readings.reliance import Reliance
from attnbalance.report.figures import draw_curves, save
from attnbalance.report.readings_table import write_readings
from attnbalance.report.wording import left_out

KIND = "context"

WITHOUT: Mapping[str, str] = {
    "context": "qa",
    "alpaca-context": "alpaca",
    "alpaca-context-only": "alpaca",
    "quote": "plain",
}
"""For each template with a context, that of the same question without it."""


@expects()
def compare_context(
    specs: Sequence[ModelSpec],
    conflicts: FactSet,
    settings: MeasureSettings,
    out: str | Path,
    *,
    skip_bad: bool = False,
    command: str = "",
    progress: bool = False,
) -> str:
    """Ask each model about knowledge conflicts, with the context and without it (see `read_reliance`).

    Writes the folder `out`: table.md and context.json (where answers come from, M_C, attention by layer),
    answers.jsonl (every prompt and output), readings.parquet (attention by prompt, layer and head; see
    `write_readings`), context.png and attention.png; returns the answer in sentences. A killed run resumes after the
    last model that was done. A folder that is finished with the same settings, conflicts and weights is left as it is.
    Raises `AttnBalanceError` for conflicts, models and folders that cannot be used.

    specs: the models, in the order in which they are drawn, such as the checkpoints of a run.
    conflicts: what to ask about (see `load_conflicts`, `make_conflicts`).
    settings: how models are asked; the template must be one of `WITHOUT`; reduction and scoring are not used.
    out: the folder to write.
    skip_bad: drop conflicts that cannot be asked, instead of raising.
    command: the command line that the results name.
    progress: show progress bars.
    """
    out = as_folder(out)
    if not specs or settings.template not in WITHOUT:
        raise DataError(
            f"expected at least one LABEL=MODEL, and one of the templates {', '.join(WITHOUT)}; got {len(specs)} "
            f"models and {settings.template!r}"
        )
    if plain := next((fact for fact in conflicts if not isinstance(fact, Conflict)), None):
        raise DataError(f"{conflicts.name} must hold conflicts, but the fact of {plain.subject!r} has no context")
    settings = replace(settings, reduce="sum", recall=True, scoring=WHOLE_WORDS)
    results = ResultFolder(out, KIND, results_config(specs, conflicts, settings, skip_bad), command)
    if not results.is_finished():
        prompts, dropped = usable_prompts(conflicts, specs, settings, skip_bad, budgets=reliance_budgets)
        with results.working() as work:
            measured, dtypes = dict[str, Reliance](), dict[str, str]()
            for i, spec in enumerate(specs):
                measured[spec.label], dtypes[spec.label] = _reliance(
                    spec, prompts, settings, work / f"model {i}", str(results.config), progress
                )
            caveat = caveats(specs, prompts, dtypes, unlike_tokens(specs, prompts, settings))
            dropped = {**conflicts.dropped, **dropped}
            words = " ".join(filter(None, [answer(measured), caveat and f"{caveat}.", left_out(dropped)]))
            refuse_changed(results.config, specs, settings)
            with results.writing(work, answer=words, dropped=dropped) as folder:
                _write(measured, folder, settings.seed)
    return results.close()


def _reliance(
    spec: ModelSpec, prompts: PromptSet, settings: MeasureSettings, saved: Path, key: str, progress: bool
) -> tuple[Reliance, str]:
    """A model's reliance, saved by an earlier run or read now, and its dtype."""
    without = make_prompts([prompt.fact for prompt in prompts], WITHOUT[settings.template])
    key += hash_prompts(prompts)  # a chat template may write the date
    kept = load_reliance(saved, key, tuple(prompts))
    if kept is not None:
        return kept
    model = load_spec(spec, settings)
    reliance = read_reliance(
        model,
        PromptSet.of(prompts, model.tokenizer),
        as_chat(without, model.tokenizer) if settings.chat else without,
        batch_size=settings.batch_size,
        progress=progress,
    )
    dtype = model.dtype
    save_reliance(reliance, dtype, saved, key)
    del model
    gc.collect()
    return reliance, dtype


def _write(measured: Mapping[str, Reliance], folder: Path, seed: int) -> None:
    write_json(folder / "context.json", {label: as_json(reliance, seed) for label, reliance in measured.items()})
    write_text(folder / "table.md", table(measured, seed))
    write_json_lines(folder / "answers.jsonl", (line for pair in measured.items() for line in lines(*pair)))
    readings = [(label, reading) for label, reliance in measured.items() for reading in reliance.attention.values()]
    write_readings(readings, folder / "readings.parquet")
    curves = {label: list(attention_curves(reliance, seed).values()) for label, reliance in measured.items()}
    for name, figure in (("context", draw_reliance(measured, seed)), ("attention", draw_curves(curves))):
        with replacing(folder / f"{name}.png") as temporary:
            save(figure, temporary, format="png", dpi=150)
