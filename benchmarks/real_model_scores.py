"""What a row of `real_model.py` keeps and learns: its shares, their table, and kept against learned as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbalance.data.prompts import Prompt
from attnbalance.files.outputs import replacing
from attnbalance.readings.recall import Recall, score
from attnbalance.report.figures import label_style, make_axes, save, whiskers
from attnbalance.report.wording import percent_interval
from attnbalance.statistics.intervals import Interval, seed_interval
from attnbalance.studies.controls import constant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEPT, LEARNED, DRIFT = "kept", "learned", "drift, nats a token"
SECONDS = "seconds a step"

Intervals = Mapping[str, Interval | None]


@dataclass(frozen=True)
class Before:
    """Facts of a split, and what the base knows of them before training."""

    heldout: Sequence[Prompt]
    """The questions about held-out facts."""
    known: Sequence[bool]
    """For each, whether the base knows the fact: it is HighlyKnown."""
    train: Sequence[Prompt]
    """The questions about training facts."""
    unknown: Sequence[bool]
    """For each, whether the base's answer is wrong in every form."""


@dataclass(frozen=True)
class Answers:
    """A row's answers about these facts."""

    heldout: Sequence[str]
    """To the held-out questions, asked as trained."""
    few_shot: Sequence[str]
    """To the held-out questions after few shots, as the base was asked."""
    train: Sequence[str]
    """To the training questions, asked as trained."""
    statement: Sequence[str]
    """To the statements of the training facts."""


def measure(before: Before, answers: Answers, shortcuts: Mapping[str, Sequence[str]]) -> dict[str, Interval | None]:
    """The shares of a row, with 95% intervals clustered by subject; None for a share of no facts.

    "other answers" leaves out facts that accept the constant answer, which a guess gets right; `shortcuts` holds each
    relation's most frequent training answer, in all its accepted forms.
    """
    asked, few_shot = (score(before.heldout, texts, shortcuts) for texts in (answers.heldout, answers.few_shot))
    trained, stated = (score(before.train, texts, shortcuts) for texts in (answers.train, answers.statement))
    frequent = constant(before.heldout, shortcuts).correct
    others = [known and not guessed for known, guessed in zip(before.known, frequent, strict=True)]
    fifths = asked.by_quintile()
    return {
        KEPT: _share(asked, before.known),
        "kept, few-shot": _share(few_shot, before.known),
        "kept, other answers": _share(asked, others),
        "kept, few-shot, other answers": _share(few_shot, others),
        LEARNED: _share(trained, before.unknown),
        "learned, statement": _share(stated, before.unknown),
        "accuracy": asked.accuracy(),
        "accuracy, popular fifth": fifths[0][1] if fifths else None,
        "shortcut rate": asked.shortcut_rate(),
    }


def _share(recall: Recall, among: Sequence[bool]) -> Interval | None:
    """The share of right answers among some of the prompts."""
    names = [name for name, counts in zip(recall.prompt_ids, among, strict=True) if counts]
    return recall.at(names).accuracy() if names else None


def over_seeds(results: Sequence[Mapping[str, Any]]) -> dict[str, Interval | None]:
    """The numbers of a row's results: one seed's own intervals; of several, the mean over seeds with its interval."""
    saved = [result["scores"] for result in results]
    if len(saved) == 1:
        return {name: _interval(value) for name, value in saved[0].items()}
    means = {name: [scores[name]["mean"] for scores in saved if scores[name]] for name in saved[0]}
    highest = dict.fromkeys((DRIFT, SECONDS), float("inf"))  # all others are shares
    return {
        name: seed_interval(values).within(0.0, highest.get(name, 1.0)) if values else None
        for name, values in means.items()
    }


def _interval(saved: Mapping[str, Any] | None) -> Interval | None:
    """An interval from its JSON, in which unknown ends are null."""
    if saved is None:
        return None
    mean, low, high = (float("nan") if saved[end] is None else saved[end] for end in ("mean", "low", "high"))
    return Interval(mean, low, high, saved["n"])


def table(rows: Mapping[str, Intervals]) -> str:
    """One line of Markdown for each row, one column for each number."""
    columns = list(next(iter(rows.values())))
    lines = [["row", *columns], ["---"] * (1 + len(columns))]
    lines += [[name, *(_cell(column, numbers[column]) for column in columns)] for name, numbers in rows.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(column: str, interval: Interval | None) -> str:
    if interval is None:
        return ""
    if column == SECONDS:
        return f"{interval.mean:.2f}"
    return str(interval) if column == DRIFT else f"{percent_interval(interval)} ({interval.n})"


def draw(rows: Mapping[str, Intervals], path: Path) -> None:
    """Write the figure of kept against learned as PNG, if there is one."""
    if not _pairs(rows):
        print("No figure: the base knows none of the held-out facts, or all training facts.")
        return
    named = {"recommended (ce-kl)" if name == "ce-kl" else name: numbers for name, numbers in rows.items()}
    with replacing(path) as temporary:
        save(figure_of(named), temporary, format="png", dpi=150)


def figure_of(rows: Mapping[str, Intervals]) -> Figure:
    """Kept against learned, in percent with intervals; a line joins the rows that no row beats in both (Pareto)."""
    pairs = _pairs(rows)
    with make_axes(1, height=6.0) as (figure, [ax]):
        best = sorted((kept.mean, learned.mean) for kept, learned in (pairs[name] for name in unbeaten(rows)))
        ax.plot([100 * kept for kept, _ in best], [100 * learned for _, learned in best], color="#555555", linewidth=1)
        for index, (name, both) in enumerate(pairs.items()):
            (x, across), (y, along) = (whiskers([interval], 100) for interval in both)
            colour, marker = label_style(index)
            ax.errorbar(x, y, along, across, color=colour, marker=marker, linestyle="none", capsize=2, label=name)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
        ax.set(xlabel="kept, of known held-out facts (%)", ylabel="learned, of unknown training facts (%)")
    return figure


def unbeaten(rows: Mapping[str, Intervals]) -> list[str]:
    """The rows of which no other keeps and learns at least as much, and more of one."""
    pairs = _pairs(rows)
    means = {name: (kept.mean, learned.mean) for name, (kept, learned) in pairs.items()}
    return [
        name
        for name, own in means.items()
        if not any(a >= own[0] and b >= own[1] and (a, b) != own for a, b in means.values())
    ]


def _pairs(rows: Mapping[str, Intervals]) -> dict[str, tuple[Interval, Interval]]:
    """What each row keeps and learns, where both are known."""
    return {
        name: (kept, learned)
        for name, numbers in rows.items()
        if (kept := numbers[KEPT]) is not None and (learned := numbers[LEARNED]) is not None
    }
