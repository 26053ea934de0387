"""`attnbalance trajectory`: the checkpoints of a run on the same prompts, from one loaded model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from attnbalance.arguments import expects
from attnbalance.comparison.caveats import caveats
from attnbalance.comparison.compare import write_numbers
from attnbalance.comparison.comparison import Comparison
from attnbalance.comparison.known_readings import chosen_readings
from attnbalance.comparison.measure import measure_all
from attnbalance.comparison.specs import MeasureSettings, ModelSpec, refuse_changed, results_config
from attnbalance.comparison.usable_prompts import usable_prompts
from attnbalance.data.facts import FactSet
from attnbalance.files.outputs import as_folder, replacing, write_json
from attnbalance.files.processes import by_main_process
from attnbalance.files.result_folder import ResultFolder
from attnbalance.models.hooked import HookedModel
from attnbalance.models.load_checkpoints import load_checkpoints
from attnbalance.report.figures import save
from attnbalance.trajectory.checkpoints import find_checkpoints, is_adapter
from attnbalance.trajectory.figures import draw_map
from attnbalance.trajectory.page import write_page
from attnbalance.trajectory.sentences import headline
from attnbalance.trajectory.tables import trajectory_json
from attnbalance.trajectory.trajectory import Trajectory

KIND = "trajectory"


@expects()
def compare_checkpoints(
    where: str | Path | Sequence[str | Path],
    facts: FactSet,
    settings: MeasureSettings,
    out: str | Path,
    *,
    base: str | Path | None = None,
    readings: Sequence[str] = (),
    skip_bad: bool = False,
    command: str = "",
    progress: bool = False,
    shared: bool = False,
) -> str:
    """Measure the checkpoints of a run on questions about facts and write the folder `out`; returns the answer.

    One model is loaded (see `load_checkpoints`); what is measured is saved every few batches. A folder that is finished
    with the same settings, facts and weights is left as it is. An interrupted run is resumed. Raises
    `AttnBalanceError` for facts, checkpoints and folders that cannot be used.

    where: the run's folder, or folders of checkpoints, or patterns such as "run/checkpoint-*" (see `find_checkpoints`).
    facts: what to ask about.
    settings: how models are asked and read.
    out: the folder to write, all at once.
    base: the model before training, which is step 0 and gets the adapters; by default the base that the adapters name.
    readings: what to measure besides subject attention (see `compare`).
    skip_bad: drop facts that cannot be asked, instead of raising.
    command: the command line that the report names.
    progress: show progress bars.
    shared: share the prompts with the other processes of `accelerate launch` (see `compare`).
    """
    out = as_folder(out)
    folders = [where] if isinstance(where, str | Path) else where
    checkpoints = find_checkpoints([str(folder) for folder in folders], None if base is None else str(base))
    specs = list(checkpoints.values())
    titles = chosen_readings(readings)
    results = ResultFolder(out, KIND, results_config(specs, facts, settings, skip_bad, titles), command)
    if not results.is_finished():
        prompts, dropped = usable_prompts(facts, specs[:1], settings, skip_bad)  # the others have its tokenizer
        pair, dropped = (specs[-1].label, specs[0].label), {**facts.dropped, **dropped}
        how = {"progress": progress, "readings": titles, "shared": shared}
        with results.working(shared) as work:
            measured = measure_all(specs, prompts, settings, work, load=_load, **how)

            def write() -> None:
                trained = specs[-1:]
                if 0 in checkpoints and not is_adapter(Path(specs[-1].adapter or specs[-1].model)):
                    trained = [specs[0], *trained]  # a full checkpoint does not name its base
                caveat = caveats(trained, prompts, {})  # all have one dtype
                comparison = Comparison(measured, tuple(prompts), settings.reduce, pair, dropped, settings.seed, caveat)
                trajectory = Trajectory(tuple(checkpoints), comparison)
                refuse_changed(results.config, specs, settings)
                with results.writing(work, answer=headline(trajectory), dropped=dropped) as folder:
                    _write(trajectory, folder, command)

            by_main_process(write, shared)
    return results.close()


def _load(specs: Sequence[ModelSpec], settings: MeasureSettings) -> Iterator[HookedModel]:
    """The checkpoints in turn, in one loaded model."""
    return load_checkpoints(
        [(spec.model, spec.adapter) for spec in specs],
        tokenizer=settings.tokenizer,
        dtype=settings.dtype,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
    )


def _write(trajectory: Trajectory, folder: Path, command: str) -> None:
    """Write the tables, the figure and the page."""
    write_numbers(trajectory.comparison, folder)
    write_json(folder / "trajectory.json", trajectory_json(trajectory))
    with replacing(folder / "trajectory.png") as path:
        save(draw_map(trajectory, trajectory.comparison.titles[0]), path, format="png", dpi=150)
    write_page(trajectory, folder / "report.html", command=command)
