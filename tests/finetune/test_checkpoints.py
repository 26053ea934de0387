"""Work folders: what is finished, what is in the way, and what a killed process leaves."""

import pytest

from attnbalance.errors import OutputError
from attnbalance.finetune.checkpoints import checkpoints, copy_for_users, is_finished, mark_complete, open_work
from attnbalance.outputs import MARKER, read_json, write_json

CONFIG = {"steps": 5, "recipe": {"layers": (1, 2)}}


def test_nothing_and_an_empty_folder_are_not_finished(tmp_path):
    assert not is_finished(tmp_path / "new", "kind", CONFIG)
    assert not is_finished(tmp_path, "kind", CONFIG)


def test_the_same_settings_are_finished(tmp_path):
    write_json(tmp_path / MARKER, {"kind": "kind", "config": CONFIG})
    assert is_finished(tmp_path, "kind", CONFIG)


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("kind", CONFIG | {"steps": 6}, "steps is 5 there, 6 here"),
        ("kind", CONFIG | {"more": 1}, "more is None there, 1 here"),
        ("other", CONFIG, "the result of `kind`"),
    ],
)
def test_other_results_are_not_overwritten(tmp_path, kind, config, message):
    write_json(tmp_path / MARKER, {"kind": "kind", "config": CONFIG})
    with pytest.raises(OutputError, match=message):
        is_finished(tmp_path, kind, config)


def test_other_files_are_not_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(OutputError, match=r"other things \(thesis.tex\)"):
        is_finished(tmp_path, "kind", CONFIG)
    with pytest.raises(OutputError, match="is a file"):
        is_finished(tmp_path / "thesis.tex", "kind", CONFIG)


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
    assert open_work(tmp_path / "out", "kind", CONFIG) == work
    assert sorted(path.name for path in work.glob("checkpoint-*")) == ["checkpoint-100", "checkpoint-20"]


def test_work_begun_with_another_config_is_thrown_away(tmp_path):
    work = open_work(tmp_path / "out", "kind", CONFIG)
    _save(work, 20, True)
    assert not checkpoints(open_work(tmp_path / "out", "kind", {"steps": 6}))
    assert read_json(work / MARKER)["config"] == {"steps": 6}


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


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        open_work(tmp_path / "file" / "out", "kind", CONFIG)
