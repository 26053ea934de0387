"""Attention rows drawn over their tokens, for notebooks, with circuitsvis."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from circuitsvis.tokens import colored_tokens_multi
from circuitsvis.utils.render import RenderedHTML
from jaxtyping import Float
from torch import Tensor

from attnbalance.arguments import expects
from attnbalance.errors import DataError
from attnbalance.files.outputs import write_text


@expects(tokens=[str], weights=Tensor)
def show_rows(
    tokens: Sequence[str], weights: Float[Tensor, "layer head position"], layers: Sequence[int] | None = None
) -> RenderedHTML:
    """One prompt's attention rows over its tokens; a click on "layer.head" colours the tokens by that head's row.

    `layers` are the layer numbers of `weights`, 0, 1, ... by default; give slices of both to show some layers only.
    With a single head (a mean over heads, say) the rows are named by layer alone. Display it as the last line of a
    cell, or save it with `save_page`. Raises `DataError` where tokens, layers and weights do not fit each other.
    """
    if weights.ndim != 3 or not weights.numel():
        raise DataError(f"weights must have a layer, a head and a position at least, got shape {tuple(weights.shape)}")
    n_layers, n_heads, n_positions = weights.shape
    numbers = list(range(n_layers)) if layers is None else list(layers)
    if n_positions != len(tokens) or n_layers != len(numbers):
        raise DataError(
            f"weights of shape {tuple(weights.shape)} (layer, head, position) do not fit {len(tokens)} tokens "
            f"and {len(numbers)} layers"
        )
    names = [f"{layer}.{head}" if n_heads > 1 else f"layer {layer}" for layer in numbers for head in range(n_heads)]
    rendered = colored_tokens_multi(list(tokens), weights.detach().float().cpu().reshape(-1, n_positions).T, names)
    return _without_markup(rendered, list(tokens))


def save_page(rendered: RenderedHTML, path: Path) -> None:
    """Write what `show_rows` returns as one HTML file that needs no network (about 1.3 MB of script)."""
    write_text(path, f'<!doctype html>\n<meta charset="utf-8">\n<title>Attention rows</title>\n{rendered.local_src}\n')


def _without_markup(rendered: RenderedHTML, tokens: list[str]) -> RenderedHTML:
    """The same page with "<" in tokens written as a JavaScript escape, so that no token ends the script."""
    raw = json.dumps(tokens)
    safe = raw.replace("<", "\\u003c")
    return RenderedHTML(rendered.local_src.replace(raw, safe), rendered.cdn_src.replace(raw, safe))
