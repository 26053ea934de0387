"""Files of cells: what is written is read back, what was changed or is of another version is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from attnbalance.errors import ModelError, OutputError
from attnbalance.papers.cell_files import read_cell, refuse_others, saved_cell, write_cell
from attnbalance.papers.figure import Cell

CELL = Cell("a-seed-0", {"seed": 0, "k": [1, 2]})


def test_a_cell_is_read_back_and_only_with_its_settings(tmp_path: Path) -> None:
    assert saved_cell(tmp_path, CELL) == {}
    write_cell(tmp_path, CELL, {"share": 0.25}, 1.5)
    saved = saved_cell(tmp_path, CELL)
    assert (saved["values"], saved["seconds"]) == ({"share": 0.25}, 1.5)
    assert json.loads((tmp_path / "cells" / "a-seed-0.json").read_text()) == saved
    assert saved_cell(tmp_path, Cell(CELL.name, {"seed": 0, "k": [1, 3]})) == {}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_refused_before_anything_is_written(tmp_path: Path, value: float) -> None:
    with pytest.raises(ModelError, match="a-seed-0 gave numbers that are not finite"):
        write_cell(tmp_path, CELL, {"share": value}, 1.0)
    assert not list(tmp_path.rglob("*.json"))


def test_a_changed_value_is_refused_and_the_file_is_kept(tmp_path: Path) -> None:
    write_cell(tmp_path, CELL, {"share": 0.25}, 1.0)
    file = tmp_path / "cells" / "a-seed-0.json"
    file.write_text(file.read_text().replace("0.25", "0.75"))
    with pytest.raises(OutputError, match="was changed: 'values' must have SHA-256"):
        read_cell(file)
    assert "0.75" in file.read_text()


def test_cells_of_other_settings_or_versions_are_refused_by_name(tmp_path: Path) -> None:
    write_cell(tmp_path, CELL, {}, 1.0)
    refuse_others({CELL.name: CELL}, tmp_path)
    with pytest.raises(OutputError, match=r"1 files .* have other settings .* \(first: a-seed-0.json\)"):
        refuse_others({CELL.name: Cell(CELL.name, {"seed": 1})}, tmp_path)
    file = tmp_path / "cells" / "a-seed-0.json"
    content = json.loads(file.read_text())
    content["versions"]["attnbalance"] = "0.0.1"
    file.write_text(json.dumps(content))
    with pytest.raises(OutputError, match="another version"):
        refuse_others({CELL.name: CELL}, tmp_path)
