"""Pages: a template filled in, and figures as SVG inside it; a page needs neither network nor scripts."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from markupsafe import Markup

from attnbalance.report import wording
from attnbalance.report.figures import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILTERS = ("share", "percent_interval", "points", "popularity", "nats", "percent_share", "questions", "stacked")
"""Functions of `wording` that templates use as filters."""


def render(template: str, content: Mapping[str, object]) -> str:
    """A template, named by its path in the package ("comparison/page.html"), filled in with `content`.

    Text that is not marked as HTML is escaped; a name that `content` lacks raises.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("attnbalance", package_path="")
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, loader=loader
    )
    environment.filters.update({name: getattr(wording, name) for name in FILTERS})
    return environment.get_template(template).render(content)


def svg(figure: Figure, description: str) -> Markup:
    """A figure as SVG for a page: text stays text, and element ids differ from those of other figures."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": description}):
        save(figure, buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    drawn = buffer.getvalue()
    drawn = re.sub(r'<g id="[^"]*"', "<g", drawn[drawn.index("<svg") :])  # group ids repeat from figure to figure
    return Markup('<svg role="img" aria-label="{}"').format(description) + Markup(drawn.removeprefix("<svg"))  # noqa: S704 - matplotlib escapes the text that it writes
