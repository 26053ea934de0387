"""Models through TransformerLens against what the transformers model itself computes, caught by hooks of torch."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import transformers
from tiny import FAMILIES, SIZES, VOCABULARY, eager, tiny_prompts, tiny_tokenizer
from uneven import hooked, uneven

from attnbalance import Fact, HookedModel, load_model, make_answer_tokens, make_prompts, read_direct_attribution
from attnbalance.data.batches import pad
from attnbalance.data.tokens import encode
from attnbalance.errors import ModelError
from attnbalance.models import bridge as bridges
from attnbalance.models.bridge import bridge_of, check_multipliers

pytestmark = pytest.mark.filterwarnings("ignore:.*is outside")

# Float32 sums of 32 products of entries up to 10, in another order: 1e-6. A wrong head or bias shows as 0.1 and more.
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
IDS = torch.randint(VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bridge_leaves_the_users_model_as_it_was(family: str) -> None:
    user = hooked(family)
    model, batch = user.model, pad(encode(tiny_prompts(), user.tokenizer))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = {name: type(module) for name, module in model.named_modules()}
    with torch.no_grad():
        rows, logits = user.rows(batch), model(IDS).logits
        bridge_of(user).weights.W_O.zero_()  # neither the user's weights nor a view of them
        assert torch.equal(model(IDS).logits, logits)
        assert torch.equal(user.rows(batch), rows)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert {name: type(module) for name, module in model.named_modules()} == modules
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_padding_on_the_left_changes_no_logit() -> None:
    every = encode(tiny_prompts(), tiny_tokenizer())
    batch = pad(every)
    for family in ("gpt2", "llama", "bloom"):
        found, _ = bridge_of(hooked(family)).run(batch.input_ids, batch.attention_mask, {})
        for logits, one in zip(found, every, strict=True):
            with torch.no_grad():
                expected = eager(uneven(family))(torch.tensor([one.ids]), use_cache=False).logits[0]
            torch.testing.assert_close(logits, expected[-1:], **CLOSE)


def test_logits_that_are_not_the_users_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    user = hooked("llama")
    monkeypatch.setattr(bridges, "merged", lambda _: uneven("llama", rms_norm_eps=0.1))
    with pytest.raises(ModelError, match="logits made from its weights differ"):
        bridge_of(user)


def test_logits_that_are_no_multiple_of_what_W_U_gives_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridges, "uncapped", lambda base, logits, before: logits.abs())
    with pytest.raises(ModelError, match=r"logits made from its weights .*: it does more than scale what W_U gives"):
        bridge_of(hooked("llama"))


def test_dropout_of_a_model_in_training_does_not_reach_the_proof() -> None:
    user = load_model(uneven("gpt2").train(), tokenizer=tiny_tokenizer())
    found, _ = bridge_of(user).run(IDS, torch.ones_like(IDS), {})
    with torch.no_grad():
        torch.testing.assert_close(found, uneven("gpt2")(IDS).logits[:, -1:], **CLOSE)
    assert user.model.training


def test_hooks_that_a_family_lacks_are_named() -> None:
    with pytest.raises(ModelError, match=r"has no blocks\.0\.ln1_post\.hook_out in TransformerLens"):
        bridge_of(hooked("gpt2")).run(IDS, torch.ones_like(IDS), {"blocks.0.ln1_post.hook_out": lambda x: x})


def test_an_unembedding_of_another_width_than_the_residual_stream_is_refused_by_name() -> None:
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "do_layer_norm_before": False}
    sizes = {name: size for name, size in SIZES.items() if name != "initializer_range"} | special
    narrow = transformers.OPTConfig(**sizes, ffn_dim=48, word_embed_proj_dim=16)  # opt-350m has 512 of 1024
    with pytest.raises(
        ModelError, match="OPTForCausalLM: its unembedding reads 16 numbers, into which .* of 32 is projected"
    ):
        bridge_of(hooked(narrow))


def test_a_head_between_the_final_norm_and_the_unembedding_is_refused() -> None:
    """ModernBERT's decoder puts a dense layer, GELU and a norm there; direct attribution would not add up."""
    sizes = {name: size for name, size in SIZES.items() if name != "initializer_range"}
    headed = transformers.ModernBertDecoderConfig(
        **sizes, intermediate_size=48, cls_token_id=1, sep_token_id=2, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    with pytest.raises(ModelError, match="more than the final norm stands between the last layer and the unembedding"):
        bridge_of(hooked(headed))


def test_multipliers_that_the_bridge_leaves_out_are_refused() -> None:
    """Falcon-H1's factors of what attention and MLPs add."""
    for setting in ({"attention_out_multiplier": 0.5}, {"mlp_multipliers": [1.0, 0.7]}):
        with pytest.raises(ModelError, match="which TransformerLens leaves out: it cannot be taken apart"):
            check_multipliers(transformers.FalconH1Config(**setting), "tiny")
    check_multipliers(transformers.FalconH1Config(), "tiny")
    check_multipliers(transformers.LlamaConfig(), "tiny")


def test_lengths_from_which_attention_changes_are_crossed_by_the_check() -> None:
    """TransformerLens multiplies queries from position 16 on, which GPT-OSS does not: 0.1 and more of a logit there."""
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    rope = {"rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    sizes = SIZES | special | {"num_local_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 2}
    for rope_parameters, refused in ((rope, False), (rope | {"llama_4_scaling_beta": 0.9}, True)):
        user = hooked(transformers.GptOssConfig(**sizes, rope_parameters=rope_parameters))
        with pytest.raises(ModelError, match="logits made from its weights differ") if refused else nullcontext():
            bridge_of(user)


def test_values_that_a_model_cuts_are_warned_of_and_no_attribution_leaves_them_out() -> None:
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}

    def olmo(clip: float | None) -> HookedModel:
        return hooked(transformers.OlmoConfig(**SIZES, **special, clip_qkv=clip))

    answers = {"Zürich": "Switzerland", "Ode to Joy": "Vienna", "Ada Lovelace": "London", "the Nile in Africa": "Egypt"}
    prompts = make_prompts([Fact(subject, "country", (answer,)) for subject, answer in answers.items()])
    batch = pad(encode(prompts, tiny_tokenizer()))
    whole = bridge_of(olmo(None))  # without a warning
    checked = torch.randint(VOCABULARY, (1, 7), generator=torch.Generator().manual_seed(0))
    largest = [  # of a value
        max(float(whole.run(ids, mask, {f"blocks.{i}.attn.hook_v": torch.abs})[1].popitem()[1].max()) for i in range(2))
        for ids, mask in ((checked, torch.ones_like(checked)), (batch.input_ids, batch.attention_mask))
    ]
    assert largest[0] < largest[1]
    with pytest.warns(
        UserWarning, match=r"cuts values to at most .* in size \(clip_qkv\), and what is read from weights"
    ):
        between = bridge_of(olmo(sum(largest) / 2))
    candidates = make_answer_tokens(prompts, between.hooked.tokenizer)
    with pytest.raises(ModelError, match="direct logit attribution adds up to"):
        read_direct_attribution(between, candidates)
    read_direct_attribution(whole, candidates)
