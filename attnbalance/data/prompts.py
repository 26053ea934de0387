"""Prompts: the text of a question with a character span for each role, recorded while the text is built."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import string
import warnings
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType

from attnbalance.arguments import expects
from attnbalance.data.conflicts import Conflict
from attnbalance.data.facts import Fact
from attnbalance.errors import BadRowsError, DataError

CharSpan = tuple[int, int]
"""Characters [start, end) of a text."""

ASKED = ("question", "subject_start", "statement")
"""Fields of a fact that say how to ask for it. prompts.jsonl leaves them out, since it holds the prompt's text."""

FIELDS = ("question", "subject", "relation", "context")


@dataclass(frozen=True)
class Prompt:
    """The text that a model is given, with a character span for each role.

    text: the whole text.
    spans: characters [start, end) of `text` by role: "subject" always, "relation" and "context" if the template has
        them. They cannot be changed: tokens are made from them once.
    prompt_id: unique within a set of prompts, and the same for the same facts in another run.
    fact: the fact that is asked about.
    has_special_tokens: the text already holds the tokenizer's special tokens (a rendered chat), so none are added.
    answer_space: the white space between the text and its answer. None: a space; nothing where the text ends in white
        space or is a rendered chat.
    """

    text: str
    spans: Mapping[str, CharSpan]
    prompt_id: str
    fact: Fact
    has_special_tokens: bool = False
    answer_space: str | None = None

    def __post_init__(self) -> None:
        """Copy the spans, read-only."""
        object.__setattr__(self, "spans", MappingProxyType(dict(self.spans)))

    def __reduce__(self) -> tuple[type[Prompt], tuple[object, ...]]:
        """Copies and pickles are made from the fields: read-only spans can be neither copied nor pickled."""
        spans = dict(self.spans)
        return Prompt, (self.text, spans, self.prompt_id, self.fact, self.has_special_tokens, self.answer_space)

    @property
    def space(self) -> str:
        """What stands between the text and an answer (see `answer_space`)."""
        usual = "" if self.has_special_tokens or self.text[-1:].isspace() else " "
        return usual if self.answer_space is None else self.answer_space

    @property
    def with_answer(self) -> str:
        """The text with the fact's first answer."""
        return f"{self.text}{self.space}{self.fact.answer}"

    def part(self, role: str) -> str:
        """The text of one role."""
        start, end = self.spans[role]
        return self.text[start:end]

    def as_dict(self) -> dict[str, object]:
        """The prompt as one line of `prompts.jsonl`."""
        fact = {name: value for name, value in self.fact.as_dict().items() if name not in ASKED}
        return {
            "prompt_id": self.prompt_id,
            "text": self.text,
            "spans": {role: list(span) for role, span in self.spans.items()},
            "has_special_tokens": self.has_special_tokens,
        } | fact


@dataclass(frozen=True)
class Template:
    """A format string with the fields {question}, {subject}, {relation} and, for conflicts, {context}.

    Raises `DataError` for other fields, for conversions and format specs, for {relation} or {context} twice, and for a
    text that does not hold exactly one of {question} and {subject}, exactly once.

    name: one of `TEMPLATES`, or the text itself.
    text: the format string.
    """

    name: str
    text: str

    def __post_init__(self) -> None:
        """Refuse a format string in which the subject has no single position."""
        try:
            self.text.encode()  # half a character could not be tokenized
            parts = list(string.Formatter().parse(self.text))
        except ValueError as error:
            raise DataError(f"template {self.text!r} is not a format string: {error}") from error
        if escape := re.search(r"\\[nt]", self.text):
            warnings.warn(
                f"template {self.text!r} holds a backslash and a letter ({escape[0]}), which are read as they stand. "
                "For a line break or tab write the character itself: $'...' in a shell, double quotes in YAML",
                stacklevel=2,
            )
        fields = [name for _, name, spec, conversion in parts if name is not None]
        odd = [
            name
            for _, name, spec, conversion in parts
            if name is not None and (name not in FIELDS or spec or conversion)
        ]
        if odd:
            raise DataError(
                f"template {self.text!r} has the field {{{odd[0]}}}; "
                f"use only {', '.join('{' + f + '}' for f in FIELDS)} as they are"
            )
        if twice := [name for name in ("relation", "context") if fields.count(name) > 1]:
            raise DataError(f"template {self.text!r} must hold {{{twice[0]}}} once, where it is read, got it twice")
        if fields.count("question") + fields.count("subject") != 1:
            raise DataError(
                f"template {self.text!r} must name the subject once, through one {{question}} or one {{subject}} "
                f"(or be one of {', '.join(TEMPLATES)})"
            )

    def render(self, fact: Fact, prompt_id: str | None = None) -> Prompt:
        """The prompt for one fact; `prompt_id` defaults to "relation/subject".

        Raises `DataError` if the fact's question does not hold its subject exactly once and `subject_start` is not set,
        and for a context of a fact that is no `Conflict`.
        """
        text, spans = "", {}
        for literal, name, _, _ in string.Formatter().parse(self.text):
            text += literal
            start = len(text)
            if name is None:
                continue
            if name == "question":
                question, (subject_start, subject_end) = question_of(fact)
                text += question
                spans["subject"] = (start + subject_start, start + subject_end)
            elif name == "context":
                if not isinstance(fact, Conflict):
                    raise DataError(f"template {self.text!r} names a context, but {fact.subject!r} has none")
                text += fact.context
                spans[name] = (start, len(text))
            else:
                text += getattr(fact, name)
                spans[name] = (start, len(text))
        return Prompt(text, spans, prompt_id or f"{fact.relation}/{fact.subject}", fact)


TEMPLATES = {
    "plain": "{question}",
    "qa": "Question: {question} Answer:",
    "context": "Context: {context} Question: {question} Answer:",
    "quote": "{context}: {question}",
    "alpaca": "### Instruction:\n{question}\n\n### Response:\n",
    "alpaca-context": "### Instruction:\n{question}\n\n### Input:\n{context}\n\n### Response:\n",
    "alpaca-context-only": "### Instruction:\nAnswer the question based on the input context only. {question}\n\n"
    "### Input:\n{context}\n\n### Response:\n",
}
"""Templates by name. Alpaca's (Taori et al. 2023) are here without their first sentence; the last asks for the context
as Goyal et al. (2024) do in appendix B.3."""


@expects(name_or_text=(str, Template))
def as_template(name_or_text: str | Template) -> Template:
    """The template of a name in `TEMPLATES`, or of a format string."""
    if isinstance(name_or_text, Template):
        return name_or_text
    return Template(name_or_text, TEMPLATES.get(name_or_text, name_or_text))


def question_of(fact: Fact) -> tuple[str, CharSpan]:
    """A fact's question and the characters of its subject in it.

    A fact without a question is asked "What is the {relation} of {subject}?". Raises `DataError` if a finished
    question does not hold the subject at `subject_start` or, without that, exactly once.

    >>> question_of(Fact("France", "capital", ("Paris",)))
    ('What is the capital of France?', (23, 29))
    """
    if fact.question is None:
        lead = f"What is the {fact.relation} of "
        return f"{lead}{fact.subject}?", (len(lead), len(lead) + len(fact.subject))
    start, size = fact.subject_start, len(fact.subject)
    if start is None:
        count = _occurrences(fact.question, fact.subject)
        if count != 1:
            raise DataError(f"subject {fact.subject!r} occurs {count} times in {fact.question!r}, not once")
        start = fact.question.index(fact.subject)
    elif fact.question[start : start + size] != fact.subject:
        raise DataError(f"subject {fact.subject!r} is not at character {start} of {fact.question!r}")
    return fact.question, (start, start + size)


def hash_prompts(prompts: Iterable[Prompt]) -> str:
    """A hash of prompts in their order: a chat template that writes the date makes others of the same facts."""
    return hashlib.sha256(json.dumps([prompt.as_dict() for prompt in prompts]).encode()).hexdigest()


@expects(facts=[Fact])
def make_prompts(facts: Iterable[Fact], template: str | Template = "qa") -> tuple[Prompt, ...]:
    """One prompt for each fact, in order.

    A fact that repeats an earlier (relation, subject) gets "#2", "#3", ... at the end of its prompt_id. Raises
    `BadRowsError` for questions that do not hold their subject exactly once, with their number and the first three.

    >>> make_prompts([Fact("France", "capital", ("Paris",))])[0].text
    'Question: What is the capital of France? Answer:'
    """
    template, prompts, bad = as_template(template), [], []
    names: set[str] = set()
    total = 0
    for index, fact in enumerate(facts):
        total += 1
        name = _unused(f"{fact.relation}/{fact.subject}", names)
        names.add(name)
        try:
            prompts.append(template.render(fact, name))
        except DataError as error:
            bad.append((index, str(error)))
    if bad:
        raise BadRowsError(
            "questions do not hold their subject exactly once",
            bad,
            total,
            "fix these rows, or drop and count them (`skip_bad=True`)",
        )
    return tuple(prompts)


def _unused(name: str, names: Set[str]) -> str:
    """The name, or the first of name#2, name#3, ... that is not in `names`."""
    numbered = (f"{name}#{number}" for number in itertools.count(2))
    return name if name not in names else next(other for other in numbered if other not in names)


def _occurrences(text: str, part: str) -> int:
    """How often `part` occurs in `text`, overlapping occurrences included."""
    return sum(text.startswith(part, i) for i in range(len(text) - len(part) + 1))
