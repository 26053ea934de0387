"""Instructions and what a model should write, as files of instruction tuning hold them (Alpaca's columns)."""

from __future__ import annotations

import hashlib
import json
import random
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from attnbalance.data.facts import check_text
from attnbalance.data.prompts import TEMPLATES
from attnbalance.data.scoring import naming
from attnbalance.errors import ArgumentError, DataError
from attnbalance.seeds import check_seed

TokenPair = tuple[tuple[int, ...], tuple[int, ...]]
"""The tokens of a prompt and of what follows it."""


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
    def texts(self) -> tuple[str, ...]:
        """All that a model reads or writes in it."""
        return self.instruction, self.input, self.output

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
        if isinstance(self.rows, str) or not isinstance(self.rows, Sequence):
            raise ArgumentError(f"InstructionSet: rows must be a tuple of Instruction, got {self.rows!r:.100}")
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
        """The instructions that have an input, such as a text to answer from; the others are counted as dropped."""
        rows = tuple(row for row in self.rows if row.input)
        return self.without({"no input": len(self.rows) - len(rows)}, rows)

    def not_naming(self, names: Sequence[str]) -> InstructionSet:
        """The instructions whose texts name none of `names` (whole words, ignoring case); the others count as dropped.

        Spellings that `is_match` treats as equal count as one. In scripts that do not separate words, a name counts
        anywhere. Use this to leave out rows that give away the answers a model is tested on (Goyal et al. 2024, section
        3.1, leave out names of countries and capitals). Warns if nothing is left out. Raises `DataError` for no names
        and for an empty one.
        """
        if not names or not all(name.strip() for name in names):
            raise DataError(f"expected one or more names, none of them empty, got {list(names)!r:.80}")
        named = naming(("\0".join(row.texts) for row in self.rows), names)
        if not any(named):
            warnings.warn(f"no instruction names any of {len(names)} names (first: {names[0]!r:.80})", stacklevel=2)
        rows = [row for row, name in zip(self.rows, named, strict=True) if not name]
        return self.without({"names one of the given": len(self.rows) - len(rows)}, rows)

    def sample(self, size: int, seed: int = 0) -> InstructionSet:
        """At most `size` rows, drawn without replacement by the seed, in their old order."""
        if size < 1:
            raise DataError(f"the number of instructions must be at least 1, got {size}")
        chosen = sorted(random.Random(check_seed(seed)).sample(range(len(self)), min(size, len(self))))  # noqa: S311
        return replace(self, rows=tuple(self.rows[i] for i in chosen))

    def bare(self) -> InstructionSet:
        """The same instructions and outputs without their inputs."""
        return replace(self, rows=tuple(replace(row, input="") for row in self.rows))

    def usable(self, tokenizer: PreTrainedTokenizerBase, max_positions: int | None) -> InstructionSet:
        """Those that a model with this tokenizer can read (see `encodings`); the others count as dropped, by reason."""
        return self.readable(self.encodings(tokenizer, max_positions))

    def encodings(self, tokenizer: PreTrainedTokenizerBase, max_positions: int | None) -> list[TokenPair | str]:
        """The tokens of each row's prompt and of its output with an end of the sequence, or why there are none.

        The tokenizer may merge the end of a prompt with its output, or lack tokens for the output; or a row may have
        more than `max_positions` tokens
        (None: no limit). A tokenizer without an end-of-sequence token adds none.
        """
        from attnbalance.data.tokens import encode_continued

        end = [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
        texts = [row.prompt for row in self.rows], [row.output for row in self.rows]
        encodings = list[TokenPair | str]()
        for encoded in encode_continued(*texts, tokenizer):
            if encoded is None:
                encodings.append("the tokenizer merges prompt and output")
                continue
            prompt, output = encoded
            if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in output:
                encodings.append("the tokenizer cannot represent the output")
                continue
            ended = output if [output[-1]] == end else (*output, *end)
            fits = max_positions is None or len(prompt) + len(ended) <= max_positions
            encodings.append((prompt, ended) if fits else f"more than {max_positions} tokens")
        return encodings

    def readable(self, encodings: Sequence[TokenPair | str]) -> InstructionSet:
        """The rows for which `encodings` has tokens; the others count as dropped, by reason."""
        rows = [row for row, encoded in zip(self.rows, encodings, strict=True) if not isinstance(encoded, str)]
        return self.without(Counter(reason for reason in encodings if isinstance(reason, str)), rows)

    def without(self, dropped: Mapping[str, int], rows: Sequence[Instruction]) -> InstructionSet:
        """The rows that are left where others are dropped, counted by reason."""
        return replace(self, rows=tuple(rows), dropped=dict(Counter(self.dropped) + Counter(dropped)))
