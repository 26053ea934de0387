"""What models know, by relation: as a table in Markdown, as JSON, and in a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from attnbalance.readings.knowledge import CATEGORIES, Knowledge
from attnbalance.report.wording import markdown, percent, percent_interval

CAPTION = """Right answers ({scoring}; 95% intervals, clustered by subject), greedy, in each form; in the form chat the
question stands as it is, whatever the template. The best form is named for each relation on these same facts, so choose
it on other facts than you report. "constant": the relation's most frequent answer to everything, which is right without
any knowledge. Categories (SLiCK, Gekhman et al. 2024): of ten greedy answers to few-shot questions with other examples,
all are right (HighlyKnown), some (MaybeKnown), or none, with a right one among up to 160 samples (WeaklyKnown) or
without (Unknown). "known": HighlyKnown or MaybeKnown. "by chance": the share that the same answers, held against
another fact of the relation, would make known; answers that have nothing to do with the subject make as much known.
Where few answers are possible, guessing makes most facts WeaklyKnown."""


def answer(label: str, known: Knowledge) -> str:
    """How many of the facts the model knows, how surely, and in which form it answers best."""
    counts, n, best = Counter(known.categories), len(known.prompts), known.best_form()
    shares = ", ".join(f"{name} {percent(counts[name] / n)}" for name in CATEGORIES)
    question = "" if best == "question" else f" (as question {percent_interval(known.accuracy('question'))})"
    right = "it answers none, in any form"
    if best:
        right = f"it answers best as {best}, {percent_interval(known.accuracy(best))} right{question}"
    known_share, chance = percent_interval(known.known()), percent_interval(known.by_chance())
    return (
        f"Of these {n} facts {label} knows {known_share} ({shares}); held against other facts of their relation, the "
        f"same answers would make {chance} known. Asked once {right}; a constant answer gets "
        f"{percent(known.constant())}."
    )


def as_json(known: Knowledge) -> dict[str, object]:
    """What one model knows, over all facts and by relation."""
    relations = {relation: known.of_relation(relation) for relation in known.relations}
    return {
        "scoring": known.scoring,
        "all": _row(known),
        "relations": {name: _row(part) | {"best_form": part.best_form()} for name, part in relations.items()},
    }


def table(measured: Mapping[str, Knowledge]) -> str:
    """One row for each model and relation."""
    forms = list(dict.fromkeys(form for known in measured.values() for form in known.right))
    head = ["model", "relation", "facts", "constant", *forms, "best form", "known", "by chance", *CATEGORIES]
    rows = [head]
    for label, known in measured.items():
        parts = [("all", known), *((relation, known.of_relation(relation)) for relation in known.relations)]
        rows += [[label, name, *_cells(part, forms)] for name, part in parts]
    scorings = ", ".join(dict.fromkeys(known.scoring for known in measured.values()))
    return f"{markdown(rows)}\n\n{CAPTION.format(scoring=scorings)}\n"


def _cells(known: Knowledge, forms: list[str]) -> list[str]:
    counts, n = Counter(known.categories), len(known.prompts)
    rates = [percent_interval(known.accuracy(form)) if form in known.right else "" for form in forms]
    shares = [percent(counts[name] / n) for name in CATEGORIES]
    overall = [percent_interval(interval) for interval in (known.known(), known.by_chance())]
    return [str(n), percent(known.constant()), *rates, known.best_form() or "none", *overall, *shares]


def _row(known: Knowledge) -> dict[str, object]:
    counts = Counter(known.categories)
    return {
        "facts": len(known.prompts),
        "known": known.known().as_dict(),
        "by_chance": known.by_chance().as_dict(),
        "constant": known.constant(),
        "forms": {form: known.accuracy(form).as_dict() for form in known.right},
        "categories": {name: counts[name] for name in CATEGORIES},
    }
