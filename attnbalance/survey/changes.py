"""What models kept of what the first one knew, and what they gained: as JSON, as a table, and in a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnbalance.data.forms import FEW_SHOT
from attnbalance.readings.knowledge import Knowledge
from attnbalance.report.wording import markdown, percent, percent_interval
from attnbalance.statistics.intervals import Interval

CAPTION = """Against {first}, asked in each form. "kept": of the facts that {first} knows surely (HighlyKnown), the
share that the model answers. "gained": of the facts to which {first} gives no right greedy answer, in any form or with
any examples, the share that the model answers. Asked otherwise than after few shots, {first} itself need not answer all
that it knows. "constant answer": the relation's most frequent answer to everything. n: number of facts."""

NAMES = ("kept", "gained")


def as_json(first: str, before: Knowledge, after: Knowledge) -> dict[str, object]:
    """What a model kept and gained against the first, in each form; None for a share of no facts."""
    saved: dict[str, object] = {"model": first}
    for name in NAMES:
        shares = {form: _share(before, after, name, form) for form in after.right}
        saved[name] = {form: share and share.as_dict() for form, share in shares.items()}
    return saved


def table(measured: Mapping[str, Knowledge]) -> str:
    """One row for each model, and one for a constant answer."""
    first, before = next(iter(measured.items()))
    forms = list(dict.fromkeys(form for known in measured.values() for form in known.right))
    chosen = {"kept": before.highly_known, "gained": before.unanswered}
    head = ["model", *(f"{name}, {form} (n = {len(chosen[name])})" for name in NAMES for form in forms)]
    rows = [
        [label, *(_cell(_share(before, after, name, form)) for name in NAMES for form in forms)]
        for label, after in measured.items()
    ]
    guesses = [_constant(before, chosen[name]) for name in NAMES for _ in forms]
    return f"{markdown([head, *rows, ['constant answer', *guesses]])}\n\n{CAPTION.format(first=first)}\n"


def sentences(measured: Mapping[str, Knowledge]) -> list[str]:
    """What each further model kept and gained, in the form in which it answers most facts; few-shot, if none."""
    (first, before), *others = measured.items()
    known, never = len(before.highly_known), len(before.unanswered)
    return [
        f"Asked as {(form := after.best_form() or FEW_SHOT)}, {label} answers "
        f"{_cell(_share(before, after, 'kept', form)) or 'none'} of the facts that {first} knows surely ({known}), and "
        f"{_cell(_share(before, after, 'gained', form)) or 'none'} of those without a right greedy answer of {first} "
        f"({never})."
        for label, after in others
    ]


def _share(before: Knowledge, after: Knowledge, name: str, form: str) -> Interval | None:
    if form not in after.right:
        return None
    return before.kept(after, form) if name == "kept" else before.gained(after, form)


def _cell(share: Interval | None) -> str:
    return "" if share is None else percent_interval(share)


def _constant(before: Knowledge, indices: Sequence[int]) -> str:
    return percent(sum(before.constant_right[i] for i in indices) / len(indices)) if indices else ""
