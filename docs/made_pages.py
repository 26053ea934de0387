"""Sphinx extension: tables and figures made from the JSON in benchmarks/results, and copies of the notebooks.

No number of a benchmark whose results are committed is typed into a page. `make_all` writes docs/_made/NAME.md, which
pages include, figures as docs/_made/NAME.svg, and docs/tutorials/*.ipynb. None of them is committed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from made_claims import claims_pages, load_figures, printed_table, scores_table
from made_tables import markdown

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parent
ROOT = DOCS.parent
RESULTS = ROOT / "benchmarks" / "results"

METHODS = {
    "base-few-shot": "no training, few-shot (keeps all by definition)",
    "constant": "constant answer",
    "plain": "plain (`ce`), 90 steps",
    "plain-top": "plain on the popular half, 90 steps (of its own 261 new facts)",
    "ce-kl": "`recommended`, 90 steps",
    "adapter-0.7": "plain, its adapter times 0.7",
    "half-adapter": "plain, its adapter halved",
    "replay": "`--replay`, 360 steps",
    "replay-0.7": "`--replay`, its adapter times 0.7",
    "half-replay": "`--replay`, its adapter halved",
}
RIVALS = {
    "plain": "plain (`ce`)",
    "ce-kl": "`recommended`",
    "lwf": "`ce + 0.3*kl(question)` (learning without forgetting)",
    "dora": "plain, DoRA",
    "mlp": "plain, on the MLPs alone",
    "qk-restored": "plain, W_Q and W_K put back",
}
OTHER_RELATIONS = {
    "constant": "constant answer",
    "plain": "plain, 100 steps",
    "half-adapter": "plain, adapter halved",
    "ce-kl": "`recommended`",
    "replay": "replay, 400 steps",
    "replay-0.7": "replay, adapter times 0.7",
    "half-replay": "replay, adapter halved",
}
OWN_FACTS = {
    ("own-facts", "constant"): "constant answer",
    ("own-facts", "replay"): "replay, 1e-3",
    ("own-facts", "replay-0.7"): "replay, 1e-3, adapter times 0.7",
    ("own-facts", "half-replay"): "replay, 1e-3, adapter halved",
    ("own-facts-3e-4", "replay"): "replay, 3e-4",
    ("own-facts-3e-4", "replay-0.7"): "replay, 3e-4, adapter times 0.7",
    ("own-facts-3e-4", "replay-mlp"): "replay, 3e-4, MLPs alone",
    ("own-facts-3e-4", "replay-mlp-0.7"): "replay, 3e-4, MLPs alone, adapter times 0.7",
}
OWN_HELD = {
    ("own-facts", "constant"): "constant answer",
    ("own-facts-3e-4", "replay"): "replay of known facts, 3e-4",
    ("own-facts-3e-4", "replay-0.7"): "the same, adapter times 0.7",
    ("own-facts", "replay-kl"): "`recommended` with replay of any facts",
    ("own-facts", "replay-kl-0.7"): "the same, adapter times 0.7",
}
LABELS = {
    "no training: statement": "no training, asked by statement",
    "no training: question": "no training, asked by question",
    "no training: few-shot": "no training, few-shot",
    "constant answer": "constant answer",
    "plain": "plain (`ce`, all weights)",
    "anchored": "anchored",
    "state-anchor": "`state-anchor(statement)` alone",
    "shuffled-labels": "anchored, shuffled answers",
    "self-labels": "plain on the base's own answers",
}
LEAGUE = {name: LABELS[name] for name in ("constant answer", "plain", "anchored")}
REPLAY = {
    "constant answer": "constant answer",
    "plain": "plain, 120 steps",
    "plain-as-long": "plain, 960 steps",
    "recommended": "`recommended`, 120 steps",
    "anchored": "anchored, 120 steps, LoRA",
    "replay-known": "replay of known facts, 960 steps",
    "replay-recommended": "`recommended` with replay of any facts, 960 steps",
    "replay-generated": "replay of generated facts, 960 steps",
    "replay-generated-more": "the same, `--replay-share 0.85`",
}
RATES = {"lr-1e-4": "1e-4", "lr-3e-4": "3e-4", "lr-1e-3": "1e-3"}
STUDY_COLUMNS = {
    "extraction": "extraction ratio",
    "kept": "kept",
    "accuracy": "accuracy",
    "popular": "most popular fifth",
    "gain": "against plain, points",
    "new_facts": "new facts",
    "drift": "drift, nats",
}
COLUMNS = {
    "kept": "kept, asked as trained",
    "kept, other answers": "of these, other answers than the usual one",
    "kept, few-shot": "kept, few-shot",
    "learned": "new facts learned",
    "learned, statement": "in other words",
    "accuracy": "accuracy",
    "accuracy, popular fifth": "most popular fifth",
    "drift, nats a token": "drift, nats",
}
DRIFT = "drift, nats a token"


def setup(app: Sphinx) -> dict[str, bool]:
    """Make the tables and copies before pages are read."""
    app.connect("config-inited", lambda _app, _config: make_all())
    app.connect("source-read", link_to_copies)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def link_to_copies(_app: Sphinx, page: str, source: list[str]) -> None:
    """In the list of tutorials, link to the shown copies instead of the notebooks, to which a code host links."""
    if page == "tutorials/index":
        source[0] = source[0].replace("](../../tutorials/", "](")


def make_all() -> None:
    """Write every made page, and copy the notebooks."""
    pages = {
        "papers-scores": scores_table(load_figures()),
        "papers-claims": claims_pages(load_figures()),
        "papers-printed": printed_table(),
        "real-model": seeds_table("real-model", METHODS, (0, 1, 2)),
        "real-model-rivals": intervals_table("real-model", RIVALS, COLUMNS),
        "other-relations": intervals_table("other-relations", OTHER_RELATIONS, list(COLUMNS)[:1] + list(COLUMNS)[2:5]),
        "own-facts": intervals_table("own-facts", OTHER_RELATIONS, list(COLUMNS)[:1] + list(COLUMNS)[2:5]),
        "own-facts-rates": counts_table(OWN_FACTS, (0, 1, 2)),
        "own-facts-held": counts_table(OWN_HELD, (0, 1, 2)),
        "labels-synthetic": study_table("labels", "synthetic", "bottom", LABELS),
        "labels-popqa": study_table("labels", "popqa", "bottom", LABELS),
        "league-synthetic": study_table("league", "synthetic", "top", LEAGUE),
        "league-popqa": study_table("league", "popqa", "top", LEAGUE),
        "replay": study_table("replay", "small", "bottom", REPLAY),
        "popularity-rates": rates_table(RATES),
        **{name: split_table(name) for name in ("popularity", "context", "instruct")},
    }
    for name, text in pages.items():
        write(DOCS / "_made" / f"{name}.md", sortable(text))
    make_figures()
    for notebook in sorted((ROOT / "tutorials").glob("*.ipynb")):
        write(DOCS / "tutorials" / notebook.name, notebook.read_text().replace("](../docs/", "](../"))


def write(path: Path, text: str) -> None:
    """Write a file, unless it holds the same: pages that did not change are not built again."""
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def make_figures() -> None:
    """Write the papers' figures and kept against learned as SVG, and the page that shows the latter."""
    from made_figures import kept_and_learned, reproduced

    for figure in load_figures():
        write(DOCS / "_made" / f"{figure['name']}.svg", reproduced(figure))
    names = {row: name.replace("`", "") for row, name in METHODS.items()}
    scores = {name: [load_scores("real-model", row, seed) for seed in (0, 1, 2)] for row, name in names.items()}
    drawing, sentence = kept_and_learned(scores)
    write(DOCS / "_made" / "kept-and-learned.svg", drawing)
    write(
        DOCS / "_made" / "kept-and-learned.md", f"![Kept against learned. {sentence}](../_made/kept-and-learned.svg)\n"
    )


def sortable(text: str) -> str:
    """A page whose tables a reader can sort by a click on a column's head (docs/_static/sort.js)."""
    return re.sub(r"(?m)^(?=\|.*\|\n\| ?---)", "```{rst-class} sortable\n```\n\n", text)


def seeds_table(folder: str, names: Mapping[str, str], seeds: Sequence[int]) -> str:
    """For each row the mean over seeds, and each seed in parentheses."""
    rows = [["method", *COLUMNS.values()]]
    for row, name in names.items():
        scores = [load_scores(folder, row, seed) for seed in seeds]
        rows.append([name, *(seeds_cell(column, [each[column] for each in scores], row) for column in COLUMNS)])
    return markdown(rows)


def counts_table(names: Mapping[tuple[str, str], str], seeds: Sequence[int]) -> str:
    """For each row of a folder, what is counted in all seeds together."""
    columns = {column: COLUMNS[column] for column in ("kept", "kept, few-shot", "learned", "learned, statement")}
    rows = [["method", *columns.values()]]
    for (folder, row), name in names.items():
        scores = [load_scores(folder, row, seed) for seed in seeds]
        cells = []
        for column in columns:
            total = sum(each[column]["n"] for each in scores)
            count = sum(round(each[column]["mean"] * each[column]["n"]) for each in scores)
            cells.append(f"{count} of {total} ({whole_percent(count / total)}%)")
        rows.append([name, *cells])
    return markdown(rows)


def seeds_cell(column: str, intervals: Sequence[Mapping[str, float] | None], row: str) -> str:
    """A mean with each seed's value; empty where there is none. The base learns nothing by definition."""
    values = [interval["mean"] for interval in intervals if interval]
    if not values or (row == "base-few-shot" and column.startswith("learned")):
        return ""
    mean = sum(values) / len(values)
    if column == DRIFT:
        return f"{mean:.2f} ({', '.join(f'{value:.2f}' for value in values)})"
    return f"{whole_percent(mean)}% ({', '.join(map(whole_percent, values))})"


def intervals_table(folder: str, names: Mapping[str, str], columns: Iterable[str]) -> str:
    """For each row the numbers of seed 0, shares of known or new facts with their 95% intervals."""
    columns = list(columns)
    rows = [["method", *(COLUMNS[column] for column in columns)]]
    for row, name in names.items():
        scores = load_scores(folder, row, 0)
        rows.append([name, *(interval_cell(column, scores[column]) for column in columns)])
    return markdown(rows)


def interval_cell(column: str, interval: Mapping[str, float] | None) -> str:
    """A share in percent with its interval, or a drift."""
    if interval is None:
        return ""
    if column == DRIFT:
        return f"{interval['mean']:.2f}"
    mean, low, high = (whole_percent(interval[name]) for name in ("mean", "low", "high"))
    return f"{mean}% [{low}, {high}]"


def study_table(folder: str, world: str, split: str, names: Mapping[str, str]) -> str:
    """A study's rows of one world and split, with their intervals over seeds."""
    saved = json.loads((RESULTS / folder / "study.json").read_text())["rows"]
    by_method = {row["method"]: row for row in saved if (row["world"], row["split"]) == (world, split)}
    rows = [["method", *STUDY_COLUMNS.values()]]
    for method, name in names.items():
        row = by_method[method] | {"popular": by_method[method]["quintiles"][0]}
        rows.append([name, *(study_cell(column, row[column]) for column in STUDY_COLUMNS)])
    return markdown(rows)


def rates_table(names: Mapping[str, str]) -> str:
    """FT-Top, FT-Whole and FT-Bottom in the popularity study, by learning rate."""
    saved = json.loads((RESULTS / "popularity" / "study.json").read_text())
    fifths = {(row["method"], row["split"]): row["quintiles"][0]["mean"] for row in saved["rows"]}
    differences = {row["method"]: row for row in saved["top_minus_bottom"]}
    head = ["learning rate", "most popular fifth: FT-Top, FT-Whole, FT-Bottom", "FT-Top minus FT-Bottom, points"]
    rows = [[*head, "on all questions", "in subject attention"]]
    for method, name in names.items():
        row, shares = differences[method], (100 * fifths[method, split] for split in ("top", "whole", "bottom"))
        mean, low, high = (row["attention"][end] for end in ("mean", "low", "high"))
        points = [study_cell("gain", interval) for interval in (row["quintiles"][0], row["accuracy"])]
        rows.append(
            [name, ", ".join(f"{share:.1f}%" for share in shares), *points, f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"]
        )
    return markdown(rows)


def study_cell(column: str, interval: Mapping[str, float] | None) -> str:
    """A ratio, a drift, a share in percent or a difference in points, with its interval."""
    if interval is None:
        return ""
    numbers = [interval[name] for name in ("mean", "low", "high")]
    if column in ("extraction", "drift"):
        mean, low, high = (f"{number:.2f}" for number in numbers)
        return f"{mean} [{low}, {high}]"
    if column == "gain":
        mean, low, high = (f"{100 * number:+.1f}" for number in numbers)
        return f"{mean} [{low}, {high}]"
    return interval_cell(column, interval)


def whole_percent(share: float) -> str:
    """A share as a whole number of percent; halves are rounded up."""
    return str(math.floor(100 * share + 0.5 + 1e-9))


def load_scores(folder: str, row: str, seed: int) -> dict[str, Any]:
    """The scores of a row and seed of benchmarks/real_model.py."""
    return json.loads((RESULTS / folder / f"{row}-seed-{seed}.json").read_text())["scores"]


def split_table(name: str) -> str:
    """A committed table.md as it is."""
    return (RESULTS / name / "table.md").read_text()
