"""`attnbalance salience`: what models store about subjects, layer by layer, and how it varies with popularity."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path

from attnbalance.arguments import expects
from attnbalance.comparison.caveats import caveats, unlike_tokens
from attnbalance.comparison.specs import MeasureSettings, ModelSpec, load_spec, refuse_changed, results_config
from attnbalance.comparison.usable_prompts import usable_prompts
from attnbalance.data.facts import FactSet
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt
from attnbalance.errors import DataError
from attnbalance.files.outputs import as_folder, write_json, write_json_lines
from attnbalance.files.result_folder import ResultFolder
from attnbalance.models.bridge import bridge_of
from attnbalance.readings.answer_checks import check_tokens
from attnbalance.readings.answer_tokens import make_answer_tokens
from attnbalance.readings.curves import Curve
from attnbalance.readings.direct_attribution import read_direct_attribution
from attnbalance.readings.relevance import read_relevance
from attnbalance.readings.salience import SUBJECTS, read_mlp_salience, read_readout_ranks, read_value_salience
from attnbalance.report.readings_table import write_readings
from attnbalance.statistics.intervals import Interval
from attnbalance.storage.conclusions import Salience, conclude
from attnbalance.storage.figures import write_figures
from attnbalance.storage.sentences import answer, left_out

KIND = "salience"


@expects()
def compare_salience(
    specs: Sequence[ModelSpec],
    facts: FactSet,
    settings: MeasureSettings,
    out: str | Path,
    *,
    skip_bad: bool = False,
    command: str = "",
    progress: bool = False,
) -> str:
    """Read what each model stores about the facts and write the folder `out`, all at once; returns the answer in words.

    Writes salience.json, salience.parquet, salience.png, popularity.png and prompts.jsonl. A folder that is finished
    with the same settings, facts and weights is left as it is. Raises `AttnBalanceError` for facts, models and folders
    that cannot be used.

    specs: the models.
    facts: what to ask about.
    settings: how models are asked and read; answers are not generated.
    out: the folder to write.
    skip_bad: drop facts that cannot be asked, instead of raising.
    command: the command line that the results name.
    progress: show progress bars.
    """
    out = as_folder(out)
    if not specs:
        raise DataError("expected at least one LABEL=MODEL to read, got none")
    results = ResultFolder(out, KIND, results_config(specs, facts, settings, skip_bad), command)
    if not results.is_finished():
        prompts, dropped = usable_prompts(facts, specs, settings, skip_bad, need_answer_tokens=True)
        with results.working() as work:
            models, dtypes = list[Salience](), dict[str, str]()
            for spec in specs:
                salience, dtypes[spec.label] = _read(spec, prompts, settings, progress)
                models.append(salience)
            caveat = caveats(specs, prompts, dtypes, unlike_tokens(specs, prompts, settings))
            said = [*map(answer, models), *([f"{caveat}."] if caveat else ())]
            refuse_changed(results.config, specs, settings)
            with results.writing(work, answer=" ".join(said), dropped={**facts.dropped, **dropped}) as folder:
                _write(models, dtypes, prompts, folder)
    return results.close()


def _read(
    spec: ModelSpec, prompts: Sequence[Prompt], settings: MeasureSettings, progress: bool
) -> tuple[Salience, str]:
    """What is read of a model, and its dtype."""
    model = load_spec(spec, settings)
    prompts = PromptSet.of(prompts, model.tokenizer)
    bridged, answer_tokens = bridge_of(model), make_answer_tokens(prompts, model.tokenizer)
    check_tokens(answer_tokens, model.model, model.name)
    attribution = read_direct_attribution(bridged, answer_tokens, batch_size=settings.batch_size, progress=progress)
    readings = [attribution.value_salience(), attribution.used()]
    readings += [read_value_salience(bridged, answer_tokens, at=at) for at in SUBJECTS]
    readings += [
        read_mlp_salience(bridged, answer_tokens, at=at, batch_size=settings.batch_size)
        for at in ("context", *SUBJECTS)
    ]
    read_only, dtype = model.read_only, model.dtype
    if not read_only:
        readings.append(read_relevance(model, prompts, batch_size=settings.batch_size, progress=progress).push)
    ranks = read_readout_ranks(bridged, answer_tokens, batch_size=settings.batch_size, seed=settings.seed)
    del bridged, model
    gc.collect()
    return conclude(spec.label, readings, ranks, prompts, answer_tokens.ambiguous, read_only, settings.seed), dtype


def _write(models: Sequence[Salience], dtypes: Mapping[str, str], prompts: Sequence[Prompt], folder: Path) -> None:
    write_json_lines(folder / "prompts.jsonl", (prompt.as_dict() for prompt in prompts))
    write_json(folder / "salience.json", [_as_json(model, dtypes[model.label]) for model in models])
    readings = [(model.label, reading) for model in models for reading in model.readings]
    write_readings(readings, folder / "salience.parquet")
    write_figures(models, folder)


def _as_json(model: Salience, dtype: str) -> dict[str, object]:
    readings = []
    for i, (reading, curve) in enumerate(zip(model.readings, model.curves, strict=True)):
        correlations = None if model.popularity is None else _intervals(model.popularity[i])
        about: dict[str, object] = {"name": reading.name, "unit": reading.unit}
        readings.append(about | curve.as_dict() | {"popularity": correlations})
    top = {
        str(k): {"stored": share.share.as_dict(), "control": share.control.as_dict(), "chance": share.chance}
        for k, share in model.top.items()
    }
    about = {"label": model.label, "dtype": dtype, "left_out": left_out(model), "ambiguous": model.ambiguous}
    return about | {"readings": readings, "stored_among_first": top}


def _intervals(curve: Curve) -> list[dict[str, float | int | None]]:
    ends = zip(curve.mean, curve.low, curve.high, strict=True)
    return [Interval(mean, low, high, curve.n).as_dict() for mean, low, high in ends]
