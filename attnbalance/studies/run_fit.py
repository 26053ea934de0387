"""One fit of a study: all variants of its method trained, the best one measured."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from attnbalance.data.facts import FactSet
from attnbalance.data.prompts import make_prompts
from attnbalance.files.outputs import write_saved
from attnbalance.finetuning.finetune import finetune
from attnbalance.finetuning.replay import GENERATED, SHARE, count_of, replay, replayed_heldout
from attnbalance.finetuning.runs import CHECKPOINTS, Run
from attnbalance.finetuning.splits import Split
from attnbalance.seeds import LARGEST_SEED
from attnbalance.studies.controls import LABELS, relabelled, scored
from attnbalance.studies.plan import REPLAYS, Fit, Variant, variants
from attnbalance.studies.prepared_world import PreparedWorld

RESULT = "result.json"

TEXTS = 200
"""Statements of the world on which drift is measured."""


def run_fit(fit: Fit, method: Mapping[str, Any], prepared: PreparedWorld, folder: Path, progress: bool) -> None:
    """Finetune all variants of a method, take the one with the lowest validation loss, measure it.

    Writes `RESULT` into `folder`, beside the runs. Raises what `finetune` and `replay` raise.

    Args:
        fit: The world, seed, split and method.
        method: The method's settings; one with several values gives several variants.
        prepared: The world with its pretrained base.
        folder: The folder of the fit.
        progress: Whether to draw progress bars.
    """
    split, base, runs, wanted = prepared.split(fit.split), prepared.base, list[Run](), list[int]()
    started = time.perf_counter()
    for i, variant in enumerate(variants(method)):
        taught = split
        if variant.labels != LABELS[0]:
            taught = relabelled(split, variant.labels, prepared.said, fit.seed)
        settings = replace(variant.settings, seed=fit.seed)
        if variant.replay != REPLAYS[0]:
            taught = _with_replay(taught, variant, prepared, progress)
        run = finetune(base, taught, folder / f"run-{i}", settings, progress=progress)
        shutil.rmtree(run.path / CHECKPOINTS, ignore_errors=True)  # the best one is the run's folder itself
        runs.append(run)
        counted = variant.replay != REPLAYS[0] and taught.replay_share is None
        wanted.append(count_of(split, _replay_share(variant)) if counted else 0)
    best = min(runs, key=lambda run: run.validation_loss[run.best_step])
    about = {
        **asdict(fit),
        "method_settings": dict(method),
        "settings": dict(best.config),
        "trained": best.trained,
        "mixed_precision": best.mixed_precision,
        "dtype": prepared.dtype,
        "best_step": best.best_step,
        "replayed": len(best.replay),
        "replay_wanted": wanted[runs.index(best)],
        "replayed_heldout": replayed_heldout(replace(split, replay=best.replay)),
    }
    about |= {"seconds": time.perf_counter() - started, "attnbalance_version": metadata.version("attnbalance")}
    write_saved(folder / RESULT, about | _measured(best, prepared, split))


def _with_replay(split: Split, variant: Variant, prepared: PreparedWorld, progress: bool) -> Split:
    from attnbalance.models.load import load_model

    objective, template = variant.settings.objective, variant.settings.template
    facts = None if variant.replay == GENERATED else prepared.facts
    base = load_model(prepared.base, dtype=prepared.dtype)
    settings = {"objective": objective, "template": template, "seed": prepared.seed, "progress": progress}
    return replay(base, split, facts, _replay_share(variant), **settings)[0]


def _replay_share(variant: Variant) -> float:
    return SHARE if variant.replay_share is None else variant.replay_share


def _measured(run: Run, prepared: PreparedWorld, split: Split) -> dict[str, Any]:
    from attnbalance.models.load import load_model
    from attnbalance.readings.attention import read_subject_attention
    from attnbalance.readings.drift import read_drift
    from attnbalance.readings.recall import recall

    base, model = (load_model(path, dtype=prepared.dtype) for path in (prepared.base, run.path))
    asked = _prompts(prepared, run, split.heldout)
    on_heldout = recall(model, asked, run.shortcuts, batch_size=128)
    on_train = recall(model, _prompts(prepared, run, split.train), run.shortcuts, batch_size=128)
    attention = read_subject_attention(model, asked, batch_size=128)
    drift = read_drift(model, base, prepared.world.statements(TEXTS, (prepared.seed + 1) % (LARGEST_SEED + 1)))
    del base, model
    gc.collect()
    return scored(on_heldout, prepared.stated, on_train) | {
        "subject_attention": attention.values.mean((0, 2)).tolist(),
        "drift": float(drift.mean()),
    }


def _prompts(prepared: PreparedWorld, run: Run, facts: FactSet) -> list[Any]:
    """Questions about some facts, with the ids that they have among all facts of the world."""
    every = zip(prepared.facts, make_prompts(prepared.facts, str(run.config["template"])), strict=True)
    names = {id(fact): prompt for fact, prompt in every}
    return [names[id(fact)] for fact in facts]
