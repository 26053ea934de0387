"""Computes the conclusions of an explanation from what was read and asked, each number once."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from attnbalance.comparison.comparison import Comparison
from attnbalance.errors import DataError
from attnbalance.explanation.conclusions import (
    TOP,
    CausalCheck,
    ChangeByCause,
    Edge,
    Explanation,
    FactChange,
    HiddenAnswers,
)
from attnbalance.models.weights import PARTS
from attnbalance.readings.change import Change
from attnbalance.readings.paired_accuracy import compare_accuracy
from attnbalance.readings.recall import Recall
from attnbalance.readings.salience import ReadoutRanks
from attnbalance.readings.steering import STRENGTH, Treatment, rescue
from attnbalance.statistics.intervals import mean_intervals, ratio_intervals
from attnbalance.statistics.shares import gain_interval, share_interval

EXAMPLES = 10
"""Number of facts that the report shows one by one."""

Answers = Mapping[str, Sequence[tuple[Treatment, Recall]]]
"""For each label, the model's answers under each treatment, in the order of `treatments`."""


def conclude(
    comparison: Comparison,
    change: Change,
    ranks: Mapping[str, ReadoutRanks],
    answers: Answers,
    ambiguous: int,
    read_only: Mapping[str, str],
) -> Explanation:
    """Compute everything that an explanation says.

    Args:
        comparison: Attention and answers of the two models, the first one before, the second one after.
        change: The change of the margins of the comparison's prompts.
        ranks: For each label, the readout ranks.
        answers: For each label, the answers under the treatments of that model against the other one.
        ambiguous: Number of prompts with a wrong answer whose token a right one has too (see `AnswerTokens`).
        read_only: See `Explanation`.

    Raises `DataError` if recall was not measured.
    """
    before, after = (_recall(comparison, measured.label) for measured in comparison.measured[:2])
    labels = [measured.label for measured in comparison.measured[:2]]
    plain = dict(zip(labels, (before, after), strict=True))
    groups = _groups(before, after)
    return Explanation(
        comparison=comparison,
        accuracy={label: recall.accuracy() for label, recall in plain.items()},
        accuracy_change=compare_accuracy(after, before),
        groups={name: _by_cause(comparison, change, indices) for name, indices in groups.items()},
        components={
            part: {name: values.mean(0).tolist() for name, values in change.components[part].items()} for part in PARTS
        },
        edges=_edges(comparison, change),
        settings=change.settings,
        checks={label: _checks(plain, label, answers[label]) for label in answers},
        hidden={label: _hidden(comparison, ranks[label], plain[label]) for label in labels},
        facts=_facts(comparison, change, ranks, answers),
        examples=_examples(groups, comparison.seed),
        ambiguous=ambiguous,
        read_only=read_only,
    )


def _recall(comparison: Comparison, label: str) -> Recall:
    recall = comparison[label].recall
    if recall is None:
        raise DataError(f"an explanation needs each model's answers, but recall of {label!r} was not measured")
    return recall


def _subjects(comparison: Comparison, indices: Sequence[int]) -> list[str]:
    return [comparison.prompts[i].fact.composed_subject for i in indices]


def _groups(before: Recall, after: Recall) -> dict[str, list[int]]:
    """The indices of each group's prompts (see `Explanation.groups`)."""
    groups = {"all": list(range(len(before.correct)))}
    fifths = before.quintiles() if before.has_popular_fifth else []
    groups |= {f"fifth {i + 1}": indices for i, indices in enumerate(fifths)}
    pairs = list(zip(before.correct, after.correct, strict=True))
    groups["lost"] = [i for i, (was_right, is_right) in enumerate(pairs) if was_right and not is_right]
    groups["gained"] = [i for i, (was_right, is_right) in enumerate(pairs) if is_right and not was_right]
    return {name: indices for name, indices in groups.items() if indices}


def _by_cause(comparison: Comparison, change: Change, indices: Sequence[int]) -> ChangeByCause:
    subjects, seed = _subjects(comparison, indices), comparison.seed
    columns = {"qk": change.qk, "ov+mlp": change.ov_mlp}
    columns |= {part: change.parts[part] for part in PARTS if part not in columns}
    if change.rows is not None:
        columns["rows"] = change.rows
    table = np.stack([column[list(indices)].double().numpy() for column in columns.values()], axis=1)
    total = (change.after - change.before)[list(indices)].double().numpy()
    means = mean_intervals(np.column_stack([table, total]), subjects, seed=seed)
    shares = ratio_intervals(table, total, subjects, seed=seed)
    return ChangeByCause(
        tuple(indices),
        means[-1],
        dict(zip(columns, means[:-1], strict=True)),
        dict(zip(columns, shares, strict=True)),
    )


def _edges(comparison: Comparison, change: Change) -> tuple[Edge, ...]:
    """The change carried from the subject's tokens, over all prompts and heads (see `Explanation.edges`)."""
    readings = (change.by_attention, change.by_readout)
    table = np.hstack([reading.values.double().sum(-1).numpy() for reading in readings])
    subjects = _subjects(comparison, range(len(comparison.prompts)))
    means = mean_intervals(table, subjects, simultaneous=True, seed=comparison.seed)
    layers = change.by_attention.layers
    return tuple(
        Edge(layer, by_attention, by_readout)
        for layer, by_attention, by_readout in zip(layers, means[: len(layers)], means[len(layers) :], strict=True)
    )


def _checks(
    plain: Mapping[str, Recall], label: str, answers: Sequence[tuple[Treatment, Recall]]
) -> tuple[CausalCheck, ...]:
    """The checks of one model: its answers under each treatment against those without, and against its control."""
    other = next(recall for name, recall in plain.items() if name != label)
    treated = {treatment.name: recall for treatment, recall in answers}
    return tuple(
        CausalCheck(
            treatment.name,
            treatment.kind,
            treatment.alpha,
            recall.accuracy(),
            rescue(plain[label], other, recall, treated.get(treatment.control or "")),
        )
        for treatment, recall in answers
    )


def _hidden(comparison: Comparison, ranks: ReadoutRanks, recall: Recall) -> HiddenAnswers | None:
    wrong = [i for i, right in enumerate(recall.correct) if not right]
    if not wrong:
        return None
    subjects = _subjects(comparison, wrong)
    hits, control = ((rank[wrong] <= TOP).tolist() for rank in (ranks.rank, ranks.control))
    gained = np.asarray(hits, dtype=int) - np.asarray(control, dtype=int)
    return HiddenAnswers(
        len(wrong),
        share_interval(hits, subjects),
        share_interval(control, subjects),
        gain_interval(gained, subjects),
        float(ranks.chance(TOP)[wrong].mean()),
    )


def _facts(
    comparison: Comparison, change: Change, ranks: Mapping[str, ReadoutRanks], answers: Answers
) -> tuple[FactChange, ...]:
    labels = before, after = (comparison.measured[0].label, comparison.measured[1].label)
    recalls = [_recall(comparison, label) for label in labels]
    rank = [ranks[label].rank.tolist() for label in labels]
    candidates = ranks[before].candidates.tolist()
    causes = {name: column.tolist() for name, column in {**change.parts, "ov+mlp": change.ov_mlp}.items()}
    margins = list(zip(change.before.tolist(), change.after.tolist(), strict=True))
    facts = []
    for i, prompt in enumerate(comparison.prompts):
        right = (recalls[0].correct[i], recalls[1].correct[i])
        wrong_in = before if not right[0] else None if right[1] else after
        facts.append(
            FactChange(
                prompt,
                (recalls[0].outputs[i], recalls[1].outputs[i]),
                right,
                margins[i],
                {name: column[i] for name, column in causes.items()},
                (rank[0][i], rank[1][i]),
                candidates[i],
                wrong_in,
                _comes_back(answers[wrong_in], i) if wrong_in else (),
            )
        )
    return tuple(facts)


def _comes_back(answers: Sequence[tuple[Treatment, Recall]], i: int) -> tuple[str, ...]:
    """The names of the treatments under which a model answers prompt i correctly, boosts at `STRENGTH` only."""
    return tuple(
        treatment.name
        for treatment, recall in answers
        if recall.correct[i] and treatment.kind != "other subject" and treatment.alpha in (None, STRENGTH)
    )


def _examples(groups: Mapping[str, list[int]], seed: int) -> tuple[int, ...]:
    """Indices of `EXAMPLES` facts: of those lost first, then of those gained, then of the others."""
    draw, examples = random.Random(seed), list[int]()  # noqa: S311
    for name in ("lost", "gained", "all"):
        indices = [i for i in groups.get(name, []) if i not in examples]
        examples += draw.sample(indices, min(EXAMPLES - len(examples), len(indices)))
    return tuple(examples)
