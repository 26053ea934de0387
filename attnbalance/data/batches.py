"""Batches: prompts of similar length padded to one length, with a mask, a query index and the tokens of each span."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from numbers import Integral

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from attnbalance.data.prompts import Prompt
from attnbalance.data.tokens import Encoding
from attnbalance.errors import BadRowsError, DataError

MOST_TOKENS = 16_384
"""The largest number of tokens in a batch, padding included: long prompts need much memory, but no large batches."""


@dataclass(frozen=True)
class PromptBatch:
    """Prompts padded to one length.

    input_ids: token ids.
    attention_mask: nonzero on real tokens, in any dtype.
    position_ids: numbers of the real tokens, from 0.
    query_index: position of each prompt's last token, the query whose attention row is read.
    spans: for each role, which positions hold its tokens.
    tokens: the characters of each prompt's tokens, without padding.
    prompts: the prompts.
    """

    input_ids: Int[Tensor, "prompt position"]
    attention_mask: Shaped[Tensor, "prompt position"]
    position_ids: Int[Tensor, "prompt position"]
    query_index: Int[Tensor, " prompt"]
    spans: Mapping[str, Bool[Tensor, "prompt position"]]
    tokens: tuple[tuple[str, ...], ...]
    prompts: tuple[Prompt, ...]

    def last_of(self, role: str) -> Int[Tensor, " prompt"]:
        """The position of the last token of each prompt's span."""
        span = self.spans[role]
        return (torch.arange(span.shape[1]) * span).amax(dim=1)

    def unpadded(self, values: Shaped[Tensor, "prompt *axes position"]) -> Shaped[Tensor, "prompt *axes position"]:
        """The values on the CPU, with token j of each prompt at position j; positions after its last token hold 0."""
        mask = self.attention_mask.cpu() != 0
        order = mask.int().argsort(dim=1, descending=True, stable=True)
        shape = (len(mask), *[1] * (values.dim() - 2), -1)
        shifted = values.cpu().gather(-1, order.view(shape).expand(values.shape))
        return shifted.masked_fill(~mask.gather(1, order).view(shape), 0)


def pad(encodings: Sequence[Encoding], pad_id: int = 0, padding_side: str = "left") -> PromptBatch:
    """Put encodings into one batch; padding is masked, so `pad_id` may be any token.

    `padding_side` is "left" or "right". Raises `DataError` for another side and for no encodings.
    """
    if padding_side not in ("left", "right") or not encodings:
        raise DataError(
            "padding_side must be left or right, and there must be at least one prompt; "
            f"got {padding_side!r} and {len(encodings)}"
        )
    lengths = torch.tensor([len(encoding.ids) for encoding in encodings])
    width = int(lengths.max())
    starts = width - lengths if padding_side == "left" else torch.zeros_like(lengths)
    position = torch.arange(width)[None] - starts[:, None]
    mask = (position >= 0) & (position < lengths[:, None])
    ids = torch.full((len(encodings), width), pad_id)
    ids[mask] = torch.tensor([i for encoding in encodings for i in encoding.ids])
    roles = dict.fromkeys(role for encoding in encodings for role in encoding.spans)
    spans = {role: torch.zeros_like(mask) for role in roles}
    for row, encoding in enumerate(encodings):
        for role, indices in encoding.spans.items():
            spans[role][row, torch.tensor(indices) + starts[row]] = True
    return PromptBatch(
        input_ids=ids,
        attention_mask=mask,
        position_ids=position.clamp(min=0) * mask,
        query_index=starts + lengths - 1,
        spans=spans,
        tokens=tuple(encoding.tokens for encoding in encodings),
        prompts=tuple(encoding.prompt for encoding in encodings),
    )


def batches(
    lengths: Sequence[int], batch_size: int, alike_from: int | None = None, most_padding: int | None = None
) -> Iterator[list[int]]:
    """Indices of at most `batch_size` prompts of similar length in tokens, longest first.

    Thus a batch too large for memory fails at once. A batch ends before it would hold more than `MOST_TOKENS` tokens,
    unless one prompt alone has more, or more than `most_padding` tokens of padding. Prompts of at least `alike_from`
    tokens share a batch only with prompts of exactly their length, so that nothing is padded (see
    `HookedModel.alike_from`). Raises `DataError` for a batch size below 1.
    """
    if not isinstance(batch_size, Integral) or batch_size < 1:
        raise DataError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for _, group in groupby(order, key=lambda i: lengths[i] if alike_from and lengths[i] >= alike_from else 0):
        batch, padding = list[int](), 0
        for i in group:
            width = lengths[batch[0]] if batch else lengths[i]
            padding += width - lengths[i]
            padded = most_padding is not None and padding > most_padding
            if batch and (len(batch) == batch_size or (len(batch) + 1) * width > MOST_TOKENS or padded):
                yield batch
                batch, padding = [], 0
            batch.append(i)
        yield batch


def check_lengths(encodings: Sequence[Encoding], max_positions: int | None, extra: Sequence[int] = ()) -> None:
    """Raise `BadRowsError` for prompts that, with `extra` tokens for the answer, exceed the model's positions."""
    if max_positions is None:
        return
    bad = []
    for i, (encoding, more) in enumerate(zip(encodings, extra or [0] * len(encodings), strict=True)):
        if len(encoding.ids) + more > max_positions:
            needed = f"{len(encoding.ids)} tokens" + (f" and {more} for the answer" if more else "")
            bad.append((i, f"{needed}: {encoding.prompt.text[:60]!r}..."))
    if bad:
        raise BadRowsError(
            f"prompts are longer than the model's {max_positions} positions",
            bad,
            len(encodings),
            "shorten these rows, or drop and count them (`skip_bad=True`)",
        )


def in_order(pieces: Sequence[Tensor], indices: Sequence[Sequence[int]]) -> Shaped[Tensor, "prompt ..."]:
    """What was read batch by batch as one tensor, in the order of the prompts.

    pieces: [prompt, ...] of each batch; the last of several axes may differ in length, and shorter ones end in 0.
    indices: the prompts' indices of each batch.
    """
    width = max(piece.shape[-1] for piece in pieces)
    if pieces[0].dim() > 1:
        pieces = [torch.nn.functional.pad(piece, (0, width - piece.shape[-1])) for piece in pieces]
    order = torch.tensor([i for batch in indices for i in batch]).argsort()
    return torch.cat(list(pieces))[order.to(pieces[0].device)]
