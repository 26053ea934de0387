"""The sizes of Xu & Chen's figures: the same names at each scale, and which of them are the paper's."""

from __future__ import annotations

from attnbalance.papers.figure import CellResult
from attnbalance.papers.xu_chen_setting import SIZES, gpt2_condition, setting_of


def test_every_scale_has_the_same_settings() -> None:
    names = {
        scale: {name: sorted(value) for name, value in sizes.items() if isinstance(value, dict)}
        for scale, sizes in SIZES.items()
    }
    assert names["tiny"] == names["small"] == names["paper"]


def test_only_the_papers_layers_heads_and_steps_meet_its_setting() -> None:
    met = {scale: gpt2_condition(sizes["GPT-2"]).met for scale, sizes in SIZES.items()}
    assert met == {"tiny": False, "small": False, "paper": True}
    for steps, expected in ((500, [True, False]), (2000, [True, True])):
        cells = [
            CellResult({"architecture": "GPT-2", "layers": 12, "heads": 12, "tuning_steps": steps}, {}),
            CellResult({"architecture": "one-layer", "tuning_steps": 2000}, {}),
        ]
        assert [condition.met for condition in setting_of(cells, "GPT-2")] == expected
        assert [condition.met for condition in setting_of(cells, "one-layer")] == [True]
