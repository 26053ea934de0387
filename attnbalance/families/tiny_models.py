"""Every causal-LM family of transformers, tiny and random, from its configuration."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 97
NEAR, FAR = 16, 512
"""Thresholds that most prompts cross, and that none does."""

SMALL: Mapping[str, object] = (
    dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size"), VOCABULARY)
    | dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "word_embed_proj_dim", "embedding_dim"), 32
    )
    | dict.fromkeys(("input_embedding_size", "output_embedding_size", "lru_width", "dim_head"), 32)
    | dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"), 4
    )
    | dict.fromkeys(("encoder_layers", "num_encoder_layers"), 1)
    | dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads"), 4
    )
    | dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4)
    | dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2)
    | dict.fromkeys(("swa_num_attention_heads", "index_n_heads", "linear_num_heads"), 4)
    | dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2)
    | dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "d_head", "v_head_dim", "attention_head_size"), 8)
    | dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "qk_nope_head_dim"), 8)
    | {
        "query_pre_attn_scalar": 8,
        "index_head_dim": 16,
        "qk_rope_head_dim": 8,
        "qk_head_dim": 16,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
    }
    | dict.fromkeys(
        ("intermediate_size", "moe_intermediate_size", "n_inner", "dff", "ffn_dim", "decoder_ffn_dim", "d_inner"), 48
    )
    | dict.fromkeys(("encoder_ffn_dim", "ffn_hidden_size", "expert_ffn_hidden_size", "dim_ff", "feed_forward_size"), 48)
    | dict.fromkeys(("shared_expert_intermediate_size", "shared_experts_intermediate_size", "block_ffn_dim"), 48)
    | dict.fromkeys(("shared_intermediate_size", "dense_intermediate_size", "intermediate_size_mlp"), 48)
    | dict.fromkeys(("moe_shared_expert_intermediate_size",), 48)
    | dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4)
    | dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2)
    | dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "num_dense_layers"), 1)
    | dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions", "context_length"),
        2048,
    )
)
"""Dimensions, set where a family's configuration has a field of that name that is not None."""

THRESHOLDS = (
    "sliding_window",
    "sliding_window_size",
    "window_size",
    "attention_window_size",
    "local_attention",
    "attention_chunk_size",
    "index_topk",
    "floor_scale",
    "keep_window_size",
    "log_scaling_n_floor",
    "rel_extent",
)
"""Fields of a configuration that name a length from which attention is another."""


ALTERNATING = ["sliding_attention", "full_attention"] * 2
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": NEAR}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
SCALED = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": NEAR}
SCALED |= {"llama_4_scaling_beta": 0.3, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1}
HYBRID = ["linear_attention", "full_attention"] * 2

SPECIAL: Mapping[str, Mapping[str, object]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"layer_types": ALTERNATING},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"num_key_value_heads": 4, "ngram_vocab_size": 97, "emb_neighbor_num": 2},
    "gemma3_text": {"layer_types": ALTERNATING},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ALTERNATING, "hidden_size_per_layer_input": 8},
    "gemma4_text": {"layer_types": ALTERNATING},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "kimi_linear": {"layer_types": HYBRID},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 16, "n_groups": 1},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": 2},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {"layer_types": ["linear_attention", "indexed_attention"] * 2},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "roc_bert": {"pronunciation_vocab_size": 97, "shape_vocab_size": 97},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""What SMALL does not say of a family: names of its own, parts that must fit together."""

CROSSED: Mapping[str, Mapping[str, object]] = {
    "falcon": {"alibi": True},
    "ministral3": {"rope_parameters": SCALED},
    "mistral4": {"rope_parameters": SCALED},
    "minimax_m3_vl_text": {"index_block_size": 4, "index_topk_blocks": 2},
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": NEAR},
    "phi4_multimodal": {"rope_parameters": LONGROPE, "original_max_position_embeddings": NEAR},
    "phimoe": {"rope_parameters": LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3}},
    "gpt_oss": {"rope_parameters": SCALED, "sliding_window": NEAR},
}
"""What the second configuration of a family sets beside THRESHOLDS."""


def _beyond(value: object) -> bool:
    return isinstance(value, int) and value >= VOCABULARY


def families() -> list[str]:
    """One model type for each class of causal language model, sorted."""
    return sorted({name: model_type for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}.values())


def settings(kind: type[PreTrainedConfig], near: bool, model_type: str) -> dict[str, object]:
    """Small dimensions for the fields that a configuration class has, and for those of its parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fields = kind().to_dict()
    chosen = {name: value for name, value in SMALL.items() if fields.get(name) is not None}
    limit = NEAR if near else FAR
    chosen |= {name: limit for name in THRESHOLDS if fields.get(name) is not None}
    chosen |= {name: 1 for name, value in fields.items() if name.endswith("_id") and _beyond(value)}
    if "kv_lora_rank" in chosen:  # latent attention has as many heads for keys as for queries
        chosen["num_key_value_heads"] = 4
    for name, part in kind.sub_configs.items():  # pyright: ignore[reportAttributeAccessIssue]
        if issubclass(part, PreTrainedConfig) and part.model_type in CONFIG_MAPPING:
            chosen[name] = settings(part, near, part.model_type)
    if near and "use_sliding_window" in fields:
        chosen |= {"use_sliding_window": True, "sliding_window": NEAR}
        chosen |= {"max_window_layers": 2} if "max_window_layers" in fields else {}
    return {**chosen, **SPECIAL.get(model_type, {}), **(CROSSED.get(model_type, {}) if near else {})}


def has_threshold(model_type: str) -> bool:
    """Whether a family's two configurations differ."""
    kind = config_class(model_type)
    try:
        return settings(kind, True, kind.model_type) != settings(kind, False, kind.model_type)
    except Exception:  # it cannot be built from a configuration: `check_family` says why
        return False


def class_of(model_type: str) -> type[PreTrainedModel]:
    """The causal language model of a model type."""
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def config_class(model_type: str) -> type[PreTrainedConfig]:
    """Its configuration."""
    return class_of(model_type).config_class  # pyright: ignore[reportReturnType]


def build(model_type: str, near: bool) -> PreTrainedModel:
    """A tiny random model in float32; its weights are large, so that attention is far from uniform.

    near: whether most prompts of the check cross the lengths from which its attention changes; else none does.

    Raises `ValueError` for a family whose models stay large whatever its configuration says; else what its own code
    raises.
    """
    cls, kind = class_of(model_type), config_class(model_type)
    config = kind(**settings(kind, near, kind.model_type))  # pyright: ignore[reportArgumentType]
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if size > 4e6:
        raise ValueError(f"{size} weights")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls(config).float().eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:  # far from uniform attention, so that a wrong mask or scale shows
                torch.nn.init.normal_(parameter, std=1.5 * min(parameter.shape[-2:]) ** -0.5)
    return model
