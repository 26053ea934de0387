"""Templates are found, filled in and escaped; figures become SVG whose ids are their own."""

from __future__ import annotations

import re
from importlib import resources

import jinja2
import pytest

from attnbalance.report.figures import draw_curves
from attnbalance.report.page import render, svg
from tests.fakes import a_comparison

CONTENT = {"title": "<b>", "headline": "a & b", "command": None, "versions": {"python": "3"}}


def test_a_template_is_filled_in_and_escaped() -> None:
    page = render("report/templates/page.html", CONTENT)
    assert "<title>&lt;b&gt;</title>" in page
    assert "a &amp; b" in page
    assert "<pre" not in page


def test_content_that_a_template_needs_may_not_be_missing() -> None:
    with pytest.raises(jinja2.UndefinedError, match="headline"):
        render("report/templates/page.html", {"title": "x"})


@pytest.mark.parametrize("template", ["comparison/page.html", "papers/page.html", "report/templates/base.html"])
def test_templates_travel_with_the_package(template: str) -> None:
    assert resources.files("attnbalance").joinpath(template).is_file()


def test_figures_on_one_page_share_no_ids_and_keep_their_text() -> None:
    made = a_comparison({"top": [0.1], "bottom": [0.2]})
    first, second = (svg(draw_curves(made.curves()), name) for name in ("first <", "second"))
    assert 'aria-label="first &lt;"' in first
    assert ">top</text>" in first
    ids = [set(re.findall(r'id="([^"]+)"', drawn)) for drawn in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]
    assert svg(draw_curves(made.curves()), "second") == second
