"""Which choice a model takes: the letter that it finds most probable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attnbalance.arguments import expects
from attnbalance.data.choices import Choice
from attnbalance.data.instructions import InstructionSet
from attnbalance.data.tokens import encode_continued
from attnbalance.errors import DataError, ModelError
from attnbalance.finetuning.examples import IGNORED, Example
from attnbalance.finetuning.labelled_logits import answer_logits
from attnbalance.models.hooked import HookedModel
from attnbalance.progress import progress_bar
from attnbalance.statistics.intervals import Interval
from attnbalance.statistics.shares import share_interval


@dataclass(frozen=True)
class ChoiceAnswers:
    """What a model takes of each question's choices.

    Attributes:
        questions: The questions.
        log_p: For each, the log-probability of each choice's letter after the prompt, nats: the sum over its tokens, if
            it has several; -inf for letters beyond the question's choices.
    """

    questions: tuple[Choice, ...]
    log_p: Float[Tensor, "question letter"]

    @property
    def taken(self) -> tuple[int, ...]:
        """The index of the choice with the most probable letter; of equal ones, the first."""
        return tuple(self.log_p.argmax(-1).tolist())

    @property
    def right(self) -> tuple[bool, ...]:
        """For each question, whether the right choice is taken."""
        return tuple(index == row.answer for index, row in zip(self.taken, self.questions, strict=True))

    @property
    def loss(self) -> tuple[float, ...]:
        """For each question, minus the log-probability of the right letter, nats: what training lowers."""
        return tuple(-float(self.log_p[i, row.answer]) for i, row in enumerate(self.questions))

    def accuracy(self) -> Interval:
        """The share of questions that are answered right, with its 95% interval over questions."""
        return share_interval(list(self.right), [row.prompt for row in self.questions])


@expects(model=HookedModel, questions=InstructionSet)
def read_choices(
    model: HookedModel, questions: InstructionSet, *, batch_size: int = 8, progress: bool = False
) -> ChoiceAnswers:
    """Ask a model multiple-choice questions, and compare the probabilities of the letters (Hendrycks et al. 2021).

    Raises `DataError` for rows that are no choices, `ModelError` for a tokenizer that merges the prompt with a letter,
    and `BadRowsError` for prompts that are longer than the model's positions.

    model: the model.
    questions: multiple-choice questions (see `load_choices`).
    batch_size: prompts with a letter in a forward pass.
    progress: show a progress bar.
    """
    rows = tuple(row for row in questions.rows if isinstance(row, Choice))
    if not rows or len(rows) < len(questions):
        raise DataError(f"expected multiple-choice questions, got {len(rows)} among {len(questions)} rows")
    examples, letters = _examples(model, rows)
    most_outputs = max(len(row.outputs) for row in rows)
    log_p = torch.full((len(rows), most_outputs), -torch.inf, dtype=torch.float32)
    with progress_bar("choices", total=len(examples), unit="prompt", shown=progress) as bar:
        for batch in answer_logits(model, examples, batch_size):
            for i, logits in batch:
                of_token = logits.log_softmax(-1)
                for row, choice, ids in letters[i]:
                    own = torch.tensor(ids, device=logits.device)[:, None]
                    log_p[row, choice] = of_token.gather(1, own).sum().cpu()
            bar.update(len(batch))
    return ChoiceAnswers(rows, log_p)


def _examples(
    model: HookedModel, rows: Sequence[Choice]
) -> tuple[list[Example], list[list[tuple[int, int, tuple[int, ...]]]]]:
    """Prompts with a letter, and the letters that each tells of: the row, the choice, and the letter's tokens.

    Letters of one row that differ in their last token are predicted alike, so they are read once.
    """
    examples, letters = list[Example](), list[list[tuple[int, int, tuple[int, ...]]]]()
    for row_index, row in enumerate(rows):
        read = dict[tuple[tuple[int, ...], tuple[int, ...]], int]()
        for choice, pair in enumerate(encode_continued([row.prompt] * len(row.outputs), row.outputs, model.tokenizer)):
            if pair is None:
                raise ModelError(f"the tokenizer of {model.name} merges 'Answer:' with the letter{row.outputs[choice]}")
            prompt, letter = map(tuple, pair)
            index = read.setdefault((prompt, letter[:-1]), len(examples))
            if index == len(examples):
                examples.append(Example((*prompt, *letter), (*[IGNORED] * len(prompt), *letter)))
                letters.append([])
            letters[index].append((row_index, choice, letter))
    return examples, letters
