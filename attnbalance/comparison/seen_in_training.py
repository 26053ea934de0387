"""Which of the questions are about facts that a model was finetuned on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attnbalance.comparison.specs import ModelSpec
from attnbalance.data.facts import Fact
from attnbalance.data.prompts import Prompt
from attnbalance.data.sources.own_facts import load_own
from attnbalance.files.outputs import MARKER, read_json
from attnbalance.files.seals import SCALED
from attnbalance.finetuning.runs import FACTS, KIND
from attnbalance.report.wording import listed


def seen_in_training(specs: Sequence[ModelSpec], prompts: Sequence[Prompt]) -> str:
    """How many questions are about training facts of models that `finetune` made, in words; empty if none is.

    A fact is a training fact if the run's file of them, or of replayed ones, has its subject and relation.
    """
    asked = [_name(prompt.fact) for prompt in prompts]
    counts = {spec.label: sum(map(_trained(spec).__contains__, asked)) for spec in specs}
    seen = [f"{label} was finetuned on the facts of {n:,} of these {len(asked):,}" for label, n in counts.items() if n]
    return listed(seen) if seen else ""


def _trained(spec: ModelSpec) -> set[tuple[str, str]]:
    """The facts that a run was trained on.

    A checkpoint's run is one of the folders above it; that of a scaled adapter is the one that it was scaled from.
    """
    folder = Path(spec.adapter or spec.model)
    marker = read_json(folder / MARKER)
    if marker.get("kind") == SCALED:
        folder = Path(marker["config"]["adapter"])
    runs = [path for path in (folder, *folder.absolute().parents[:2]) if read_json(path / MARKER).get("kind") == KIND]
    files = [run / FACTS[part] for run in runs for part in ("train", "replay")]
    return {_name(fact) for file in files if file.is_file() for fact in load_own(file)}


def _name(fact: Fact) -> tuple[str, str]:
    return fact.composed_subject, fact.relation
