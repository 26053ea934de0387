"""The readings that a comparison can hold, by title, with their words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attnbalance.errors import DataError
from attnbalance.readings.attention import FIRST_TOKEN, REST, AttentionRows
from attnbalance.readings.reading import Reading


@dataclass(frozen=True)
class Measurement:
    """A reading of attention rows that a comparison can hold.

    read: makes it of rows, given the settings' `reduce`.
    verb, complement: what a model with more of it does, with "more", "less" or "most" between the two in sentences.
    about: what it is, in the words that follow "<title> is" in a report, given the settings' `reduce`.
    weighted: whether it is of value-weighted rows, from a float32 copy of the model.
    """

    read: Callable[[AttentionRows, str], Reading]
    verb: str
    complement: str
    about: Callable[[str], str]
    weighted: bool = False


def _about_subject_attention(reduce: str) -> str:
    reductions = {
        "max": "in each head the largest attention probability on any one of them",
        "max-of-mean": "in each layer the largest attention probability, averaged over heads, on any one of them",
        "sum": "in each head the sum of the attention probabilities on all of them",
    }
    return (
        "how much the last token of the prompt, from which the answer is given, attends to the subject's tokens: "
        f"{reductions[reduce]}, from 0 to 1. A model that looks away from the subject can still guess what kind of "
        "answer is wanted, but not which one."
    )


def _share(part: str, complement: str, tokens: str) -> Measurement:
    """The share of attention on one part of the prompt (see `AttentionRows.share`), with its tokens in words."""
    about = f"in each head the sum of the last token's attention probabilities on {tokens}, from 0 to 1."
    return Measurement(lambda rows, reduce: rows.share(part), "attends", complement, lambda _: about)


def _about_weighted(reduce: str) -> str:
    reductions = {
        "max": "in each head the longest of these vectors",
        "max-of-mean": "in each layer the greatest length, averaged over heads, for any one token",
        "sum": "in each head the sum of these vectors' lengths",
    }
    return (
        "how much the last token takes from the subject's tokens: each attention probability times the length of the "
        f"vector that the head writes for that token (Kobayashi et al. 2020); {reductions[reduce]}, in the units of "
        "the model's residual stream."
    )


_ENTROPY = (
    "how widely the last token's attention is spread in each head, in nats: 0 where one token has all of it, log n "
    "where n tokens have the same. It grows with the number of tokens of the prompt."
)

SUBJECT_ATTENTION = "subject attention"

READINGS: dict[str, Measurement] = {
    SUBJECT_ATTENTION: Measurement(
        lambda rows, reduce: rows.to("subject", reduce), "attends", "to the subject", _about_subject_attention
    ),
    "subject share": _share("subject", "to all of the subject", "all of the subject's tokens"),
    "relation share": _share("relation", "to the relation", "the relation's tokens"),
    "context share": _share("context", "to the context", "the context's tokens"),
    "first token share": _share(
        FIRST_TOKEN,
        "to the first token",
        "the prompt's first token (none if that belongs to the subject, relation or context)",
    ),
    "rest share": _share(
        REST,
        "to the rest of the prompt",
        "all tokens but the first that belong to none of subject, relation and context",
    ),
    "attention entropy": Measurement(
        lambda rows, reduce: rows.entropy(), "has", "attention entropy", lambda _: _ENTROPY
    ),
    "value-weighted subject attention": Measurement(
        lambda rows, reduce: rows.to("subject", reduce), "takes", "from the subject", _about_weighted, weighted=True
    ),
}
"""The readings that a comparison can hold, by their title (`Reading.title`)."""


def chosen_readings(further: Sequence[str] = ()) -> tuple[str, ...]:
    """The titles of a comparison's readings: subject attention, which headlines are about, and the further ones.

    Raises `DataError` for a title that is not in `READINGS`.
    """
    if isinstance(further, str):
        raise DataError(f"readings must be a list of names, got the text {further!r}")
    if unknown := [title for title in further if title not in READINGS]:
        raise DataError(f"readings must be among {', '.join(READINGS)}; got {unknown[0]!r}")
    return tuple(dict.fromkeys((SUBJECT_ATTENTION, *further)))


def reading_words(title: str) -> tuple[str, str]:
    """Verb and complement of a reading in sentences, for a title that is not in `READINGS` too.

    >>> "{} more {}".format(*reading_words("subject attention"))
    'attends more to the subject'
    """
    entry = READINGS.get(title)
    return (entry.verb, entry.complement) if entry else ("has", title)
