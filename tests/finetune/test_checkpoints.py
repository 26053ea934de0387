"""Checkpoints of unfinished training, and what a killed process leaves of them."""

import pytest

from attnbalance.errors import OutputError
from attnbalance.finetune.checkpoints import checkpoints, copy_for_users, drop_incomplete, mark_complete
from attnbalance.outputs import MARKER, open_work, read_json

CONFIG = {"steps": 5, "recipe": {"layers": (1, 2)}}


def _save(work, step, complete):
    folder = work / f"checkpoint-{step}"
    folder.mkdir()
    for name in ("model.safetensors", "optimizer.pt", "rng_state.pth", "training_args.bin", "trainer_state.json"):
        (folder / name).write_text(name)
    if complete:
        mark_complete(work, step)


def test_only_complete_checkpoints_survive_and_are_in_order_of_steps(tmp_path):
    work = open_work(tmp_path / "out", "kind", CONFIG)
    for step, complete in ((100, True), (20, True), (300, False)):
        _save(work, step, complete)
    assert list(checkpoints(work)) == [20, 100]
    assert drop_incomplete(work) == work
    assert sorted(path.name for path in work.glob("checkpoint-*")) == ["checkpoint-100", "checkpoint-20"]


def test_work_begun_with_another_config_is_refused_and_kept(tmp_path):
    work = open_work(tmp_path / "out", "kind", CONFIG)
    _save(work, 20, True)
    with pytest.raises(OutputError, match=r"unfinished work with other settings: steps is \d+ there, 6 here"):
        open_work(tmp_path / "out", "kind", {"steps": 6})
    assert list(checkpoints(open_work(tmp_path / "out", "kind", CONFIG))) == [20]
    assert read_json(work / MARKER)["config"]["steps"] == CONFIG["steps"]


def test_work_in_which_nothing_was_done_makes_way(tmp_path):
    open_work(tmp_path / "out", "kind", CONFIG)
    assert read_json(open_work(tmp_path / "out", "kind", {"steps": 6}) / MARKER)["config"] == {"steps": 6}


def test_only_the_newest_checkpoint_keeps_the_state_of_the_optimizer(tmp_path):
    work = open_work(tmp_path / "out", "kind", CONFIG)
    _save(work, 20, True)
    assert (work / "checkpoint-20" / "optimizer.pt").exists()
    _save(work, 40, True)
    assert not (work / "checkpoint-20" / "optimizer.pt").exists()
    assert (work / "checkpoint-40" / "optimizer.pt").exists()


@pytest.mark.parametrize("link", [False, True])
def test_users_get_the_model_without_pickles(tmp_path, link):
    work = open_work(tmp_path / "out", "kind", CONFIG)
    _save(work, 20, True)
    copy_for_users(work / "checkpoint-20", tmp_path / "copy", link=link)
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["model.safetensors"]
