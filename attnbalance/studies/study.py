"""The study: methods x splits x seeds on several worlds, each fit in a folder of its own, and the table of them all."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from attnbalance.arguments import expects
from attnbalance.data.prompts import make_prompts
from attnbalance.data.sources.load_facts import load_facts
from attnbalance.errors import AttnBalanceError, DataError, ModelError, OutputError
from attnbalance.files.outputs import MARKER, as_folder, check_saved, provenance, read_json, read_saved, write_json
from attnbalance.files.work import in_place, is_finished, is_locked, locked
from attnbalance.files.worker import parse_worker
from attnbalance.finetuning.schedule import warn_of_precisions
from attnbalance.models.fingerprint import files_fingerprint
from attnbalance.progress import progress_bar
from attnbalance.studies.plan import REPLAYS, Fit, Study, Variant, parse_study, recipe_of, variants
from attnbalance.studies.prepared_world import PreparedWorld
from attnbalance.studies.run_fit import RESULT, run_fit
from attnbalance.studies.summary import FIELDS

KIND = "study"


@expects(path=(str, Path), out=(str, Path))
def study(path: str | Path, out: str | Path, *, worker: str | None = None, progress: bool = False) -> str:
    """Run a study, or one worker's part "I/N" of it, into the folder `out`; returns the table, or what is left to do.

    Finished fits are not run again, and a killed fit resumes. The worker that finds all results complete writes
    `table.md`, `study.json` and `study.png`. The results are the same for any number of workers. If `worker` is None,
    Slurm's array index is used, if there is one. Raises `AttnBalanceError` for a study that cannot be run.
    """
    from attnbalance.studies.tables import write_tables

    plan, out = parse_study(path), as_folder(out)
    index, count = parse_worker(worker)
    for name in plan.worlds:  # what is wrong with one shows before any of them is trained on
        try:
            _check_world(plan, name)
        except AttnBalanceError as error:
            raise DataError(f"world {name}: {error}") from error
    if "plain" not in plan.methods:
        warnings.warn("no method is called plain: the columns against plain stay empty", stacklevel=3)
    worlds = {name: _with_files(settings) for name, settings in plan.worlds.items()}
    _take_up(worlds, out)
    _refuse_mixed(plan, out)
    with in_place(out, KIND, {"worlds": worlds}):  # methods, seeds and splits may be added
        for (world, seed), fits in itertools.groupby(plan.part(index, count), key=lambda fit: (fit.world, fit.seed)):
            left = [fit for fit in fits if not _done(fit, plan, out)]
            if left:
                _refuse_changed(world, worlds[world], _with_files(plan.worlds[world]), out)
                with locked(out / "fits" / world / f"seed-{seed}"):
                    _run_all(left, plan, out, progress)
        missing = [fit for fit in plan.fits if not _done(fit, plan, out)]
        if not missing:
            for world, settings in worlds.items():
                _refuse_changed(world, settings, _with_files(plan.worlds[world]), out)
            results = [read_saved(out / fit.folder / RESULT) for fit in plan.fits]
            _warn_of_versions(results)
            _warn_of_precisions(results)
            return write_tables([*_controls(plan, out, progress), *results], out)
    return (
        f"{len(plan.fits) - len(missing)} of {len(plan.fits)} fits are done; the others are other workers'. "
        "Whoever finishes the last writes the table, as does this command, run again then"
    )


def _refuse_mixed(plan: Study, out: Path) -> None:
    """Raise `OutputError` for fits that were measured in another dtype than the study's methods now call for."""
    done = [read_saved(out / fit.folder / RESULT) for fit in plan.fits if (out / fit.folder / RESULT).is_file()]
    mixed = sum("dtype" not in result or result["dtype"] != plan.dtype for result in done if result)
    if mixed:
        raise OutputError(
            f"{mixed} of {len(done)} fits in {out} were measured in another dtype than {plan.dtype or 'the base has'}, "
            "in which this study compares its methods, or by an earlier version; name a new folder"
        )


def _warn_of_versions(results: Sequence[Mapping[str, Any]]) -> None:
    """Warn if fits were made, and scored, by another version than this one."""
    now = metadata.version("attnbalance")
    others = Counter(result.get("attnbalance_version", "of unknown number") for result in results)
    count = others.total() - others.pop(now, 0)
    if count:
        warnings.warn(
            f"{count} of {len(results)} fits were made by attnbalance {', '.join(sorted(others))}, and this is {now}; "
            "name a new folder to make all of them by one version",
            stacklevel=4,
        )


def _warn_of_precisions(results: Sequence[Mapping[str, Any]]) -> None:
    """Warn if machines chose different mixed precisions for fits whose methods name none; float64 has none."""
    chosen = [
        result
        for result in results
        if result["method_settings"].get("mixed_precision") is None
        and "float64" not in str(result["method_settings"].get("dtype"))
    ]
    warn_of_precisions([result.get("mixed_precision") for result in chosen], "fits", stacklevel=5)


def _controls(plan: Study, out: Path, progress: bool) -> list[dict[str, Any]]:
    """The results of what every fit is set against, for all worlds, seeds and splits."""
    worlds = {cell: _prepare(plan, *cell, out, progress) for cell in itertools.product(plan.worlds, plan.seeds)}
    templates = list(dict.fromkeys(method.get("template", "qa") for method in plan.methods.values()))
    return [
        {"world": world, "seed": seed, "split": split, "method": name} | result
        for (world, seed), prepared in worlds.items()
        for split in plan.splits
        for name, result in prepared.controls(split, templates).items()
    ]


def _run_all(fits: Sequence[Fit], plan: Study, out: Path, progress: bool) -> None:
    """Do fits on one world with one seed, one after the other."""
    world, seed = fits[0].world, fits[0].seed
    prepared = _prepare(plan, world, seed, out, progress)
    for fit in progress_bar(f"{world}, seed {seed}", items=fits, unit="fit", shown=progress, leave=True):
        try:
            run_fit(fit, plan.methods[fit.method], prepared, out / fit.folder, progress)
        except DataError as error:
            raise DataError(f"{fit.folder}: {error}") from error


def _prepare(plan: Study, world: str, seed: int, out: Path, progress: bool) -> PreparedWorld:
    return PreparedWorld(plan.worlds[world], seed, out / "bases" / f"{world}-{seed}", progress, plan.dtype)


def _check_world(plan: Study, name: str) -> None:
    """Raise `AttnBalanceError` for what no fit on a world could begin with: facts, splits, questions, model, parts."""
    from attnbalance.finetuning.parameters import check_layers, parse_parts
    from attnbalance.models.config import load_config
    from attnbalance.models.load import load_limits
    from attnbalance.models.load_adapter import split_adapter

    settings = plan.worlds[name]
    prepared = PreparedWorld(settings, plan.seeds[0], Path(), False)
    prepared.world.statements(1)
    for split in plan.splits:
        prepared.split(split)
    grids = {method: variants(values) for method, values in plan.methods.items() if _decides_reading(values)}
    if grids:
        each = [PreparedWorld(settings, seed, Path(), False) for seed in plan.seeds]
        facts = max(len(of_seed.split(split).train) for of_seed in each for split in plan.splits)
        for method, tried in grids.items():
            check_grid(method, tried, facts)
    if "model" in settings:
        model, adapter = split_adapter(settings["model"], None)
        if adapter is not None:
            raise ModelError(f"{settings['model']} is an adapter; merge it into its base and name that")
        load_limits(model)
        layers = load_config(model).get_text_config().num_hidden_layers
    else:
        layers = recipe_of(settings).layers
    chosen = [variant for method in plan.methods.values() for variant in variants(method)]
    for template in {"qa"} | {variant.settings.template for variant in chosen}:
        make_prompts(prepared.facts, template)
    for parts in {variant.settings.train for variant in chosen}:
        check_layers(parse_parts(parts), layers, parts)


def _decides_reading(method: Mapping[str, Any]) -> bool:
    """Whether a method's variants differ in what decides which facts are read, and in which order."""
    return any(isinstance(method.get(name), list) for name in ("steps", "batch_size", "curriculum"))


def check_grid(name: str, tried: Sequence[Variant], facts: int) -> None:
    """Raise `DataError` for variants whose validation losses hold the model to different numbers of the base.

    These depend on the training facts that are read, in the order in which they come first.
    """
    from attnbalance.finetuning.objectives.parse import parse_objective

    objective = parse_objective(tried[0].settings.objective)
    if objective.asks_of_all and len({_facts_read(variant, facts) for variant in tried}) > 1:
        raise DataError(
            f"method {name}: its variants read different training facts, or in a different order, and the targets of "
            f"{objective.text} depend on them, so that validation losses cannot be compared; let steps x batch_size be "
            f"at least {facts} in each, without a curriculum or replay, or make them methods of their own"
        )


def _facts_read(variant: Variant, facts: int) -> tuple[object, ...]:
    """What two variants have in common that read the same of `facts` training facts in the same order."""
    settings = variant.settings
    if settings.curriculum == "shuffled" and variant.replay == REPLAYS[0]:
        return (min(facts, settings.steps * settings.batch_size),)
    return settings.curriculum, settings.steps, settings.batch_size


def _with_files(world: Mapping[str, Any]) -> dict[str, Any]:
    """A world's settings, with hashes of the facts and of the model's files that its results depend on."""
    files = dict[str, Any]()
    if world["facts"] != "synthetic":
        files["facts_sha256"] = load_facts(world["facts"], world.get("relations")).sha256
    if "model" in world:
        files["model_files"] = files_fingerprint(world["model"])
    return {**world, **files}


def _take_up(worlds: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """Update the recorded worlds of a folder, where nothing was measured on them yet and no process is at work.

    So worlds may be added, and one whose model could not be loaded may name another. What differs beyond that raises
    `OutputError`.
    """
    before, now = _worlds_in(out), dict(worlds)
    begun = {name: now.get(name) for name in before if _begun(out, name)}
    for name, settings in begun.items():
        _refuse_changed(name, before[name], settings or {}, out)
    if before != now and is_finished(out, KIND, {"worlds": {**before, **begun}}):
        write_json(out / MARKER, {"kind": KIND, "config": {"worlds": now}} | provenance())


def _refuse_changed(name: str, before: Mapping[str, Any], now: Mapping[str, Any], out: Path) -> None:
    """Raise `OutputError` for a world whose facts or model are not those of the results."""
    for key, what in (("facts_sha256", "facts"), ("model_files", "model's files")):
        if key in now and before.get(key) not in (None, now[key]):
            raise OutputError(
                f"the {what} of world {name} have changed since results were written to {out}; restore them, or "
                "name a new folder"
            )


def _worlds_in(out: Path) -> dict[str, dict[str, Any]]:
    """The worlds that a folder of a study records, with their settings; none in another folder."""
    path, marker = out / MARKER, read_json(out / MARKER)
    if marker.get("kind") != KIND:
        return {}
    check_saved(path, marker, out, config=dict)
    check_saved(path, marker["config"], out, worlds=dict)
    check_saved(path, marker["config"]["worlds"], out, **dict.fromkeys(marker["config"]["worlds"], dict))
    return marker["config"]["worlds"]


def _begun(out: Path, world: str) -> bool:
    """Whether something was measured on a world, a fit or what its base knows, or is being measured now."""
    measured = itertools.chain(out.glob(f"fits/{world}/*/*/*/{RESULT}"), out.glob(f"bases/{world}-[0-9]*.json"))
    return any(True for _ in measured) or any(map(is_locked, out.glob(f"fits/{world}/seed-*")))


def _done(fit: Fit, plan: Study, out: Path) -> bool:
    """Whether a fit has its result.

    Raises `OutputError` if it was changed, is that of another fit, or has other settings than the study's.
    """
    path = out / fit.folder / RESULT
    result = read_saved(path)
    if result:
        check_saved(path, result, path, **FIELDS, method_settings=dict)
        held = replace(fit, **{name: result.get(name) for name in asdict(fit)})
        if held != fit:
            raise OutputError(f"{path} holds the result of {held.folder}; remove it, and this fit is done again")
    if result and result["method_settings"] != plan.methods[fit.method]:
        raise OutputError(
            f"{out / fit.folder} holds a fit with other settings ({result['method_settings']}); give the method "
            "another name, or remove that folder"
        )
    return bool(result)
