"""The study: methods x splits x seeds on several worlds, each fit in a folder of its own, and the table of them all."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from attnbalance.datasets.load import load_facts
from attnbalance.errors import DataError, OutputError
from attnbalance.facts import FactSet
from attnbalance.finetune.curriculum import check_curriculum
from attnbalance.finetune.pretrain import POPQA_RECIPE, SYNTHETIC_RECIPE, Recipe, pretrain
from attnbalance.finetune.runs import Run
from attnbalance.finetune.splits import SPLITS, Split, split_facts
from attnbalance.finetune.trainer import finetune
from attnbalance.outputs import MARKER, as_folder, is_finished, provenance, read_json, replacing, write_json
from attnbalance.prompts import make_prompts
from attnbalance.worlds.statements import World, statement_prompts
from attnbalance.worlds.synthetic import synthetic_facts

KIND = "study"
RESULT = "result.json"
FIELDS = ("worlds", "seeds", "splits", "methods", "defaults")
WORLD_FIELDS = ("facts", "relations", "limit", "power", "model", "recipe", "subjects", "answers")
METHOD_FIELDS = (
    "template",
    "steps",
    "learning_rate",
    "batch_size",
    "accumulate",
    "weight_decay",
    "lora_rank",
    "lora_alpha",
    "train",
    "objective",
    "curriculum",
    "gradient_rank",
    "dtype",
    "checkpoint_every",
    "patience",
)
"""Settings of `finetune`; a list of values stands for a grid."""

NUMBERS = {"steps": 1, "learning_rate": 0, "batch_size": 1, "accumulate": 1, "weight_decay": 0, "lora_rank": 0}
NUMBERS |= {"lora_alpha": 0, "gradient_rank": 1, "checkpoint_every": 1, "patience": 1}
"""The settings that are numbers, and the least that each may be."""

TEXTS = 200
"""Statements of the world on which drift is measured."""


@dataclass(frozen=True)
class Fit:
    """One cell of the study."""

    world: str
    seed: int
    split: str
    method: str

    @property
    def folder(self) -> str:
        """Where its result stands, below the study's folder."""
        return f"fits/{self.world}/seed-{self.seed}/{self.split}/{self.method}"


@dataclass(frozen=True)
class Study:
    """A study as its file describes it: settings by the names of worlds and methods, seeds and splits."""

    worlds: Mapping[str, Mapping[str, Any]]
    methods: Mapping[str, Mapping[str, Any]]
    seeds: tuple[int, ...]
    splits: tuple[str, ...]

    @cached_property
    def fits(self) -> list[Fit]:
        """All cells: those of one world and seed, which share a base model, one after the other."""
        return [Fit(*cell) for cell in itertools.product(self.worlds, self.seeds, self.splits, self.methods)]

    def part(self, worker: int, workers: int) -> list[Fit]:
        """The cells of one of several workers; those that share a base go to one."""
        shared = list(itertools.product(self.worlds, self.seeds))
        mine = {pair for i, pair in enumerate(shared) if i % workers == worker}
        return [fit for fit in self.fits if (fit.world, fit.seed) in mine]


def parse_study(path: str | Path) -> Study:
    """The study that a YAML file describes; raises `DataError` for anything in it that is not known, by name."""
    from attnbalance.finetune.objectives import parse_objective
    from attnbalance.finetune.parameters import parse_parts

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read the study {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise DataError(f"the study {path} is no YAML: {' '.join(str(error).split())}") from error
    whole = _mapping(found, "the study", FIELDS)
    worlds = {str(name): _mapping(one, f"world {name}", WORLD_FIELDS) for name, one in _named(whole, "worlds").items()}
    defaults = _mapping(whole.get("defaults") or {}, "defaults", METHOD_FIELDS)
    methods = {
        str(name): {**defaults, **_mapping(one or {}, f"method {name}", METHOD_FIELDS)}
        for name, one in _named(whole, "methods").items()
    }
    for name, world in worlds.items():
        if "facts" not in world:
            raise DataError(f"world {name} names no facts: a SOURCE, or synthetic")
        unknown = sorted(set(world.get("recipe") or {}) - set(asdict(SYNTHETIC_RECIPE)))
        if unknown:
            raise DataError(
                f"world {name}: no {unknown[0]} in a recipe; there are {', '.join(asdict(SYNTHETIC_RECIPE))}"
            )
    many = [name for name, method in methods.items() if isinstance(method.get("objective"), list)]
    if many:
        raise DataError(f"method {many[0]} must name one objective: the values of two cannot be compared")
    for name, method in methods.items():
        if [] in method.values():
            raise DataError(f"method {name} has an empty list of values")
        for variant in variants(method):
            _check_numbers(name, variant)
            try:
                parse_objective(variant.get("objective", "ce"))
                parse_parts(variant.get("train") or "all")
                check_curriculum(variant.get("curriculum", "shuffled"))
            except DataError as error:
                raise DataError(f"method {name}: {error}") from error
    seeds, splits = whole.get("seeds", [0]), whole.get("splits", ["top", "bottom"])
    for what, values, kind in (("seeds", seeds, int), ("splits", splits, str)):
        right = isinstance(values, list) and values and all(isinstance(one, kind) for one in values)
        if not right or len(set(values)) < len(values):
            raise DataError(f"{what} are a list of different {'whole numbers' if kind is int else 'names'}: {values!r}")
    unknown = sorted(set(splits) - set(SPLITS))
    if unknown:
        raise DataError(f"no split {unknown[0]!r}; there are {', '.join(SPLITS)}")
    return Study(worlds, methods, tuple(seeds), tuple(splits))


def _check_numbers(name: str, variant: Mapping[str, Any]) -> None:
    """Raise `DataError` for a setting of a method that should be a number and is none, or none that can be used."""
    for field in NUMBERS:
        value, least = variant.get(field), NUMBERS[field]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < least):
            raise DataError(
                f"method {name}: {field} must be a number of at least {least}, got {value!r} (in YAML, 1e-3 is a text: "
                "write 0.001 or 1.0e-3)"
            )


def variants(method: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings that a method's lists of values stand for."""
    values = [value if isinstance(value, list) else [value] for value in method.values()]
    return [dict(zip(method, chosen, strict=True)) for chosen in itertools.product(*values)]


def study(path: str | Path, out: str | Path, *, worker: str | None = None, progress: bool = False) -> str:
    """Run a study, or one worker's part "I/N" of it, into the folder `out`; returns the table, or what is left to do.

    Fits that have a result are not done again, and a killed one goes on where it was. The worker that finds all results
    there writes `table.md`, `study.json` and `study.png`; the results are the same for any number of workers. Where
    `worker` is None, Slurm's array index counts. Raises `AttnBalanceError` for a study that cannot be run.
    """
    from tqdm import tqdm

    from attnbalance.report.study import write_tables

    plan, out = parse_study(path), as_folder(out)
    index, count = _worker(worker)
    config = {"worlds": plan.worlds}  # methods, seeds and splits may be added
    for world in plan.worlds.values():  # what is wrong with one shows before any of them is trained on
        Bench(world, plan.seeds[0], out, False).world.statements(1)
    if not is_finished(out, KIND, config):
        try:
            out.mkdir(parents=True, exist_ok=True)
            write_json(out / MARKER, {"kind": KIND, "config": config} | provenance())
        except OSError as error:
            raise OutputError(f"cannot write to --out {out}: {error}") from error
    for place, fits in itertools.groupby(plan.part(index, count), key=lambda fit: (fit.world, fit.seed)):
        left = [fit for fit in fits if not _done(fit, plan, out)]
        if left:
            bench = Bench(plan.worlds[place[0]], place[1], out / "bases" / f"{place[0]}-{place[1]}", progress)
            for fit in tqdm(left, f"{place[0]}, seed {place[1]}", unit="fit", disable=not progress):
                try:
                    _run(fit, plan.methods[fit.method], bench, out / fit.folder, progress)
                except DataError as error:
                    raise DataError(f"{fit.folder}: {error}") from error
    missing = [fit for fit in plan.fits if not _done(fit, plan, out)]
    if missing:
        return (
            f"{len(plan.fits) - len(missing)} of {len(plan.fits)} fits are done; the others are other workers'. "
            "Whoever finishes the last writes the table, as does this command, run again then"
        )
    return write_tables([read_json(out / fit.folder / RESULT) for fit in plan.fits], out)


def _done(fit: Fit, plan: Study, out: Path) -> bool:
    """Whether a fit has its result; raises `OutputError` where that is of other settings than the study's."""
    found = read_json(out / fit.folder / RESULT)
    if found and found["method_settings"] != plan.methods[fit.method]:
        raise OutputError(
            f"{out / fit.folder} holds a fit with other settings ({found['method_settings']}); give the method another "
            "name, or remove that folder"
        )
    return bool(found)


class Bench:
    """What all fits on one world with one seed share: its facts, the base model and what that model has stored."""

    def __init__(self, world: Mapping[str, Any], seed: int, folder: Path, progress: bool) -> None:
        self.settings, self.seed, self.folder, self.progress = world, seed, folder, progress

    @cached_property
    def facts(self) -> FactSet:
        """The world's facts."""
        source, some = self.settings["facts"], self.settings.get
        if source == "synthetic":
            sizes = {name: self.settings[name] for name in ("subjects", "answers") if name in self.settings}
            return synthetic_facts(self.seed, **sizes)
        return load_facts(source, some("relations"), some("limit"), self.seed)

    @cached_property
    def world(self) -> World:
        """The facts, stated as often as the world says."""
        return World(self.facts, self.settings.get("power", 1.0 if self.settings["facts"] == "synthetic" else 0.5))

    @cached_property
    def base(self) -> str:
        """The base model: the world's own, or one pretrained on its statements."""
        if "model" in self.settings:
            return str(self.settings["model"])
        usual = SYNTHETIC_RECIPE if self.settings["facts"] == "synthetic" else POPQA_RECIPE
        recipe: Recipe = replace(usual, **(self.settings.get("recipe") or {}))
        return str(pretrain(self.world, self.folder, recipe=recipe, seed=self.seed, progress=self.progress))

    @cached_property
    def stated(self) -> dict[str, bool]:
        """For each fact, by prompt id, whether the base completes its statement."""
        from attnbalance.models.load import load_model
        from attnbalance.readings.recall import recall

        kept = self.folder.with_name(f"{self.folder.name}-stated.json")
        if not kept.exists():
            found = recall(load_model(self.base), statement_prompts(self.facts), batch_size=128)
            write_json(kept, dict(zip(found.prompt_ids, found.correct, strict=True)))
        return read_json(kept)

    def split(self, name: str) -> Split:
        """One of the splits of the world's facts."""
        return split_facts(self.facts, name, seed=self.seed)


def _run(fit: Fit, method: Mapping[str, Any], bench: Bench, folder: Path, progress: bool) -> None:
    """Finetune all variants of a method, take the one with the lowest validation loss, measure it."""
    split, runs, base = bench.split(fit.split), list[Run](), bench.base
    started = time.perf_counter()
    for i, variant in enumerate(variants(method)):
        run = finetune(base, split, folder / f"run-{i}", seed=fit.seed, progress=progress, **variant)
        shutil.rmtree(run.path / "checkpoints", ignore_errors=True)  # the best one is the run's folder itself
        runs.append(run)
    best = min(runs, key=lambda run: run.validation_loss[run.best_step])
    about = {
        **asdict(fit),
        "method_settings": dict(method),
        "settings": dict(best.config),
        "trained": best.trained,
        "best_step": best.best_step,
    }
    about |= {"seconds": time.perf_counter() - started}
    with replacing(folder / RESULT) as path:
        write_json(path, about | _measured(best, bench, split))


def _measured(run: Run, bench: Bench, split: Split) -> dict[str, Any]:
    from attnbalance.models.load import load_model
    from attnbalance.readings.attention import read_subject_attention
    from attnbalance.readings.drift import read_drift
    from attnbalance.readings.recall import recall

    base, model = load_model(bench.base), load_model(run.path)
    asked = _prompts(bench, run, split.heldout)
    found = recall(model, asked, run.shortcuts, batch_size=128)
    trained = recall(model, _prompts(bench, run, split.train), run.shortcuts, batch_size=128)
    attention = read_subject_attention(model, asked, batch_size=128)
    wrong = found.shortcut_rate()
    drift = read_drift(model, base, bench.world.statements(TEXTS, bench.seed + 1))
    stated = [bench.stated[name] for name in found.prompt_ids]
    known = [bench.stated[name] for name in trained.prompt_ids]
    del base, model
    gc.collect()
    return {
        "prompt_ids": list(found.prompt_ids),
        "subjects": list(found.subjects),
        "correct": list(found.correct),
        "stated": stated,
        "accuracy_by_quintile": [_mean([found.correct[i] for i in places]) for places in found.quintiles()],
        "shortcut_rate": None if wrong is None else wrong.mean,
        "subject_attention": attention.values.mean((0, 2)).tolist(),
        "new_facts": _mean([right for right, before in zip(trained.correct, known, strict=True) if not before]),
        "kept_facts": _mean([right for right, before in zip(trained.correct, known, strict=True) if before]),
        "drift": float(drift.mean()),
    }


def _prompts(bench: Bench, run: Run, facts: FactSet) -> list[Any]:
    """Questions about some facts, with the ids that they have among all facts of the world."""
    every = zip(bench.facts, make_prompts(bench.facts, str(run.config["template"])), strict=True)
    names = {id(fact): prompt for fact, prompt in every}
    return [names[id(fact)] for fact in facts]


def _mean(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def _worker(text: str | None) -> tuple[int, int]:
    if text is None:
        if "SLURM_ARRAY_TASK_ID" not in os.environ:
            return 0, 1
        step = {name: int(os.environ.get(f"SLURM_ARRAY_TASK_{name}", "1")) for name in ("ID", "MIN", "STEP", "COUNT")}
        text = f"{(step['ID'] - step['MIN']) // max(1, step['STEP'])}/{step['COUNT']}"
    index, slash, count = text.partition("/")
    if not slash or not (index.isdigit() and count.isdigit()) or not int(index) < int(count):
        raise DataError(f"expected a worker as I/N with I from 0 to N - 1, got {text!r}")
    return int(index), int(count)


def _mapping(value: object, what: str, fields: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{what} must be a mapping of settings, got {value!r}")
    unknown = sorted(str(name) for name in value if name not in fields)
    if unknown:
        raise DataError(f"{what} has no setting {unknown[0]!r}; there are {', '.join(fields)}")
    return value


def _named(whole: Mapping[str, Any], field: str) -> dict[str, Any]:
    found = whole.get(field)
    if not isinstance(found, dict) or not found:
        raise DataError(f"the study needs {field}: names, each with its settings")
    odd = [name for name in found if not str(name).replace("-", "").replace("_", "").replace(".", "").isalnum()]
    if odd:
        raise DataError(f"{field}: {odd[0]!r} becomes a folder's name; use letters, digits, '-', '_' and '.'")
    return found
