"""The site's figures that are drawn from committed results when it is built."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from real_model_scores import figure_of, over_seeds, unbeaten  # of benchmarks/, which conf.py puts on the path

from attnbalance.report.figures import save


def kept_and_learned(scores: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[str, str]:
    """Kept against learned of each row as SVG, and which rows no other beats, in a sentence.

    `scores`: the scores of each row, for each seed.
    """
    rows = {name: over_seeds([{"scores": seed} for seed in seeds]) for name, seeds in scores.items()}
    drawn = io.StringIO()
    with rc_context({"svg.hashsalt": "kept and learned"}):  # the same figure is the same file
        save(figure_of(rows), drawn, format="svg", metadata={"Date": None, "Creator": None})
    return drawn.getvalue(), f"No other row both keeps and learns as much as these: {'; '.join(unbeaten(rows))}."
