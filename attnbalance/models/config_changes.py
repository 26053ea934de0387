"""Where the configurations of two models differ in something that their outputs may depend on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from transformers import PreTrainedConfig, PreTrainedModel

WITHOUT_EFFECT = (
    "architectures",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "tie_word_embeddings",
    "transformers_version",
    "use_cache",
)
"""Settings that no output in evaluation mode depends on; neither do ids of special tokens and rates of dropout.

All others count as differences: at worst, work is done to find that one changes nothing.
"""


def changed_settings(a: PreTrainedModel, b: PreTrainedModel) -> dict[str, tuple[object, object]]:
    """The settings in which two models' configurations differ, with both values; nested ones as "outer.inner".

    A setting that only one configuration has is None in the other. Those in `WITHOUT_EFFECT` are left out.
    """
    return differing_settings(settings_of(a.config), settings_of(b.config))


def settings_of(config: PreTrainedConfig) -> dict[str, object]:
    """The settings that outputs may depend on, as JSON values; infinite numbers as texts."""
    settings = {name: value for name, value in _flat(config.get_text_config().to_dict()) if _counts(name)}
    return json.loads(json.dumps(settings, default=str), parse_constant=str)


def differing_settings(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """The settings (see `settings_of`) that differ, with both values; None where one lacks the setting."""
    pairs = {name: (first.get(name), second.get(name)) for name in sorted(first.keys() | second.keys())}
    return {name: values for name, values in pairs.items() if values[0] != values[1]}


def _flat(settings: Mapping[str, object], outer: str = "") -> Iterator[tuple[str, object]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{outer}{name}.")
        else:
            yield f"{outer}{name}", value


def _counts(name: str) -> bool:
    outer, inner = name.partition(".")[0], name.rpartition(".")[2]
    left_out = name.startswith("_") or outer in WITHOUT_EFFECT or inner.endswith("_token_id")
    return not left_out and "dropout" not in inner and not inner.endswith("pdrop")
