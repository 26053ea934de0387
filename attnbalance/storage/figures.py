"""Figures of salience along layers, one panel for each reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from attnbalance.files.outputs import replacing
from attnbalance.readings.curves import Curve
from attnbalance.report.figures import draw_curves, save
from attnbalance.storage.conclusions import Salience


def write_figures(models: Sequence[Salience], folder: Path) -> None:
    """Write salience.png and, if popularity is known, popularity.png into a folder."""
    _write({model.label: model.curves for model in models}, folder / "salience.png")
    correlated = {model.label: model.popularity for model in models if model.popularity is not None}
    if correlated:
        _write(correlated, folder / "popularity.png")


def _write(curves: Mapping[str, Sequence[Curve]], path: Path) -> None:
    with replacing(path) as temporary:
        save(draw_curves(curves), temporary, format="png", dpi=150)
