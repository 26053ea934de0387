"""Facts that a model generates itself, to be replayed: about subjects that it names, with its own answers."""

from __future__ import annotations

import random
import re
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from attnbalance.arguments import expects
from attnbalance.data.batches import check_lengths
from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.forms import FEW_SHOT, FEW_SHOT_STATEMENT, in_form
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt, Template, make_prompts, question_of
from attnbalance.data.scoring import is_match
from attnbalance.data.squad import squad_words
from attnbalance.data.usable_facts import drop_bad
from attnbalance.errors import DataError
from attnbalance.finetuning.examples import examples_of
from attnbalance.finetuning.objectives.best_forms import rate_forms
from attnbalance.models.generate import Sampling, generate
from attnbalance.models.hooked import HookedModel
from attnbalance.progress import progress_bar
from attnbalance.seeds import check_seed

UNKNOWN = "?"
"""The answer of a fact that the model has not been asked about."""

SENTENCE_END = re.compile(r"(?<=\w{3})\.(?=\s|$)")
"""A full stop that ends an answer; that of "St. Louis" or "J. K. Rowling" does not."""

TRIES = 10
"""The most subjects that are sampled for each fact that is wanted."""

ROUND = 64
"""Subjects that are sampled before the model is asked about them, at least, if so many may be."""

ACCENTS_FROM = 200
"""Canonical combining classes from here on are accents; vowel signs of Indic and Semitic scripts have lower ones."""

DRAWS = 4
"""Draws of few shots after which the model must give one and the same answer."""


@expects(model=HookedModel, facts=FactSet, count=int)
def generated_facts(
    model: HookedModel,
    facts: FactSet,
    count: int,
    *,
    template: str | Template = "qa",
    batch_size: int = 64,
    seed: int = 0,
    progress: bool = False,
) -> FactSet:
    """Facts like given ones that the model generates, about other subjects: what it says, right or wrong.

    Training on them together with new facts holds the model to its own answers, even if no facts that it knows are at
    hand. This is rehearsal of what a model generates (Robins 1995; Huang et al. 2024, Self-Synthesized Rehearsal), for
    facts. For each relation, the model continues the text before the subject, sampled at temperature 1, until it writes
    the text after the subject ("What is the capital of" ... "?"). Then it is asked about the subject that it has named,
    and its greedy answer becomes the fact's answer. Both happen in the form that suits the relation best (see
    `rate_forms`). Two kinds of answers are left out, since training on them would teach a guess: answers that differ
    between `DRAWS` draws of few shots (guesses follow the shots), and words of the subject ("canton of Corbeil":
    Corbeil). A subject given in one relation may be named in another.

    Args:
        model: The model that is going to be finetuned.
        facts: Facts that say what to ask: those that the model is going to be finetuned on.
        count: How many to generate, divided among the relations as the given facts are. There may be fewer: at most
            `TRIES` times as many subjects are sampled, and sampling for a relation ends after a round that gives no
            fact.
        template: Name or text of the questions' template (see `Template`).
        batch_size: Prompts of one forward pass.
        seed: Seed of the few shots and of the samples; these also depend on `batch_size`.
        progress: Whether to draw a progress bar.

    Warns of relations whose prompts begin with their subject, since there is no text to continue. Raises `BadRowsError`
    for given facts that cannot be asked; `DataError` for no facts, a count below 1, and if the model generates none.
    """
    check_seed(seed)
    if count < 1 or not len(facts):
        raise DataError(f"expected facts, and a number of facts to generate >= 1, got {len(facts)} facts and {count}")
    examples = examples_of(PromptSet.of(make_prompts(facts, template), model.tokenizer), model.tokenizer)
    made, asked = list[Fact](), 0
    with progress_bar("what the model says", total=count, unit="fact", shown=progress) as bar:
        for relation, rated in rate_forms(examples, model, batch_size, seed, progress).items():
            like = make_prompts(facts.of_relations([relation]), template)
            before, asked = asked, asked + len(like)
            wanted = round(count * asked / len(facts)) - round(count * before / len(facts))
            for fact in _Generator(model, like, rated.form, template, batch_size, seed).facts(wanted):
                made.append(fact)
                bar.update()
    if not made:
        raise DataError(
            f"the model names no subject of {', '.join(facts.relations)} about which it gives one answer; replay facts "
            "that it knows"
        )
    return FactSet(tuple(made), f"facts generated by {model.name}")


@dataclass(frozen=True)
class _Generator:
    """What it takes to generate facts of one relation."""

    model: HookedModel
    like: Sequence[Prompt]
    """Questions of the relation."""
    form: str
    """The form in which the model is asked."""
    template: str | Template
    batch_size: int
    seed: int

    def facts(self, wanted: int) -> Iterator[Fact]:
        """As many facts as are wanted, or those that `TRIES` times as many samples give; none where nothing leads."""
        if wanted and not self._leading:
            warnings.warn(
                f"relation {self.like[0].fact.relation!r} is not generated: its prompts begin with their subject "
                f"({in_form(self.form, self.like, self.seed)[0].text!r}), so that the model cannot be led to name one",
                stacklevel=3,
            )
            return
        rng, tries = random.Random(self.seed), TRIES * wanted  # noqa: S311
        taken = {subject_key(prompt.fact.subject) for prompt in self.like}
        while wanted and tries:
            count = min(max(wanted, ROUND), tries)
            named = {subject_key(fact.subject): fact for fact in self._named(count, rng)}
            new = self._answered([fact for key, fact in named.items() if key not in taken])[:wanted]
            if not new:
                return
            yield from new
            taken |= set(named)
            tries -= count
            wanted -= len(new)

    @cached_property
    def _leading(self) -> list[Prompt]:
        """The prompts in which some text stands before the subject, and which hold it nowhere else."""
        asked = in_form(self.form, self.like, self.seed)
        return [
            prompt for prompt in asked if _lead(prompt) and question_of(prompt.fact)[0].count(prompt.fact.subject) == 1
        ]

    @cached_property
    def _longest(self) -> tuple[int, int]:
        """Tokens of the longest given answer, and from a subject to the end of its prompt."""
        ends = (prompt.text[prompt.spans["subject"][0] :] for prompt in self._leading)
        return max(self._length(f" {prompt.fact.answer}") for prompt in self.like), max(map(self._length, ends))

    def _named(self, count: int, rng: random.Random) -> Iterator[Fact]:
        """Facts, without an answer, about subjects that the model names where the prompts' subjects stand."""
        drawn, budget = rng.choices(self._leading, k=count), 2 + self._longest[1]
        prompts = [Prompt(_lead(prompt), {}, str(i), prompt.fact) for i, prompt in enumerate(drawn)]
        sampling = Sampling(1.0, rng.randrange(2**31))
        for prompt, output in zip(drawn, self._said(prompts, budget, sampling), strict=True):
            after = prompt.text[prompt.spans["subject"][1] :].partition("\n")[0]
            end = re.search(re.escape(after) + r"(?!\w)" if after else "$", output)
            name = unicodedata.normalize("NFC", output[: end.start()].strip()) if end else ""
            whole = self._length(f" {name}") < budget  # a longer one may have been cut off
            if whole and _is_line(name):
                yield _about(prompt.fact, name)

    def _answered(self, facts: Sequence[Fact]) -> list[Fact]:
        """The facts with the model's answers: those of which it is sure, at most as long as the longest given one."""
        longest = self._longest[0]
        for draw in range(DRAWS if self.form in (FEW_SHOT, FEW_SHOT_STATEMENT) else 1):
            asked = _usable(facts, lambda facts, draw=draw: self._ask(facts, self.seed + draw))
            outputs = self._said(asked, longest + 2) if asked else []
            answers = [SENTENCE_END.split(output)[0].strip() for output in outputs]
            facts = [
                replace(prompt.fact, answers=(answer,))
                for prompt, answer in zip(asked, answers, strict=True)
                if _is_line(answer) and not is_match(prompt.fact.subject, [answer])
                if draw == 0 or answer == prompt.fact.answer
            ]
        short = [fact for fact in facts if self._length(f" {fact.answer}") <= longest]
        return [prompt.fact for prompt in _usable(short, self._trained)]

    def _ask(self, facts: FactSet, seed: int) -> PromptSet:
        prompts = in_form(self.form, make_prompts(facts, self.template), seed, self.like)
        asked = PromptSet.of(prompts, self.model.tokenizer)
        check_lengths(asked.encodings, self.model.max_positions, extra=[self._longest[0] + 2] * len(asked))
        return asked

    def _trained(self, facts: FactSet) -> PromptSet:
        prompts = PromptSet.of(make_prompts(facts, self.template), self.model.tokenizer)
        examples_of(prompts, self.model.tokenizer, max_positions=self.model.max_positions)
        return prompts

    def _said(self, prompts: Sequence[Prompt], budget: int, sampling: Sampling | None = None) -> list[str]:
        """The first line of what the model says, within its positions."""
        asked = PromptSet.of(prompts, self.model.tokenizer)
        room = [(self.model.max_positions or sys.maxsize) - len(encoding.ids) for encoding in asked.encodings]
        budgets = [max(1, min(budget, left)) for left in room]
        settings = {"batch_size": self.batch_size, "sampling": sampling, "first_line": True}
        return generate(self.model, asked, max_new_tokens=budgets, **settings)

    def _length(self, text: str) -> int:
        """The number of tokens of a text."""
        return len(self.model.tokenizer(text, add_special_tokens=False)["input_ids"])


def _lead(prompt: Prompt) -> str:
    """The text before the subject, without the space between them."""
    return prompt.text[: prompt.spans["subject"][0]].rstrip(" ")


def _is_line(text: str) -> bool:
    """Whether a text is one line with a letter or digit and without parts of characters."""
    return len(text.splitlines()) == 1 and any(map(str.isalnum, text)) and "\N{REPLACEMENT CHARACTER}" not in text


def _about(fact: Fact, subject: str) -> Fact:
    """A fact's question and statement about another subject, without an answer."""
    if fact.question is None:
        return Fact(subject, fact.relation, (UNKNOWN,), statement=fact.statement)
    question, (start, end) = question_of(fact)
    question = f"{question[:start]}{subject}{question[end:]}"
    return Fact(subject, fact.relation, (UNKNOWN,), question=question, subject_start=start, statement=fact.statement)


def subject_key(subject: str) -> str:
    """One key for a subject's spellings: without case, English articles, punctuation, accents and spaces.

    Other letters stay apart ("Łódź", "Lodz"); a few different subjects have one key ("C", "C++").

    >>> subject_key("St. José"), subject_key("the st-jose")
    ('stjose', 'stjose')
    """
    folded = unicodedata.normalize("NFKD", subject.casefold())
    bare = (character for character in folded if unicodedata.combining(character) < ACCENTS_FROM)
    letters = "".join(" " if unicodedata.category(character)[0] == "P" else character for character in bare)
    return "".join(squad_words(letters)) or folded


def _usable(facts: Sequence[Fact], make: Callable[[FactSet], PromptSet]) -> Sequence[Prompt]:
    """The prompts that can be made of facts, without the others."""
    return drop_bad(FactSet(tuple(facts)), make)[0] or ()
