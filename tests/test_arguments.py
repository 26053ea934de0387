"""Arguments of the wrong kind are refused by name."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from types import NoneType

import numpy as np
import pytest
import torch
from tiny import tiny_model, tiny_prompts, tiny_tokenizer

from attnbalance import (
    Fact,
    FactSet,
    Reading,
    Recall,
    gain_interval,
    load_facts,
    mean_intervals,
    rank_correlations,
    ratio_intervals,
    recall,
    reproduce,
    share_interval,
    split_facts,
    steer_attention,
)
from attnbalance.arguments import expects, fits
from attnbalance.data.scoring import is_match
from attnbalance.errors import ArgumentError, AttnBalanceError
from attnbalance.models.hooked import hook


@expects(count=int, name=(str, NoneType), parts=[str], forms=({str: [str]}, NoneType))
def taking(count: int, name: str | None = None, *, parts: object = (), forms: object = None) -> tuple[object, ...]:
    """What it was given."""
    return (count, name, parts) if forms is None else (forms,)


def test_arguments_of_the_right_kind_pass_however_they_are_given() -> None:
    assert taking(1) == (1, None, ())
    assert taking(1, "a", parts=["b"]) == (1, "a", ["b"])
    assert taking(name=None, count=2, parts=("b",)) == (2, None, ("b",))
    forms = {"country": ("USA", "US"), "sport": ["golf"]}
    assert taking(1, forms=forms) == (forms,)
    assert taking(1, forms={}) == ({},)
    assert taking.__name__ == "taking"
    assert taking.__doc__ == "What it was given."


def test_a_flag_is_true_or_false_and_no_text_that_counts_as_true() -> None:
    @expects(count=int)
    def asking(count: int, loud: bool = False) -> bool:
        return loud

    assert asking(1, loud=True)
    assert not asking(1, False)
    with pytest.raises(ArgumentError, match=r"asking: loud must be bool, got 'no' \(str\)"):
        asking("1", loud="no")  # pyright: ignore[reportArgumentType]


def test_true_and_false_are_no_numbers() -> None:
    with pytest.raises(ArgumentError, match=r"taking: count must be int, got True \(bool\)"):
        taking(True)
    wrong = ((True, int), (True, float), (True, Real), ([True], [Real]), ([0.5, False], [Real]))
    assert not any(fits(value, kind) for value, kind in wrong)
    assert fits(True, bool)
    assert fits([True, False], [bool])


def test_an_iterator_is_taken_only_where_it_is_gone_through_once() -> None:
    @expects(parts=[str])
    def joining(parts: Iterable[str]) -> str:
        return "".join(parts)

    assert joining(iter("ab")) == "ab"
    with pytest.raises(ArgumentError, match=r"taking: parts must be a collection of str, got .*; make a list of it"):
        taking(1, parts=iter("ab"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": None}, "taking: count must be int, got None (NoneType)"),
        ({"count": math.nan}, "taking: count must be int, got nan (float)"),
        ({"count": 1, "name": []}, "taking: name must be str or None, got [] (list)"),
        ({"count": 1, "parts": "text"}, "taking: parts must be a collection of str, got 'text' (str); write ['text']"),
        ({"count": 1, "parts": ["a", 1]}, "taking: parts must be a collection of str, got ['a', 1] (list)"),
        ({"count": 1, "parts": {"a": 1}}, "taking: parts must be a collection of str, got {'a': 1} (dict)"),
        (
            {"count": 1, "forms": {"sport": ["golf"], "country": "USA"}},
            "taking: forms must be a mapping from str to a collection of str or None, got {'sport': ['golf'], "
            "'country': 'USA'} (dict); write ['USA']",
        ),
        (
            {"count": 1, "forms": {1: ["USA"]}},
            "taking: forms must be a mapping from str to a collection of str or None, got {1: ['USA']} (dict)",
        ),
        (
            {"count": 1, "forms": ["USA"]},
            "taking: forms must be a mapping from str to a collection of str or None, got ['USA'] (list)",
        ),
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
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
import attnbalance as ab
from attnbalance.report.heads import show_rows

bad = (None, "text", [], math.nan, object())
functions = [
    ab.read_attention, ab.read_change, ab.read_drift, ab.read_direct_attribution, ab.read_mlp_salience,
    ab.read_relevance, ab.read_readout_ranks, ab.read_value_salience, ab.top_neurons, ab.bridge_of, ab.patch_rows,
    ab.transplant_weights, ab.recall, ab.steer_attention, ab.rescue, ab.difference, ab.layer_curve, ab.head_map,
    ab.select_weights, ab.train_only, ab.add_lora, ab.split_facts, show_rows,
    ab.compare_accuracy, ab.draw_curves,
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
    **dict.fromkeys((ab.load_instructions, ab.load_choices, ab.load_run), (None, [], math.nan, object())),
    ab.parse_objective: (None, [], math.nan, object()),
    **dict.fromkeys((ab.World, ab.InstructionSet, ab.FrozenWeights), (None, "text", math.nan, object())),
    **dict.fromkeys((ab.make_prompts, ab.statement_prompts), (None, "text", math.nan, [1])),
    ab.boost_attention: (None, "text", []),
}.items():
    for value in values:
        try:
            function(value)
        except ab.AttnBalanceError as error:
            assert " must be " in str(error), error
        else:
            raise AssertionError((function, value))

tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
for ids, mask, message in (
    ([5, 6, 7.5, 8], [1, 1, 1, 1], "input_ids and labels must be whole numbers"),
    ([5, 6, "7", 8], [1, 1, 1, 1], "input_ids and labels must be whole numbers"),
    ([5, 6, 7, 8], ["1", "1", "1", "0"], "attention_mask must be 0 or 1"),
    ([5, 6, 7, 8], [1, 1, 1, 0.5], "attention_mask must be 0 or 1"),
    ([5, 6, 7, 8], [2, 1, 1, 0], "attention_mask must be 0 or 1"),
):
    row = {"input_ids": ids, "labels": [-100, -100, 7, 8], "attention_mask": mask}
    try:
        ab.as_examples([row], [None], tokenizer)
    except ab.AttnBalanceError as error:
        assert f"row 1: {message}" in str(error), error
    else:
        raise AssertionError(row)

made_by_functions = {"AttentionRows", "HookedModel", "Prompt", "Run"}
flags = 0
for name in sorted(set(ab.__all__) - made_by_functions):
    function = getattr(ab, name)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        continue
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    for flag in (p.name for p in parameters if p.annotation in ("bool", bool)):
        for text in ("no", 1):
            try:
                function(*[object()] * len(needed), **{flag: text})
            except ab.AttnBalanceError as error:
                assert f"{flag} must be bool, got {text!r}" in str(error), (function, error)
                flags += 1
            else:
                raise AssertionError((function, flag))
assert flags > 80, flags
"""


def test_no_public_function_fails_inside_on_nothing_on_a_text_or_on_a_number_that_is_none() -> None:
    subprocess.run([sys.executable, "-c", PUBLIC], check=True)  # without the checks that tests add to annotations


OSLO, FEW = FactSet((Fact("Oslo", "country", ("Norway",)),)), tuple("abcdefgh")
READ = Reading("height", "m", torch.zeros(8, 1, 1), (0,), FEW, FEW)
ANSWERED = Recall(FEW, FEW, (None,) * 8, FEW, {"whole-words": (True,) * 8}, (1.0,) * 8, (False,) * 8)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda text: is_match("a plan", text), "answers"),
        (lambda text: OSLO.of_relations(text), "relations"),
        (lambda text: load_facts("nowhere.jsonl", text), "relations"),
        (lambda text: split_facts(OSLO, "random", train_relations=text), "train_relations"),
        (lambda text: reproduce(text, "nowhere"), "names"),
        (lambda text: READ.at(text), "Reading.at: prompt_ids"),
        (lambda text: ANSWERED.at(text), "prompt_ids"),
        (lambda text: mean_intervals([[0.0]] * 8, text), "clusters"),
        (lambda text: ratio_intervals([[0.0]] * 8, [1.0] * 8, text), "clusters"),
        (lambda text: rank_correlations([[0.0]] * 8, [1.0] * 8, text), "clusters"),
        (lambda text: share_interval([True] * 8, text), "clusters"),
        (lambda text: gain_interval(np.ones(8, int), text), "clusters"),
    ],
)
def test_a_text_is_not_read_letter_by_letter_where_texts_are_meant(
    call: Callable[[Sequence[str]], object], name: str
) -> None:
    with pytest.raises(
        ArgumentError, match=rf"{name} must be a collection of str.*, got 'abcdefgh' \(str\); write \['ab"
    ):
        call("abcdefgh")


@pytest.mark.parametrize("ask", [recall, steer_attention])
def test_accepted_answers_of_a_relation_are_a_list(ask: Callable[..., object]) -> None:
    model = hook(tiny_model("llama"), tiny_tokenizer(), "llama")
    with pytest.raises(ArgumentError, match=r"shortcuts must be a mapping from str to .*'USA'.*; write \['USA'\]"):
        ask(model, tiny_prompts(), shortcuts={"country": "USA"})
