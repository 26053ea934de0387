"""Study files: YAML read within limits and checked, by name, against the settings that there are."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from attnbalance.errors import AttnBalanceError, DataError
from attnbalance.finetuning.objectives.expression import parse_expression
from attnbalance.finetuning.pretrain import POPQA_RECIPE, SYNTHETIC_RECIPE, Recipe
from attnbalance.finetuning.settings import FinetuneSettings
from attnbalance.finetuning.splits import SPLITS
from attnbalance.seeds import LARGEST_SEED
from attnbalance.studies.controls import LABELS
from attnbalance.studies.yaml_file import read_yaml

MOST_RUNS = 10_000
"""Finetunings of one study: worlds x seeds x splits x variants of methods."""

LONGEST_NAME = 100
"""Bytes of a name that becomes a folder's; file systems take 255, some of which a suffix takes."""

REPLAYS = ("none", "known", "generated")
"""What is trained on beside a split's facts: nothing, other facts of the world that the base knows (any, if the
objective keeps what it says of them), or facts that the base generates."""

Count = Annotated[int, Field(ge=1, le=10**9)]
Rate = Annotated[float, Field(gt=0)]


class _Checked(BaseModel):
    """Settings of these names and types, and no others; what is not given is left to the code that takes it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class _Recipe(_Checked):
    layers: Count = 1
    d_model: Count = 1
    heads: Count = 1
    vocabulary: Count = 1
    steps: Count = 1
    batch_size: Count = 1
    learning_rate: Rate = 1.0


class _World(_Checked):
    facts: Annotated[str, Field(min_length=1)]
    relations: Annotated[list[str], Field(min_length=1)] = []
    limit: Count = 1
    power: Annotated[float, Field(ge=0)] = 1.0
    model: Annotated[str, Field(min_length=1)] = ""
    recipe: dict[str, Any] = {}
    subjects: Annotated[int, Field(ge=2, le=10**9)] = 2
    answers: Annotated[int, Field(ge=2, le=10**9)] = 2


def _method_types() -> dict[str, Any]:
    """The types of a method's settings: those of `FinetuneSettings` but the seed, and those of `Variant`."""
    types = get_type_hints(FinetuneSettings) | {"template": str}
    settings = {field.name: (types[field.name], field.default) for field in fields(FinetuneSettings)}
    del settings["seed"]
    own = {"labels": (Literal[LABELS], LABELS[0]), "replay": (Literal[REPLAYS], REPLAYS[0])}  # pyright: ignore
    return {**settings, **own, "replay_share": (Annotated[float | None, Field(gt=0, lt=1)], None)}


_Method = create_model("_Method", __base__=_Checked, **_method_types())
"""Settings of one run; in a file, a list of values stands for a grid."""


class _File(_Checked):
    worlds: Annotated[dict[str, Any], Field(min_length=1)]
    seeds: Annotated[list[Annotated[int, Field(ge=0, le=LARGEST_SEED)]], Field(min_length=1)] = [0]
    splits: Annotated[list[Literal[SPLITS]], Field(min_length=1)] = ["top", "bottom"]  # pyright: ignore
    methods: Annotated[dict[str, dict[str, Any] | None], Field(min_length=1)]
    defaults: dict[str, Any] | None = None


Settings = TypeVar("Settings", bound=_Checked)


@dataclass(frozen=True)
class Variant:
    """One combination of a method's settings."""

    settings: FinetuneSettings
    """How to train; the seed is the fit's."""
    labels: str = LABELS[0]
    """Where the answers come from (see `controls.LABELS`)."""
    replay: str = REPLAYS[0]
    """What is trained on beside the split's facts, one of `REPLAYS`."""
    replay_share: float | None = None
    """The share of replayed facts among all training facts, with `kl` in each batch; None: the usual one."""


@dataclass(frozen=True)
class Fit:
    """One cell of the study."""

    world: str
    seed: int
    split: str
    method: str

    @property
    def folder(self) -> str:
        """The folder of its result, in the study's folder."""
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

    @property
    def dtype(self) -> str | None:
        """The dtype in which the base and all fits are asked and compared; None: the base's own."""
        settings = [variant.settings for method in self.methods.values() for variant in variants(method)]
        dtypes = {each.compared_dtype for each in settings}
        return dtypes.pop() if len(dtypes) == 1 else "float32"

    def part(self, worker: int, workers: int) -> list[Fit]:
        """The cells of one of several workers; those that share a base go to one."""
        shared = list(itertools.product(self.worlds, self.seeds))
        mine = {pair for i, pair in enumerate(shared) if i % workers == worker}
        return [fit for fit in self.fits if (fit.world, fit.seed) in mine]


def parse_study(path: str | Path) -> Study:
    """The study that a YAML file describes.

    Raises `DataError`, naming the setting, for a file that is not a regular one of at most `LARGEST_FILE` bytes of
    UTF-8 or not YAML without aliases, for settings that are unknown, missing, of another type or out of range, and for
    more than `MOST_RUNS` finetunings.
    """
    whole = _checked(_File, read_yaml(Path(path)), "the study")
    for what in ("seeds", "splits"):
        values = getattr(whole, what)
        if len(set(values)) < len(values):
            raise DataError(f"{what} must be a list of distinct values, got {values!r}")
    for name in (*whole.worlds, *whole.methods):
        _check_name(name)
    worlds = {name: _world(value, name) for name, value in whole.worlds.items()}
    methods = {name: {**(whole.defaults or {}), **(given or {})} for name, given in whole.methods.items()}
    runs = len(worlds) * len(whole.seeds) * len(whole.splits) * sum(map(_count, methods.values()))
    if runs > MOST_RUNS:
        raise DataError(
            f"the study asks for {runs:,} finetunings ({len(worlds)} worlds x {len(whole.seeds)} seeds x "
            f"{len(whole.splits)} splits x all variants of methods); {MOST_RUNS:,} are allowed: make it several studies"
        )
    for name, method in methods.items():
        _check_method(method, f"method {name}")
        if "objective" in method:  # written out, so that a fit of another version's `recommended` is not taken for it
            methods[name] = {**method, "objective": parse_expression(method["objective"]).written_out}
    return Study(worlds, methods, tuple(whole.seeds), tuple(whole.splits))


def variants(method: Mapping[str, Any]) -> list[Variant]:
    """All combinations of a method's values, in an order that does not depend on the order of the settings."""
    return [_variant(values) for values in _combinations(method)]


def _variant(values: Mapping[str, Any]) -> Variant:
    own = {name: value for name, value in values.items() if name in ("labels", "replay", "replay_share")}
    return Variant(FinetuneSettings(**{name: values[name] for name in values if name not in own}), **own)


def _combinations(method: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = sorted(method)
    values = [method[name] if isinstance(method[name], list) else [method[name]] for name in names]
    return [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*values)]


def recipe_of(world: Mapping[str, Any]) -> Recipe:
    """How the base model of a world without one of its own is pretrained."""
    usual = SYNTHETIC_RECIPE if world["facts"] == "synthetic" else POPQA_RECIPE
    return Recipe(**{**vars(usual), **world.get("recipe", {})})


def _world(value: object, name: str) -> dict[str, Any]:
    """The settings of a world, of which none would be ignored."""
    checked = _checked(_World, value, f"world {name}")
    if "recipe" in checked.model_fields_set:
        _checked(_Recipe, checked.recipe, f"the recipe of world {name}")
    settings = checked.model_dump(exclude_unset=True)
    synthetic = checked.facts == "synthetic"
    idle = [("relations", synthetic), ("limit", synthetic), ("subjects", not synthetic), ("answers", not synthetic)]
    idle.append(("recipe", "model" in settings))
    for setting, ignored in idle:
        if ignored and setting in settings:
            other = "model" if setting == "recipe" else f"facts {checked.facts!r}"
            raise DataError(f"world {name}: {setting} does nothing together with {other}; leave one of the two out")
    try:
        recipe_of(settings)
    except DataError as error:
        raise DataError(f"the recipe of world {name}: {error}") from error
    return settings


def _check_method(method: Mapping[str, Any], what: str) -> None:
    """Raise `DataError` for settings of a method that some variant of it could not be run with."""
    from attnbalance.finetuning.adapters import peft_config
    from attnbalance.finetuning.objectives.parse import parse_objective
    from attnbalance.finetuning.parameters import parse_parts
    from attnbalance.finetuning.replay import check_replay

    for setting in ("objective", "labels", "template", "replay", "replay_share"):
        if isinstance(method.get(setting), list):
            raise DataError(f"{what} must name one {setting}: validation losses of two cannot be compared")
    if method.get("replay_share") is not None and method.get("replay", REPLAYS[0]) == REPLAYS[0]:
        raise DataError(f"{what}: replay_share is the share of replayed facts; give replay as well")
    if [] in method.values():
        raise DataError(f"{what} has an empty list of values")
    for values in _combinations(method):
        _checked(_Method, values, what)
        try:
            variant = _variant(values)
            parse_objective(variant.settings.objective)
            parse_parts(variant.settings.train)
            if variant.settings.peft is not None:
                peft_config(variant.settings.peft)
            if variant.replay != REPLAYS[0]:
                check_replay(variant.settings)
        except AttnBalanceError as error:
            raise DataError(f"{what}: {error}") from error


def _count(method: Mapping[str, Any]) -> int:
    """The number of a method's variants, without making them."""
    return math.prod(len(value) for value in method.values() if isinstance(value, list))


def _check_name(name: str) -> None:
    """Raise `DataError` for the name of a world or method that cannot be a folder's."""
    if not re.fullmatch(r"\w[\w.-]*", name) or len(name.encode()) > LONGEST_NAME:
        raise DataError(
            f"{name!r} becomes a folder's name; use letters, digits, '-', '_' and '.', at most {LONGEST_NAME} bytes, "
            "the first a letter, digit or '_'"
        )


def _checked(schema: type[Settings], value: object, what: str) -> Settings:
    """Settings in their types; raises `DataError` for the first that is wrong."""
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    name, given = ".".join(map(str, first["loc"])), _shown(first["input"])
    if first["type"] == "extra_forbidden":
        raise DataError(f"{what} has no setting {name!r}; there are {', '.join(schema.model_fields)}")
    if first["type"] == "missing":
        raise DataError(f"{what} needs {name}; its settings are {', '.join(schema.model_fields)}")
    if not name:
        raise DataError(f"{what} must be a mapping of settings, got {given}")
    must = first["msg"].replace("Input should", "must")
    hint = " (in YAML, 1e-3 is a text: write 0.001 or 1.0e-3)" if first["type"] == "float_type" else ""
    if first["type"] == "string_type" and isinstance(first["input"], bool):
        hint = " (in YAML, no, off, yes and on are booleans: write them in quotes)"
    raise DataError(f"{what}: {name} {must}, got {given}{hint}")


def _shown(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # Python refuses to write out numbers of more than 4,300 digits
        return "a number of thousands of digits"
