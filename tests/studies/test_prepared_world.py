"""The controls of a world: scored by the shortcuts of training, left out if they cannot be asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from attnbalance.data.prompts import Prompt
from attnbalance.readings.recall import Recall, score
from attnbalance.studies.prepared_world import PreparedWorld


def test_controls_are_scored_by_the_shortcuts_of_training_and_left_out_where_they_cannot_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = PreparedWorld({"facts": "synthetic", "subjects": 8, "answers": 3}, 0, tmp_path / "base", False)
    usual = world.split("bottom").train.most_frequent_answers()
    held = world.split("bottom").heldout

    def asked(name: str, prompts: Sequence[Prompt]) -> Recall:
        return score(prompts, [usual[prompt.fact.relation][0] for prompt in prompts], {})

    monkeypatch.setattr(world, "_asked", asked)
    with pytest.warns(
        UserWarning, match="no training: few-shot' of split bottom is left out: few-shot needs more than 4"
    ):
        controls = world.controls("bottom")
    assert list(controls) == ["no training: statement", "no training: question", "constant answer"]
    wrong = [fact for fact in held if fact.answer != usual[fact.relation][0]]
    assert wrong
    for control in controls.values():  # all say the shortcut, so whatever is wrong is the shortcut
        assert control["shortcut_rate"] == 1.0
