"""Multiple-choice questions, asked as MMLU's are: the letter of an answer is what is learned and compared."""

from __future__ import annotations

from dataclasses import dataclass

from attnbalance.data.facts import check_text
from attnbalance.data.instructions import Instruction
from attnbalance.errors import DataError

LETTERS = "ABCDEFGHIJ"

MMLU = "The following are multiple choice questions (with answers) about {topic}.\n\n{question}\n{choices}\nAnswer:"
"""The text of Hendrycks et al. (2021), as lm-evaluation-harness writes it without examples."""


@dataclass(frozen=True)
class Choice(Instruction):
    r"""A question with some answers, one of which is right. What is learned is its letter, after a space.

    Raises `DataError` for fewer than two answers, more than ten, an empty or repeated one, an output that is not the
    letter of one of them, and an input.

    choices: the answers, in the order of their letters.
    topic: what the questions are about, such as "prehistory".

    >>> Choice("Which is a city?", " B", choices=("Oslo fjord", "Rome"), topic="places").prompt.splitlines()[2:]
    ['Which is a city?', 'A. Oslo fjord', 'B. Rome', 'Answer:']
    """

    choices: tuple[str, ...] = ()
    topic: str = ""

    def __post_init__(self) -> None:
        """Refuse questions that cannot be asked or learned."""
        super().__post_init__()
        check_text("topic", self.topic)
        if self.input:
            raise DataError(f"a question with choices has no input, got {self.input!r:.40}; write it into the question")
        if not 2 <= len(self.choices) <= len(LETTERS):
            raise DataError(f"a question must have 2 to {len(LETTERS)} choices, got {len(self.choices)}")
        for choice in self.choices:
            check_text("a choice", choice)
        if len(set(self.choices)) < len(self.choices):
            raise DataError(f"choices must differ, got {self.choices!r:.120}")
        if self.output not in self.outputs:
            raise DataError(f"the output must be a space and the letter of a choice, got {self.output!r:.40}")

    @property
    def texts(self) -> tuple[str, ...]:
        """All that a model reads or writes in it."""
        return *super().texts, self.topic, *self.choices

    @property
    def outputs(self) -> tuple[str, ...]:
        """What a model may write: a space and a letter, for each choice."""
        return tuple(f" {letter}" for letter in LETTERS[: len(self.choices)])

    @property
    def answer(self) -> int:
        """The index of the right choice."""
        return self.outputs.index(self.output)

    @property
    def prompt(self) -> str:
        """The text before the letter (see `MMLU`)."""
        lines = (f"{letter}. {choice}" for letter, choice in zip(LETTERS, self.choices, strict=False))
        return MMLU.format(topic=self.topic, question=self.instruction.strip(), choices="\n".join(lines))
