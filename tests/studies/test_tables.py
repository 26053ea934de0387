"""The tables of a study, cell by cell against text written by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

from attnbalance.files.outputs import MARKER, write_json
from attnbalance.statistics.intervals import Interval, seed_interval
from attnbalance.studies.summary import SplitContrast, StudyRow, study_rows
from attnbalance.studies.tables import AGREED, CAPTION, HEAD, table_of, write_tables
from tests.fakes import a_fit

NONE = Interval(math.nan, math.nan, math.nan, 0)
FULL = StudyRow(
    world="small",
    method="plain",
    split="top",
    seeds=3,
    extraction=Interval(1.25, 1.0, 1.5, 3),
    kept=Interval(0.5, 0.25, 0.75, 3),
    accuracy=Interval(0.2, 0.1, 0.3, 3),
    quintiles=(Interval(0.9, 0.8, 1.0, 3), Interval(0.1, 0.0, 0.2, 3)),
    gain=Interval(-0.05, -0.1, 0.0, 3),
    gap=Interval(0.5, 0.4, 0.6, 3),
    shortcut_rate=Interval(0.75, 0.5, 1.0, 3),
    attention=Interval(0.125, 0.1, 0.15, 3),
    new_facts=Interval(0.6, 0.55, 0.65, 3),
    kept_facts=Interval(0.7, 0.65, 0.75, 3),
    drift=Interval(0.01, 0.005, 0.015, 3),
)
BARE = StudyRow("large", "none", "bottom", 1, NONE, NONE, FULL.accuracy, (), *[None] * 7)


def cells(line: str) -> dict[str, str]:
    return dict(zip(HEAD, (cell.strip() for cell in line.strip("|").split("|")), strict=True))


def test_a_row_has_its_numbers_in_the_columns_units() -> None:
    lines = table_of([FULL]).splitlines()
    assert lines[0] == "**small**, 3 seeds"
    assert cells(lines[2]) == {name: name for name in HEAD}
    assert cells(lines[4]) == {
        "method": "plain",
        "trained on": "top",
        "extraction ratio": "1.250 [1.000, 1.500]",
        "kept": "50.0% [25.0, 75.0]",
        "accuracy": "20.0% [10.0, 30.0]",
        "most popular fifth": "90.0% [80.0, 100.0]",
        "against plain, points": "-5.0 [-10.0, +0.0]",
        "gap closed": "50% [40, 60]",
        "shortcut rate": "75.0% [50.0, 100.0]",
        "subject attention": "0.125 [0.100, 0.150]",
        "new facts": "60.0% [55.0, 65.0]",
        "drift": "0.010 [0.005, 0.015]",
    }


def test_what_is_unknown_or_does_not_apply_is_told_apart() -> None:
    first, second = table_of([FULL, BARE]).split("\n\n**large**, 1 seed\n\n")
    assert "1 seeds" not in first + second
    row = cells(second.splitlines()[2])
    assert (row["extraction ratio"], row["kept"]) == ("? (the base completes none in a seed)", "?")
    assert [name for name in HEAD if not row[name]] == [
        "most popular fifth",
        "against plain, points",
        "gap closed",
        "shortcut rate",
        "subject attention",
        "new facts",
        "drift",
    ]


def test_a_column_that_lacks_a_value_in_some_seeds_says_in_how_many_it_has_one() -> None:
    partly = {
        "shortcut_rate": Interval(0.75, 0.5, 1.0, 2),
        "attention": Interval(0.125, 0.1, 0.15, 2),
        "new_facts": Interval(1.0, math.nan, math.nan, 1),
        "drift": Interval(0.01, 0.005, 0.015, 2),
    }
    row = cells(table_of([replace(FULL, **partly)]).splitlines()[4])
    assert row["shortcut rate"] == "75.0% [50.0, 100.0] (2 of 3 seeds)"
    assert row["subject attention"] == "0.125 [0.100, 0.150] (2 of 3 seeds)"
    assert row["new facts"] == "100.0% (1 of 3 seeds)"
    assert row["drift"] == "0.010 [0.005, 0.015] (2 of 3 seeds)"
    results = [
        a_fit("plain", "top", seed, [1, 0], [1, 1]) | {"new_facts": value} for seed, value in ((0, None), (1, 1))
    ]
    (of_fits,) = study_rows(results)
    assert "| 100.0% (1 of 2 seeds) |" in table_of([of_fits])
    assert (of_fits.as_dict()["new_facts"], of_fits.seeds) == ({"mean": 1.0, "low": None, "high": None, "n": 1}, 2)


def test_an_interval_of_zero_width_is_explained_below_the_table() -> None:
    agreed = replace(FULL, accuracy=Interval(0.325, 0.325, 0.325, 2))
    assert table_of([FULL, agreed]).endswith(f" |\n\n{AGREED}")
    tenths = seed_interval([0.1, 0.1, 0.1])
    assert tenths.low < tenths.high  # by rounding alone
    assert table_of([replace(FULL, new_facts=tenths)]).endswith(AGREED)
    assert AGREED not in table_of([FULL, BARE])
    one = Interval(1.0, 1.0, 1.0, 3)
    by_statement = replace(FULL, method="no training: statement", extraction=one, kept=one)
    assert AGREED not in table_of([by_statement])  # these are 1 by definition


def test_the_table_is_written_with_its_numbers_its_figure_and_as_the_folders_answer(tmp_path: Path) -> None:
    write_json(tmp_path / MARKER, {"kind": "study"})
    table = write_tables([a_fit("plain", "top", seed, [1, 1, 0, seed], [1, 1, 1, 1]) for seed in (0, 1)], tmp_path)
    assert (tmp_path / "table.md").read_text() == f"{table}\n\n{CAPTION}\n"
    assert json.loads((tmp_path / MARKER).read_text()) == {"kind": "study", "answer": table}
    (row,) = json.loads((tmp_path / "study.json").read_text())["rows"]
    assert (row["method"], row["seeds"], row["accuracy"]["mean"]) == ("plain", 2, 0.625)  # of 2/4 and 3/4
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")


def test_top_minus_bottom_follows_the_table_of_its_world() -> None:
    by_fifth = tuple(Interval(value, value - 0.1, value + 0.1, 3) for value in (0.2, 0.1, 0.0, -0.1, -0.2))
    contrast = SplitContrast(
        "small", "lr-1", 3, Interval(0.05, 0.0, 0.1, 3), by_fifth, Interval(-0.02, -0.03, -0.01, 3)
    )
    control = SplitContrast("small", "constant answer", 1, Interval(0.01, math.nan, math.nan, 1), (), None)
    text = table_of([FULL, replace(FULL, world="large")], [contrast, control])
    assert text.count("FT-Top minus FT-Bottom") == 1
    lines = text.split("**small**, FT-Top minus FT-Bottom, points\n\n")[1].splitlines()
    fifths = "most popular fifth | second | third | fourth | least popular"
    assert lines[0] == f"| method | seeds | accuracy | {fifths} | subject attention |"
    assert lines[2].startswith("| lr-1 | 3 | +5.0 [+0.0, +10.0] | +20.0 [+10.0, +30.0] | +10.0 [+0.0, +20.0] | +0.0 [")
    assert lines[2].endswith("| -0.020 [-0.030, -0.010] |")
    assert AGREED not in text
    agreed = replace(contrast, accuracy=Interval(0.05, 0.05, 0.05, 3))
    assert AGREED in table_of([FULL], [agreed])
    assert AGREED not in table_of([FULL], [replace(agreed, seeds=1)])
    assert lines[3] == "| constant answer | 1 | +1.0 (no interval) |  |  |  |  |  |  |"
