"""Arguments of the wrong kind are refused by name."""

from __future__ import annotations

import math
import subprocess
import sys
from types import NoneType

import pytest

from attnbalance.arguments import expects
from attnbalance.errors import ArgumentError, AttnBalanceError


@expects(count=int, name=(str, NoneType), parts=[str])
def taking(count: int, name: str | None = None, *, parts: object = ()) -> tuple[object, ...]:
    """What it was given."""
    return count, name, parts


def test_arguments_of_the_right_kind_pass_however_they_are_given() -> None:
    assert taking(1) == (1, None, ())
    assert taking(1, "a", parts=["b"]) == (1, "a", ["b"])
    assert taking(name=None, count=2, parts=("b",)) == (2, None, ("b",))
    letters = iter("ab")
    assert list(taking(1, parts=letters)[2]) == ["a", "b"]  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert taking.__name__ == "taking"
    assert taking.__doc__ == "What it was given."


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": None}, "taking: count must be int, got None (NoneType)"),
        ({"count": math.nan}, "taking: count must be int, got nan (float)"),
        ({"count": 1, "name": []}, "taking: name must be str or None, got [] (list)"),
        ({"count": 1, "parts": "text"}, "taking: parts must be a collection of str, got 'text' (str)"),
        ({"count": 1, "parts": ["a", 1]}, "taking: parts must be a collection of str, got ['a', 1] (list)"),
        ({"count": 1, "parts": {"a": 1}}, "taking: parts must be a collection of str, got {'a': 1} (dict)"),
        ({"count": 1, "parts": None}, "taking: parts must be a collection of str, got None (NoneType)"),
    ],
)
def test_an_argument_of_another_kind_is_refused_with_what_came(given: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        taking(**given)  # pyright: ignore[reportArgumentType]
    assert str(caught.value) == message
    assert isinstance(caught.value, AttnBalanceError)
    assert isinstance(caught.value, TypeError)


def test_an_argument_that_is_missing_or_unknown_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'count'"):
        taking()  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
        taking(1, size=2)  # pyright: ignore[reportCallIssue]


PUBLIC = """
import inspect
import math
import attnbalance as ab
from attnbalance.report.heads import show_rows

bad = (None, "text", [], math.nan, object())
functions = [
    ab.read_attention, ab.read_change, ab.read_drift, ab.read_direct_attribution, ab.read_mlp_salience,
    ab.read_relevance, ab.read_readout_ranks, ab.read_value_salience, ab.top_neurons, ab.bridge_of, ab.patch_rows,
    ab.transplant_weights, ab.recall, ab.steer_attention, ab.rescue, ab.difference, ab.layer_curve, ab.head_map,
    ab.select_weights, ab.train_only, ab.add_lora, ab.split_facts, show_rows,
]
for function in functions:
    needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    for value in bad:
        try:
            function(*[value] * len(needed))
        except ab.AttnBalanceError as error:
            assert " must be " in str(error) or "expected" in str(error), (function, error)
        else:
            raise AssertionError((function, value))
for function in (ab.make_answer_tokens, ab.make_examples):
    for value in bad:
        try:
            function([], value)
        except ab.AttnBalanceError as error:
            assert "tokenizer must be PreTrainedTokenizerBase, got " in str(error), error
        else:
            raise AssertionError((function, value))
for function, values in {
    ab.load_model: (None, [], math.nan, object()),
    ab.load_facts: (None, [], math.nan, object()),
    ab.parse_objective: (None, [], math.nan, object()),
    ab.make_prompts: (None, "text", math.nan, [1]),
    ab.boost_attention: (None, "text", []),
}.items():
    for value in values:
        try:
            function(value)
        except ab.AttnBalanceError as error:
            assert " must be " in str(error), error
        else:
            raise AssertionError((function, value))
"""


def test_no_public_function_fails_inside_on_nothing_on_a_text_or_on_a_number_that_is_none() -> None:
    subprocess.run([sys.executable, "-c", PUBLIC], check=True)  # without the checks that tests add to annotations
