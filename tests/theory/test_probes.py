"""On a one-layer model the readings for deep models equal the closed forms of `attnbalance.theory`."""

from __future__ import annotations

import pytest
import torch
from one_layer import VOCABULARY, lab_llama, word_prompts, word_tokenizer
from torch import Tensor

from attnbalance import load_model
from attnbalance.models.bridge import bridge_of
from attnbalance.models.hooked import HookedModel
from attnbalance.readings.answer_tokens import make_answer_tokens
from attnbalance.readings.attention import read_attention
from attnbalance.readings.direct_attribution import read_direct_attribution
from attnbalance.readings.relevance import read_relevance
from attnbalance.readings.salience import read_value_salience
from attnbalance.theory.attention_only import AttentionOnly, attention_only
from attnbalance.theory.triples import Examples

# The Llama computes in float32 on numbers of about 1, the lab in float64: the difference is some 1e-7.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def lab() -> AttentionOnly:
    return attention_only(VOCABULARY, [0], scale=0.5)


@pytest.fixture(scope="module")
def deep(lab: AttentionOnly) -> HookedModel:
    return load_model(lab_llama(lab), tokenizer=word_tokenizer())


@pytest.fixture(scope="module")
def asked() -> Examples:
    """The word prompts as the lab has them."""
    ids = [word_tokenizer()(f"{prompt.text} {prompt.fact.answer}")["input_ids"] for prompt in word_prompts()]
    subject, query, answer = torch.tensor(ids).T[:, None]
    return Examples(subject, query, answer, torch.full(subject.shape, 1 / len(ids), dtype=torch.float64))


def near(measured: Tensor, expected: Tensor) -> None:
    assert float(expected.abs().max()) > 0.1
    torch.testing.assert_close(measured.double(), expected, atol=TOLERANCE, rtol=0)


def test_attention_is_the_labs(lab: AttentionOnly, deep: HookedModel, asked: Examples) -> None:
    near(read_attention(deep, word_prompts()).to("subject").values[:, 0, 0], lab.attention(asked)[0])


def test_relevance_is_definitions_4_3_and_4_4_and_the_push_the_gradient_of_the_scores(
    lab: AttentionOnly, deep: HookedModel, asked: Examples
) -> None:
    relevance, expected, share = read_relevance(deep, word_prompts()), lab.relevance(asked), lab.attention(asked)[0]
    near(relevance.subject.values[:, 0, 0], expected.subject[0])
    near(relevance.others.values[:, 0, 0], expected.prompt[0])
    difference = (expected.subject - expected.prompt)[0]
    near(relevance.push.values[:, 0, 0], share * (1 - share) * difference)
    single = asked.take(torch.tensor([[3]]))
    slope = lab.gradient(single).W_KQ[0, int(single.subject), int(single.query)]
    near(relevance.push.values[3:4, 0, 0], slope[None])


def test_salience_is_definition_4_1_set_against_the_other_answers(
    lab: AttentionOnly, deep: HookedModel, asked: Examples
) -> None:
    answer_tokens = make_answer_tokens(word_prompts(), word_tokenizer())
    probed = read_value_salience(bridge_of(deep), answer_tokens, at="embedding").values[:, 0, 0]
    salience = lab.salience(asked)[0]
    expected = []
    for i, prompt in enumerate(answer_tokens.prompts):
        candidates = answer_tokens.candidates[prompt.fact.relation]
        others = torch.tensor([[candidates[k] for k in answer_tokens.others[i]]])
        same = asked.subject[:, i : i + 1].expand_as(others)
        rest = Examples(same, same, others, torch.ones(others.shape, dtype=torch.float64))
        expected.append(salience[i] - lab.salience(rest).mean())
    near(probed, torch.stack(expected))


def test_direct_attribution_adds_up_to_the_labs_logits(lab: AttentionOnly, deep: HookedModel, asked: Examples) -> None:
    answer_tokens = make_answer_tokens(word_prompts(), word_tokenizer())
    attribution = read_direct_attribution(bridge_of(deep), answer_tokens)
    expected = answer_tokens.difference(lab.logits(asked)[0].float())
    near(attribution.logit_difference, expected.double())
    near(attribution.total(), expected.double())
