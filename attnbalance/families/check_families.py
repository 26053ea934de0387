"""Attention rows of every causal-LM family of transformers against the family's own eager attention.

Each family is built tiny and random from its configuration (see `tiny_models`). Where the configuration names a length
from which attention changes (a window, a chunk, the number of keys that sparse attention keeps, the original length of
a scaled rotary embedding), the family is read twice: with that length beyond every prompt, and with one that most
prompts cross. The prompts have 3 to 41 random tokens. Rows and last logits are read in batches padded left, in batches
padded right, one prompt at a time, and, where caches can be shared, after the cache of the tokens that five of them
begin with. The reference is each prompt alone, in float64 where the family can, without mask or position ids: rows of
eager attention, logits of the attention that the family has by default. Models in bfloat16 are compared with the same
rounded weights in float64.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel

from attnbalance.data.facts import Fact
from attnbalance.data.prompts import Prompt
from attnbalance.data.tokens import Encoding, encode
from attnbalance.errors import AttnBalanceError, ModelError
from attnbalance.families.tiny_models import VOCABULARY, build, families, has_threshold
from attnbalance.models.forward import attention_maps, forward_rows
from attnbalance.models.hooked import HookedModel
from attnbalance.models.load import load_model
from attnbalance.models.prefix_cache import copies
from attnbalance.models.shared_prefixes import with_prefixes

EXACT, FALLBACK, REFUSED, WRONG, NOT_BUILT = OUTCOMES = ("exact", "fallback", "refused", "WRONG", "not built")
"""What may come of a family."""

TOLERANCE = 1e-4
"""Largest difference allowed in a probability, and in a logit relative to the largest one: float32 kernels sum in
another order (1e-6 here, 1e-5 where scores are large); a wrong mask, scale or position shows as 1e-2 to 1."""

DTYPES = {"float32": (torch.float32, 2), "bfloat16": (torch.bfloat16, 3)}
"""Dtypes of weights, and how many times as far from float64 as eager attention of that dtype a reading may be.

In bfloat16 each step rounds to three digits, so that both are far from it where scores are large (up to 0.6 in a row of
these random models), and their errors differ; what is wrong everywhere is seen, what is wrong by less is not."""

LENGTHS = (41, 3, 29, 17, 5, 23, 11, 35)

SHARED = 12
"""Number of words that all longer prompts begin with."""


def _prompts() -> list[Prompt]:
    """Prompts of random words, each one token of `_word_tokenizer`."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]
    drawn = [drawn[0][:SHARED] + ids[SHARED:] if len(ids) > SHARED else ids for ids in drawn]
    texts = [" ".join(f"w{i}" for i in ids) for ids in drawn]
    fact = Fact("w", "r", ("w2",))
    return [Prompt(text, {"subject": (0, text.index(" "))}, str(i), fact) for i, text in enumerate(texts)]


def _word_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of the words w0, w1, ...: each is the token of its number."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w1")  # noqa: S106


_ByPrompt = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Rows [layer, head, position] and last logits of each prompt; no logits where they were not computed."""


def _reference(model: PreTrainedModel, encodings: list[Encoding]) -> _ByPrompt:
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


def _read(model: HookedModel, encodings: list[Encoding], batch_size: int, side: str) -> _ByPrompt:
    """What the package reads, in batches as it makes them: rows of a pass that ends early, and of a whole one."""
    readings: _ByPrompt = {}
    for indices, batch in model.batches(encodings, batch_size, padding_side=side):
        rows, logits = forward_rows(model.model, batch, model.kernel)
        both = torch.stack([model.rows(batch), rows], dim=1)
        for row, i in enumerate(indices):
            at = logits[row, -1] if logits.shape[1] == 1 else logits[row, int(batch.query_index[row])]
            whole = logits.shape[1] > 1 or int(batch.query_index[row]) == batch.input_ids.shape[1] - 1
            readings[i] = (both[row][..., batch.attention_mask[row] != 0], at if whole else torch.empty(0))
    return readings


def _read_after_prefix(model: HookedModel, encodings: list[Encoding]) -> _ByPrompt:
    """The rows, without logits, that are read after the cache of what prompts share; empty if none can be."""
    readings, no_logits = _ByPrompt(), torch.empty(0)
    groups = list(with_prefixes(model, [e.ids for e in encodings], lambda shared, prompts: shared * (prompts - 1)))
    if all(prefix is None for prefix, _ in groups):
        return readings
    for prefix, group in groups:
        for indices, batch in model.batches([encodings[i] for i in group], 3, padding_side="right"):
            rows = model.rows(batch, None if prefix is None else copies(prefix, len(indices)))
            for i, row, mask in zip(indices, rows, batch.attention_mask, strict=True):
                readings[group[i]] = row[..., mask != 0], no_logits
    return readings


def _difference(ours: _ByPrompt, expected: _ByPrompt) -> tuple[float, float]:
    """The largest difference of a probability, and of a logit relative to the largest one; NaN if there is one."""
    rows = torch.stack([(ours[i][0] - expected[i][0]).abs().max() for i in expected])
    relative = [
        (ours[i][1] - expected[i][1]).abs().max() / (1 + expected[i][1].abs().max())
        for i in expected
        if len(ours[i][1])
    ]
    return float(rows.max()), float(torch.stack(relative).max()) if relative else 0.0


def _best_reference(model: PreTrainedModel, encodings: list[Encoding], times: float) -> tuple[_ByPrompt, float]:
    """The reference in float64, and the largest difference allowed: `times` that of the model's own dtype, or more.

    Families that compute in float32 whatever their weights are have float32 in its place.
    """
    own = _reference(copy.deepcopy(model), encodings)
    try:
        best = _reference(copy.deepcopy(model).double(), encodings)
    except RuntimeError:
        best = _reference(copy.deepcopy(model).float(), encodings)
    return best, max(TOLERANCE, times * max(_difference(own, best)))


@dataclass(frozen=True)
class FamilyOutcome:
    """What came of one family with one configuration.

    Attributes:
        family: The model type.
        crossed: Whether most prompts cross a length from which the family's attention changes.
        kind: One of `OUTCOMES`. "exact": rows read beside the model's own kernel, and logits, are those of the
            reference. "fallback": read through eager attention, and equal to the reference. "refused": `load_model` or
            the reading raises a `ModelError`. "WRONG": anything else. "not built": no tiny model can be built from a
            configuration, or the tiny model does not run by itself, so there is nothing to compare with.
        detail: The largest difference of a probability from the reference, or else the message, or what went wrong.
    """

    family: str
    crossed: bool
    kind: str
    detail: str


def check_families(names: Sequence[str] = (), dtype: str = "float32") -> Iterator[FamilyOutcome]:
    """Read each family and compare it with its own eager attention; takes one to five seconds for each.

    >>> from attnbalance import check_families
    >>> [(outcome.family, outcome.kind) for outcome in check_families(["gpt2", "llama"])]
    [('gpt2', 'exact'), ('llama', 'exact')]

    names: model types, such as "llama"; by default every family of the transformers that is installed.
    dtype: of the weights, one of `DTYPES`.

    Raises `ModelError` for a name that is not the type of a causal language model, and for another dtype.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype must be {' or '.join(DTYPES)}, got {dtype!r}")
    known = families()
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, 3)
            raise ModelError(
                f"{name!r} is no model type of a causal language model of transformers {transformers.__version__}"
                + (f"; did you mean {', '.join(near)}?" if near else "")
            )
    return (check_family(name, crossed, dtype) for name in names or known for crossed in _lengths(name))


def _lengths(name: str) -> tuple[bool, ...]:
    """Whether a family is read within, or also beyond, the lengths that its configuration names."""
    with _quiet():
        return (False, True) if has_threshold(name) else (False,)


@torch.no_grad()
def check_family(name: str, crossed: bool, dtype: str = "float32") -> FamilyOutcome:
    """What comes of one family; for `crossed` see `FamilyOutcome`, for `dtype` see `check_families`."""
    weights, times = DTYPES[dtype]
    with _quiet():
        try:
            model = build(name, crossed).to(weights)  # pyright: ignore[reportArgumentType]
            oracle = copy.deepcopy(model)
        except Exception as error:  # whatever a family's own code raises for these dimensions
            return FamilyOutcome(name, crossed, NOT_BUILT, _words(error))
        tokenizer = _word_tokenizer()
        encodings, kernel, failure = encode(_prompts(), tokenizer), "", ""
        modes = dict[str, _ByPrompt]()
        try:
            hooked = load_model(model, tokenizer=tokenizer)
            kernel = hooked.kernel
            modes = {f"padded {side}": _read(hooked, encodings, 4, side) for side in ("left", "right")}
            modes["alone"] = _read(hooked, encodings, 1, "left")
            if after := _read_after_prefix(hooked, encodings):
                modes["after a shared prefix"] = after
        except AttnBalanceError as error:
            return FamilyOutcome(name, crossed, REFUSED, str(error))
        except Exception as error:
            failure = _words(error)
        try:
            expected, tolerance = _best_reference(oracle, encodings, times)
        except Exception as error:
            return FamilyOutcome(name, crossed, NOT_BUILT, _words(error))
    if failure:
        return FamilyOutcome(name, crossed, WRONG, failure)
    off = {mode: _difference(readings, expected) for mode, readings in modes.items()}
    wrong = {mode: both for mode, both in off.items() if not all(value <= tolerance for value in both)}  # NaN too
    if wrong:
        detail = ", ".join(
            f"{mode} {rows:.1e} in rows, {logits:.1e} in logits" for mode, (rows, logits) in wrong.items()
        )
        return FamilyOutcome(name, crossed, WRONG, f"{kernel}: {detail}")
    kind = EXACT if kernel == "sdpa" else FALLBACK
    return FamilyOutcome(name, crossed, kind, f"{max(rows for rows, _ in off.values()):.0e}")


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings and notices of models that nobody uses."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
