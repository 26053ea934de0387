"""Examples: the prompt is read, the answer is learned, and padding changes nothing."""

import math
import re
from dataclasses import replace

import pytest
import torch
from tiny import FACTS as OTHERS
from tiny import tiny_model, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, trainers
from transformers import PreTrainedTokenizerFast

from attnbalance.data.bpe_tokenizer import train_tokenizer
from attnbalance.data.facts import Fact
from attnbalance.data.prompts import make_prompts
from attnbalance.data.tokens import as_chat, encode
from attnbalance.errors import ArgumentError, BadRowsError, DataError
from attnbalance.finetuning.examples import (
    IGNORED,
    Example,
    as_examples,
    collate,
    examples_of,
    first_difference,
    make_examples,
)

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
    return naive_losses(tiny(**batch).logits, labels)


def test_rows_without_labels_are_refused():
    with pytest.raises(DataError, match="expected rows with input_ids and labels"):
        as_examples([{"input_ids": [1]}], FACTS[:1], TOKENIZER)
    for rows in (None, 5, "text", [None]):
        with pytest.raises(ArgumentError, match="as_examples: rows must be a collection of Mapping, got"):
            as_examples(rows, FACTS[:1], TOKENIZER)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="facts must be a collection of Fact or None, got"):
        as_examples([{"input_ids": [1, 2], "labels": [-100, 2]}] * 2, [None, "Paris"], TOKENIZER)
    with pytest.raises(BadRowsError, match="no label"):
        as_examples([{"input_ids": [1, 2], "labels": [1, -100]}], [None], TOKENIZER)
    with pytest.raises(DataError, match="labels of the prompt's tokens must be -100"):
        as_examples([{"input_ids": [1, 2], "labels": [1, 2]}], FACTS[:1], TOKENIZER)


def test_the_query_is_the_prompts_last_token_and_the_first_label_the_answers_first():
    for fact, example in zip(FACTS, make_examples(FACTS, TOKENIZER), strict=True):
        prompt = TOKENIZER(f"Question: What is the {fact.relation} of {fact.subject}? Answer:")["input_ids"]
        assert example.query == len(prompt) - 1
        whole = TOKENIZER(f"Question: What is the {fact.relation} of {fact.subject}? Answer: {fact.answer}")
        assert example.labels[example.query + 1] == whole["input_ids"][len(prompt)]


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        ((5, 6, 2), (7, 8, 2), (0, 7)),
        ((3, 5, 2), (3, 7, 2), (1, 7)),  # both begin alike, as with a bare "▁"
        ((3, 2), (3, 7, 2), (1, 7)),  # the answer ends where the other goes on
        ((3, 5, 2), (3, 5, 2), (-1, -1)),
    ],
)
def test_another_answer_is_told_by_its_first_token_that_differs(own, other, expected):
    examples = [Example((1, *labels), (IGNORED, *labels)) for labels in (own, other)]
    assert first_difference(*examples) == expected


def test_examples_know_the_tokens_of_their_spans():
    for fact, example in zip(FACTS, make_examples(FACTS, TOKENIZER, "{subject}, {relation}:"), strict=True):
        for role, text in (("subject", fact.subject), ("relation", fact.relation)):
            assert TOKENIZER.decode([example.ids[j] for j in example.spans[role]]).strip() == text
        assert example.prompt is not None
        assert example.prompt.fact == fact


def test_spans_and_queries_of_a_batch_by_hand():
    prompts = make_prompts([*FACTS, FACTS[0]])
    first = Example((5, 6, 7), (IGNORED, 6, 7), prompts[0], {"subject": (0,), "relation": (0,)})
    second = Example((5, 6, 7, 8, 9), (IGNORED, IGNORED, IGNORED, 8, 9), prompts[1], {"subject": (0, 2)})
    batch = collate([first, second])
    assert batch["query_index"].tolist() == [0, 2]
    assert batch["span.subject"].tolist() == [[True] + [False] * 4, [True, False, True, False, False]]
    assert "span.relation" not in batch  # not every example has it
    assert "span.relation" in collate([first])
    assert "has_fact" not in batch
    mixed = collate([first, replace(second, prompt=None, spans={})])
    assert mixed["has_fact"].tolist() == [True, False]
    assert mixed["query_index"].tolist() == [0, 2]
    assert mixed["span.subject"].tolist() == [[True] + [False] * 4, [False] * 5]
    assert "span.relation" in mixed  # of those with a prompt, all have it
    assert collate([Example((5, 6), (5, 6))])["query_index"].tolist() == [0]  # no token before the labels
    assert "query_index" not in collate([first, Example((5, 6), (IGNORED, IGNORED))])


def test_targets_of_a_batch_are_joined_by_what_they_belong_to():
    def example(length, answer, start):
        numbers = torch.arange(start, start + 100.0)
        return Example(
            (1,) * length,
            (IGNORED,) * (length - answer) + (1,) * answer,
            targets={
                "kl/token": numbers[: 2 * answer].view(answer, 2),
                "rows/position": numbers[: 2 * (length - answer)].view(2, length - answer),
                "share": numbers[:3],
                "weight": numbers[0],
            },
        )

    batch = collate([example(5, 2, 0), example(3, 1, 100)])
    assert batch["target.kl/token"].tolist() == [[0, 1], [2, 3], [100, 101]]
    assert batch["target.rows/position"].tolist() == [
        [[0, 1, 2, 0, 0], [3, 4, 5, 0, 0]],
        [[100, 101, 0, 0, 0], [102, 103, 0, 0, 0]],
    ]
    assert batch["target.share"].tolist() == [[0, 1, 2], [100, 101, 102]]
    assert batch["target.weight"].tolist() == [0, 100]


def test_a_batch_holds_the_targets_that_all_of_its_examples_have():
    share, weight = torch.tensor([0.25]), torch.tensor(2.0)
    first = Example((5, 6), (IGNORED, 6), targets={"share": share, "weight": weight})
    second = Example((5, 6), (IGNORED, 6), targets={"weight": weight})
    for examples in ([first, second], [second, first]):
        assert [name for name in collate(examples) if name.startswith("target.")] == ["target.weight"]
    assert "target.share" in collate([first, first])


def as_rows(examples):
    return [{"input_ids": list(example.ids), "labels": list(example.labels)} for example in examples]


@pytest.mark.parametrize("kind", ["plain", "bos", "metaspace"])
@pytest.mark.parametrize("template", ["qa", "plain"])
def test_rows_that_are_tokenized_already_are_the_examples_that_the_facts_make(kind, template):
    tokenizer = tiny_tokenizer(kind)
    # metaspace: in the scripts that it was trained on, as its bytes count as special tokens
    facts = [*OTHERS[:3], *OTHERS[7:]] if kind == "metaspace" else OTHERS
    made = make_examples(facts, tokenizer, template)
    for example, other in zip(made, as_examples(as_rows(made), facts, tokenizer), strict=True):
        assert (example.ids, example.labels, example.spans) == (other.ids, other.labels, other.spans)
        assert example.query == other.query
        assert other.prompt is not None
        assert other.prompt.part("subject") == other.prompt.fact.subject


def test_the_fact_of_a_row_has_the_answer_first_that_the_row_teaches():
    """Objectives, checks and few-shot examples take a fact's first answer: it must be the one that is learned."""
    rows = as_rows(make_examples(FACTS, TOKENIZER))
    listed = [replace(FACTS[0], answers=("golfing", "a game", "golf")), replace(FACTS[1], answers=("NYC",))]
    named, other = (example.prompt.fact for example in as_examples(rows, listed, TOKENIZER))  # pyright: ignore
    assert named.answers == ("golf", "golfing", "a game")
    assert other == listed[1]  # the row teaches no accepted answer
    further = [{name: [*ids[:-1], *ids[-1:], 5] for name, ids in row.items()} for row in rows]  # text after the end
    assert [example.prompt.fact for example in as_examples(further, listed, TOKENIZER)] == [named, other]  # pyright: ignore


@pytest.mark.parametrize("kind", ["plain", "bos"])
def test_prompts_of_rows_go_on_with_the_answer_as_the_rows_do(kind):
    # What reads an answer behind these prompts (kl on the question, relevance) must find the tokens of the rows.
    tokenizer = tiny_tokenizer(kind)
    made = make_examples(OTHERS[:3], tokenizer)
    prompts = [example.prompt for example in as_examples(as_rows(made), OTHERS[:3], tokenizer)]
    again = examples_of(prompts, tokenizer)  # pyright: ignore
    assert [example.ids for example in again] == [example.ids for example in made]


def test_rows_of_chats_are_read_as_they_were_rendered():
    tokenizer = tiny_tokenizer("chat")
    made = examples_of(as_chat(make_prompts(OTHERS[:3], "plain"), tokenizer), tokenizer)
    examples = as_examples(as_rows(made), OTHERS[:3], tokenizer)
    for example, other in zip(made, examples, strict=True):
        assert (example.ids, example.labels, example.spans) == (other.ids, other.labels, other.spans)
        assert other.prompt is not None
        assert other.prompt.text.startswith("<s><|user|>\n")
    again = examples_of([example.prompt for example in examples], tokenizer)  # pyright: ignore
    assert [example.ids for example in again] == [example.ids for example in made]


def test_padding_of_rows_is_cut_off_on_both_sides():
    made = make_examples(FACTS, TOKENIZER)
    rows = [
        {
            "input_ids": [3, 3, *example.ids, 3],
            "labels": [IGNORED, IGNORED, *example.labels, 3],
            "attention_mask": [0, 0, *[1] * len(example.ids), 0],
        }
        for example in made
    ]
    examples = as_examples(rows, FACTS, TOKENIZER)
    assert [(example.ids, example.labels, example.spans) for example in examples] == [
        (example.ids, example.labels, example.spans) for example in made
    ]


def test_rows_and_facts_are_counted():
    with pytest.raises(DataError, match="one fact for each row, got 2 rows and 1 facts"):
        as_examples(as_rows(make_examples(FACTS, TOKENIZER)), FACTS[:1], TOKENIZER)


def test_rows_that_do_not_hold_their_subject_once_are_shown():
    facts = [FACTS[1], Fact("o", "place", ("x",)), Fact("Eve", "place", ("x",)), FACTS[0]]
    made = make_examples([FACTS[1], FACTS[1], FACTS[1], FACTS[0]], TOKENIZER)
    with pytest.raises(BadRowsError, match="2 of 4 rows cannot be read as examples") as caught:
        as_examples(as_rows(made), facts, TOKENIZER)
    assert caught.value.indices == (1, 2)
    text = "Question: What is the place of birth of Bob? Answer:"
    assert f"subject 'o' occurs {text.count('o')} times in {text!r}, not once" in str(caught.value)
    assert f"subject 'Eve' occurs 0 times in {text!r}, not once" in str(caught.value)


@pytest.mark.parametrize("labels", [[IGNORED] * 4, [5, 6, 7, 8]])
def test_rows_without_a_label_or_a_prompt_are_shown(labels):
    with pytest.raises(BadRowsError, match="row 1: no prompt"):
        as_examples([{"input_ids": [5, 6, 7, 8], "labels": labels}], FACTS[:1], TOKENIZER)


def test_rows_of_another_tokenization_are_shown():
    tokenizer = tiny_tokenizer()
    fact = OTHERS[0]
    letters = [tokenizer(letter)["input_ids"][0] for letter in "Name"] + tokenizer(" Zürich?")["input_ids"]
    assert tokenizer("Name Zürich?")["input_ids"] != letters
    row = {"input_ids": [*letters, 9], "labels": [*[IGNORED] * len(letters), 9]}
    with pytest.raises(BadRowsError, match="row 1: 'Name Zürich\\?' tokenizes to other ids than the row's"):
        as_examples([row], [fact], tokenizer)


@pytest.mark.parametrize("fact", [FACTS[0], None])
@pytest.mark.parametrize(
    ("ids", "labels", "problem"),
    [
        ([5, 6, 7, 8], [-100, 7, 8, -100], "label 7 at position 1 is not its token 6 or -100, the next token"),
        ([5, 6, 7, 8], [-100, -100, 9, 8], "label 9 at position 2 is not its token 7 or -100$"),
        ([5, 6, 7, 8], [-1, -1, 7, 8], "label -1 at position 0 is not its token 5 or -100$"),
        ([5, 6, 7], [-100, 6], "lists of different lengths: input_ids 3, labels 2"),
    ],
)
def test_labels_that_are_not_the_rows_own_tokens_are_refused(ids, labels, problem, fact) -> None:
    with pytest.raises(BadRowsError) as raised:
        as_examples([{"input_ids": ids, "labels": labels}], [fact], TOKENIZER)
    assert re.search(problem, str(raised.value), re.MULTILINE)


def test_labels_of_padding_may_be_anything() -> None:
    row = {"input_ids": [5, 6, 7, 0], "labels": [-100, -100, 7, 9], "attention_mask": [1, 1, 1, 0]}
    assert as_examples([row], [None], TOKENIZER)[0].labels == (-100, -100, 7)
