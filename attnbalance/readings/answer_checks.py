"""Checks that a model can be read at answer tokens, which were made with one tokenizer."""

from __future__ import annotations

import torch
from torch.nn import Module
from transformers import PreTrainedTokenizerBase

from attnbalance.data.prompt_sets import PromptSet, is_same
from attnbalance.errors import DataError
from attnbalance.models.forward import check_vocabulary
from attnbalance.readings.answer_tokens import AnswerTokens


def check_tokens(answer_tokens: AnswerTokens, model: Module, name: str) -> None:
    """Raise `ModelError` if a prompt or an answer has a token that the model has no embedding for."""
    largest = [max(encoding.ids) for encoding in answer_tokens.encodings]
    largest += [max(tokens) for tokens in answer_tokens.candidates.values()]
    check_vocabulary(model, torch.tensor(largest), name)


def check_answers_alike(answer_tokens: AnswerTokens, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `DataError` for a model whose tokenizer would compare answers at other tokens.

    It must give all prompts and answers that are compared the ids that they have; in other texts it may differ. An
    answer that is the beginning of another is compared at the end of sequence, which must be the same token.
    """
    own = answer_tokens.tokenizer
    if is_same(own, tokenizer):
        return
    _check_same_ids(answer_tokens.compared, PromptSet.of(tuple(answer_tokens.compared), tokenizer))
    ends = (own.eos_token_id, tokenizer.eos_token_id)
    compared = {token for tokens in answer_tokens.candidates.values() for token in tokens}
    if ends[0] != ends[1] and any(end in compared for end in ends):
        raise DataError(
            "some answers begin another answer of their relation, so the end of sequence is compared: it must be "
            f"the same token, got {own.eos_token!r} and {tokenizer.eos_token!r}; set one eos_token in both tokenizers"
        )


def _check_same_ids(first: PromptSet, second: PromptSet) -> None:
    """Raise `DataError` unless prompts and answers have the same ids under two tokenizers."""
    for i, prompt in enumerate(first):
        if first.encodings[i].ids != second.encodings[i].ids or first.answers.ids[i] != second.answers.ids[i]:
            raise DataError(
                "these are different tokenizers, which give other ids for "
                f"{prompt.text[:80]!r} or its answer {prompt.fact.answer!r}: answers, logits, rows and weights cannot "
                "be compared token by token"
            )
