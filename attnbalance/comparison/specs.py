"""The models of a comparison, each under a label, and the settings that all of them are measured with."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from attnbalance.data.facts import FactSet
from attnbalance.data.scoring import WHOLE_WORDS
from attnbalance.errors import ArgumentError, DataError, ModelError
from attnbalance.files.outputs import MARKER, check_saved, read_json
from attnbalance.models.fingerprint import files_fingerprint, hub_file
from attnbalance.models.hooked import HookedModel
from attnbalance.models.load import load_model
from attnbalance.seeds import check_seed


@dataclass(frozen=True)
class ModelSpec:
    """A model to measure.

    label: its name in every table, figure and sentence.
    model: a folder, or an id on the Hub.
    adapter: a folder or Hub id of a LoRA adapter to put on top.
    """

    label: str
    model: str
    adapter: str | None = None

    @property
    def run(self) -> Mapping[str, object]:
        """The `attnbalance.json` in the folder of the adapter or model: how it was made; empty without one.

        Raises `OutputError` if it was changed, so that its shortcuts are no answers by relation.
        """
        path = Path(self.adapter or self.model) / MARKER
        record = read_json(path)
        if "shortcuts" in record:
            check_saved(path, record, path, shortcuts=dict)
            check_saved(path, record["shortcuts"], path, **{relation: [str] for relation in record["shortcuts"]})
        return record


@dataclass(frozen=True)
class MeasureSettings:
    """How models are asked and read; the same for all models of a comparison.

    template: name or text of the questions' template (see `Template`).
    chat: put questions into the model's chat template.
    reduce: reduction of attention over the subject's tokens (see `AttentionRows.to`).
    recall: also generate answers and score them.
    batch_size: prompts per forward pass.
    dtype: dtype to load weights in; by default the checkpoint's.
    device: device to load models on; by default the accelerator, if any.
    tokenizer: folder or Hub id of a tokenizer that is not the model's own.
    trust_remote_code: run code that comes with a model.
    seed: of intervals and of the choice of example prompts.
    scoring: which answers are right (see `SCORINGS`).
    """

    template: str = "qa"
    chat: bool = False
    reduce: str = "max"
    recall: bool = False
    batch_size: int = 32
    dtype: str | None = None
    device: str | None = None
    tokenizer: str | None = None
    trust_remote_code: bool = False
    seed: int = 0
    scoring: str = WHOLE_WORDS

    def __post_init__(self) -> None:
        """Refuse texts for True or False, unusable seeds, and a scoring of answers that are not asked for."""
        for name in ("chat", "recall", "trust_remote_code"):
            if not isinstance(value := getattr(self, name), bool):
                raise ArgumentError(f"MeasureSettings: {name} must be bool, got {value!r} ({type(value).__name__})")
        check_seed(self.seed)
        if self.scoring != WHOLE_WORDS and not self.recall:
            raise DataError(f"scoring {self.scoring!r} does nothing without answers; ask for them (`recall=True`)")


def parse_spec(text: str) -> ModelSpec:
    """A spec from LABEL=MODEL or LABEL=MODEL+ADAPTER; without a label, it is the last parts of the paths.

    A '=' or '+' is part of the path if a file or folder of that whole name exists. Raises `DataError` for other texts.

    >>> parse_spec("tuned=models/base+runs/lora")
    ModelSpec(label='tuned', model='models/base', adapter='runs/lora')
    >>> parse_spec("models/base+runs/lora").label
    'base+lora'
    """
    label, equals, path = text.partition("=")
    if text and Path(_expand_home(text)).exists():
        label, path = Path(os.path.abspath(_expand_home(text))).name, text  # "." has a name too
    elif not equals:
        base, plus, adapter = text.rpartition("+")
        label, path = (f"{Path(base).name}+{Path(adapter).name}" if plus else Path(text).name), text
    if not label or not path:
        raise DataError(f"expected LABEL=MODEL or LABEL=MODEL+ADAPTER, got {text!r}")
    if Path(_expand_home(path)).exists() or "+" not in path:
        return ModelSpec(label, _expand_home(path))
    model, _, adapter = path.rpartition("+")
    if not model or not adapter:
        raise DataError(f"expected LABEL=MODEL+ADAPTER, got {text!r}")
    return ModelSpec(label, _expand_home(model), _expand_home(adapter))


def _expand_home(path: str) -> str:
    """The path with `~` expanded, which a shell does at the beginning of a word only."""
    try:
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except RuntimeError as error:
        raise ModelError(f"no model folder at {path}: {error}") from error


def check_labels(specs: Sequence[ModelSpec]) -> None:
    """Raise `DataError` if two models have the same label."""
    repeated = [label for label, count in Counter(spec.label for spec in specs).items() if count > 1]
    if repeated:
        raise DataError(f"label {repeated[0]!r} is used for more than one model; give each its own: LABEL=MODEL")


def load_spec(spec: ModelSpec, settings: MeasureSettings) -> HookedModel:
    """The model of a spec, loaded with the settings' tokenizer, dtype and device (see `load_model`)."""
    return load_model(
        spec.model,
        adapter=spec.adapter,
        tokenizer=settings.tokenizer,
        dtype=settings.dtype,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
    )


def load_each(specs: Sequence[ModelSpec], settings: MeasureSettings) -> Iterator[HookedModel]:
    """The model of each spec in turn, loaded anew."""
    for spec in specs:
        yield load_spec(spec, settings)


def fingerprints(spec: ModelSpec, settings: MeasureSettings) -> list[str | None]:
    """Fingerprints of the folders, and commits of the Hub ids, that a measurement of a model depends on.

    They are those of the model, of its base if it is an adapter, of the adapter put on top, and of the tokenizer (see
    `files_fingerprint`).
    """
    paths = (spec.model, _adapter_base(spec.model), spec.adapter, settings.tokenizer)
    return [files_fingerprint(path) for path in paths if path]


def _adapter_base(model: str) -> str | None:
    """The base that a folder or Hub id names if it is an adapter."""
    name, folder = "adapter_config.json", Path(model)
    file = folder / name if folder.is_dir() else hub_file(model, name)
    base = read_json(file).get("base_model_name_or_path") if file else None
    return base if isinstance(base, str) else None  # loading the adapter refuses anything else


def results_config(
    specs: Sequence[ModelSpec],
    facts: FactSet,
    settings: MeasureSettings,
    skip_bad: bool,
    readings: Sequence[str] = (),
) -> dict[str, object]:
    """Everything that the results for some models and facts depend on; raises `DataError` for a repeated label.

    `readings` are the titles of a comparison's readings (`chosen_readings`), where the results hold them.
    """
    check_labels(specs)
    return {
        "models": [asdict(spec) for spec in specs],
        "files": [fingerprints(spec, settings) for spec in specs],
        "facts": facts.name,
        "facts_sha256": facts.sha256,
        **asdict(settings),
        "skip_bad": skip_bad,
        "readings": list(readings),
        "shortcuts": [spec.run.get("shortcuts") for spec in specs] if readings else None,
        "attnbalance_version": metadata.version("attnbalance"),
    }


def refuse_changed(config: Mapping[str, Any], specs: Sequence[ModelSpec], settings: MeasureSettings) -> None:
    """Raise `ModelError` for a model whose files are not those that `results_config` recorded any more."""
    changed = [
        spec.label for spec, files in zip(specs, config["files"], strict=True) if fingerprints(spec, settings) != files
    ]
    if changed:
        raise ModelError(
            f"the files of model {changed[0]} changed while it was measured; remove the unfinished work, or name a new "
            "folder, and run the command again"
        )
