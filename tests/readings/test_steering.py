"""Causal checks: which are made, and how rescue is counted, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import tiny_model, tiny_prompts, tiny_tokenizer

from attnbalance import Fact, load_model
from attnbalance.data.prompts import make_prompts
from attnbalance.data.scoring import SCORINGS
from attnbalance.errors import DataError, ModelError
from attnbalance.readings.recall import Recall, recall
from attnbalance.readings.steering import ALPHAS, bands, rescue, steer_attention, treatments, with_other_subject


def a_recall(correct: list[bool]) -> Recall:
    n = len(correct)
    names = tuple(f"p{i}" for i in range(n))
    right = dict.fromkeys(SCORINGS, tuple(correct))
    return Recall(names, names, (None,) * n, ("",) * n, right, tuple(map(float, correct)), (False,) * n)


PLAIN = a_recall([True] * 10 + [False] * 20)
OTHER = a_recall([True] * 5 + [False] * 5 + [True] * 12 + [False] * 8)
TREATED = a_recall([True] * 8 + [False] * 2 + [True] * 3 + [False] * 17)
CONTROL = a_recall([True] * 10 + [True] * 1 + [False] * 19)


def test_rescue_counts_lost_facts_that_return_and_right_ones_that_break():
    found = rescue(PLAIN, OTHER, TREATED, CONTROL)
    assert found.rescued is not None
    assert found.broken is not None
    assert found.over_control is not None
    assert (found.rescued.mean, found.rescued.n) == (3 / 12, 12)  # lost: prompts 10 to 21
    assert (found.broken.mean, found.broken.n) == (2 / 10, 10)
    assert found.net.interval.mean == pytest.approx(1 / 30)
    assert (found.net.a_only, found.net.b_only) == (3, 2)
    assert (found.over_control.a_only, found.over_control.b_only) == (2, 0)
    assert found.over_control.p_value == pytest.approx(0.5)  # 2 / 2 ** 2


def test_a_check_that_changes_nothing_rescues_and_breaks_nothing():
    found = rescue(PLAIN, OTHER, PLAIN)
    assert found.rescued is not None
    assert found.broken is not None
    assert found.rescued.mean == found.broken.mean == 0
    assert found.net.p_value == 1
    assert found.over_control is None


def test_where_nothing_was_lost_there_is_no_share():
    found = rescue(OTHER, a_recall([False] * 30), TREATED, CONTROL)
    assert found.rescued is None
    assert found.over_control is None


def test_recalls_of_other_prompts_are_refused():
    with pytest.raises(DataError, match="same prompts"):
        rescue(PLAIN, a_recall([True]), TREATED)


def test_bands_cover_all_layers_once():
    for n in range(1, 40):
        found = bands(range(n))
        assert [layer for band in found for layer in band] == list(range(n))
        assert len(found) == min(4, n)
        assert max(map(len, found)) - min(map(len, found)) <= 1


def test_the_other_subject_stands_before_the_prompt_with_spans_in_place():
    facts = [Fact(f"Town {i}x", "country", ("A",), None, f"Where is Town {i}x?") for i in range(4)]
    prompts = make_prompts(facts, "qa")
    for before, after in zip(prompts, with_other_subject(prompts), strict=True):
        assert after.part("subject") == before.part("subject")
        assert after.part("other") in {fact.subject for fact in facts} - {before.fact.subject}
        assert after.text == f"{after.part('other')}. {before.text}"
    assert with_other_subject(prompts[:1]) == ()


def test_the_arms_of_a_model_against_itself_with_other_rows_change_nothing_but_boosts_do():
    model = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    twin = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    prompts = tiny_prompts()
    plain = recall(model, prompts)
    made = list(treatments(model, twin, prompts, lambda m, p, e: recall(m, p, edit=e)))
    kinds = [treatment.kind for treatment in made]
    assert kinds.count("boost") == kinds.count("control") == len(ALPHAS)
    assert kinds.count("rows") == 3  # all, and each of two layers
    assert "weights" not in kinds  # none differ
    assert all(treatment.ask().outputs == plain.outputs for treatment in made if treatment.kind == "rows")
    assert any(treatment.ask().outputs != plain.outputs for treatment in made if treatment.kind == "boost")


def test_no_check_edits_the_rows_of_a_model_whose_rows_cannot_be_edited():
    model, other = (load_model(tiny_model("llama"), tokenizer=tiny_tokenizer()) for _ in range(2))
    with torch.no_grad():
        other.model.model.layers[0].mlp.up_proj.weight.mul_(2)
    made = treatments(replace(model, editable=False), other, tiny_prompts(), lambda m, p, e: recall(m, p, edit=e))
    assert [treatment.kind for treatment in made] == ["weights"]


def test_weights_of_all_parts_that_differ_are_tried_and_bring_back_the_other_models_answers():
    model, other = (load_model(tiny_model("gpt2"), tokenizer=tiny_tokenizer()) for _ in range(2))
    with torch.no_grad():
        for name, parameter in other.model.named_parameters():
            if name.endswith("mlp.c_proj.weight"):
                parameter.mul_(-3)
    prompts = tiny_prompts()
    made = [a for a in treatments(model, other, prompts, lambda m, p, e: recall(m, p, edit=e)) if a.kind == "weights"]
    assert [treatment.name for treatment in made] == ["MLPs"]
    assert made[0].ask().outputs == recall(other, prompts).outputs != recall(model, prompts).outputs


def test_steering_by_one_is_the_plain_recall_and_families_outside_are_refused():
    model = load_model(tiny_model("qwen2"), tokenizer=tiny_tokenizer())
    prompts = tiny_prompts()
    found = steer_attention(model, prompts, (1.0, 50.0))
    assert found[1.0].outputs == recall(model, prompts).outputs != found[50.0].outputs
    with pytest.warns(UserWarning, match="eager"):
        outside = load_model(tiny_model("bloom"), tokenizer=tiny_tokenizer())
    with pytest.raises(ModelError, match="not edited"):
        steer_attention(outside, prompts, (2.0,))


@pytest.mark.parametrize("heads", [{9: [0]}, {0: [4]}])
def test_layers_and_heads_that_are_not_there_are_refused(heads):
    model = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    with pytest.raises(DataError, match="no attention layer 9|heads 0 to 3"):
        steer_attention(model, tiny_prompts(), (2.0,), heads=heads)
