"""Checkpoints of unfinished training, and what a killed process leaves of them."""

import json
import shutil
from pathlib import Path

import pytest

from attnbalance.errors import OutputError
from attnbalance.files.seals import SEAL
from attnbalance.finetuning.checkpoints import (
    checkpoints,
    copy_for_users,
    drop_incomplete,
    mark_complete,
    set_damaged_aside,
    written,
)

FILES = ("model.safetensors", "optimizer.pt", "rng_state.pth", "training_args.bin", "trainer_state.json")


def _save(work: Path, step: int, complete: bool, log: tuple[int, ...] = ()) -> None:
    folder = work / f"checkpoint-{step}"
    folder.mkdir()
    for name in FILES:
        (folder / name).write_text(name)
    state = {"global_step": step, "log_history": [{"step": earlier, "eval_objective": 1.0} for earlier in log]}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    if complete:
        mark_complete(work, step)


def _left(work: Path) -> list[str]:
    return sorted(path.name for path in work.iterdir())


def test_only_complete_checkpoints_survive_and_are_in_order_of_steps(tmp_path):
    for step, complete in ((20, True), (100, True), (300, False)):
        _save(tmp_path, step, complete)
    assert list(checkpoints(tmp_path)) == [20, 100]
    assert drop_incomplete(tmp_path) == tmp_path
    assert _left(tmp_path) == ["checkpoint-100", "checkpoint-20"]


@pytest.mark.parametrize("how", ["truncated", "zeroed", "garbage", "gone"])
@pytest.mark.parametrize("name", [*FILES, SEAL])
@pytest.mark.parametrize("step", [20, 40])
def test_damaged_checkpoints_are_set_aside_with_one_message(tmp_path, recwarn, step, name, how):
    _save(tmp_path, 20, True)
    _save(tmp_path, 40, True, (20, 40))
    path = tmp_path / f"checkpoint-{step}" / name
    spent = step == 20 and not path.exists()
    if how == "gone" or spent:
        path.unlink(missing_ok=True)
    else:
        old = path.read_bytes()
        path.write_bytes({"truncated": old[:4], "zeroed": bytes(len(old))}.get(how, b"?" * len(old)))
    set_damaged_aside(drop_incomplete(tmp_path))
    if spent:  # what older checkpoints need no longer
        assert not recwarn.list
        assert list(checkpoints(tmp_path)) == [20, 40]
        return
    assert checkpoints(tmp_path) == {}
    assert len(recwarn.list) == 1
    gone = {f"checkpoint-{step}"} if (name, how) == (SEAL, "gone") else set()  # was never complete
    assert set(_left(tmp_path)) == {f"damaged-{kept}" for kept in {"checkpoint-20", "checkpoint-40"} - gone}


def test_training_whose_earlier_checkpoint_is_gone_begins_anew(tmp_path):
    _save(tmp_path, 40, True, (20, 40))
    with pytest.warns(UserWarning, match="checkpoint-20 is gone; set aside as damaged-checkpoint-40"):
        set_damaged_aside(drop_incomplete(tmp_path))
    assert _left(tmp_path) == ["damaged-checkpoint-40"]


def test_a_checkpoint_of_another_step_or_another_run_is_set_aside(tmp_path):
    for run in ("mine", "other"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "attnbalance.json").write_text(run)
        _save(tmp_path / run, 20, True)
        _save(tmp_path / run, 40, True, (20, 40))
    mine = tmp_path / "mine"
    shutil.copytree(mine / "checkpoint-40", mine / "checkpoint-60")
    with pytest.warns(UserWarning, match=r"checkpoint-60 is the checkpoint of step 40; set aside"):
        set_damaged_aside(mine)
    shutil.copytree(tmp_path / "other" / "checkpoint-40", mine / "checkpoint-40")
    with pytest.warns(UserWarning, match=r"checkpoint-40 is part of other work; set aside"):
        set_damaged_aside(mine)


def test_folders_whose_names_hold_no_step_are_no_checkpoints(tmp_path):
    _save(tmp_path, 20, True)
    shutil.copytree(tmp_path / "checkpoint-20", tmp_path / "checkpoint-abc")
    assert list(checkpoints(tmp_path)) == [20]


def test_checkpoints_removed_while_training_ran_are_named(tmp_path):
    _save(tmp_path, 20, True)
    assert list(written(tmp_path, [20])) == [20]
    with pytest.raises(OutputError, match="the checkpoint of step 10 in .* was removed while training ran"):
        written(tmp_path, [10, 20])
    with pytest.raises(OutputError, match="every checkpoint in .* was removed"):
        written(tmp_path / "none")


def test_only_the_newest_checkpoint_keeps_the_state_of_the_optimizer(tmp_path):
    _save(tmp_path, 20, True)
    assert (tmp_path / "checkpoint-20" / "optimizer.pt").exists()
    _save(tmp_path, 40, True)
    assert not (tmp_path / "checkpoint-20" / "optimizer.pt").exists()
    assert (tmp_path / "checkpoint-40" / "optimizer.pt").exists()


@pytest.mark.parametrize("link", [False, True])
def test_users_get_the_model_without_pickles(tmp_path, link):
    _save(tmp_path, 20, True)
    copy_for_users(tmp_path / "checkpoint-20", tmp_path / "copy", link=link)
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["model.safetensors"]


def test_work_whose_checkpoints_hold_no_weights_is_not_finished_and_kept(tmp_path):
    """As FSDP leaves them where each process writes its own part of the weights."""
    for step in (2, 4):
        _save(tmp_path, step, complete=True)
    (tmp_path / "checkpoint-4" / "model.safetensors").rename(tmp_path / "checkpoint-4" / "part.distcp")
    with pytest.raises(OutputError, match="checkpoint-4 holds no weights in safetensors.*FULL_STATE_DICT"):
        written(tmp_path, (2, 4))
    assert _left(tmp_path) == ["checkpoint-2", "checkpoint-4"]
