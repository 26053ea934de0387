"""Lengths from which on a model's attention changes, found by the names of settings in its configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from transformers import PreTrainedConfig

from attnbalance.models.forward import position_limit

FARTHEST = 512
"""The self-check crosses thresholds up to this length: it makes whole attention maps of so long a prompt."""

SELECTION = re.compile(r"index_topk$|keep_window_size$|token_budget$|indexer_budget$")
"""Names of settings that say how many keys are kept by score. Equal scores (often 0, after a ReLU) are kept by their
position among the padding, in eager attention too, and no prompt of the self-check may happen to show it."""

THRESHOLD = re.compile(
    rf"{SELECTION.pattern}|window(_size|_len)?$|local_attention$|attention_chunk_size$|index_block_size$|floor|extent$|compress_rates"
    r"|original_max_position_embeddings$"
)
"""Names of settings that are lengths from which on attention changes."""


class LengthThresholds(NamedTuple):
    """The lengths, in tokens, from which on a model's attention changes."""

    crossed: list[int]
    """Those that a prompt of the self-check crosses, in order."""
    unsure: list[int]
    """Those at which the self-check cannot vouch for padded batches: too long, or numbers of keys kept by score."""


class CacheLimits(NamedTuple):
    """The lengths, in tokens, beyond which a model's cache does not hold what whole passes would."""

    rotations: list[int]
    """Beyond these, all tokens are rotated otherwise (LongRoPE): keys that were cached up to there do not hold."""
    selections: list[int]
    """Numbers of keys kept by score, where transformers' cache differs (DeepSeek-V3.2, GLM-MoE-DSA, AXK2, Doge)."""

    def crossed(self, length: int, budget: int) -> list[int]:
        """Those that matter for a prompt of some length and its answer, whose last token is not read."""
        read = length + budget - 1
        rotations = [limit for limit in self.rotations if length <= limit < read]
        return rotations + [limit for limit in self.selections if max(limit, length) < read]


def length_thresholds(config: PreTrainedConfig) -> LengthThresholds:
    """The thresholds that a configuration names, without those beyond its number of positions."""
    text, limit = config.get_text_config(), position_limit(config)
    named = dict(_lengths("", text.to_dict()))
    if hasattr(text, "index_topk_blocks"):  # a number of blocks, each of a number of keys
        named["index_topk"] = text.index_topk_blocks * text.index_block_size
    possible = {path: length for path, length in named.items() if limit is None or length <= limit}
    crossed = sorted(length for length in possible.values() if length <= FARTHEST)
    unsure = [length for path, length in possible.items() if length > FARTHEST or SELECTION.search(path)]
    return LengthThresholds(crossed, unsure)


def cache_limits(config: PreTrainedConfig) -> CacheLimits:
    """The limits of a model's cache, each kind in order.

    Where blocks of keys (MiniMax-M3) or compressed keys (DeepSeek-V4, Qwen4-Exp) are kept by score, no cache was seen
    to differ.
    """
    text = config.get_text_config()
    selections = {length for path, length in _lengths("", text.to_dict()) if SELECTION.search(path)}
    if any(hasattr(text, name) for name in ("index_topk_blocks", "compress_rates", "indexer_compress_ratio")):
        selections = set()
    return CacheLimits(sorted(set(_long_rotations(text.to_dict()))), sorted(selections))


def _long_rotations(settings: dict) -> Iterator[int]:
    """The original lengths of LongRoPE among settings, which may be those of each type of layers."""
    if "longrope" in (settings.get("rope_type"), settings.get("type")):
        yield from [int(length) for name, length in settings.items() if name == "original_max_position_embeddings"]
    for part in settings.values():
        if isinstance(part, dict):
            yield from _long_rotations(part)


def _lengths(path: str, value: object) -> Iterator[tuple[str, int]]:
    """The settings whose name is one of `THRESHOLD`, by their path."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _lengths(f"{path}.{name}", part)
    elif isinstance(value, int | float) and THRESHOLD.search(path) and value > 1:
        yield path, int(value)
