"""An explanation in words, as JSON, as a table and as a page: what was lost, why, and whether it comes back."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbalance.models.parts import PARTS
from attnbalance.outputs import replacing, write_text
from attnbalance.readings.causal import STRENGTH, WEIGHTS
from attnbalance.readings.explanation import TOP, Check, Explanation, Hidden, Split
from attnbalance.readings.intervals import Interval
from attnbalance.report import sentence, wording
from attnbalance.report.figures import draw_causes, draw_curves, draw_steering
from attnbalance.report.html import accuracy, making, render, svg

if TYPE_CHECKING:
    import pyarrow as pa

EXAMPLES = 10
LOST = "the questions lost (chosen for that)"
NAMES = {
    "attention": "attention: W_Q, W_K",
    "storage": "storage: W_V, W_O, MLPs",
    "values": "of that, W_V, W_O",
    "mlp": "of that, MLPs",
    "rest": "embeddings and norms",
    "rows": "carried by last token's rows",
}
"""How tables name the causes of a change."""


def headline(explanation: Explanation) -> str:
    """The answer: how many facts are lost, whether that is attention or storage, and what brings them back.

    A cause is given its share only where the change's interval excludes zero. The change is that of the most popular
    fifth, or of all questions where popularity is not known.
    """
    before, after = explanation.labels
    lost, gained = (len(explanation.groups.get(name, ())) for name in ("lost", "gained"))
    shares = [wording.percent(sum(r.correct) / len(r.correct)) for r in map(explanation.recall, (before, after))]
    n = wording.questions(len(explanation.prompts))
    paired = explanation.accuracy()
    told = f": not told apart, exact McNemar p = {paired.p_value:.2g}" if paired and not paired.differs else ""
    counts = (
        f"{after} gets {lost:,} of {n} wrong that {before} gets right, and {gained:,} right that {before} gets wrong "
        f"({shares[0]} right before, {shares[1]} after{told})."
    )
    return f"{counts} {cause_sentence(explanation)} {rescue_sentence(explanation, after, brief=True)}"


def cause_sentence(explanation: Explanation) -> str:
    """What attention and storage cause of the change of the right answer's lead; see `headline`.

    Where that change is not sure, it is said, and followed by that of all questions, or else of those lost, if sure.
    """
    splits = explanation.splits
    group = "fifth 1" if "fifth 1" in splits and not math.isnan(splits["fifth 1"].total.low) else "all"
    split, where = splits[group], _where(group)
    if split.total.excludes_zero:
        return _causes(split, where)
    if math.isnan(split.total.low):
        size = f"{split.total.mean:+.2f} nats on {where}"
        return f"The right answer's lead over other answers changes by {size} ({sentence.FEW}: no interval)."
    size = f"{wording.logits(split.total)} nats"
    text = f"On {where} the right answer's lead over other answers does not change measurably ({size})."
    sure = [name for name in ("all", "lost") if name in splits and splits[name].total.excludes_zero]
    return f"{text} {_causes(splits[sure[0]], _where(sure[0]))}" if sure else text


def _causes(split: Split, where: str) -> str:
    way = "falls" if split.total.mean < 0 else "rises"
    low, high = sorted((abs(split.total.low), abs(split.total.high)))
    parts = {name: wording.percent_share(found) for name, found in split.shares.items()}
    carried = split.shares.get("rows")
    rows = ""
    if carried:
        told = wording.percent_share(carried)
        rows = f" The attention rows of the last token carry {told} of it, whichever weights moved them."
    return (
        f"On {where} the right answer's lead over other answers {way} by {abs(split.total.mean):.2f} "
        f"[{low:.2f}, {high:.2f}] nats, {verdict(split)}: {parts['attention']} of that is caused by changed W_Q and "
        f"W_K (attention), {parts['storage']} by changed W_V, W_O and MLPs (storage), {parts['rest']} by embeddings "
        f"and norms.{rows}"
    )


def verdict(split: Split) -> str:
    """Which weights cause more than half of a change for sure, in words."""
    attention, storage = (split.shares[name].low > 0.5 for name in ("attention", "storage"))
    if attention and storage:
        return "because of both the weights of attention and those of storage, against the others"
    if attention:
        return "mostly because of the weights that direct attention"
    if storage:
        return "mostly because of the weights that store and read out, not of those that direct attention"
    return "and neither the weights of attention nor those of storage cause more than half of it for sure"


def rescue_sentence(explanation: Explanation, label: str, *, brief: bool = False) -> str:
    """What brings back the answers that a model lost to the other one; `brief` names fewer checks."""
    other = explanation.swapped(label)
    lost = "lost" if label == explanation.labels[1] else "gained"
    if lost not in explanation.groups:
        return f"{label} gets nothing wrong that {other} gets right, so there is nothing to bring back."
    n, found = len(explanation.groups[lost]), []
    boost, control = explanation.check(label, "boost"), explanation.check(label, "control")
    if boost and control and boost.rescue.over_control:
        p = boost.rescue.over_control.p_value
        found.append(
            f"{_share(boost.rescue.rescued)} with attention to the subject raised x{STRENGTH:g} "
            f"({_share(control.rescue.rescued)} with attention to as many other tokens; exact McNemar p = {p:.2g})"
        )
    rows = explanation.check(label, "rows", None)
    if rows and not brief:
        found.append(f"{_share(rows.rescue.rescued)} with {other}'s attention rows")
    found += [
        f"{_share(one.rescue.rescued)} with {other}'s {one.name}"
        for one in explanation.checks[label]
        if one.kind == "weights" and (not brief or one.name != WEIGHTS["rest"])
    ]
    if not found:
        return "No check could be made."
    return f"Of the {n:,} that {label} gets wrong and {other} right, these come back: {wording.listed(found)}."


def hidden_sentence(explanation: Explanation, label: str) -> str:
    """How much a model stores of what it gets wrong."""
    found = explanation.hidden(label)
    if found is None:
        return f"{label} gets nothing wrong."
    low, high = found.difference.low, found.difference.high
    told = "more than chance" if low > 0 else "less than chance" if high < 0 else "not told apart from chance"
    return (
        f"Of the {found.wrong:,} facts that {label} gets wrong, {wording.percent_interval(found.stored)} have the "
        f"right answer among the first {TOP} of their relation in what its heads could read at the subject; at other "
        f"subjects the same answers are there in {wording.percent_interval(found.control)}: {told} "
        f"({wording.points(found.difference)})."
    )


def write_page(explanation: Explanation, path: Path, *, command: str | None = None) -> None:
    """Write the report as one HTML file, whole or not at all; text from facts, tokens and labels is escaped."""
    comparison, (before, after) = explanation.comparison, explanation.labels
    content: dict[str, object] = {
        "title": f"What became of the facts from {before} to {after}",
        "command": command,
        "headline": headline(explanation),
        "labels": [one.label for one in comparison.measured],
        "pair": comparison.pair,
        "before": before,
        "after": after,
        "curves": svg(draw_curves(comparison), "Subject attention by layer"),
        "curves_sentence": sentence.curves_sentence(comparison),
        "difference_sentence": sentence.difference_sentence(comparison),
        "causes": svg(draw_causes(explanation), "Change of the lead by cause"),
        "names": {key: name for key, name in NAMES.items() if key in explanation.splits["all"].causes},
        "splits": {_where(name): split for name, split in explanation.splits.items()},
        "edges": list(zip(explanation.change.looked.layers, explanation.edges(explanation.groups["all"]), strict=True)),
        "checks": {label: explanation.checks[label] for label in (after, before)},
        "rescues": {label: rescue_sentence(explanation, label) for label in (after, before)},
        "steering": svg(draw_steering(explanation), "Accuracy as attention to the subject is raised")
        if explanation.check(after, "boost")
        else None,
        "hidden": [hidden_sentence(explanation, label) for label in explanation.labels],
        "examples": examples(explanation),
        "ambiguous": explanation.ambiguous,
        "strength": STRENGTH,
    }
    write_text(path, render("explanation.html", accuracy(comparison) | making(comparison) | content))


def explanation_json(explanation: Explanation) -> dict[str, Any]:
    """The content of `explain.json`; intervals that are not known are null, logits are nats."""
    change = explanation.change
    return {
        "before": explanation.labels[0],
        "after": explanation.labels[1],
        "answer": headline(explanation),
        "ambiguous": explanation.ambiguous,
        "groups": {
            name: {
                "n": split.n,
                "change": split.total.as_dict(),
                "causes": {cause: found.as_dict() for cause, found in split.causes.items()},
                "shares": {cause: found.as_dict() for cause, found in split.shares.items()},
            }
            for name, split in explanation.splits.items()
        },
        "places": {
            cause: {place: values.mean(0).tolist() for place, values in change.places[cause].items()} for cause in PARTS
        },
        "edges": [
            {"layer": layer} | {name: found.as_dict() for name, found in edge.items()}
            for layer, edge in zip(change.looked.layers, explanation.edges(explanation.groups["all"]), strict=True)
        ],
        "checks": {label: [_check(one) for one in checks] for label, checks in explanation.checks.items()},
        "hidden": {label: _hidden(explanation.hidden(label)) for label in explanation.labels},
        "examples": examples(explanation),
    }


def write_changes(explanation: Explanation, path: Path) -> None:
    """Write one row a question to a Parquet file: right or not, lead before and after, causes, stored ranks."""
    import pyarrow.parquet as pq

    with replacing(path) as temporary:
        pq.write_table(_changes(explanation), temporary, compression="zstd")


def _changes(explanation: Explanation) -> pa.Table:
    import pyarrow as pa

    prompts, change, (before, after) = explanation.prompts, explanation.change, explanation.labels
    columns: dict[str, Any] = {
        "prompt_id": [prompt.prompt_id for prompt in prompts],
        "subject": [prompt.fact.subject for prompt in prompts],
        "relation": [prompt.fact.relation for prompt in prompts],
        "popularity": [prompt.fact.popularity for prompt in prompts],
        "right_before": list(explanation.recall(before).correct),
        "right_after": list(explanation.recall(after).correct),
        "lead_before": change.before.numpy(),
        "lead_after": change.after.numpy(),
    }
    columns |= {part: change.parts[part].numpy() for part in PARTS}
    for name, label in (("before", before), ("after", after)):
        columns[f"stored_rank_{name}"] = explanation.stored[label].rank.numpy()
    return pa.table(columns | {"candidates": explanation.stored[before].candidates.numpy()})


def examples(explanation: Explanation) -> list[dict[str, Any]]:
    """Ten facts at random (seeded): of those lost first, then of those gained, then of the others."""
    draw, (before, after) = random.Random(explanation.comparison.seed), explanation.labels  # noqa: S311
    order: list[int] = []
    for name in ("lost", "gained", "all"):
        places = [i for i in explanation.groups.get(name, []) if i not in order]
        order += draw.sample(places, min(EXAMPLES - len(order), len(places)))
    return [_example(explanation, i, before, after) for i in order]


def _example(explanation: Explanation, i: int, before: str, after: str) -> dict[str, Any]:
    prompt, change = explanation.prompts[i], explanation.change
    lost_by = after if explanation.recall(before).correct[i] else before
    plain = explanation.recall(lost_by).correct[i]
    said = {label: explanation.recall(label) for label in (before, after)}
    return {
        "prompt_id": prompt.prompt_id,
        "text": prompt.text,
        "subject": prompt.fact.subject,
        "relation": prompt.fact.relation,
        "answers": list(prompt.fact.answers),
        "said": {label: [one.outputs[i].strip(), one.correct[i]] for label, one in said.items()},
        "lead": [float(change.before[i]), float(change.after[i])],
        "causes": {
            "attention": float(change.attention[i]),
            "storage": float(change.storage[i]),
            "rest": float(change.parts["rest"][i]),
        },
        "stored_rank": {label: int(explanation.stored[label].rank[i]) for label in (before, after)},
        "candidates": int(explanation.stored[before].candidates[i]),
        "wrong_in": None if plain else lost_by,
        "comes_back": []
        if plain
        else [
            one.name
            for one in explanation.checks[lost_by]
            if one.recall.correct[i] and one.kind != "other subject" and one.alpha in (None, STRENGTH)
        ],
    }


def _check(one: Check) -> dict[str, Any]:
    found = one.rescue
    return {
        "name": one.name,
        "kind": one.kind,
        "alpha": one.alpha,
        "accuracy": sum(one.recall.correct) / len(one.recall.correct),
        "rescued": None if found.rescued is None else found.rescued.as_dict(),
        "broken": None if found.broken is None else found.broken.as_dict(),
        "net": found.net.interval.as_dict() | {"p_value": found.net.p_value},
        "over_control": None
        if found.over_control is None
        else found.over_control.interval.as_dict() | {"p_value": found.over_control.p_value},
    }


def _hidden(found: Hidden | None) -> Mapping[str, Any] | None:
    if found is None:
        return None
    names = ("stored", "control", "difference")
    return {"wrong": found.wrong, "top": TOP} | {name: getattr(found, name).as_dict() for name in names}


def _share(found: Interval | None) -> str:
    return "none" if found is None else wording.percent_interval(found)


def _where(group: str) -> str:
    """A group of questions in words."""
    if group == "fifth 1":
        return "the most popular fifth"
    names = {"all": "all questions", "lost": LOST, "gained": "the questions gained (chosen for that)"}
    return names.get(group, group.replace("fifth", "fifth of popularity"))
