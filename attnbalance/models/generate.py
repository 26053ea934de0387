"""Answers to prompts, greedy or sampled, batched."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain

import torch
from tqdm import tqdm
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList

from attnbalance.data.batches import PromptBatch, check_lengths
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt
from attnbalance.data.tokens import Encoding
from attnbalance.errors import BadRowsError, DataError, ModelError
from attnbalance.models.forward import base_of, check_vocabulary
from attnbalance.models.hooked import HookedModel
from attnbalance.models.interventions import Edit, HeadEdit, edited
from attnbalance.models.length_thresholds import CacheLimits, cache_limits
from attnbalance.models.prefix_cache import only_settings
from attnbalance.models.shared_prefixes import read_on, with_prefixes
from attnbalance.models.thoughts import warn_of_thoughts
from attnbalance.progress import progress_bar

UNPADDED = ("git", "reformer")
"""Families that, in transformers' own generation, answer a padded prompt otherwise than the prompt alone."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn at random: from the whole distribution at a temperature above 0.

    Each prompt draws from a generator of its own, so an answer does not depend on the batch that it is in.
    """

    temperature: float
    seed: int

    def generator(self, index: int) -> torch.Generator:
        """The generator of the prompt with this index."""
        digest = hashlib.sha256(f"{self.seed} {index}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7]))


class _RefuseNaN(LogitsProcessor):
    """Stops generation at NaN and infinite logits, whose argmax would pass for an answer; minus infinity is allowed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores as they are."""
        if not bool(scores.amax(-1).isfinite().all()):  # the largest of a row with NaN is NaN
            raise ModelError(f'{self.name} gives NaN or infinite logits while answering; try `dtype="float32"`')
        return scores


class _Draw(LogitsProcessor):
    """Leaves of each prompt's logits one token, drawn from their softmax by inverting its distribution function."""

    def __init__(self, sampling: Sampling, indices: Sequence[int]) -> None:
        self._temperature = sampling.temperature
        self._generators = [sampling.generator(index) for index in indices]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores of 0 for the drawn tokens and minus infinity for all others."""
        uniform = torch.cat([torch.rand(1, dtype=torch.float64, generator=each) for each in self._generators])
        below_most = scores.float() - scores.float().amax(-1, keepdim=True)
        shares = (below_most / self._temperature).softmax(-1)
        up_to = (shares.cpu() if scores.device.type == "mps" else shares).cumsum(-1, dtype=torch.float64)  # no float64
        drawn = torch.searchsorted(up_to, uniform.to(up_to.device)[:, None] * up_to[:, -1:], right=True)
        drawn = drawn.clamp(max=scores.shape[1] - 1).to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter(1, drawn, 0.0)


def stop_ids(model: HookedModel) -> list[int]:
    """The ids that end an answer: the model's own, and the tokenizer's end of sequence, which finetuning teaches."""
    own = getattr(base_of(model.model).generation_config, "eos_token_id", None)
    ids = [*(own if isinstance(own, list) else [own]), model.tokenizer.eos_token_id]
    return sorted({i for i in ids if isinstance(i, int)})


@torch.no_grad()
def generate(
    model: HookedModel,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int | Sequence[int],
    batch_size: int,
    edit: Edit | None = None,
    sampling: Sampling | None = None,
    first_line: bool = False,
    read: Callable[[list[int], PromptBatch], DynamicCache] | None = None,
    progress: bool = False,
    title: str = "answers",
) -> list[str]:
    """The text that the model generates after each prompt, without special tokens, in order of the prompts.

    Greedy, unless `sampling` is given. An answer ends at the model's end-of-sequence tokens and at the tokenizer's. The
    model's own generation settings (sampling, penalties, lengths) are not used. A prefix that prompts share (few-shot
    examples) is read once, where the model's cache allows it and nothing is edited. Answers that may cross the length
    at which LongRoPE turns to its long factors are generated without a cache, whose keys would stay as they were
    rotated before; so are those with more tokens than the keys that a model keeps by score (DeepSeek-V3.2, Doge), where
    transformers' cache gives other answers. Raises what `HookedModel.batches` raises, `BadRowsError` for an edit of
    such answers, and `ModelError` for a token that the model does not know, for NaN logits, and for an edit of a model
    whose cache does not agree with its whole passes (see `HookedModel.answers_from_cache`; without an edit, it is not
    used).

    Arguments:
        model: the model that answers.
        prompts: what it is asked.
        max_new_tokens: the longest answer in tokens, one number for all prompts or one for each.
        batch_size: the number of prompts that are answered at once.
        edit: what to do with the attention row of each prompt's last token; by default nothing.
        sampling: how to draw tokens at random; by default the most probable one is taken.
        first_line: whether answers also end at the first line break.
        read: what reads each batch before it is answered, given the prompts' indices and the batch, and returns the
            keys and values of all tokens but each prompt's last; by default the model itself.
        progress: whether to show a progress bar.
        title: the title of the progress bar.
    """
    if edit is not None and read is not None:
        raise DataError("expected `edit` or `read`, got both: what was read before would not be edited")
    budgets = _budgets(max_new_tokens, len(prompts))
    prompts = PromptSet.of(prompts, model.tokenizer)
    encodings = prompts.encodings
    check_lengths(encodings, model.max_positions, extra=budgets)  # over all prompts: groups have other row numbers
    check_vocabulary(model.model, torch.tensor([max(encoding.ids) for encoding in encodings]), model.name)
    if isinstance(edit, HeadEdit):
        edit.check(model, prompts)
    settings, answers, whole = _settings(model, first_line), [""] * len(encodings), [""] * len(encodings)
    if edit is not None and not model.answers_from_cache:
        raise ModelError(f"{model.name}'s answers with its cache differ from those without, so they cannot be edited")
    limits = cache_limits(base_of(model.model).config)
    if edit is not None:
        _check_cached(encodings, budgets, limits)
    with model.evaluating(), _bar(len(encodings), title, progress) as bar:
        sequences = [encoding.ids for encoding in encodings]
        groups = [(None, list(range(len(encodings))))]
        if edit is None and read is None:  # an edit changes what the cache would hold
            groups = with_prefixes(model, sequences)
        for prefix, group in groups:
            asked, own = [encodings[i] for i in group], [budgets[i] for i in group]
            alike = prefix is not None or base_of(model.model).config.model_type in UNPADDED
            for indices, batch in model.batches(asked, batch_size, budgets=own, alike=alike):
                settings.max_new_tokens = max(own[j] for j in indices)
                width = batch.input_ids.shape[1]
                settings.use_cache = model.answers_from_cache and not limits.crossed(width, settings.max_new_tokens)
                cache = None if read is None else read(indices, batch)
                if not settings.use_cache:
                    cache = None  # `read` was called for what it collects
                elif prefix is not None:
                    cache = read_on(model, prefix, batch.input_ids.to(model.device))
                processors: list[LogitsProcessor] = [_RefuseNaN(model.name)]
                if sampling is not None:
                    processors.append(_Draw(sampling, [group[j] for j in indices]))
                continued = _continuations(model, batch, settings, processors, edit, cache)
                for j, new in zip(indices, continued, strict=True):
                    answers[group[j]] = _text(model, new[: own[j]], first_line)  # others of the batch may have more
                    whole[group[j]] = str(model.tokenizer.decode(new[: own[j]]))
                bar.update(len(indices))
    warn_of_thoughts(prompts, whole)
    return answers


def _bar(prompts: int, title: str, progress: bool) -> tqdm:
    return progress_bar(title, total=prompts, unit="prompt", shown=progress)


def _budgets(max_new_tokens: int | Sequence[int], prompts: int) -> list[int]:
    """The longest answer to each prompt in tokens; raises `DataError` for no prompts, and for no token for one."""
    budgets = [max_new_tokens] * prompts if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if not prompts or len(budgets) != prompts or min(budgets) < 1:
        raise DataError(
            f"expected at least one prompt and one token to generate for each, got {prompts} prompts and tokens "
            f"from {min(budgets, default=0)} for {len(budgets)} prompts"
        )
    return budgets


def _check_cached(encodings: Sequence[Encoding], budgets: Sequence[int], limits: CacheLimits) -> None:
    """Raise `BadRowsError` for prompts whose answers may go beyond a length up to which the cache holds."""
    crossed = [limits.crossed(len(encoding.ids), budget) for encoding, budget in zip(encodings, budgets, strict=True)]
    bad = [
        (i, f"{len(encoding.ids)} tokens and {budget} for the answer: {encoding.prompt.text[:60]!r}...")
        for i, (encoding, budget) in enumerate(zip(encodings, budgets, strict=True))
        if crossed[i]
    ]
    if bad:
        limit = min(chain.from_iterable(crossed))
        raise BadRowsError(
            f"answers cannot be edited, since they may go on beyond {limit} tokens, up to which the cache holds "
            "(then LongRoPE turns to its long factors, or keys are kept by score)",
            bad,
            len(encodings),
            "shorten these rows, or drop and count them (`skip_bad=True`)",
        )


def _settings(model: HookedModel, first_line: bool) -> GenerationConfig:
    """How tokens are generated, and which of them end an answer."""
    stops = {*stop_ids(model), *(model.line_breaks if first_line else ())}
    return GenerationConfig(
        pad_token_id=model.pad_id,
        eos_token_id=sorted(stops) or None,
        do_sample=False,
    )


def _continuations(
    model: HookedModel,
    batch: PromptBatch,
    settings: GenerationConfig,
    processors: Sequence[LogitsProcessor],
    edit: Edit | None,
    cache: DynamicCache | None,
) -> list[list[int]]:
    """The tokens that the model puts after each prompt, not yet cut at the end of the answer.

    The cache holds the keys and values of the first tokens of all prompts, and is filled further.
    """
    base = base_of(model.model)
    cached = {} if cache is None else {"past_key_values": cache}
    with only_settings(base, settings), nullcontext() if edit is None else edited(model, edit(batch)):
        output = base.generate(  # pyright: ignore[reportCallIssue]
            input_ids=batch.input_ids.to(model.device),
            attention_mask=(batch.attention_mask != 0).long().to(model.device),
            generation_config=settings,
            logits_processor=LogitsProcessorList(processors),
            **cached,
        )
    return output[:, batch.input_ids.shape[1] :].tolist()


def _text(model: HookedModel, ids: list[int], first_line: bool) -> str:
    """An answer's text, up to its end. A token may hold the end of a line and the beginning of the break."""
    stops = stop_ids(model)
    end = next((index for index, token in enumerate(ids) if token in stops), len(ids))
    text = str(model.tokenizer.decode(ids[:end], skip_special_tokens=True))
    return text.partition("\n")[0] if first_line else text
