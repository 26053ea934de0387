"""Instructions and what a model should write, as files of instruction tuning hold them (Alpaca's columns)."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from attnbalance.data.facts import check_text
from attnbalance.data.prompts import TEMPLATES
from attnbalance.errors import DataError


@dataclass(frozen=True)
class Instruction:
    r"""What a model is asked to do and should write. Raises `DataError` for an empty instruction or output.

    instruction: the task.
    output: what the model should write.
    input: what the task is about, e.g. a text that holds the answer; may be empty.

    >>> Instruction("Name a city.", "Rome").prompt
    '### Instruction:\nName a city.\n\n### Response:\n'
    """

    instruction: str
    output: str
    input: str = ""

    def __post_init__(self) -> None:
        """Refuse texts that cannot be taught."""
        check_text("instruction", self.instruction)
        check_text("output", self.output)
        if self.input != "":
            check_text("input", self.input)

    @property
    def prompt(self) -> str:
        """The text before the output: the template `alpaca-context`, or `alpaca` for an instruction without input."""
        template = TEMPLATES["alpaca-context" if self.input else "alpaca"]
        return template.format(question=self.instruction, context=self.input)


@dataclass(frozen=True)
class InstructionSet:
    """Instructions from one source.

    rows: the instructions.
    source: where they come from.
    dropped: how many rows of the source were left out, by reason.
    """

    rows: tuple[Instruction, ...]
    source: str = "memory"
    dropped: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse rows that are no instructions."""
        if wrong := [row for row in self.rows if not isinstance(row, Instruction)]:
            raise DataError(f"expected instructions, got {wrong[0]!r:.80}")

    def __len__(self) -> int:
        """The number of instructions."""
        return len(self.rows)

    @property
    def sha256(self) -> str:
        """A hash of the instructions in their order."""
        return hashlib.sha256(json.dumps([asdict(row) for row in self.rows]).encode()).hexdigest()

    def with_input(self) -> InstructionSet:
        """Those whose task is about an input, such as a text to answer from; the others are counted as dropped."""
        rows = tuple(row for row in self.rows if row.input)
        return self.without({"no input": len(self.rows) - len(rows)}, rows)

    def without(self, dropped: Mapping[str, int], rows: Sequence[Instruction]) -> InstructionSet:
        """The rows that are left where others are dropped, counted by reason."""
        return replace(self, rows=tuple(rows), dropped=dict(Counter(self.dropped) + Counter(dropped)))
