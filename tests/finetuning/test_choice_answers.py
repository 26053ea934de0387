"""Choices against plain transformers, one prompt and letter at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnbalance.data.choices import Choice
from attnbalance.data.instructions import Instruction, InstructionSet
from attnbalance.errors import DataError
from attnbalance.finetuning import choice_answers as module
from attnbalance.finetuning.choice_answers import ChoiceAnswers, read_choices
from attnbalance.finetuning.examples import Example
from attnbalance.finetuning.output_loss import read_output_loss
from attnbalance.models.load import load_model

ROWS = tuple(
    Choice(f"Which is {word}?", f" {letter}", choices=choices, topic="things")
    for word, letter, choices in (
        ("red", "B", ("sky", "rose", "grass", "snow")),
        ("a cat", "A", ("Tom", "Rex")),
        ("much longer than the other questions of this set", "C", ("one", "two", "three")),
    )
)


def test_letters_are_those_that_transformers_finds_most_probable(stories: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(stories), AutoTokenizer.from_pretrained(stories)
    answers = read_choices(load_model(stories), InstructionSet(ROWS), batch_size=2)
    for row, read, taken in zip(ROWS, answers.log_p, answers.taken, strict=True):
        before = len(tokenizer(row.prompt)["input_ids"])
        expected = []
        for output in row.outputs:
            ids = torch.tensor([tokenizer(row.prompt + output)["input_ids"]])
            with torch.no_grad():
                log_p = model(ids).logits[0, before - 1 : -1].log_softmax(-1)
            expected.append(sum(log_p[i, token] for i, token in enumerate(ids[0, before:])))
        torch.testing.assert_close(read[: len(expected)], torch.stack(expected), atol=1e-4, rtol=0)
        assert taken == int(torch.stack(expected).argmax())
        assert bool((read[len(expected) :] == -torch.inf).all())


def test_right_loss_and_accuracy_follow_the_letters() -> None:
    log_p = torch.tensor([[0.1, 0.6, 0.2, 0.1], [0.3, 0.7, 0.0, 0.0], [0.2, 0.2, 0.6, 0.0]]).log()
    answers = ChoiceAnswers(ROWS, log_p)
    assert answers.taken == (1, 1, 2)
    assert answers.right == (True, False, True)
    assert answers.loss == pytest.approx([-torch.tensor(p).log().item() for p in (0.6, 0.3, 0.6)])
    assert answers.accuracy().mean == pytest.approx(2 / 3)


def test_the_loss_is_what_training_on_the_letter_lowers(stories: Path) -> None:
    """Training's mean over the letter's tokens and the end of the sequence, less the end's own part."""
    model, rows = load_model(stories), InstructionSet(ROWS)
    whole, letter = read_output_loss(model, rows), read_choices(model, rows).loss
    plain, tokenizer = model.model, model.tokenizer
    for row, mean, own in zip(ROWS, whole.tolist(), letter, strict=True):
        prompt, text = (tokenizer(part)["input_ids"] for part in (row.prompt, row.prompt + row.output))
        with torch.no_grad():
            end = -plain(input_ids=torch.tensor([text])).logits[0, -1].log_softmax(-1)[tokenizer.eos_token_id]
        assert own == pytest.approx((len(text) - len(prompt) + 1) * mean - float(end), abs=1e-3)


def test_rows_that_are_no_choices_are_refused(stories: Path) -> None:
    model = load_model(stories)
    for rows in ((), (ROWS[0], Instruction("Say.", "yes"))):
        with pytest.raises(DataError, match="expected multiple-choice questions, got"):
            read_choices(model, InstructionSet(rows))


def test_a_prompt_is_read_once_for_letters_that_differ_in_their_last_token(
    stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = load_model(stories), list[Example]()
    own = module.answer_logits
    monkeypatch.setattr(module, "answer_logits", lambda *asked: given.extend(asked[1]) or own(*asked))
    read_choices(model, InstructionSet(ROWS))
    expected = set()
    for row in ROWS:
        for output in row.outputs:
            expected.add(tuple(model.tokenizer(row.prompt + output)["input_ids"][:-1]))
    assert len(given) == len(expected) < sum(len(row.outputs) for row in ROWS)
    assert {example.ids[:-1] for example in given} == expected


def test_letters_of_several_tokens_are_read_by_their_beginnings(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that splits letters behind a space; C and D also differ in the token before the last one."""
    model = load_model(stories)
    split = {" A": (5, 9), " B": (5, 10), " C": (6, 11), " D": (7, 11)}
    prompt = (1, 300, 301, 302)
    monkeypatch.setattr(module, "encode_continued", lambda _, outputs, __: [(prompt, split[o]) for o in outputs])
    (read,) = read_choices(model, InstructionSet(ROWS[:1])).log_p
    for value, letter in zip(read, split.values(), strict=True):
        with torch.no_grad():
            log_p = model.model(input_ids=torch.tensor([[*prompt, *letter]])).logits[0].log_softmax(-1)
        assert float(value) == pytest.approx(float(log_p[3, letter[0]] + log_p[4, letter[1]]), abs=1e-4)
