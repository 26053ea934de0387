"""The world's tokenizer: nothing is lost, offsets are right, and it is the same when loaded."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from attnbalance.data.bpe_tokenizer import SMALLEST, train_tokenizer
from attnbalance.errors import DataError

TEXTS = [
    "The sport of Ann Lee is golf.",
    "Ann Lee plays golf.",
    "Question: What is the sport of Ann Lee? Answer: golf",
] * 5
TOKENIZER = train_tokenizer(TEXTS, 400)


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(text):
    ids = TOKENIZER(text)["input_ids"]
    assert ids[0] == TOKENIZER.bos_token_id
    assert TOKENIZER.decode(ids[1:]) == text


def test_offsets_cut_words_out_without_the_space_before_them():
    text = TEXTS[0]
    encoding = TOKENIZER(text, return_offsets_mapping=True)
    pieces = [text[start:end] for start, end in encoding["offset_mapping"]]
    assert pieces == ["", "The", "sport", "of", "Ann", "Lee", "is", "golf", "."]


def test_special_tokens_are_known_and_pad_is_not_the_end():
    assert sorted(TOKENIZER.all_special_ids) == [0, 1, 2]
    assert TOKENIZER("golf</s>")["input_ids"][-1] == TOKENIZER.eos_token_id


def test_a_saved_tokenizer_is_the_same_when_loaded(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(TEXTS)["input_ids"] == TOKENIZER(TEXTS)["input_ids"]
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == ("<s>", "</s>", "<pad>")


def test_the_same_texts_give_the_same_tokenizer():
    assert train_tokenizer(TEXTS, 400).get_vocab() == TOKENIZER.get_vocab()


def test_a_vocabulary_without_room_for_every_byte_is_refused():
    with pytest.raises(DataError, match=f"at least {SMALLEST} tokens, got 100"):
        train_tokenizer(TEXTS, 100)
