"""The drawn bars, against the counts."""

from __future__ import annotations

import pytest
from known_facts import made

from attnbalance.survey.figures import draw_knowledge


def test_the_bars_of_each_group_are_the_shares_of_its_categories() -> None:
    figure = draw_knowledge({"base": made(), "other": made()})
    ax = figure.axes[0]
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names[:3] == ["all (6)", "city|state (4)", "sport (2)"]
    assert names[3] == "popularity: most popular (2)"
    widths = [[bar.get_width() for bar in container] for container in ax.containers]
    assert [column[1] for column in widths] == pytest.approx([25.0] * 4)
    assert [column[2] for column in widths] == pytest.approx([0.0, 0.0, 0.0, 100.0])
    for row in range(len(names)):
        assert sum(column[row] for column in widths) == pytest.approx(100)
    assert [container.get_label() for container in ax.containers] == [
        "HighlyKnown", "MaybeKnown", "WeaklyKnown", "Unknown"
    ]  # fmt: skip
    assert names[-1] == "popularity: least popular (1)"
    assert len(figure.axes) == 2
