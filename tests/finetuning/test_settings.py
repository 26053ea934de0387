"""Settings of finetuning: what they record, their defaults, and what is refused."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from attnbalance.data.prompts import Template
from attnbalance.errors import ArgumentError, DataError
from attnbalance.finetuning.objectives.expression import RECOMMENDED
from attnbalance.finetuning.settings import HIGHEST_RANK, FinetuneSettings

RECORDED = {
    "template": "Question: {question} Answer:",
    "steps": 200,
    "learning_rate": 3e-4,
    "batch_size": 128,
    "accumulate": 1,
    "weight_decay": 0.0,
    "lora_rank": 0,
    "lora_alpha": None,
    "train": "all",
    "objective": "ce",
    "curriculum": "shuffled",
    "gradient_rank": None,
    "dtype": None,
    "checkpoint_every": 20,
    "patience": 3,
    "seed": 0,
}
"""What attnbalance.json of a finished run has always held; another key or value would make runs unknown."""


def test_the_record_is_the_one_that_finished_runs_hold() -> None:
    assert FinetuneSettings().record() == RECORDED
    assert list(FinetuneSettings().record()) == list(RECORDED)
    assert FinetuneSettings(lora_rank=4).record() == RECORDED | {"lora_rank": 4, "lora_alpha": 8}
    assert FinetuneSettings(lora_rank=4, lora_alpha=1.5).record()["lora_alpha"] == 1.5
    assert FinetuneSettings(template=Template("own", "{subject} is")).record()["template"] == "{subject} is"
    assert FinetuneSettings(mixed_precision="no").record() == RECORDED | {"mixed_precision": "no"}
    assert FinetuneSettings(peft={"peft_type": "OFT"}).record() == RECORDED | {"peft": {"peft_type": "OFT"}}


def test_weights_of_64_bits_are_multiplied_in_64_bits() -> None:
    assert FinetuneSettings(dtype="float64").schedule.mixed_precision == "no"
    assert FinetuneSettings(dtype="float16").schedule.mixed_precision is None
    assert FinetuneSettings(mixed_precision="bf16").schedule.mixed_precision == "bf16"


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [({}, "float32"), ({"lora_rank": 2}, None), ({"dtype": "bfloat16"}, "bfloat16")],
)
def test_weights_that_are_trained_themselves_are_float32_by_default(changes: dict[str, Any], dtype: str | None) -> None:
    assert FinetuneSettings(**changes).weights_dtype == dtype


def test_a_curriculum_that_changes_over_time_is_not_stopped_early() -> None:
    assert FinetuneSettings(curriculum="popular-first").schedule.patience is None
    assert FinetuneSettings(curriculum="popular-share=0.5").schedule.patience == 3
    assert FinetuneSettings(curriculum="popular-first").record()["patience"] == 3


def test_a_rate_that_falls_runs_to_its_end_and_is_recorded_where_it_is_given() -> None:
    assert (FinetuneSettings(decay=True).schedule.decay, FinetuneSettings(decay=True).schedule.patience) == (True, None)
    assert FinetuneSettings(decay=True).record()["decay"] is True
    assert (FinetuneSettings().schedule.decay, "decay" in FinetuneSettings().record()) == (False, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"template": "Hello"}, "must name the subject once"),
        ({"steps": 0}, "`steps` must be a whole number >= 1, got 0"),
        ({"steps": 2.0}, "`steps` must be a whole number >= 1, got 2.0"),
        ({"steps": True}, "`steps` must be a whole number >= 1, got True"),
        ({"steps": -(16**5000)}, "`steps` must be a whole number >= 1, got a number of many digits"),
        ({"steps": np.int64(5)}, r"`steps` must be a whole number >= 1, got .*5.*; pass a Python int"),
        ({"learning_rate": np.float32(0.1)}, "`learning_rate` must be a number, got .*; pass a Python float"),
        ({"learning_rate": "1e-3"}, "`learning_rate` must be a number, got '1e-3'"),
        ({"learning_rate": 10**5000}, "`learning_rate` must be a finite number > 0, got a larger one"),
        ({"weight_decay": None}, "`weight_decay` must be a number, got None"),
        ({"decay": 0.5}, "decay must be bool, got 0.5"),
        ({"lora_alpha": 3.0}, "`lora_alpha` scales LoRA adapters; give `lora_rank` as well"),
        ({"lora_alpha": -3}, "`lora_alpha` must be a finite number > 0, got -3"),
        ({"curriculum": 3}, "`curriculum` must be a text, got 3"),
        ({"train": 3}, "`train` must be a text, got 3"),
        ({"seed": 10**5000}, "seed must be an integer from 0 to 4294967295, got a number of many digits"),
        ({"batch_size": 10**4400}, "`batch_size` must be at most 1,000,000,000, got a larger number"),
        ({"patience": 0}, "`patience` must be a whole number >= 1, got 0"),
        ({"gradient_rank": 0}, "`gradient_rank` must be a whole number >= 1, got 0"),
        ({"checkpoint_every": -1}, "`checkpoint_every` must be a whole number >= 1, got -1"),
        ({"learning_rate": 0.0}, "`learning_rate` must be a finite number > 0"),
        ({"learning_rate": math.nan}, "`learning_rate` must be a finite number > 0"),
        ({"weight_decay": -0.1}, "`weight_decay` must be a finite number >= 0, got -0.1"),
        ({"batch_size": 8, "accumulate": 3}, "`batch_size` must be a multiple of `accumulate`, got 8 and 3"),
        ({"steps": 10**6, "batch_size": 1000}, "must be at most 100,000,000 examples"),
        ({"lora_rank": -1}, "`lora_rank` must be a whole number >= 0, got -1"),
        ({"lora_rank": HIGHEST_RANK + 1}, "`lora_rank` must be at most 65536, got 65537"),
        ({"lora_rank": 2, "lora_alpha": 0.0}, "`lora_alpha` must be a finite number > 0, got 0.0"),
        ({"dtype": "int8"}, "`dtype` must be float32, bfloat16, float16 or float64, got 'int8'"),
        ({"mixed_precision": "fp16"}, "`mixed_precision` must be no or bf16, got 'fp16'"),
        ({"mixed_precision": True}, "`mixed_precision` must be no or bf16, got True"),
        ({"mixed_precision": "bf16", "dtype": "float64"}, "needs weights of 32 or 16 bits; leave `dtype` float64 out"),
        ({"objective": "ce +"}, "There are ce; kl"),
        ({"objective": "2*recommended"}, "recommended takes no weight"),
        ({"objective": "ce", "curriculum": "easy"}, "no curriculum 'easy'"),
        ({"seed": -1}, "seed must be an integer"),
    ],
)
def test_settings_that_no_training_could_use_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        FinetuneSettings(**changes)


def test_an_objective_is_text() -> None:
    with pytest.raises(ArgumentError, match="text must be str, got 3"):
        FinetuneSettings(objective=3)  # pyright: ignore[reportArgumentType]


def test_the_record_names_what_recommended_stands_for() -> None:
    """A run of a version in which the name stood for other terms must not be taken for this one's."""
    assert FinetuneSettings(objective="recommended").record()["objective"] == RECOMMENDED
    assert FinetuneSettings(objective="floor+ 2*kl").record()["objective"] == "floor + 2*kl"


def test_settings_are_frozen_and_have_defaults_throughout() -> None:
    settings = FinetuneSettings()
    with pytest.raises(FrozenInstanceError):
        settings.steps = 3  # pyright: ignore[reportAttributeAccessIssue]
    parameters = inspect.signature(FinetuneSettings).parameters.values()
    assert all(parameter.default is not parameter.empty for parameter in parameters)


def test_settings_are_checked_without_torch() -> None:
    code = (
        "import sys; from attnbalance.finetuning.settings import FinetuneSettings as S\n"
        "S(objective='recommended', curriculum='popular-first').record(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
