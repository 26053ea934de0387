"""The papers' claims as tables, from the committed results of `attnbalance reproduce`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from made_tables import markdown

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "papers"
VERDICTS = ("seen", "opposite", "absent", "cannot tell")


def load_figures() -> list[dict[str, Any]]:
    """The reproduced figures, in alphabetical order."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]


def paper_of(figure: Mapping[str, Any]) -> str:
    """The paper of a figure, from its source: "Ghosal et al. 2024, Figure 2(a)"."""
    return str(figure["source"]).partition(",")[0]


def scores_table(figures: Sequence[Mapping[str, Any]]) -> str:
    """By paper: how often each verdict is given on its statements in its setting, and the claims that do not count."""
    rows = [["paper", "statements in its setting", *VERDICTS, "outside its setting", "extensions of ours"]]
    for paper in dict.fromkeys(paper_of(figure) for figure in figures):
        claims = [claim for figure in figures if paper_of(figure) == paper for claim in figure["claims"]]
        scored = [claim["verdict"] for claim in claims if claim["scored"]]
        outside = sum(bool(claim["place"]) and not claim["scored"] for claim in claims)
        extensions = sum(not claim["place"] for claim in claims)
        counts = [scored.count(verdict) for verdict in VERDICTS]
        rows.append([paper, *map(str, (len(scored), *counts, outside, extensions))])
    return markdown(rows)


def claims_pages(figures: Sequence[Mapping[str, Any]]) -> str:
    """A section for each figure: what is run, its panels, and a table of its claims."""
    parts = []
    for figure in figures:
        rows = [["verdict", "claim", "where", "measured", "mean [95%]", "counts above", "the paper's number"]]
        rows += [claim_row(claim) for claim in figure["claims"]]
        seeds = figure["claims"][0]["interval"]["n"]
        made = f"(`attnbalance reproduce {figure['name']} --seeds {seeds} --out papers`, scale {figure['scale']})"
        titles = ", ".join(dict.fromkeys(panel["title"] for panel in figure["panels"]))
        drawn = f"![{titles}](_made/{figure['name']}.svg)"
        parts += [f"### `{figure['name']}`: {figure['source']}", f"{figure['about']} {made}", drawn, markdown(rows)]
    return "\n\n".join(parts) + "\n"


def printed_table() -> str:
    """Every figure and table of the papers, and the figure that runs it or why it is not run."""
    from attnbalance.papers.coverage import PRINTED

    rows = [["paper", "number", "what it shows", "run as, or why not"]]
    for row in PRINTED:
        how = "; ".join(filter(None, [", ".join(f"`{name}`" for name in row.figures), row.instead]))
        rows.append([row.paper, row.number, row.shows, how])
    return markdown(rows)


def claim_row(claim: Mapping[str, Any]) -> list[str]:
    """A claim's verdict, text and number."""
    unmet = [it for it in claim["setting"] if not it["met"]]
    conditions = "; ".join(f"{it['says']}: {it['measured']}" for it in unmet or claim["setting"])
    where = claim["place"] or "an extension"
    mean, low, high = (claim["interval"][name] for name in ("mean", "low", "high"))
    number = f"{mean:+.3g}" + ("" if low is None else f" [{low:+.3g}, {high:+.3g}]")
    standing = f", {'outside' if unmet else 'in'} its setting ({conditions})" if claim["place"] and conditions else ""
    least = f"{claim['least']:g}"
    return [claim["verdict"], claim["says"], where + standing, claim["measured"], number, least, claim["printed"]]
