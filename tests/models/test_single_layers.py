"""Values, MLPs and embeddings run by themselves, against what forward hooks see inside the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tiny import FACTS, GROUPED, POSITIONS, VOCABULARY, tiny_config, tiny_model, tiny_tokenizer
from torch import Tensor
from torch.nn import Module
from transformers import PretrainedConfig
from uneven import hooked

from attnbalance import load_model
from attnbalance.data.prompts import make_prompts
from attnbalance.errors import ModelError
from attnbalance.models.bridge import bridge_of
from attnbalance.models.single_layers import check_single_layers
from attnbalance.readings.answer_tokens import AnswerTokens, make_answer_tokens
from attnbalance.readings.direct_attribution import read_direct_attribution
from attnbalance.readings.salience import read_mlp_salience, read_value_salience

pytestmark = pytest.mark.filterwarnings("ignore:.*is outside")

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OPT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "word_embed_proj_dim": 32,
    "init_std": 0.3,
}
KINDS: dict[str, Callable[[], PretrainedConfig]] = {
    "bloom": lambda: tiny_config("bloom"),
    "mpt": lambda: transformers.MptConfig(
        d_model=32, n_heads=4, n_layers=2, vocab_size=VOCABULARY, max_seq_len=POSITIONS, expansion_ratio=2
    ),
    "opt": lambda: transformers.OPTConfig(**OPT, **SPECIAL),
    "xglm": lambda: transformers.XGLMConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        ffn_dim=48,
        num_layers=2,
        attention_heads=4,
        max_position_embeddings=POSITIONS,
        init_std=0.3,
        **SPECIAL,
    ),
    "nanochat": lambda: transformers.NanoChatConfig(**GROUPED, **SPECIAL),
    "gpt2": lambda: tiny_config("gpt2"),
    "gemma2": lambda: tiny_config("gemma2"),
    "neox": lambda: tiny_config("neox"),
}
IDS = torch.tensor([5, 17, 200, 350])
# One layer of float32, in another batch: off by 1e-7 of the largest entry, and never by a hundred times as much.
TOLERANCE = 1e-5


def first_inputs(model: Module, ids: Tensor) -> Tensor:
    """What a transformers model gives its first layer at the last token of each prompt, by a forward hook."""
    seen: list[Tensor] = []
    layer = next(module for _, module in model.named_modules() if isinstance(module, torch.nn.ModuleList))[0]
    handle = layer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"])[:, -1].clone()),
        with_kwargs=True,
    )
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    handle.remove()
    return seen[0]


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("kind", ["bloom", "nanochat", "mpt", "gemma2", "neox"])
def test_an_embedding_is_what_the_first_layer_is_given(kind: str) -> None:
    model = hooked(KINDS[kind]())
    near(bridge_of(model).embedding(IDS), first_inputs(model.model, IDS[:, None]))


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_learned_positions_are_left_out_of_an_embedding(kind: str) -> None:
    model = hooked(KINDS[kind]())
    weight = model.model.get_input_embeddings().weight.detach()
    assert torch.equal(bridge_of(model).embedding(IDS), weight[IDS])
    assert (first_inputs(model.model, IDS[:, None]) - weight[IDS]).abs().max() > 0.01


NORMS = {
    "bloom": "post_attention_layernorm",
    "mpt": "norm_2",
    "opt": "final_layer_norm",
    "xglm": "final_layer_norm",
    "nanochat": "post_attention_layernorm",
    "gpt2": "ln_2",
    "gemma2": "pre_feedforward_layernorm",
}
"""The norm before the MLP in transformers' own layers."""


@pytest.mark.parametrize("kind", NORMS)
def test_an_mlp_alone_writes_what_it_writes_in_a_prompt(kind: str) -> None:
    model, seen = hooked(KINDS[kind]()), dict[str, Tensor]()
    layer = next(module for module in model.model.modules() if isinstance(module, torch.nn.ModuleList))[0]
    norm = layer.get_submodule(NORMS[kind])
    handles = [
        norm.register_forward_pre_hook(lambda _, args: seen.update(before=args[0].reshape(-1, 32).clone())),
        layer.register_forward_hook(
            lambda _, args, output: seen.update(after=(output[0] if isinstance(output, tuple) else output).clone())
        ),
    ]
    with torch.no_grad():
        model.model(input_ids=IDS[None], use_cache=False)
    for handle in handles:
        handle.remove()
    bridged = bridge_of(model)
    with torch.no_grad():
        near(bridged.mlp_output(0, seen["before"]), seen["after"].reshape(-1, 32) - seen["before"])


@pytest.fixture(scope="module")
def answer_tokens() -> AnswerTokens:
    return make_answer_tokens(make_prompts([replace(fact, relation="r") for fact in FACTS]), tiny_tokenizer())


@pytest.mark.parametrize("kind", KINDS)
def test_salience_without_context_can_be_read_and_passes_the_check(answer_tokens: AnswerTokens, kind: str) -> None:
    bridged = bridge_of(hooked(KINDS[kind]()))
    check_single_layers(bridged)
    for at in ("embedding", "extended"):
        for found in (
            read_value_salience(bridged, answer_tokens, at=at),
            read_mlp_salience(bridged, answer_tokens, at=at),
        ):
            assert bool(found.values.isfinite().all())
            assert found.values.abs().max() > 0


def test_a_family_with_norms_behind_attention_and_mlp_is_refused_by_name(answer_tokens: AnswerTokens) -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS)
    bridged = bridge_of(hooked(config))
    with pytest.raises(ModelError, match=r"values of layer 0, run by themselves.*salience without context cannot"):
        read_value_salience(bridged, answer_tokens)
    with pytest.raises(ModelError, match=r"OPTForCausalLM.* cannot be taken apart by TransformerLens"):
        bridge_of(hooked(transformers.OPTConfig(**OPT, do_layer_norm_before=False, **SPECIAL)))


def test_a_hook_that_a_family_never_calls_is_named(answer_tokens: AnswerTokens) -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS)
    with pytest.raises(ModelError, match=r"never calls blocks\.1\.hook_resid_post"):
        read_direct_attribution(bridge_of(hooked(config)), answer_tokens)


def test_an_adapter_that_peft_cannot_merge_is_named() -> None:
    lora = LoraConfig(target_modules=["q_proj"], lora_bias=True, r=2)
    model = load_model(get_peft_model(tiny_model("llama"), lora), tokenizer=tiny_tokenizer())  # pyright: ignore
    with pytest.raises(ModelError, match=r"adapter of .* cannot be merged into its base"):
        bridge_of(model)


@pytest.mark.parametrize("kind", ["bloom", "mpt"])
def test_readings_in_context_of_families_with_alibi_are_the_models_own(answer_tokens: AnswerTokens, kind: str) -> None:
    model = hooked(KINDS[kind]())
    attribution, found = read_direct_attribution(bridge_of(model), answer_tokens), []
    for one, answer, others in zip(answer_tokens.encodings, answer_tokens.answer, answer_tokens.others, strict=True):
        with torch.no_grad():
            logits = model.model(input_ids=torch.tensor([one.ids])).logits[0, -1, list(answer_tokens.candidates["r"])]
        found.append(logits[answer] - logits[list(others)].mean())
    near(attribution.total(), torch.stack(found))
