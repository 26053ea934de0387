"""Attention rows of every causal-LM family of transformers, tiny and random, against the family's own eager attention.

    python benchmarks/families.py                  # every family; a few minutes on two cores, no network
    python benchmarks/families.py phi3 llama4_text # some of them, by model type

Each family is built from its configuration (see `family_models.py`). Where the configuration names a threshold of
length (a window, a chunk, the number of keys that sparse attention keeps, the original length of a scaled rotary
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
from typing import NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from family_models import VOCABULARY, build, has_threshold
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel
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

LENGTHS = (41, 3, 29, 17, 5, 23, 11, 35)


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
