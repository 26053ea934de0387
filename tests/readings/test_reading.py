"""Readings: what they refuse, selection, joining and paired differences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnbalance.errors import DataError
from attnbalance.readings.reading import Reading, concatenate, difference


def _reading(names="abcd", layers=3, heads=2, seed=0):
    values = torch.rand(len(names), layers, heads, generator=torch.Generator().manual_seed(seed))
    ids = tuple(names)
    return Reading("attention", "probability", values, tuple(range(layers)), ids, tuple(f"s{name}" for name in ids))


def test_labels_must_fit_the_values():
    good = _reading()
    for wrong in ({"layers": (0, 1)}, {"prompt_ids": tuple("abc")}, {"subjects": ("s",)}):
        with pytest.raises(DataError, match="do not match"):
            replace(good, **wrong)


def test_prompts_must_be_told_apart():
    with pytest.raises(DataError, match="'a' occurs more than once"):
        _reading("aba")


def test_selection_takes_values_and_subjects_in_the_order_asked():
    found = _reading().at(["c", "a"])
    assert torch.equal(found.values, _reading().values[[2, 0]])
    assert found.subjects == ("sc", "sa")
    with pytest.raises(DataError, match="no prompt 'x' \\(1 of 2 missing\\)"):
        _reading().at(["a", "x"])


def test_parts_joined_are_the_whole():
    whole = _reading()
    joined = concatenate([whole.at(list("ab")), whole.at(list("cd"))])
    assert torch.equal(joined.values, whole.values)
    assert (joined.prompt_ids, joined.subjects, joined.layers) == (whole.prompt_ids, whole.subjects, whole.layers)


def test_different_measurements_are_not_joined():
    with pytest.raises(DataError, match="cannot join"):
        concatenate([_reading("ab"), replace(_reading("cd"), name="salience")])
    with pytest.raises(DataError, match="cannot join .* different layers"):
        concatenate([_reading("ab"), replace(_reading("cd"), layers=(0, 1, 3))])


def test_a_difference_is_paired_by_prompt_whatever_the_order():
    a, b = _reading(), _reading(seed=1)
    found = difference(a, b.at(list("dbca")))
    assert torch.equal(found.values, a.values - b.values)
    assert found.name == "attention: difference"
    assert difference(a, replace(b, name="other")).name == "attention - other"


def test_a_difference_with_itself_is_zero():
    assert not difference(_reading(), _reading().at(list("dcba"))).values.any()


def test_a_difference_turned_round_changes_its_sign():
    a, b = _reading(), _reading(seed=1)
    assert torch.equal(difference(a, b).values, -difference(b, a).values)


def test_a_difference_needs_the_same_prompts_layers_heads_and_unit():
    a = _reading()
    with pytest.raises(DataError, match="same prompts: 2 are"):
        difference(a, _reading("abce"))
    for other in (_reading(layers=2), _reading(heads=1), replace(a, unit="nats"), replace(a, layers=(1, 2, 3))):
        with pytest.raises(DataError, match="same layers, heads and unit"):
            difference(a, other)


def test_a_reading_prints_its_shape_and_no_values():
    assert repr(_reading()) == "Reading('attention', probability, 4 prompts x 3 layers x 2 heads)"
