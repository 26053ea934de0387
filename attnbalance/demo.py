"""The demonstration: a small world, a model pretrained on it, three finetunings, and what they do to attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from attnbalance.comparison.compare import write_results
from attnbalance.comparison.comparison import Comparison
from attnbalance.comparison.measure import measure_all
from attnbalance.comparison.sentences import headline
from attnbalance.comparison.specs import MeasureSettings, ModelSpec
from attnbalance.comparison.usable_prompts import usable_prompts
from attnbalance.data.prompts import make_prompts
from attnbalance.data.sources.load_facts import load_facts
from attnbalance.data.statements import World, statement_prompts
from attnbalance.data.synthetic import synthetic_facts
from attnbalance.files.outputs import as_folder, remove
from attnbalance.files.result_folder import ResultFolder
from attnbalance.finetuning.finetune import finetune
from attnbalance.finetuning.pretrain import POPQA_RECIPE, SYNTHETIC_RECIPE, pretrain
from attnbalance.finetuning.runs import Run
from attnbalance.finetuning.settings import FinetuneSettings
from attnbalance.finetuning.splits import Split, split_facts
from attnbalance.report.wording import percent_interval
from attnbalance.seeds import check_seed

KIND = "demo"
LABELS = {"top": "FT-Top", "bottom": "FT-Bottom", "whole": "FT-Whole"}
HOW = MeasureSettings(recall=True, batch_size=128)
POPQA_POWER = 0.5
MEASURED = ".measured"
ABOUT = (
    "base was pretrained on statements of the facts and has never seen a question, so it answers few. It was finetuned "
    "on questions about the popular half of the facts (FT-Top), the obscure half (FT-Bottom) or all of them (FT-Whole)."
)
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
    all of them, and measure all four models on questions about held-out subjects. What is there already is not done
    again; a killed run goes on and ends with the same numbers. Raises `AttnBalanceError`, before anything is written
    where the facts are at fault.

    Args:
        out: The folder of the report and of the four models.
        source: Where real facts come from (see `load_facts`); None: the invented world.
        relations: The relations to take from `source`; None: all.
        limit: Facts to take from `source` at most, drawn at random.
        seed: Decides everything that is random.
        command: What the report names as its origin.
        progress: Whether to draw progress bars.
    """
    out, seed = as_folder(out), check_seed(seed)
    facts = synthetic_facts(seed) if source is None else load_facts(source, relations, limit, seed)
    power, recipe = (1.0, SYNTHETIC_RECIPE) if source is None else (POPQA_POWER, POPQA_RECIPE)
    world, splits = World(facts, power), {label: split_facts(facts, name, seed=seed) for name, label in LABELS.items()}
    make_prompts(facts, HOW.template)
    config = {"facts": facts.name, "facts_sha256": facts.sha256, "recipe": asdict(recipe), "seed": seed}
    results = ResultFolder(out, KIND, config, command)
    if not results.is_finished():
        with results.working_in_place():
            base = pretrain(world, out / "base", recipe=recipe, seed=seed, progress=progress)
            runs = {
                label: finetune(base, split, out / f"ft-{split.name}", FinetuneSettings(seed=seed), progress=progress)
                for label, split in splits.items()
            }
            comparison = _compare(base, runs, splits["FT-Whole"], facts.dropped, out / MEASURED, seed, progress)
            title = "Attention to the subject after finetuning on popular and on obscure facts"
            write_results(comparison, out, title=title, about=ABOUT, command=command)
            results.mark(out, answer=headline(comparison), dropped=comparison.dropped)
    remove(out / MEASURED)
    return results.answer()


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
    caveat = CAVEAT.format(stored=percent_interval(stated.recall.accuracy())) if stated.recall else ""
    return Comparison(measured, tuple(prompts), HOW.reduce, ("FT-Top", "FT-Bottom"), dropped, seed, caveat)
