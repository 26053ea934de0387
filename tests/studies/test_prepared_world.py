"""The controls of a world: scored by the shortcuts of training, left out if they cannot be asked."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest

from attnbalance.data.prompts import Prompt, make_prompts
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
        controls = world.controls("bottom", ["qa"])
    assert list(controls) == ["no training: statement", "no training: question", "constant answer"]
    wrong = [fact for fact in held if fact.answer != usual[fact.relation][0]]
    assert wrong
    for control in controls.values():  # all say the shortcut, so whatever is wrong is the shortcut
        assert control["shortcut_rate"] == 1.0


def test_controls_are_asked_as_the_methods_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base that answers the plain question alone."""
    world = PreparedWorld({"facts": "synthetic", "subjects": 40, "answers": 3}, 0, tmp_path / "base", False)
    asked_in = dict[str, list[str]]()

    def asked(name: str, prompts: Sequence[Prompt]) -> Recall:
        asked_in[name] = [prompt.text for prompt in prompts]
        said = [prompt.fact.answer if "Question:" not in prompt.text else "no" for prompt in prompts]
        return score(prompts, said, {})

    monkeypatch.setattr(world, "_asked", asked)
    alone, both = world.controls("top", ["plain"]), world.controls("top", ["qa", "plain"])
    names = ["no training: question", "no training: few-shot"]
    assert [name for name in alone if name in names] == names
    assert all(all(alone[name]["correct"]) for name in names)
    assert [name for name in both if "question" in name] == [
        "no training: question (qa)",
        "no training: question (plain)",
    ]
    right = {name: all(result["correct"]) for name, result in both.items() if "(" in name}
    assert right == {f"{name} ({template})": template == "plain" for template in ("qa", "plain") for name in names}
    heldout = world.split("top").heldout
    texts = {template: [prompt.text for prompt in make_prompts(heldout, template)] for template in ("qa", "plain")}
    assert asked_in["heldout-question"] == texts["qa"]  # each wording is kept in a file of its own
    assert [text for name, text in asked_in.items() if name.startswith("heldout-question-")] == [texts["plain"]]


@pytest.mark.parametrize("known_in", ["few-shot", "statement"])
def test_a_base_that_knows_more_than_its_statements_show_is_warned_of(
    known_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = PreparedWorld({"facts": "synthetic", "subjects": 40, "answers": 3}, 0, tmp_path / "base", False)

    def asked(name: str, prompts: Sequence[Prompt]) -> Recall:
        return score(prompts, [prompt.fact.answer if known_in in name else "no" for prompt in prompts], {})

    monkeypatch.setattr(world, "_asked", asked)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        world.controls("bottom", ["qa"])
    said = [str(warning.message) for warning in caught]
    if known_in == "statement":
        assert said == []
    else:
        assert len(said) == 1
        assert "0.0% of the held-out facts of split bottom" in said[0]
        assert said[0].endswith("100.0% by the control 'no training: few-shot'")
