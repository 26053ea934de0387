"""Rows over tokens with circuitsvis: the right numbers, and no markup from tokens."""

from __future__ import annotations

import json

import pytest
import torch

from attnbalance.errors import ArgumentError, DataError
from attnbalance.report.heads import save_page, show_rows

EVIL = "</script><img src=x onerror=alert(1)>"


def _props(page: str) -> dict:
    """The properties that the page hands to circuitsvis, read back from its source."""
    return json.JSONDecoder().raw_decode(page[page.rindex('{"tokens"') :])[0]


def test_every_head_has_its_row_under_its_name():
    weights = torch.rand(2, 3, 4).softmax(-1)
    props = _props(show_rows(["a", "b", "c", "d"], weights, layers=[5, 9]).local_src)
    assert props["tokens"] == ["a", "b", "c", "d"]
    assert props["labels"] == ["5.0", "5.1", "5.2", "9.0", "9.1", "9.2"]
    for k, name in enumerate(props["labels"]):
        layer, head = [5, 9].index(int(name[0])), int(name[-1])
        assert [row[k] for row in props["values"]] == pytest.approx(weights[layer, head].tolist())


def test_a_single_head_is_named_by_its_layer():
    assert _props(show_rows(["a"], torch.ones(2, 1, 1)).local_src)["labels"] == ["layer 0", "layer 1"]


def test_a_token_cannot_end_the_script_and_is_still_shown_as_it_is():
    rendered = show_rows([EVIL, "<!--"], torch.ones(1, 1, 2))
    for page in (rendered.local_src, rendered.cdn_src):
        assert EVIL not in page
        assert page.count("</script>") == 1
        assert _props(page)["tokens"] == [EVIL, "<!--"]


def test_a_saved_page_needs_no_network(tmp_path):
    path = tmp_path / "rows.html"
    save_page(show_rows(["é", "b"], torch.ones(1, 1, 2)), path)
    page = path.read_text(encoding="utf-8")
    assert '<meta charset="utf-8">' in page
    assert "unpkg.com" not in page


def test_weights_that_do_not_fit_the_tokens_are_refused():
    with pytest.raises(DataError, match="do not fit 3 tokens"):
        show_rows(["a", "b", "c"], torch.ones(1, 1, 2))
    with pytest.raises(DataError, match="and 3 layers"):
        show_rows(["a", "b"], torch.ones(1, 1, 2), layers=[1, 2, 3])


def test_no_tokens_and_weights_of_another_shape_are_refused():
    for tokens, weights in (([], torch.ones(1, 1, 0)), (["a"], torch.ones(0, 1, 1))):
        with pytest.raises(DataError, match="a layer, a head and a position at least"):
            show_rows(tokens, weights)
    with pytest.raises(ArgumentError, match="weights must be Tensor, got None"):
        show_rows([], None)
