"""What a trajectory says, in sentences that claim no more than their intervals do."""

from __future__ import annotations

import math

from attnbalance.comparison.known_readings import reading_words
from attnbalance.report.wording import FEW, bounds, percent, points, questions, share
from attnbalance.trajectory.trajectory import Trajectory


def headline(trajectory: Trajectory) -> str:
    """The answer in one sentence: how attention to the subject, and accuracy, changed from the first to the last step.

    A change is claimed only where its interval excludes zero; in accuracy only if the exact McNemar test also has
    p < 0.05 (see `PairedAccuracy.differs`). Brackets hold 95% intervals.
    """
    title, n = trajectory.comparison.titles[0], questions(len(trajectory.comparison.prompts))
    size = f"{n} and {len(trajectory.steps)} checkpoints"
    caveat = f"; {trajectory.comparison.caveat}" if trajectory.comparison.caveat else ""
    return f"Over {size}, {change_sentence(trajectory, title)}; {_accuracy(trajectory)}{caveat}."


def change_sentence(trajectory: Trajectory, title: str) -> str:
    """How a reading's mean over layers changed from the first step to the last."""
    (first, *_, last), means, change = trajectory.steps, trajectory.means(title), trajectory.changes(title)[-1]
    difference = f"{share(change.mean, '+')} {bounds(change.low, change.high, '+')}".strip()
    values = f"{share(means[-1].mean)} against {share(means[0].mean)}, difference {difference}"
    if change.excludes_zero:
        verb, complement = reading_words(title)
        degree = "more" if change.mean > 0 else "less"
        return (
            f"the model {verb} {degree} {complement} at step {last} than at step {first}: averaged over layers {values}"
        )
    verdict = f"{FEW} give no interval for a change" if math.isnan(change.low) else "there is no measurable change"
    return f"{verdict} in {title} from step {first} to step {last}: averaged over layers {values}"


def _accuracy(trajectory: Trajectory) -> str:
    change, rates = trajectory.accuracy_change, trajectory.accuracies()
    if change is None or rates is None:
        return "accuracy was not measured"
    if not any(rate.mean for rate in (rates[0], rates[-1])):
        return "neither the first nor the last checkpoint answers any question right"
    values = f"from {percent(rates[0].mean)} to {percent(rates[-1].mean)}"
    test = f"{points(change.interval)}, exact McNemar p = {change.p_value:.2g}"
    if math.isnan(change.interval.low):
        return f"accuracy went {values} ({FEW}: no interval)"
    if not change.differs:
        return f"accuracy did not change measurably ({values}, {test})"
    return f"accuracy {'rose' if change.interval.mean > 0 else 'fell'} {values} ({test})"
