"""The demonstration: a small world, a model pretrained on it, three finetunings, and what they do to attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from attnbalance.datasets.load import load_facts
from attnbalance.errors import OutputError
from attnbalance.finetune.pretrain import POPQA_RECIPE, SYNTHETIC_RECIPE, pretrain
from attnbalance.finetune.runs import Run
from attnbalance.finetune.splits import Split, split_facts
from attnbalance.finetune.trainer import finetune
from attnbalance.measure import How, ModelSpec, measure_all, usable_prompts
from attnbalance.outputs import MARKER, as_folder, is_finished, provenance, read_json, remove, write_json
from attnbalance.prompts import make_prompts
from attnbalance.readings.compare import Comparison
from attnbalance.report.wording import percent_interval
from attnbalance.results import write_results
from attnbalance.worlds.statements import World, statement_prompts
from attnbalance.worlds.synthetic import synthetic_facts

KIND = "demo"
LABELS = {"top": "FT-Top", "bottom": "FT-Bottom", "whole": "FT-Whole"}
HOW = How(recall=True, batch_size=128)
POPQA_POWER = 0.5
CAVEAT = "the base itself completes {stored} of these facts as statements, and this is one seed of one small model"


def demo(
    out: str | Path,
    *,
    source: str | None = None,
    relations: Sequence[str] | None = None,
    limit: int | None = None,
    seed: int = 0,
    command: str = "",
    progress: bool = False,
) -> str:
    """Run the demonstration into the folder `out`; returns the report's first sentence.

    On an invented world, or on facts from `source` (see `load_facts`): pretrain a small Llama on statements of the
    facts, finetune it on questions about the more popular half of the subjects trained on, the less popular half, and
    all of them, and measure all four models on questions about held-out subjects. `seed` decides everything. What is
    there already is not done again; a killed run goes on and ends with the same numbers. `command` is what the report
    names as its origin. Raises `AttnBalanceError`, before anything is written where the facts are at fault.
    """
    out = as_folder(out)
    facts = synthetic_facts(seed) if source is None else load_facts(source, relations, limit, seed)
    power, recipe = (1.0, SYNTHETIC_RECIPE) if source is None else (POPQA_POWER, POPQA_RECIPE)
    world, splits = World(facts, power), {label: split_facts(facts, name, seed=seed) for name, label in LABELS.items()}
    make_prompts(facts, HOW.template)
    config = {"facts": facts.name, "facts_sha256": facts.sha256, "recipe": asdict(recipe), "seed": seed}
    if not is_finished(out, KIND, config):
        _claim(out, config)
    if "answer" not in read_json(out / MARKER):
        base = pretrain(world, out / "base", recipe=recipe, seed=seed, progress=progress)
        runs = {
            label: finetune(base, split, out / f"ft-{split.name}", seed=seed, progress=progress)
            for label, split in splits.items()
        }
        comparison = _compare(base, runs, splits["FT-Whole"], facts.dropped, out / ".measured", seed, progress)
        title = "Attention to the subject after finetuning on popular and on obscure facts"
        write_results(comparison, out, KIND, config, title=title, command=command)
    remove(out / ".measured")
    return str(read_json(out / MARKER)["answer"])


def _claim(out: Path, config: dict[str, object]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / MARKER, {"kind": KIND, "config": config} | provenance())
    except OSError as error:
        raise OutputError(f"cannot write to --out {out}: {error}") from error


def _compare(
    base: Path,
    runs: dict[str, Run],
    split: Split,
    dropped: Mapping[str, int],
    work: Path,
    seed: int,
    progress: bool,
) -> Comparison:
    """The base and the runs, asked about the held-out subjects, which all splits of one seed share."""
    specs = [ModelSpec("base", str(base)), *(ModelSpec(label, str(run.path)) for label, run in runs.items())]
    prompts, _ = usable_prompts(split.heldout, specs, HOW, skip_bad=False)
    shortcuts = runs["FT-Whole"].shortcuts
    measured = measure_all(specs, prompts, HOW, work, shortcuts, progress)
    statements = statement_prompts(split.heldout)
    (stated,) = measure_all(specs[:1], statements, HOW, work / "statements", progress=progress)
    caveat = CAVEAT.format(stored=percent_interval(stated.recall.accuracy(seed))) if stated.recall else ""
    return Comparison(measured, prompts, HOW.reduce, ("FT-Top", "FT-Bottom"), dropped, seed, caveat)
