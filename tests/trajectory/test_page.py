"""The page begins with the answer, holds the table, and escapes text."""

from __future__ import annotations

import re
from pathlib import Path

from attnbalance.trajectory.page import write_page
from attnbalance.trajectory.sentences import headline
from tests.trajectory.made import a_trajectory


def test_the_page_begins_with_the_answer_and_has_a_row_for_each_checkpoint(tmp_path: Path) -> None:
    trajectory = a_trajectory()
    write_page(trajectory, tmp_path / "report.html", command="attnbalance trajectory <run>")
    text = (tmp_path / "report.html").read_text()
    body = text[text.index("<main>") :]
    assert body.index(f'<p class="headline">{headline(trajectory)}</p>') < body.index("<svg")
    assert body.count("<svg") == 3
    table = body[body.index('<table id="checkpoints">') :].partition("</table>")[0]
    assert table.count("<tr") == 4
    assert "75.0%" in table
    assert "run/<wbr>&lt;b&gt;checkpoint" in table
    assert "attnbalance trajectory &lt;run&gt;" in body
    assert not re.search(r"<script|<link|src=|@import|url\((?!#)", text)


def test_without_answers_the_page_says_so(tmp_path: Path) -> None:
    write_page(a_trajectory(right=None), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "Accuracy was not measured" in text
    assert "<th>accuracy</th>" not in text
