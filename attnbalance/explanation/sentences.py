"""An explanation in sentences: what was lost, which weights caused it, and what brings it back."""

from __future__ import annotations

import math

from attnbalance.explanation.conclusions import TOP, ChangeByCause, Explanation
from attnbalance.readings.steering import STRENGTH, WEIGHTS
from attnbalance.report import wording
from attnbalance.statistics.intervals import Interval

FINAL_CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Settings that cap the logits (see `Change`)."""

SETTINGS = 5
"""Largest number of differing settings that a sentence names."""


def headline(explanation: Explanation) -> str:
    """The answer in brief: how many facts are lost, which weights moved the margin, and what brings facts back.

    Causes are given shares only if the change's interval excludes zero. The change is that of the most popular fifth,
    or of all questions if popularity is unknown. How many questions are about facts that a model was trained on, and
    what is left out where rows cannot be edited, end the answer.
    """
    before, after = explanation.labels
    lost, gained = (count_of(explanation, group) for group in ("lost", "gained"))
    rates = [wording.percent(explanation.accuracy[label].mean) for label in (before, after)]
    n = wording.questions(len(explanation.facts))
    paired = explanation.accuracy_change
    unsure = "" if paired.differs else f", no clear difference, exact McNemar p = {paired.p_value:.2g}"
    counts = (
        f"{after} gets {lost:,} of {n} wrong that {before} gets right, and {gained:,} right that {before} gets wrong "
        f"({rates[0]} right before, {rates[1]} after{unsure})."
    )
    text = f"{counts} {cause_sentence(explanation, brief=True)} {rescue_sentence(explanation, after, brief=True)}"
    caveat = f"{explanation.comparison.caveat}." if explanation.comparison.caveat else ""
    return " ".join(part for part in (text, caveat, left_out(explanation)) if part)


def left_out(explanation: Explanation) -> str | None:
    """What is left out because rows cannot be edited, and why; None if they can be."""
    labels, reasons = list(explanation.read_only), list(dict.fromkeys(explanation.read_only.values()))
    if not labels:
        return None
    return (
        f"Left out for {wording.listed(labels)}, whose family {wording.listed(reasons)}, so that rows can be read but "
        "not edited: the checks that raise attention or put in the other model's rows, their controls, and what rows "
        "carry of the change."
    )


def cause_sentence(explanation: Explanation, *, brief: bool = False) -> str:
    """Which weights caused the change of the right answer's margin; see `headline`.

    `brief` leaves out the share of embeddings, norms and configuration, and what attention rows carry. If that change
    is not sure, the sentence says so, and the change of all questions, or else of those lost, follows if it is sure.
    That of all questions also follows if it surely has the other sign. Settings that differ between the two
    configurations are named at the end.
    """
    return _change(explanation, brief) + _settings(explanation)


def _settings(explanation: Explanation) -> str:
    """The settings that differ between the two configurations, as a sentence; empty if there are none."""
    before, after = explanation.labels
    said = {
        n: f"{n} ({str(a)[:40]} in {before}, {str(b)[:40]} in {after})" for n, (a, b) in explanation.settings.items()
    }
    caps = [said.pop(name) for name in FINAL_CAPS if name in said]
    named = list(said.values())
    more = f" and {len(named) - SETTINGS} more" if len(named) > SETTINGS else ""
    counted = f" The configurations differ too, which counts as configuration: {', '.join(named[:SETTINGS])}{more}."
    outside = (
        f" The cap of the logits differs too, and counts nowhere, as margins are those before it: {''.join(caps[:1])}."
    )
    return (counted if named else "") + (outside if caps else "")


def headline_group(explanation: Explanation) -> str:
    """The questions that the headline is about: the most popular fifth where it has an interval, else all."""
    groups = explanation.groups
    return "fifth 1" if "fifth 1" in groups and not math.isnan(groups["fifth 1"].total.low) else "all"


def _change(explanation: Explanation, brief: bool) -> str:
    groups, name = explanation.groups, headline_group(explanation)
    total, overall, where = groups[name].total, groups["all"].total, group_name(name)
    if total.excludes_zero:
        text, opposite = _causes(groups[name], where, brief), overall.excludes_zero and overall.mean * total.mean < 0
        return f"{text} {_causes(groups['all'], group_name('all'), brief)}" if opposite else text
    if math.isnan(total.low):
        change = f"{total.mean:+.2f} nats on {where} ({wording.FEW}: no interval)"
        return f"The right answer's margin over the others changes by {change}."
    text = (
        f"On {where} the right answer's margin over the others does not change measurably ({wording.nats(total)} nats)."
    )
    sure = [name for name in ("all", "lost") if name in groups and groups[name].total.excludes_zero]
    return f"{text} {_causes(groups[sure[0]], group_name(sure[0]), brief)}" if sure else text


def _causes(change: ChangeByCause, where: str, brief: bool) -> str:
    direction = "falls" if change.total.mean < 0 else "rises"
    low, high = sorted((abs(change.total.low), abs(change.total.high)))
    shares = {cause: wording.percent_share(share) for cause, share in change.shares.items()}
    text = (
        f"On {where} the right answer's margin over the others {direction} by {abs(change.total.mean):.2f} "
        f"[{low:.2f}, {high:.2f}] nats, {verdict(change)}"
    )
    if brief:
        return f"{text} (QK {shares['qk']}, OV and MLPs {shares['ov+mlp']}, all else {shares['rest']})."
    rows = ""
    if "rows" in shares:
        rows = f" The attention rows of the last token carry {shares['rows']} of it, whichever weights changed them."
    return (
        f"{text}: QK (W_Q, W_K) causes {shares['qk']} of that, OV and MLPs (W_V, W_O, MLPs) {shares['ov+mlp']}, and "
        f"embeddings, norms and configuration {shares['rest']}.{rows}"
    )


def verdict(change: ChangeByCause) -> str:
    """Which weights measurably cause more than half of a change, in words."""
    qk, ov_mlp = (change.shares[cause].low > 0.5 for cause in ("qk", "ov+mlp"))
    if qk and ov_mlp:
        return "because of both QK, and OV and MLPs, while the other weights work against it"
    if qk:
        return "mostly because of QK, the weights that direct attention"
    if ov_mlp:
        share, name = change.shares["qk"], "QK, which directs attention"
        part = f"while {name}, works against it" if share.high < 0 else f"and not measurably because of {name}"
        part = f"and partly because of {name}" if share.low > 0 else part
        return f"mostly because of OV and MLPs, the weights that store and read out, {part}"
    return "and neither QK, nor OV and MLPs, measurably cause more than half of it"


def rescue_sentence(explanation: Explanation, label: str, *, brief: bool = False) -> str:
    """What brings back the answers that a model lost to the other one; `brief` names fewer checks."""
    other = explanation.other(label)
    lost = count_of(explanation, "lost" if label == explanation.labels[1] else "gained")
    if not lost:
        return f"{label} gets nothing wrong that {other} gets right, so there is nothing to bring back."
    parts = []
    boosted, control = explanation.check(label, "boost"), explanation.check(label, "control")
    if boosted and control and boosted.rescue.over_control:
        p = boosted.rescue.over_control.p_value
        test = "" if brief else f"; exact McNemar p = {p:.2g}"
        parts.append(
            f"{_share(boosted.rescue.rescued)} with attention to the subject raised x{STRENGTH:g} "
            f"({_share(control.rescue.rescued)} with attention to as many other tokens{test})"
        )
    rows = explanation.check(label, "rows", None)
    if rows and not brief:
        parts.append(f"{_share(rows.rescue.rescued)} with {other}'s attention rows")
    parts += [
        f"{_share(check.rescue.rescued)} with {other}'s {check.name}"
        for check in explanation.checks[label]
        if check.kind == "weights" and (not brief or check.name != WEIGHTS["rest"])
    ]
    if not parts:
        return "No check could be made."
    those = f"Of the {lost:,} lost" if brief else f"Of the {lost:,} that {label} gets wrong and {other} right"
    return f"{those}, these come back: {wording.listed(parts)}."


def hidden_sentence(explanation: Explanation, label: str) -> str:
    """How many of the answers that a model gets wrong its heads could read out at the subject."""
    hidden = explanation.hidden[label]
    if hidden is None:
        return f"{label} gets nothing wrong."
    low, high = hidden.difference.low, hidden.difference.high
    verdict = "more than chance" if low > 0 else "less than chance" if high < 0 else "not clearly different from chance"
    return (
        f"Of the {hidden.wrong:,} facts that {label} gets wrong, {wording.percent_interval(hidden.share)} have the "
        f"right answer among the first {TOP} of their relation in what its heads could read out at the subject (random "
        f"orders would give {wording.percent(hidden.chance)}); at other subjects the same answers are among the first "
        f"{TOP} in {wording.percent_interval(hidden.control)}: {verdict} ({wording.points(hidden.difference)})."
    )


def group_name(group: str) -> str:
    """A group of questions in words.

    >>> group_name("lost"), group_name("fifth 2")
    ('the questions lost (chosen for that)', 'fifth of popularity 2')
    """
    names = {
        "all": "all questions",
        "fifth 1": "the most popular fifth",
        "lost": "the questions lost (chosen for that)",
        "gained": "the questions gained (chosen for that)",
    }
    return names.get(group, group.replace("fifth", "fifth of popularity"))


def count_of(explanation: Explanation, group: str) -> int:
    """The number of questions of a group."""
    return explanation.groups[group].n if group in explanation.groups else 0


def _share(share: Interval | None) -> str:
    return "none" if share is None else wording.percent_interval(share)
