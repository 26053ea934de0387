"""Attention rows of every causal-LM family of transformers, tiny and random, against the family's own eager attention.

    python benchmarks/families.py                  # every family; a few minutes on two cores, no network
    python benchmarks/families.py phi3 llama4_text # some of them, by model type

Each family is built from its configuration, with the dimensions in SMALL. Where the configuration names a threshold
of length (a window, a chunk, the number of keys that sparse attention keeps, the original length of a scaled rotary
embedding), the family is read twice: with the threshold beyond every prompt, and with one that most prompts cross. The
prompts have 3 to 41 random tokens. Rows and last logits are read in batches padded left, in batches padded right, and
one prompt at a time. The reference is each prompt alone, in float64 where the family can, without mask or position ids:
rows of eager attention, logits of the attention that the family has by default.

    exact     rows read beside the model's own kernel, and logits, are those of the reference
    fallback  read through eager attention (with a warning), and equal to the reference
    refused   `load_model` or the reading raises a ModelError
    WRONG     anything else
    not built cannot be built tiny from a configuration, or does not run alone: nothing to compare with
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import os
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from attnbalance.data.facts import Fact
from attnbalance.data.prompts import Prompt
from attnbalance.data.tokens import Encoding, encode
from attnbalance.errors import AttnBalanceError
from attnbalance.models.forward import attention_maps, forward_rows
from attnbalance.models.hooked import HookedModel
from attnbalance.models.load import load_model

TOLERANCE = 1e-4
"""Largest difference allowed in a probability, and in a logit relative to the largest one: float32 kernels sum in
another order (1e-6 here, 1e-5 where scores are large); a wrong mask, scale or position shows as 1e-2 to 1."""

VOCABULARY = 97
LENGTHS = (41, 3, 29, 17, 5, 23, 11, 35)
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
    | {"index_head_dim": 16, "qk_rope_head_dim": 8, "qk_head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 16}
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
    except Exception:  # it cannot be built from a configuration: `outcome` says why
        return False


def class_of(model_type: str) -> type[PreTrainedModel]:
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def config_class(model_type: str) -> type[PreTrainedConfig]:
    kind = class_of(model_type).config_class
    assert kind is not None
    return kind


def build(model_type: str, near: bool) -> PreTrainedModel:
    cls, kind = class_of(model_type), config_class(model_type)
    config = kind(**settings(kind, near, kind.model_type))  # pyright: ignore[reportArgumentType]
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if size > 4e6:
        raise ValueError(f"{size} weights")
    torch.manual_seed(0)
    model = cls(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:  # far from uniform attention, so that a wrong mask or scale shows
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
    return model


def prompts() -> list[Prompt]:
    """Prompts of random words, each one token of `word_tokenizer`."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]
    texts = [" ".join(f"w{i}" for i in ids) for ids in drawn]
    fact = Fact("w", "r", ("w2",))
    return [Prompt(text, {"subject": (0, text.index(" "))}, str(i), fact) for i, text in enumerate(texts)]


def word_tokenizer() -> transformers.PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w1")  # noqa: S106


Read = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Rows [layer, head, position] and last logits of each prompt."""


def reference(model: PreTrainedModel, encodings: list[Encoding]) -> Read:
    """Rows of eager attention on each prompt alone, and logits of the attention that the family has by default."""
    ids = [torch.tensor([encoding.ids]) for encoding in encodings]
    own = [model(input_ids=prompt, use_cache=False).logits[0, -1] for prompt in ids]
    with contextlib.suppress(ValueError, KeyError):  # outside the interface, where the line below is enough
        model.set_attn_implementation("eager")
    model.config._attn_implementation = "eager"
    read = {}
    for i, prompt in enumerate(ids):
        maps, _ = attention_maps(model(input_ids=prompt, output_attentions=True, use_cache=False))
        read[i] = (torch.stack([layer[0, :, -1] for layer in maps]), own[i])
    return read


def read(model: HookedModel, encodings: list[Encoding], batch_size: int, side: str) -> Read:
    """What the package reads, in batches as it makes them."""
    readings: Read = {}
    for indices, batch in model.batches(encodings, batch_size, padding_side=side):
        rows, logits = forward_rows(model.model, batch, model.kernel)
        for row, i in enumerate(indices):
            at = logits[row, -1] if logits.shape[1] == 1 else logits[row, int(batch.query_index[row])]
            whole = logits.shape[1] > 1 or int(batch.query_index[row]) == batch.input_ids.shape[1] - 1
            readings[i] = (rows[row][..., batch.attention_mask[row] != 0], at if whole else torch.empty(0))
    return readings


def difference(ours: Read, expected: Read) -> tuple[float, float]:
    """The largest difference of a probability, and of a logit relative to the largest one."""
    rows = max(float((ours[i][0] - expected[i][0]).abs().max()) for i in expected)
    with_logits = [i for i in expected if len(ours[i][1])]
    scale = [1 + float(expected[i][1].abs().max()) for i in with_logits]
    logits = [float((ours[i][1] - expected[i][1]).abs().max()) / s for i, s in zip(with_logits, scale, strict=True)]
    return rows, max(logits)


def best_reference(model: PreTrainedModel, encodings: list[Encoding]) -> tuple[Read, float]:
    """The reference in float64, and the largest difference allowed: twice that of the reference in float32, or more.

    Families that compute in float32 whatever their weights are have that one alone.
    """
    single = reference(copy.deepcopy(model), encodings)
    try:
        double = reference(copy.deepcopy(model).double(), encodings)
    except RuntimeError:
        return single, TOLERANCE
    return double, max(TOLERANCE, 2 * max(difference(single, double)))


class Outcome(NamedTuple):
    """What came of one family with one configuration."""

    kind: str
    said: str


@torch.no_grad()
def outcome(model_type: str, near: bool) -> Outcome:
    try:
        model = build(model_type, near)
        oracle = copy.deepcopy(model)
    except Exception as error:  # whatever a family's own code raises for these dimensions
        return Outcome("not built", f"{type(error).__name__}: {error}")
    try:
        tokenizer = word_tokenizer()
        encodings = encode(prompts(), tokenizer)
        hooked = load_model(model, tokenizer=tokenizer)
        modes = {f"padded {side}": read(hooked, encodings, 4, side) for side in ("left", "right")}
        modes["alone"] = read(hooked, encodings, 1, "left")
    except AttnBalanceError as error:
        return Outcome("refused", str(error))
    expected, tolerance = best_reference(oracle, encodings)
    off = {mode: difference(readings, expected) for mode, readings in modes.items()}
    wrong = {mode: both for mode, both in off.items() if not max(both) <= tolerance}  # NaN is wrong too
    if wrong:
        return Outcome("WRONG", f"{hooked.kernel}: " + ", ".join(f"{m} {r:.1e} {g:.1e}" for m, (r, g) in wrong.items()))
    return Outcome("exact" if hooked.kernel == "sdpa" else "fallback", f"{max(r for r, _ in off.values()):.0e}")


def families() -> list[str]:
    """One model type for each class of causal language model."""
    return list({name: model_type for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="MODEL_TYPE", help="default: every family")
    chosen = parser.parse_args().families or sorted(families())
    logging.disable(logging.ERROR)
    transformers.logging.disable_progress_bar()
    counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
    for model_type in chosen:
        for near in (False, True) if has_threshold(model_type) else (False,):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                kind, said = outcome(model_type, near)
            counts[near][kind] += 1
            where = "crossed" if near else ""
            print(f"{model_type:<28} {where:<8} {kind:<9} {' '.join(said.split())[:200]}", flush=True)
    for near, name in ((False, "thresholds beyond the prompts"), (True, "thresholds crossed")):
        print(f"{name}: {', '.join(f'{count} {kind}' for kind, count in sorted(counts[near].items()))}")
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    return int(any(count["WRONG"] for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
