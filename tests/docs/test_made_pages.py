"""The tables that the site makes from committed results hold the results' numbers."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType

import pytest
from doc_pages import DOCS, ROOT

from attnbalance.papers.page import panel_as_dict

ROWS = {
    "plain": "plain finetuning (`ce`)",
    "ce-kl": "`--objective recommended`",
    "adapter-0.7": "plain, its adapter scaled by 0.7",
    "replay": "`--replay` of known facts",
    "replay-0.7": "`--replay`, its adapter scaled by 0.7",
    "constant": "control: each relation's most frequent answer, no training",
}
"""Rows of the benchmark, and their titles in the README's table."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DOCS)  # as Sphinx has it
    return importlib.import_module("made_pages")


def test_a_row_shows_the_mean_of_its_seeds_and_each(made: ModuleType) -> None:
    table = made.seeds_table("real-model", {"plain": "plain"}, (0, 1, 2))
    kept = [59 / 70, 43 / 43, 16 / 27]  # counted by hand: facts kept, of those surely known
    row = table.splitlines()[2]
    assert f"| plain | {100 * sum(kept) / 3:.0f}% ({', '.join(f'{100 * share:.0f}' for share in kept)}) |" in row


def test_counts_of_seeds_are_added(made: ModuleType) -> None:
    table = made.counts_table({("own-facts", "replay-0.7"): "replay"}, (0, 1))
    kept, learned = (37 + 28, 41 + 30), (190 + 192, 192 + 200)  # read off the files by hand
    row = table.splitlines()[2]
    assert row.startswith(
        f"| replay | {kept[0]} of {kept[1]} (92%) | 63 of 71 (89%) | {learned[0]} of {learned[1]} (97%) |"
    )


def test_halves_of_a_percent_are_rounded_up_and_intervals_are_not_rounded_twice(made: ModuleType) -> None:
    for share, shown in ((0.065, "7"), (0.025, "3"), (0.005, "1"), (0.3748, "37"), (1.0, "100"), (0.0, "0")):
        assert made.whole_percent(share) == shown


def test_a_studys_row_shows_the_means_and_intervals_of_its_file(made: ModuleType) -> None:
    table = made.study_table("labels", "popqa", "bottom", {"constant answer": "constant", "plain": "plain (`ce`)"})
    committed = (ROOT / "benchmarks" / "results" / "labels" / "table.md").read_text().split("**popqa**")[1]
    for name, shown in (("constant answer", "constant"), ("plain", "plain (`ce`)")):
        cells = next(line for line in committed.splitlines() if line.startswith(f"| {name} |")).split("|")
        row = next(line for line in table.splitlines() if line.startswith(f"| {shown} |")).split("|")
        assert row[2].split()[0] == f"{float(cells[3].split()[0]):.2f}"
        assert row[3].split()[0] == f"{float(cells[4].split('%')[0]):.0f}%"
        assert row[6].strip() == cells[7].strip()  # points against plain, to one digit in both


def test_scores_count_the_claims_of_each_paper_in_its_setting(made: ModuleType) -> None:
    figures = made.load_figures()
    table = made.scores_table(figures)
    for paper in ("Ghosal et al. 2024", "Goyal et al. 2024", "Xu & Chen 2025"):
        row = next(line for line in table.splitlines() if line.startswith(f"| {paper} |"))
        cells = [int(cell) for cell in row.split("|")[2:-1]]
        claims = [claim for figure in figures if figure["source"].startswith(paper) for claim in figure["claims"]]
        assert cells[0] == sum(cells[1:5]) == sum(claim["scored"] for claim in claims)
        assert cells[0] + cells[5] + cells[6] == len(claims)


def test_every_claim_has_a_row(made: ModuleType) -> None:
    text = made.claims_pages(made.load_figures())
    claims = [
        claim
        for path in (ROOT / "benchmarks" / "results" / "papers").glob("*.json")
        for claim in json.loads(path.read_text())["claims"]
    ]
    assert sum(
        line.startswith(tuple(f"| {verdict} |" for verdict in importlib.import_module("made_claims").VERDICTS))
        for line in text.splitlines()
    ) == len(claims)


def test_every_reproduced_figure_is_drawn_from_its_file(made: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    drawing, figures = importlib.import_module("made_figures"), made.load_figures()
    text = made.claims_pages(figures)
    for figure in figures:
        assert text.count(f"](_made/{figure['name']}.svg)") == 1
        assert [panel_as_dict(drawing.panel_of(panel)) for panel in figure["panels"]] == figure["panels"]
    figure = next(figure for figure in figures if figure["name"] == "ghosal-table2")
    svg = drawing.reproduced(figure)
    assert svg == drawing.reproduced(figure)
    assert svg.startswith("<?xml")
    changed = json.loads(json.dumps(figure))
    changed["panels"][0]["series"][1]["y"][0]["mean"] += 0.1
    assert svg != drawing.reproduced(changed)


def test_a_cell_keeps_signs_that_markdown_would_read(made: ModuleType) -> None:
    assert made.markdown([["a"], ["W_Q | *b* `x_y*`"]]).splitlines()[2] == r"| W\_Q \| \*b\* `x_y*` |"


def test_every_made_table_can_be_sorted_and_other_text_stays(made: ModuleType) -> None:
    page = "Words | here\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 | 4 |\n\n**more**\n\n" + made.markdown(
        [["c"], ["5"]]
    )
    marked = made.sortable(page)
    assert marked.count("```{rst-class} sortable\n```\n\n| ") == 2
    assert marked.replace("```{rst-class} sortable\n```\n\n", "") == page
    for name in ("popularity", "context", "instruct"):
        table = made.split_table(name)
        assert (
            made.sortable(table).count("{rst-class} sortable")
            == table.count("|\n| --- |") + table.count("|\n|---|")
            > 0
        )


def test_the_figure_shows_the_means_of_the_committed_results_and_names_what_is_unbeaten(
    made: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    figures, drawing = importlib.import_module("made_figures"), importlib.import_module("real_model_scores")
    scores = {row: [made.load_scores("real-model", row, seed) for seed in (0, 1, 2)] for row in made.METHODS}
    both = {
        row: tuple(sum(seed[name]["mean"] for seed in seeds) / 3 for name in ("kept", "learned"))
        for row, seeds in scores.items()
    }
    best = [
        row
        for row, (kept, learned) in both.items()
        if all(kept > k or learned > n or (kept, learned) == (k, n) for k, n in both.values())
    ]
    svg, sentence = figures.kept_and_learned(scores)
    assert sentence == f"No other row both keeps and learns as much as these: {'; '.join(best)}."
    assert svg == figures.kept_and_learned(scores)[0]  # pages that did not change are not built again
    rows = {row: drawing.over_seeds([{"scores": seed} for seed in seeds]) for row, seeds in scores.items()}
    [axes] = drawing.figure_of(rows).axes
    drawn = {bar.get_label(): bar.lines[0].get_xydata()[0] / 100 for bar in axes.containers}
    assert {row: tuple(point) for row, point in drawn.items()} == {row: pytest.approx(both[row]) for row in both}
    line = axes.lines[0].get_xydata() / 100
    assert line.tolist() == [pytest.approx(point) for point in sorted(both[row] for row in best)]


def test_the_result_in_the_readme_is_that_of_the_committed_files(made: ModuleType) -> None:
    def counts(row: str, name: str) -> tuple[int, int]:
        shares = [made.load_scores("real-model", row, seed)[name] for seed in (0, 1, 2)]
        return sum(round(share["mean"] * share["n"]) for share in shares), sum(int(share["n"]) for share in shares)

    known, unknown = counts("plain", "kept")[1], counts("plain", "learned")[1]
    rows = [
        f"| finetuned by | kept, of {known} | learned, of {unknown} | in other words, of {unknown} |",
        "|---|---|---|---|",
    ]
    for row, title in ROWS.items():
        cells = [counts(row, name)[0] for name in ("kept", "learned", "learned, statement")]
        rows.append(f"| {title} | {' | '.join(map(str, cells))} |")
    table = "\n".join(rows)
    assert f"\n\n{table}\n\n" in (ROOT / "README.md").read_text()


def test_what_popular_facts_are_worth_is_that_of_the_committed_study(made: ModuleType) -> None:
    table = (ROOT / "benchmarks" / "results" / "popularity" / "table.md").read_text()
    contrasts = table.split("FT-Top minus FT-Bottom, points")[1].splitlines()
    cells = next(line for line in contrasts if line.startswith("| lr-1e-4 |")).split("|")
    row = next(line for line in made.rates_table(made.RATES).splitlines() if line.startswith("| 1e-4 |")).split("|")
    assert (row[3].strip(), row[4].strip()) == (cells[4].strip(), cells[3].strip())  # the popular fifth, all questions
    low, high = (float(end) for end in cells[4].split("[")[1].strip("] ").split(","))
    assert f"[{float(cells[4].split()[0]):.0f} points [{low:.0f}, {high:.0f}]]" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "place", "index", "title"),
    [
        ("ghosal-table2", "Table 2", 0, "FT-Top minus FT-Bottom, PopQA-Controlled"),
        ("ghosal-fig3", "Figure 3(a)", 0, "the same for subject attention past the first layers"),
        ("ghosal-fig4", "Figure 4", 0, "FT-Top minus FT-Bottom, less the same on the most popular fifth"),
        ("ghosal-fig5", "Figure 5", 0, "FT-Top minus FT-Bottom, all of PopQA"),
        ("ghosal-fig5", "Figure 5", 1, "FT-Random minus FT-Bottom, all of PopQA"),
        ("ghosal-table3", "Table 3", 0, "FT-Top minus FT-Bottom, MMLU history"),
        ("goyal-fig2", "Figure 2(c)", 0, "first rise of answers from the context"),
        ("goyal-fig2", "Figure 2(c)", 1, "fall of these answers after that"),
        ("goyal-fig3", "Figure 3(b)", 0, "first rise of attention to the context"),
        ("goyal-fig3", "Figure 3(b)", 1, "fall of this attention after that"),
        ("goyal-fig4", "Figure 4(b)", 2, "how much less these answers fall with context-critical instructions"),
        ("goyal-fig4c", "Figure 4(c)", 1, "how much less they fall with context-critical SQuAD"),
        ("goyal-fig5", "Figure 5(a)", 0, "their gain by counterfactual data"),
        ("goyal-fig5", "Figure 5(c)", 1, "their gain by training W_Q and W_K alone"),
        ("xu-chen-capitals", "Section 7.1, table", 0, "frequent minus rare capitals, exact match"),
    ],
)
def test_the_papers_experiments_in_the_readme_are_those_of_the_committed_files(
    name: str, place: str, index: int, title: str
) -> None:
    claim = json.loads((ROOT / "benchmarks" / "results" / "papers" / f"{name}.json").read_text())["claims"][index]
    digits = 2 if name == "ghosal-fig3" else 1
    mean, low, high = (f"{100 * claim['interval'][end]:+.{digits}f}" for end in ("mean", "low", "high"))
    row = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(f"| {title}"))
    assert row.endswith(f"| {mean} [{low}, {high}] | {claim['verdict']} |")
    assert claim["place"] == place
