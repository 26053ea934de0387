"""The figure of correlations is written only if popularity is known."""

from __future__ import annotations

from pathlib import Path

from attnbalance.readings.curves import Curve
from attnbalance.storage.conclusions import Salience
from attnbalance.storage.figures import write_figures

CURVE = Curve("value salience", "logits", (0, 1), (0.1, 0.2), (0.0, 0.1), (0.2, 0.3), 8)


def test_popularity_is_drawn_only_where_it_is_known(tmp_path: Path) -> None:
    without, known = tmp_path / "without", tmp_path / "known"
    for folder, popularity in ((without, None), (known, (CURVE,))):
        folder.mkdir()
        write_figures([Salience(label, (), (CURVE,), popularity, {}, 0, None) for label in "ab"], folder)
    assert {path.name for path in without.iterdir()} == {"salience.png"}
    assert {path.name for path in known.iterdir()} == {"salience.png", "popularity.png"}
