"""Tokens: prompts as ids with a mask, a query index and the tokens of each span, from any fast tokenizer."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Shaped
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from attnbalance.errors import BadRowsError, DataError, ModelError
from attnbalance.prompts import Prompt, Span


@dataclass(frozen=True)
class Encoding:
    """One prompt as token ids, with the positions of the tokens that make up each of its spans.

    A token belongs to a span when it shares at least one character with it, so a subject's first token may hold the
    space before it and its last one the letters after it. `tokens` are the characters of each token, to be shown; the
    parts of a character that was split all show it whole, and special tokens show their name.
    """

    prompt: Prompt
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    spans: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class PromptBatch:
    """Prompts padded to one length.

    `attention_mask` is nonzero on real tokens, in any dtype. `position_ids` count real tokens from 0. `query_index` is
    the position of each prompt's last token: the query whose attention row is read. `spans` marks, for each role, the
    tokens that belong to it; `tokens` are the characters of each prompt's own tokens.
    """

    input_ids: Int[Tensor, "prompt position"]
    attention_mask: Shaped[Tensor, "prompt position"]
    position_ids: Int[Tensor, "prompt position"]
    query_index: Int[Tensor, " prompt"]
    spans: Mapping[str, Bool[Tensor, "prompt position"]]
    tokens: tuple[tuple[str, ...], ...]
    prompts: tuple[Prompt, ...]


def encode(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[Encoding]:
    """Tokenize prompts, in order, mapping character spans to tokens through the tokenizer's offsets.

    Special tokens are added as the tokenizer does by itself, except behind the text (an end-of-sequence token would
    become the query) and for prompts that hold them already. Nothing is truncated. Each span is checked by decoding
    its tokens. Raises `ModelError` for a tokenizer without offsets, `BadRowsError` for prompts with a span that has no
    tokens or whose tokens decode to something else.
    """
    if not tokenizer.is_fast:
        raise ModelError(
            f"tokenizer {type(tokenizer).__name__} gives no character offsets; use a fast one (with a tokenizer.json)"
        )
    encodings, bad = [], []
    for special in (False, True):
        chosen = [i for i, prompt in enumerate(prompts) if prompt.has_special_tokens == special]
        if chosen:
            texts = [prompts[i].text for i in chosen]
            found = _tokenize(texts, tokenizer, add_special_tokens=not special)
            encodings += [(i, *one) for i, one in zip(chosen, found, strict=True)]
    result = []
    for i, ids, offsets in sorted(encodings):
        spans = {role: _tokens_of(span, offsets) for role, span in prompts[i].spans.items()}
        wrong = [_mismatch(prompts[i].part(role), [ids[j] for j in spans[role]], tokenizer) for role in spans]
        bad += [(i, problem) for problem in wrong if problem][:1]
        result.append(Encoding(prompts[i], tuple(ids), _shown(prompts[i].text, ids, offsets, tokenizer), spans))
    if bad:
        raise BadRowsError(
            "prompts have a span that their tokens do not hold",
            bad,
            len(prompts),
            "check the tokenizer (`--tokenizer`), mend these rows, or drop and count them (`--skip-bad`)",
        )
    return result


def encode_answers(encodings: Sequence[Encoding], tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    """The tokens of each prompt's first answer behind the prompt, without special tokens.

    A space stands between the two, except behind a rendered chat, whose header ends where the answer begins.

    Raises `BadRowsError` where the tokenizer merges the end of a prompt with the answer.
    """
    answers: list[tuple[int, ...]] = [()] * len(encodings)
    bad = []
    for special in (False, True):
        chosen = [i for i, one in enumerate(encodings) if one.prompt.has_special_tokens == special]
        space = "" if special else " "  # a chat's own header ends where the answer begins
        joined = [f"{one.prompt.text}{space}{one.prompt.fact.answer}" for one in (encodings[i] for i in chosen)]
        found = _tokenize(joined, tokenizer, add_special_tokens=not special) if chosen else []
        for i, text, (whole, _) in zip(chosen, joined, found, strict=True):
            size = len(encodings[i].ids)
            if tuple(whole[:size]) != encodings[i].ids:
                bad.append((i, f"{text!r} does not begin with the tokens of its prompt"))
            elif len(whole) == size:
                bad.append((i, f"the answer of {text!r} has no token of its own"))
            answers[i] = tuple(whole[size:])
    if bad:
        raise BadRowsError(
            "prompts merge with their answer", bad, len(encodings), "end the template differently, e.g. with ':'"
        )
    return answers


def pad(encodings: Sequence[Encoding], pad_id: int = 0, padding_side: str = "left") -> PromptBatch:
    """Put encodings into one batch; any `pad_id` does, since padding is masked.

    `padding_side` is "left" or "right". Raises `DataError` for another side and for no encodings.
    """
    if padding_side not in ("left", "right") or not encodings:
        raise DataError(
            f"pad needs a side of left or right and at least one prompt; got {padding_side!r} and {len(encodings)}"
        )
    lengths = torch.tensor([len(one.ids) for one in encodings])
    width = int(lengths.max())
    starts = width - lengths if padding_side == "left" else torch.zeros_like(lengths)
    position = torch.arange(width)[None] - starts[:, None]
    mask = (position >= 0) & (position < lengths[:, None])
    ids = torch.full((len(encodings), width), pad_id)
    ids[mask] = torch.tensor([i for one in encodings for i in one.ids])
    roles = dict.fromkeys(role for one in encodings for role in one.spans)
    spans = {role: torch.zeros_like(mask) for role in roles}
    for row, one in enumerate(encodings):
        for role, places in one.spans.items():
            spans[role][row, torch.tensor(places) + starts[row]] = True
    return PromptBatch(
        input_ids=ids,
        attention_mask=mask,
        position_ids=position.clamp(min=0) * mask,
        query_index=starts + lengths - 1,
        spans=spans,
        tokens=tuple(one.tokens for one in encodings),
        prompts=tuple(one.prompt for one in encodings),
    )


def batches(encodings: Sequence[Encoding], batch_size: int) -> Iterator[list[int]]:
    """Places of at most `batch_size` encodings of like length, longest first: what does not fit shows at once.

    Raises `DataError` for a batch size below 1.
    """
    if batch_size < 1:
        raise DataError(f"a batch size must be at least 1, got {batch_size}")
    order = sorted(range(len(encodings)), key=lambda i: -len(encodings[i].ids))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def check_lengths(encodings: Sequence[Encoding], max_positions: int | None, extra: int = 0) -> None:
    """Raise `BadRowsError` for prompts that, with `extra` tokens to come, are longer than the model's positions."""
    if max_positions is None:
        return
    bad = [
        (i, f"{len(one.ids)} tokens{f' and {extra} to generate' if extra else ''}: {one.prompt.text[:60]!r}...")
        for i, one in enumerate(encodings)
        if len(one.ids) + extra > max_positions
    ]
    if bad:
        raise BadRowsError(
            f"prompts are longer than the model's {max_positions} positions",
            bad,
            len(encodings),
            "shorten these rows, or drop and count them (`--skip-bad`)",
        )


def as_chat(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> tuple[Prompt, ...]:
    """The prompts as one user turn of the tokenizer's chat template, up to where the assistant begins.

    The template is rendered around a mark, so the spans move by a known number of characters. Raises `ModelError` for
    a tokenizer without a chat template, and for a template that cannot be rendered or alters the text of a turn.
    """
    if not tokenizer.chat_template:
        raise ModelError(f"tokenizer {tokenizer.name_or_path!r} has no chat template; leave out --chat")

    def render(content: str) -> str:
        turn = [{"role": "user", "content": content}]
        try:
            return str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            raise ModelError(
                f"the chat template of {tokenizer.name_or_path!r} refuses one user turn: {error}; leave out --chat"
            ) from error

    mark = "\N{OBJECT REPLACEMENT CHARACTER}"
    before, _, after = render(mark).partition(mark)
    result = []
    for prompt in prompts:
        text = render(prompt.text)
        if text != before + prompt.text + after:
            raise ModelError(
                f"the chat template of {tokenizer.name_or_path!r} alters the text of a turn: {prompt.text[:80]!r}"
            )
        spans = {role: (start + len(before), end + len(before)) for role, (start, end) in prompt.spans.items()}
        result.append(Prompt(text, spans, prompt.prompt_id, prompt.fact, has_special_tokens=True))
    return tuple(result)


def _tokenize(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool
) -> Iterator[tuple[list[int], list[Span]]]:
    found = tokenizer(
        texts,
        add_special_tokens=add_special_tokens,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        padding=False,
        truncation=False,
        verbose=False,
    )
    for text, ids, offsets, special in zip(
        texts, found["input_ids"], found["offset_mapping"], found["special_tokens_mask"], strict=True
    ):
        end = len(ids)
        while end and special[end - 1]:
            end -= 1
        yield ids[:end], _with_width(offsets[:end], special[:end], len(text))


def _with_width(offsets: list[Span], special: list[int], size: int) -> list[Span]:
    """Offsets in which a zero-width token ends where the next one starts.

    Some tokenizers (Llama 3's, `ignore_merges`) report the start only of words that are one token; see
    huggingface/tokenizers issue 1553. Special tokens hold no text and stay as they are.
    """
    starts = [start for start, _ in offsets[1:]] + [size]
    return [
        (start, max(end, following)) if start == end and not added else (start, end)
        for (start, end), following, added in zip(offsets, starts, special, strict=True)
    ]


def _shown(text: str, ids: list[int], offsets: list[Span], tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The characters of each token, with the space before it, which some tokenizers leave out of their offsets."""
    shown, last = [], 0
    for one, (start, end) in zip(ids, offsets, strict=True):
        begin = last if text[last:start].isspace() else start
        shown.append(text[begin:end] or str(tokenizer.decode([one])))
        last = max(last, end)
    return tuple(shown)


def _tokens_of(span: Span, offsets: list[Span]) -> tuple[int, ...]:
    return tuple(j for j, (start, end) in enumerate(offsets) if start < span[1] and end > span[0])


def _mismatch(text: str, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str | None:
    """What is wrong with the tokens of a span, or None; unknown tokens cannot be compared and pass."""
    if not ids:
        return f"{text!r} has no token of its own"
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        return None
    decoded = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    return None if _letters(text) in _letters(decoded) else f"the tokens of {text!r} decode to {decoded!r}"


def _letters(text: str) -> str:
    """The text without case, accents, compatibility forms and white space, which tokenizers may normalise away."""
    parts = unicodedata.normalize("NFKD", text)
    return "".join(c for c in parts if not unicodedata.combining(c) and not c.isspace()).casefold()
