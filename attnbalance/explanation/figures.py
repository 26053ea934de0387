"""The figures of an explanation: what caused the change, and what raised attention brings back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnbalance.explanation.conclusions import Explanation
from attnbalance.report.figures import draw_bars, draw_points, legend, make_axes, short_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAUSES = {
    "qk": "QK (W_Q, W_K)",
    "ov+mlp": "OV and MLPs (W_V, W_O, MLPs)",
    "rest": "embeddings, norms, configuration",
}
"""The causes that add up to a change, as the figure names them."""

RAISED = {"boost": "attention to the subject", "control": "to other tokens"}
"""The kinds of checks that multiply attention, and the tokens whose attention they multiply."""


def draw_causes(explanation: Explanation) -> Figure:
    """The margin's change by cause, with 95% intervals, for all questions, each fifth, and those lost and gained."""
    groups = explanation.groups
    with make_axes(1) as (figure, [ax]):
        ax.axhline(0, color="#555555", linewidth=1)
        for index, (cause, label) in enumerate(CAUSES.items()):
            changes = [change.causes[cause] for change in groups.values()]
            draw_bars(ax, np.arange(len(groups)) + 0.26 * (index - 1), changes, index, label)
        ax.set_xticks(range(len(groups)), [name.replace(" ", "\n") for name in groups])
        ax.set(
            ylabel="mean change of the margin (nats)",
            xlabel="questions" + "; fifth 1 is the most popular" * ("fifth 1" in groups),
        )
        ax.grid(axis="x", visible=False)
        legend(figure, ax.containers[1::2])
    return figure


def draw_steering(explanation: Explanation) -> Figure:
    """Accuracy of both models as attention to the subject, or to as many other tokens, is multiplied."""
    with make_axes(2) as (figure, axes):
        for ax, label in zip(axes, explanation.labels, strict=True):
            for index, (kind, name) in enumerate(RAISED.items()):
                checks = [check for check in explanation.checks[label] if check.kind == kind]
                rates = {1.0: explanation.accuracy[label]}
                rates |= {check.alpha: check.accuracy for check in checks if check.alpha}
                alphas = sorted(rates)
                x = np.log2(alphas)
                draw_points(ax, x + 0.12 * (index - 0.5), [rates[alpha] for alpha in alphas], index, name, line="-")
                ax.set_xticks(x, [f"{alpha:g}" for alpha in alphas])
            ax.set(title=short_label(label), xlabel="factor on attention")
        axes[0].set_ylim(0, None)  # of both, which share it: set before the second is drawn, it would cut that off
        axes[0].set_ylabel("share of questions answered right (%)")
        legend(figure, axes[0].containers)
    return figure
