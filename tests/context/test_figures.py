"""What the figure draws."""

from __future__ import annotations

from conflict_facts import made

from attnbalance.context.figures import draw_reliance


def test_models_stand_in_their_order_with_one_line_for_each_share() -> None:
    figure = draw_reliance({"b": made(), "a": made()})
    [ax] = figure.axes
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["b", "a"]
    drawn = {str(line.get_label()): list(line[0].get_ydata()) for line in ax.containers}  # pyright: ignore
    assert [round(values[0], 1) for values in drawn.values()] == [66.7, 16.7, 50.0, 66.7]
    assert list(drawn) == [
        "from the context", "from memory", "M_C", "remembered without the context",
    ]  # fmt: skip
