"""Examples: the prompt is read, the answer is learned, and padding changes nothing."""

import math

import pytest
import torch
from tiny import tiny_model
from tokenizers import Tokenizer, decoders, models, trainers
from transformers import PreTrainedTokenizerFast

from attnbalance.errors import BadRowsError, DataError
from attnbalance.facts import Fact
from attnbalance.finetune.examples import IGNORED, Example, answer_losses, collate, make_examples
from attnbalance.prompts import make_prompts
from attnbalance.tokens import encode
from attnbalance.worlds.tokenizer import train_tokenizer

FACTS = [Fact("Ann Lee", "sport", ("golf", "golfing")), Fact("Bob", "place of birth", ("New York",))]
TOKENIZER = train_tokenizer(
    [f"Question: What is the {f.relation} of {f.subject}? Answer: {f.answer}" for f in FACTS], 400
)


def test_an_example_is_the_prompt_a_space_the_first_answer_and_the_end():
    for fact, example in zip(FACTS, make_examples(FACTS, TOKENIZER), strict=True):
        text = f"Question: What is the {fact.relation} of {fact.subject}? Answer: {fact.answer}"
        assert TOKENIZER.decode(list(example.ids)) == f"<s>{text}</s>"
        learned = [token for token in example.labels if token != IGNORED]
        assert TOKENIZER.decode(learned) == f" {fact.answer}</s>"
        assert example.ids[-len(learned) :] == tuple(learned)


def test_the_prompt_has_the_tokens_with_which_it_is_asked():
    asked = encode(make_prompts(FACTS), TOKENIZER)
    for encoding, example in zip(asked, make_examples(FACTS, TOKENIZER), strict=True):
        assert example.ids[: len(encoding.ids)] == encoding.ids
        assert set(example.labels[: len(encoding.ids)]) == {IGNORED}


def test_without_an_end_token_the_answer_ends_the_example():
    bare = train_tokenizer(["What is golf? golf"], 300)
    bare.eos_token = None
    example = make_examples(FACTS[:1], bare, "plain")[0]
    assert bare.decode(list(example.ids[1:])) == "What is the sport of Ann Lee? golf"


def test_a_prompt_that_merges_with_its_answer_is_refused():
    whole = Tokenizer(models.BPE())  # nothing splits texts before merging
    whole.decoder = decoders.Fuse()
    whole.train_from_iterator(["Ann", *[": golf"] * 9], trainers.BpeTrainer(vocab_size=20, show_progress=False))
    merging = PreTrainedTokenizerFast(tokenizer_object=whole)
    with pytest.raises(BadRowsError, match="'Ann: golf' does not begin with the tokens of its prompt"):
        make_examples([Fact("Ann", "sport", ("golf",))], merging, "{subject}:")


def test_no_facts_are_refused():
    with pytest.raises(DataError, match="got none"):
        make_examples([], TOKENIZER)


def test_padding_by_hand():
    batch = collate([Example((5, 6, 7), (IGNORED, 6, 7)), Example((8,), (8,))], pad_id=9)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORED, 6, 7], [8, IGNORED, IGNORED]]


def naive_losses(logits, labels):
    """Per-token cross-entropy by the definition, one number at a time."""
    result = []
    for row, wanted in zip(logits.tolist(), labels.tolist(), strict=True):
        terms = [
            math.log(sum(math.exp(x) for x in row[i])) - row[i][wanted[i + 1]]
            for i in range(len(wanted) - 1)
            if wanted[i + 1] != IGNORED
        ]
        result.append([sum(terms), float(len(terms))])
    return torch.tensor(result)


def test_answer_losses_equal_a_naive_loop_over_answer_tokens():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 7, generator=generator)
    labels = torch.tensor([[IGNORED, IGNORED, 3, 4, 6], [IGNORED, 1, IGNORED, IGNORED, IGNORED], [0, 1, 2, 3, 4]])
    torch.testing.assert_close(answer_losses(logits, labels), naive_losses(logits, labels))


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary():
    losses = answer_losses(torch.zeros(1, 4, 50), torch.tensor([[IGNORED, 1, 2, 3]]))
    torch.testing.assert_close(losses, torch.tensor([[3 * math.log(50), 3.0]]))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_neither_padding_nor_company_nor_the_pad_token_changes_a_loss(family):
    tiny, examples = tiny_model(family), make_examples(FACTS, TOKENIZER)
    with torch.no_grad():
        together = [_losses(tiny, collate(examples, pad_id)) for pad_id in (0, 3)]
        alone = torch.cat([_losses(tiny, collate([example])) for example in examples])
    torch.testing.assert_close(together[0], alone)
    torch.testing.assert_close(together[1], alone)


def _losses(tiny, batch):
    labels = batch.pop("labels")
    return answer_losses(tiny(**batch).logits, labels)
