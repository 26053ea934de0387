"""A byte-level BPE tokenizer trained on the sentences of a world."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attnbalance.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
SMALLEST = 256 + 3
"""Every byte and the three special tokens."""


def check_vocabulary(size: int) -> None:
    """Raise `DataError` for a size below `SMALLEST`."""
    if size < SMALLEST:
        raise DataError(f"a byte-level vocabulary needs at least {SMALLEST} tokens, got {size}")


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `vocabulary` tokens that puts <s> before every text and knows </s> and <pad>.

    Every byte is a token, so any text can be encoded and decoded back to itself. A token's character offsets leave out
    the space before its word. Raises `DataError` for a vocabulary below `SMALLEST`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    check_vocabulary(vocabulary)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[PAD, BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True, add_prefix_space=False),
            processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[bos]),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )
