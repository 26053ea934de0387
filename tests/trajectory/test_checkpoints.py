"""Checkpoints of a run, specs by folder or pattern, and their steps."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnbalance.comparison.specs import ModelSpec
from attnbalance.errors import ModelError
from attnbalance.trajectory.checkpoints import find_checkpoints


def made(folder: Path, state: object = None, file: str = "adapter_config.json") -> Path:
    """A folder that looks like a checkpoint."""
    folder.mkdir(parents=True)
    (folder / file).write_text('{"base_model_name_or_path": "models/base"}')
    if state is not None:
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": state}))
    return folder


def test_a_trainers_folder_a_pattern_and_a_list_give_the_same_sorted_by_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    paths = [made(run / f"checkpoint-{step}", step) for step in (100, 20, 3)]
    made(tmp_path / "run-final", file="config.json")
    (run / "adapter_config.json").write_text("{}")  # Trainer's last save, beside the checkpoints
    specs = find_checkpoints([str(run)])
    assert list(specs) == [0, 3, 20, 100]
    assert specs[0] == ModelSpec("step 0", "models/base")
    assert specs[3] == ModelSpec("step 3", str(paths[2]))
    assert find_checkpoints([str(run / "checkpoint-*")]) == specs == find_checkpoints([str(path) for path in paths])


def test_the_model_before_training_is_step_0_and_can_be_named(tmp_path: Path) -> None:
    paths = [made(tmp_path / "lora" / f"checkpoint-{step}") for step in (1, 2)]
    specs = find_checkpoints([str(tmp_path / "lora")], "models/other")
    assert specs[0] == ModelSpec("step 0", "models/other")
    assert specs[2] == ModelSpec("step 2", "models/other", str(paths[1]))
    paths = [made(tmp_path / "full" / f"checkpoint-{step}", file="config.json") for step in (1, 2)]
    assert list(find_checkpoints([str(tmp_path / "full")])) == [1, 2]
    specs = find_checkpoints([str(tmp_path / "full")], "models/other")
    assert specs == {
        0: ModelSpec("step 0", "models/other"),
        **{step: ModelSpec(f"step {step}", str(path)) for step, path in zip((1, 2), paths, strict=True)},
    }
    made(tmp_path / "full" / "checkpoint-0", file="config.json")  # one that was saved before the first step
    assert find_checkpoints([str(tmp_path / "full")])[0].model.endswith("checkpoint-0")
    made(tmp_path / "lora" / "checkpoint-0")
    assert find_checkpoints([str(tmp_path / "lora")], "models/other")[0].adapter is not None


def test_the_step_is_the_states_or_the_number_at_the_names_end(tmp_path: Path) -> None:
    paths = [made(tmp_path / "best", 70), made(tmp_path / "adapter_v2", 500), made(tmp_path / "step-000040")]
    assert list(find_checkpoints([str(path) for path in paths])) == [0, 40, 70, 500]


def test_a_link_has_the_step_of_its_own_name_and_without_a_number_that_of_its_target(tmp_path: Path) -> None:
    first, last = made(tmp_path / "store" / "first-2"), made(tmp_path / "store" / "last-1")
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoint-100").symlink_to(first)
    (run / "checkpoint-200").symlink_to(last)
    specs = find_checkpoints([str(run)], base="base")
    assert {step: spec.adapter for step, spec in specs.items()} == {
        0: None,
        100: str(run / "checkpoint-100"),
        200: str(run / "checkpoint-200"),
    }
    (tmp_path / "newest").symlink_to(first)
    assert list(find_checkpoints([str(tmp_path / "newest")], base="base")) == [0, 2]
    (first / "trainer_state.json").write_text(json.dumps({"global_step": 100}))
    assert list(find_checkpoints([str(run)], base="base")) == [0, 100, 200]


def test_a_base_beside_a_full_checkpoint_of_step_0_is_refused(tmp_path: Path) -> None:
    for step in (0, 10):
        made(tmp_path / f"checkpoint-{step}", file="config.json")
    assert list(find_checkpoints([str(tmp_path)])) == [0, 10]
    with pytest.raises(ModelError, match="step 0 must be one model, got the base other and .*checkpoint-0; leave one"):
        find_checkpoints([str(tmp_path)], base="other")


def test_a_run_of_ours_gives_its_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(checkpoints={20: tmp_path / "step-000020", 10: tmp_path / "step-000010"})
    (tmp_path / "attnbalance.json").write_text('{"kind": "finetune"}')
    monkeypatch.setattr("attnbalance.trajectory.checkpoints.load_run", lambda _: run)
    assert list(find_checkpoints([str(tmp_path)])) == [10, 20]


def test_what_has_no_step_is_refused_by_name(tmp_path: Path) -> None:
    made(tmp_path / "best")
    with pytest.raises(ModelError, match=r"best has no step: its name must end with one"):
        find_checkpoints([str(tmp_path / "best")])
    made(tmp_path / "other", "many")
    with pytest.raises(ModelError, match=r"other has no step"):
        find_checkpoints([str(tmp_path / "other")])


def test_a_name_that_contradicts_the_state_is_refused(tmp_path: Path) -> None:
    made(tmp_path / "checkpoint-10", 20)
    with pytest.raises(ModelError, match=r"checkpoint-10 is named for another step .* says: 20"):
        find_checkpoints([str(tmp_path)])


def test_two_checkpoints_of_one_step_are_refused_but_not_one_named_twice(tmp_path: Path) -> None:
    for run in ("a", "b"):
        for step in (1, 2):
            made(tmp_path / run / f"checkpoint-{step}")
    assert len(find_checkpoints([str(tmp_path / "a"), str(tmp_path / "a" / "checkpoint-1")])) == 3
    with pytest.raises(ModelError, match="step 1 must have one checkpoint, got .*checkpoint-1 and .*checkpoint-1"):
        find_checkpoints([str(tmp_path / "a"), str(tmp_path / "b")])


def test_a_half_written_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    made(tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(ModelError, match=r"checkpoint-2 is no checkpoint: it holds neither config.json nor"):
        find_checkpoints([str(tmp_path)])


def test_a_place_without_checkpoints_and_a_single_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no checkpoints at .*nowhere"):
        find_checkpoints([str(tmp_path / "nowhere")])
    made(tmp_path / "checkpoint-1", file="config.json")
    with pytest.raises(ModelError, match="expected at least two checkpoints, got 1"):
        find_checkpoints([str(tmp_path)])


def test_adapters_beside_a_configuration_are_adapters(tmp_path: Path) -> None:
    """Some trainers leave the base's config.json in the folder."""
    for step in (1, 2):
        made(tmp_path / "lora" / f"checkpoint-{step}")
        (tmp_path / "lora" / f"checkpoint-{step}" / "config.json").write_text("{}")
    specs = find_checkpoints([str(tmp_path / "lora")])
    assert list(specs) == [0, 1, 2]
    assert specs[0] == ModelSpec("step 0", "models/base")
    named = find_checkpoints([str(tmp_path / "lora")], "models/other")
    assert named[1] == ModelSpec("step 1", "models/other", str(tmp_path / "lora" / "checkpoint-1"))


def test_an_empty_base_is_refused(tmp_path: Path) -> None:
    for step in (1, 2):
        made(tmp_path / "lora" / f"checkpoint-{step}")
    with pytest.raises(ModelError, match="base must name a model, got an empty text"):
        find_checkpoints([str(tmp_path / "lora")], "")
