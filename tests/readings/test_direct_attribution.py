"""Direct logit attribution against the transformers model's own logits, and TransformerLens' own decomposition."""

from __future__ import annotations

import dataclasses
import random
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from tiny import FACTS, FAMILIES, GROUPED, eager, tiny_tokenizer
from torch import Tensor
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import PretrainedConfig
from uneven import hooked, uneven

from attnbalance import read_attention
from attnbalance.data.prompts import make_prompts
from attnbalance.errors import BadRowsError, DataError, ModelError
from attnbalance.models.bridge import BridgedModel, bridge_of
from attnbalance.readings.answer_tokens import AnswerTokens, make_answer_tokens
from attnbalance.readings.direct_attribution import DirectAttribution, read_direct_attribution

pytestmark = pytest.mark.filterwarnings("ignore:.*is outside")

# Logit differences of about 1 to 10 are sums of some 500 float32 products of like size: 1e-6 each, 1e-5 in all.
TOLERANCE = 1e-5
OTHERS = {
    "gemma": transformers.GemmaConfig(**GROUPED, head_dim=8, pad_token_id=None),
    "olmo2": transformers.Olmo2Config(**GROUPED, pad_token_id=None, eos_token_id=None),
    "phi": transformers.PhiConfig(**(GROUPED | {"num_key_value_heads": 4}), pad_token_id=None),
}
KINDS: dict[str, str | PretrainedConfig] = OTHERS | {family: family for family in FAMILIES}


@cache
def answer_tokens() -> AnswerTokens:
    """Subjects of several lengths at several positions, all of one relation."""
    facts = [dataclasses.replace(fact, relation="is") for fact in FACTS]
    return make_answer_tokens(make_prompts(facts), tiny_tokenizer())


@cache
def bridged(kind: str) -> BridgedModel:
    return bridge_of(hooked(KINDS[kind]))


@cache
def attribution(kind: str) -> DirectAttribution:
    return read_direct_attribution(bridged(kind), answer_tokens(), batch_size=4)


def difference_of(own: AnswerTokens, logits: Tensor, i: int) -> Tensor:
    """One prompt's logit difference, token by token."""
    tokens = own.candidates["is"]
    return logits[own.tokens[i]] - torch.stack([logits[tokens[k]] for k in own.others[i]]).mean()


@pytest.mark.parametrize("kind", KINDS)
def test_the_entries_add_up_to_the_difference_of_the_models_own_logits(kind: str) -> None:
    model = eager(uneven(KINDS[kind]))
    model.config.final_logit_softcapping = None  # Gemma 2's own: attribution is about the logits before it
    total = attribution(kind).total()
    for i, one in enumerate(answer_tokens().encodings):
        with torch.no_grad():
            logits = model(torch.tensor([one.ids]), use_cache=False).logits[0, -1]
        expected = difference_of(answer_tokens(), logits, i)
        torch.testing.assert_close(total[i], expected, atol=TOLERANCE, rtol=1e-5)
        torch.testing.assert_close(attribution(kind).logit_difference[i], expected, atol=TOLERANCE, rtol=1e-5)
    assert total.abs().max() > 1


def lens(family: str) -> Any:
    """TransformerLens' model with its norms folded into the weights behind them, so that its readouts hold."""
    model = eager(uneven(family))
    bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config, tokenizer=None)
    bridge.enable_compatibility_mode(
        disable_warnings=True, center_writing_weights=False, center_unembed=False, fold_value_biases=False
    )
    return bridge


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_each_entry_is_what_transformer_lens_attributes_to_it(family: str) -> None:
    bridge, found, own = lens(family), attribution(family), answer_tokens()
    tokens = own.candidates["is"]
    for i, one in enumerate(own.encodings):
        ids = torch.tensor([one.ids])
        with torch.no_grad():
            _, cache = bridge.run_with_cache(ids)

            def attributed(stack: Tensor, i: int = i, cache: Any = cache) -> Tensor:
                each = [
                    cache.logit_attrs(stack, own.tokens[i], incorrect_tokens=tokens[k], pos_slice=-1)
                    for k in own.others[i]
                ]
                return torch.stack(each).mean(0)[:, 0]

            parts, names = cache.decompose_resid(pos_slice=-1, return_labels=True)
            written = dict(zip(names, attributed(parts), strict=True))
            heads = attributed(cache.stack_head_results(pos_slice=-1)).reshape(2, 4)
        embedding = written["embed"] + written.get("pos_embed", 0)
        torch.testing.assert_close(found.embedding[i], embedding, atol=TOLERANCE, rtol=1e-5)
        used = found.rows[i] * found.readout[i]
        torch.testing.assert_close(used.sum(-1), heads, atol=TOLERANCE, rtol=1e-5)
        for layer in range(2):
            attention = used[layer].sum() + found.bias[i, layer]
            torch.testing.assert_close(attention, written[f"{layer}_attn_out"], atol=TOLERANCE, rtol=1e-5)
            torch.testing.assert_close(found.mlp[i, layer], written[f"{layer}_mlp_out"], atol=TOLERANCE, rtol=1e-5)
        constant = difference_of(own, bridge.b_U, i)
        torch.testing.assert_close(found.constant[i], constant, atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_readout_is_what_a_head_would_add_if_it_attended_there_alone(family: str) -> None:
    bridge, found, own = lens(family), attribution(family), answer_tokens()
    one, tokens = own.encodings[0], own.candidates["is"]
    size = len(one.ids)

    def alone(pattern: Tensor, hook: object) -> Tensor:
        return torch.eye(size)[:, None, None].expand(pattern.shape)  # prompt j of the batch looks at position j

    for layer in range(2):
        hook = (f"blocks.{layer}.attn.hook_pattern", alone)
        with torch.no_grad(), bridge.hooks([hook]):
            _, changed = bridge.run_with_cache(torch.tensor([one.ids] * size))
        with torch.no_grad():
            _, plain = bridge.run_with_cache(torch.tensor([one.ids]))  # its final scale, not the changed one's
            heads = changed.stack_head_results(pos_slice=-1)[4 * layer : 4 * layer + 4].flatten(0, 1)[:, None]
            each = [
                plain.logit_attrs(heads, own.tokens[0], incorrect_tokens=tokens[k], pos_slice=-1) for k in own.others[0]
            ]
        expected = torch.stack(each).mean(0).reshape(4, size)
        torch.testing.assert_close(found.readout[0, layer, :, :size], expected, atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_read_attention_and_padding_is_zero(kind: str) -> None:
    found = attribution(kind)
    read = read_attention(hooked(KINDS[kind]), answer_tokens().prompts)
    plain = [i for i, one in enumerate(answer_tokens().encodings) if len(one.ids) == len(read.tokens[i])]
    assert 1 < len(plain) < len(read.tokens)  # behind the others stands the bare space of their answer
    width = read.values.shape[-1]
    torch.testing.assert_close(found.rows[plain][..., :width], read.values[plain], atol=TOLERANCE, rtol=0)
    assert torch.equal(found.spans["subject"][:, :width], read.spans["subject"])
    for i, one in enumerate(answer_tokens().encodings):
        assert not found.rows[i, ..., len(one.ids) :].any()
        assert not found.readout[i, ..., len(one.ids) :].any()
        assert found.readout[i, ..., : len(one.ids)].all()


def test_what_is_used_is_rows_times_readout_over_the_subjects_tokens() -> None:
    found = attribution("llama")
    used, readout = found.used(), found.value_salience()
    for i, one in enumerate(answer_tokens().encodings):
        positions = list(one.spans["subject"])
        expected = (found.rows[i] * found.readout[i])[..., positions].sum(-1)
        torch.testing.assert_close(used.values[i], expected, atol=1e-6, rtol=1e-6)  # the order of a sum
        assert torch.equal(readout.values[i], found.readout[i, ..., positions[-1]])
    assert used.prompt_ids == tuple(prompt.prompt_id for prompt in answer_tokens().prompts)
    assert (used.unit, used.layers, used.name) == ("logits", (0, 1), "subject used")
    with pytest.raises(DataError, match="a span 'relation'; there are subject"):
        found.used("relation")


@pytest.mark.parametrize("kind", ["gpt2", "neox", "gemma2", "gpt_oss", "bloom"])
def test_batch_size_and_order_change_no_entry(kind: str) -> None:
    expected, order = attribution(kind), random.Random(0).sample(range(9), 9)
    for batch_size in (1, 2, 9):
        found = read_direct_attribution(bridged(kind), answer_tokens().at(order), batch_size=batch_size)
        for name in ("logit_difference", "embedding", "rows", "readout", "bias", "mlp", "constant"):
            torch.testing.assert_close(
                getattr(found, name), getattr(expected, name)[order], atol=TOLERANCE, rtol=1e-5, msg=name
            )


def test_tokens_that_all_answers_begin_with_are_read_as_part_of_the_prompt() -> None:
    facts = [dataclasses.replace(f, relation="is", answers=(f"the {f.answer}",)) for f in FACTS[:4]]
    own, model = make_answer_tokens(make_prompts(facts), tiny_tokenizer()), eager(uneven("qwen2"))
    total = read_direct_attribution(bridged("qwen2"), own).total()
    for i, prompt in enumerate(own.prompts):
        with torch.no_grad():
            logits = model(**tiny_tokenizer()(prompt.text + " the", return_tensors="pt"), use_cache=False).logits[0, -1]
        torch.testing.assert_close(total[i], difference_of(own, logits, i), atol=TOLERANCE, rtol=1e-5)


def test_a_final_softcap_is_undone_even_where_it_flattens_the_logits() -> None:
    capped = read_direct_attribution(bridge_of(hooked("gemma2", final_logit_softcapping=0.5)), answer_tokens())
    torch.testing.assert_close(
        capped.logit_difference, attribution("gemma2").logit_difference, atol=TOLERANCE, rtol=1e-5
    )


SCALED = (
    transformers.CohereConfig(**GROUPED, logit_scale=0.25, pad_token_id=None),
    transformers.GraniteConfig(**GROUPED, logits_scaling=8.0, pad_token_id=None),
    transformers.GraniteConfig(  # the factors of Granite 3.1's smallest
        **GROUPED, residual_multiplier=0.22, logits_scaling=8.0, embedding_multiplier=12.0, pad_token_id=None
    ),
)


@pytest.mark.parametrize("config", SCALED)
def test_a_familys_scale_of_logits_is_in_every_entry(config: PretrainedConfig) -> None:
    model = hooked(config)
    parts = read_direct_attribution(bridge_of(model), answer_tokens())
    with torch.no_grad():
        own = torch.stack(
            [
                model.model(input_ids=torch.tensor([encoding.ids])).logits[0, -1]
                for encoding in answer_tokens().encodings
            ]
        )
    torch.testing.assert_close(parts.total(), answer_tokens().difference(own), atol=TOLERANCE, rtol=1e-5)


def test_a_scale_that_attribution_has_no_entry_for_is_refused() -> None:
    config = transformers.GraniteMoeConfig(**GROUPED, residual_multiplier=0.5, num_local_experts=2, pad_token_id=None)
    with pytest.raises(ModelError, match=r"GraniteMoeForCausalLM: .*head outputs of layer 0"):
        read_direct_attribution(bridge_of(hooked(config)), answer_tokens())


def test_prompts_longer_than_the_models_positions_are_refused() -> None:
    with pytest.raises(BadRowsError, match="longer than the model's 8 positions"):
        read_direct_attribution(bridge_of(hooked("gpt2", n_positions=8)), answer_tokens())
