"""Tokens: prompts as ids with the tokens of each span, and the tokens of their answers, from any fast tokenizer."""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from sys import intern

from transformers import PreTrainedTokenizerBase

from attnbalance.data.chat_templates import ANSWER, OPEN, render_turns
from attnbalance.data.prompts import CharSpan, Prompt
from attnbalance.errors import BadRowsError, ModelError

TOGETHER = 1000
"""Texts that are tokenized at once: the tokenizer's own record of them takes much more memory than what is kept."""


@dataclass(frozen=True)
class Encoding:
    """One prompt as token ids, with the positions of each span's tokens.

    A token belongs to a span if it shares at least one character with it, so a subject's first token may hold the
    space before it and its last token the letters after it. A token of only that space (SentencePiece's bare "▁")
    belongs to no span, even where its offsets say otherwise: at the start of a text, or between digits.

    prompt: the prompt.
    ids: its token ids, without padding.
    tokens: the characters of each token, for display; each part of a split character shows the whole character, and a
        special token shows its name.
    spans: the positions of each role's tokens.
    """

    prompt: Prompt
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    spans: Mapping[str, tuple[int, ...]]

    def last_of(self, role: str) -> int:
        """The position of the last token of a span."""
        return max(self.spans[role])


def encode(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[Encoding]:
    """Tokenize prompts, in order, mapping character spans to tokens through the tokenizer's offsets.

    Special tokens are added as the tokenizer does by default, except after the text (an end-of-sequence token would
    become the query) and for prompts that already hold them. Nothing is truncated. Each span is checked by decoding
    its tokens. Warns of subjects that hold characters unknown to the tokenizer, since the model sees another text.
    Raises `ModelError` for a tokenizer without offsets, `BadRowsError` for prompts with a span that has no tokens or
    whose tokens decode to other text.
    """
    encodings, bad = dict[int, Encoding](), []
    decoded = cache(lambda token: str(tokenizer.decode([token])))
    held = cache(int)  # each token id is held once, as are its characters
    for special in (False, True):
        chosen = [i for i, prompt in enumerate(prompts) if prompt.has_special_tokens == special]
        tokenized = _tokenize([prompts[i].text for i in chosen], tokenizer, add_special_tokens=not special)
        for i, (ids, offsets) in zip(chosen, tokenized, strict=True):
            parts = prompts[i].spans.items()
            spans = {role: _tokens_of(span, prompts[i].text, ids, offsets, decoded) for role, span in parts}
            wrong = [_mismatch(prompts[i].part(role), [ids[j] for j in spans[role]], tokenizer) for role in spans]
            bad += [(i, problem) for problem in wrong if problem][:1]
            shown = _shown(prompts[i].text, ids, offsets, decoded)
            encodings[i] = Encoding(prompts[i], tuple(map(held, ids)), shown, spans)
    if bad:
        raise BadRowsError(
            "prompts have a span that their tokens do not hold",
            sorted(bad),
            len(prompts),
            "check the tokenizer (`tokenizer`), fix these rows, or drop and count them (`skip_bad=True`)",
        )
    in_order = [encodings[i] for i in range(len(prompts))]
    _warn_of_unknown_subjects(in_order, tokenizer)
    return in_order


def _warn_of_unknown_subjects(encodings: Sequence[Encoding], tokenizer: PreTrainedTokenizerBase) -> None:
    unknown = [
        encoding.prompt
        for encoding in encodings
        if any(encoding.ids[i] == tokenizer.unk_token_id for i in encoding.spans.get("subject", ()))
    ]
    if unknown:
        warnings.warn(
            f"{len(unknown)} of {len(encodings)} prompts have a subject with characters that are unknown to the "
            f"tokenizer (first: {unknown[0].part('subject')!r}); the model reads {tokenizer.unk_token} instead",
            stacklevel=3,
        )


def encode_answers(encodings: Sequence[Encoding], tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    """The tokens of each prompt's first answer, put after the prompt, without special tokens.

    `Prompt.answer_space` says what stands between the two. Raises `BadRowsError` for prompts whose end the tokenizer
    merges with the answer, and for answers that it has no tokens for.
    """
    answers: list[tuple[int, ...]] = [()] * len(encodings)
    bad, unwritten = [], []
    for special in (False, True):
        chosen = [i for i, encoding in enumerate(encodings) if encoding.prompt.has_special_tokens == special]
        joined = [encodings[i].prompt.with_answer for i in chosen]
        tokenized = _tokenize(joined, tokenizer, add_special_tokens=not special) if chosen else []
        for i, text, (whole, _) in zip(chosen, joined, tokenized, strict=True):
            size = len(encodings[i].ids)
            if tuple(whole[:size]) != encodings[i].ids:
                bad.append((i, f"{text!r} does not begin with the tokens of its prompt"))
            elif len(whole) == size:
                bad.append((i, f"the answer of {text!r} has no token of its own"))
            elif problem := _unwritten(encodings[i].prompt.fact.answer, whole[size:], tokenizer):
                unwritten.append((i, problem))
            answers[i] = tuple(whole[size:])
    if bad:
        raise BadRowsError(
            "prompts merge with their answer", bad, len(encodings), "end the template differently, e.g. with ':'"
        )
    if unwritten:
        raise BadRowsError(
            "answers cannot be represented by the tokenizer",
            sorted(unwritten),
            len(encodings),
            "write these answers otherwise, or drop and count them (`skip_bad=True`)",
        )
    return answers


def _unwritten(answer: str, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str | None:
    """What of an answer is lost in its tokens, or None."""
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        return f"{answer!r} holds {tokenizer.unk_token}"
    return _mismatch(answer, ids, tokenizer)


def encode_continued(
    texts: Sequence[str], continuations: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[tuple[int, ...], tuple[int, ...]] | None]:
    """The tokens of each text and of what is written after it, special tokens only before the text.

    None where the tokenizer merges the two, or where the continuation has no token. Raises `ModelError` for a tokenizer
    without offsets.
    """
    if not texts:
        return []
    wholes = [text + continuation for text, continuation in zip(texts, continuations, strict=True)]
    alone, joined = (_tokenize(list(part), tokenizer, add_special_tokens=True) for part in (texts, wholes))
    return [
        (tuple(ids), tuple(whole[len(ids) :])) if whole[: len(ids)] == ids and len(whole) > len(ids) else None
        for (ids, _), (whole, _) in zip(alone, joined, strict=True)
    ]


def answer_lengths(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The number of tokens of each prompt's longest accepted answer, with the space before it, if there is one.

    Without a space it is the larger of two counts, alone and after a line break: SentencePiece puts a space before a
    text. Warns of prompts for none of whose answers the tokenizer has tokens: all outputs count as wrong.
    """
    written = [[f"{prompt.space}{answer}" for answer in prompt.fact.answers] for prompt in prompts]
    texts = list(dict.fromkeys(text for own in written for text in own))
    following = [f"\n{text}" for text in texts if not text[0].isspace()]
    texts += [*following, *["\n"][: len(following)]]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    ids = dict(zip(texts, encoded, strict=True))  # pyright: ignore[reportArgumentType]
    lost = cache(lambda text: _unwritten(text.strip(), ids[text], tokenizer))
    beyond = [own for own in written if all(map(lost, own))]
    if beyond:
        warnings.warn(
            f"{len(beyond)} of {len(prompts)} prompts have no answer that the tokenizer can write, so that all outputs "
            f"count as wrong (first: {lost(beyond[0][0])})",
            stacklevel=2,
        )
    lengths = {text: len(tokens) for text, tokens in ids.items()}
    lengths |= {text[1:]: max(lengths[text[1:]], lengths[text] - lengths["\n"]) for text in following}
    return [max(lengths[text] for text in own) for own in written]


def as_chat(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> tuple[Prompt, ...]:
    """The prompts as one user turn of the tokenizer's chat template, up to where the assistant begins.

    The template is rendered around a mark, so the spans move by a known number of characters, and once with an answer:
    that of Llama 2 or Vicuna puts a space before it. Warns of a template that puts other text before it (the empty
    thought of Qwen3) or ends prompts inside a thought (DeepSeek-R1): the model does not begin its answer there. Raises
    `ModelError` for a tokenizer without a chat template, and for a template that cannot be rendered or alters the text
    of a turn.
    """
    if not tokenizer.chat_template:
        raise ModelError(f"tokenizer {tokenizer.name_or_path!r} has no chat template; leave out `chat=True`")
    mark = "\N{OBJECT REPLACEMENT CHARACTER}"
    (marked, *texts), answered = render_turns(tokenizer, [mark, *(prompt.text for prompt in prompts)])
    before, _, after = marked.partition(mark)
    between, answer, _ = answered.removeprefix(marked).partition(ANSWER)
    known = bool(answer) and answered.startswith(marked)
    thought = OPEN.search(marked)
    if thought or (known and between.strip()):
        how = (
            f"ends prompts with {thought[0]!r}" if thought else f"puts {between!r} before an answer, behind the prompt"
        )
        warnings.warn(
            f"the chat template of {tokenizer.name_or_path!r} {how}: probabilities of answers, salience and relevance "
            "are read where the model does not answer yet",
            stacklevel=3,
        )
    space = between if known and not between.strip() else ""
    result = []
    for prompt, text in zip(prompts, texts, strict=True):
        if text != before + prompt.text + after:
            raise ModelError(
                f"the chat template of {tokenizer.name_or_path!r} alters the text of a turn: {prompt.text[:80]!r}"
            )
        spans = {role: (start + len(before), end + len(before)) for role, (start, end) in prompt.spans.items()}
        result.append(Prompt(text, spans, prompt.prompt_id, prompt.fact, has_special_tokens=True, answer_space=space))
    return tuple(result)


def _tokenize(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool
) -> Iterator[tuple[list[int], list[CharSpan]]]:
    """The ids of each text, without special tokens at its end, and their offsets."""
    if not tokenizer.is_fast:
        raise ModelError(
            f"tokenizer {type(tokenizer).__name__} gives no character offsets; use a fast one (with a tokenizer.json)"
        )
    for start in range(0, len(texts), TOGETHER):
        some = texts[start : start + TOGETHER]
        encoded = tokenizer(
            some,
            add_special_tokens=add_special_tokens,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            padding=False,
            truncation=False,
            verbose=False,
        )
        for text, ids, offsets, special in zip(
            some, encoded["input_ids"], encoded["offset_mapping"], encoded["special_tokens_mask"], strict=True
        ):
            end = len(ids)
            while end and special[end - 1]:
                end -= 1
            yield ids[:end], _with_width(offsets[:end], special[:end], len(text))


def _with_width(offsets: list[CharSpan], special: list[int], size: int) -> list[CharSpan]:
    """Offsets in which a zero-width token ends where the next one starts.

    For words of one token some tokenizers (Llama 3's, `ignore_merges`) report only the start; see
    huggingface/tokenizers issue 1553. Special tokens hold no text and stay as they are.
    """
    starts = [start for start, _ in offsets[1:]] + [size]
    return [
        (start, max(end, following)) if start == end and not added else (start, end)
        for (start, end), following, added in zip(offsets, starts, special, strict=True)
    ]


def _shown(text: str, ids: list[int], offsets: list[CharSpan], decoded: Callable[[int], str]) -> tuple[str, ...]:
    """The characters of each token, with the space before it, which some tokenizers leave out of their offsets.

    A token of a space alone is shown as one, whatever its offsets claim: "▁" may claim the next token's characters.
    """
    shown, last = [], 0
    for token, (start, end) in zip(ids, offsets, strict=True):
        begin = last if text[last:start].isspace() else start
        claimed = not decoded(token).strip() and bool(text[begin:end].strip())
        characters = " " if claimed else text[begin:end] or decoded(token)
        shown.append(intern(characters))
        last = max(last, end)
    return tuple(shown)


def _tokens_of(
    span: CharSpan, text: str, ids: list[int], offsets: list[CharSpan], decoded: Callable[[int], str]
) -> tuple[int, ...]:
    """The positions of the tokens that share a character with a span, without bare spaces that the span does not hold.

    A span that would have no token keeps them.
    """
    tokens = [j for j, (start, end) in enumerate(offsets) if start < span[1] and end > span[0]]
    blank = [j for j in tokens if not decoded(ids[j]).strip()]
    spaces = [j for j in blank if j == tokens[0] or text[slice(*offsets[j])].strip()]
    return tuple(j for j in tokens if j not in spaces) or tuple(tokens)


def _mismatch(text: str, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str | None:
    """What is wrong with the tokens of a span, or None; unknown tokens cannot be compared, so they pass."""
    if not ids:
        return f"{text!r} has no token of its own"
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        return None
    decoded = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    return None if _letters(text) in _letters(decoded) else f"the tokens of {text!r} decode to {decoded!r}"


def _letters(text: str) -> str:
    """The text without case, accents, compatibility forms and white space, which tokenizers may change."""
    parts = unicodedata.normalize("NFKD", text)
    return "".join(c for c in parts if not unicodedata.combining(c) and not c.isspace()).casefold()
