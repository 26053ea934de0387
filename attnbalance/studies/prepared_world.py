"""What all fits on one world with one seed share: its facts, the base model and that model's answers."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.prompts import Prompt, hash_prompts, make_prompts
from attnbalance.data.sources.load_facts import load_facts
from attnbalance.data.statements import World, statement_prompts
from attnbalance.data.synthetic import synthetic_facts
from attnbalance.errors import DataError, OutputError
from attnbalance.files.outputs import read_saved, write_saved
from attnbalance.finetuning.pretrain import pretrain
from attnbalance.finetuning.splits import Split, split_facts
from attnbalance.models.fingerprint import files_fingerprint
from attnbalance.readings.recall import Recall, score
from attnbalance.statistics.intervals import Interval
from attnbalance.statistics.shares import gain_interval
from attnbalance.studies.controls import CONSTANT, constant, scored, untrained
from attnbalance.studies.plan import recipe_of


class PreparedWorld:
    """What all fits on one world with one seed share: its facts, the base model and what that model has stored."""

    def __init__(
        self, world: Mapping[str, Any], seed: int, folder: Path, progress: bool, dtype: str | None = None
    ) -> None:
        self.settings, self.seed, self.folder, self.progress, self.dtype = world, seed, folder, progress, dtype

    @cached_property
    def facts(self) -> FactSet:
        """The world's facts."""
        source, setting = self.settings["facts"], self.settings.get
        if source == "synthetic":
            sizes = {name: self.settings[name] for name in ("subjects", "answers") if name in self.settings}
            return synthetic_facts(self.seed, **sizes)
        return load_facts(source, setting("relations"), setting("limit"), self.seed)

    @cached_property
    def world(self) -> World:
        """The facts, stated as often as the world says."""
        return World(self.facts, self.settings.get("power", 1.0 if self.settings["facts"] == "synthetic" else 0.5))

    @cached_property
    def base(self) -> str:
        """The base model: the world's own, or one pretrained on its statements."""
        if "model" in self.settings:
            return str(self.settings["model"])
        recipe = recipe_of(self.settings)
        return str(pretrain(self.world, self.folder, recipe=recipe, seed=self.seed, progress=self.progress))

    @cached_property
    def questions(self) -> dict[int, Prompt]:
        """The question about each fact, by the fact's identity."""
        return {id(fact): prompt for fact, prompt in zip(self.facts, make_prompts(self.facts), strict=True)}

    @cached_property
    def statements(self) -> Recall:
        """What the base says after the statement of each fact."""
        return self._asked("statement", statement_prompts(self.facts))

    @cached_property
    def stated(self) -> dict[str, bool]:
        """For each fact, by prompt id, whether the base completes its statement."""
        return dict(zip(self.statements.prompt_ids, self.statements.correct, strict=True))

    def said(self, fact: Fact) -> str:
        """What the base says after a fact's statement."""
        return self._said[self.questions[id(fact)].prompt_id]

    @cached_property
    def _said(self) -> dict[str, str]:
        return dict(zip(self.statements.prompt_ids, self.statements.outputs, strict=True))

    def controls(self, name: str, templates: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The results on a split's held-out questions of the base, asked in each form, and of a constant answer.

        Questions are asked by each of the templates, and named with it if there are several.
        """
        split = self.split(name)
        shortcuts = split.train.most_frequent_answers()
        asked = [self.questions[id(fact)] for fact in split.heldout]
        answers = {untrained("statement"): self.statements.at([prompt.prompt_id for prompt in asked])}
        for template in templates:
            wording = f" ({template})" if len(templates) > 1 else ""
            for form, said in self._untrained(name, split, template):
                answers[untrained(form + wording)] = said
        scores = {control: score(asked, answered.outputs, shortcuts) for control, answered in answers.items()}
        scores[CONSTANT] = constant(asked, shortcuts)
        _warn_of_better_forms(name, scores)
        return {control: scored(answered, self.stated) for control, answered in scores.items()}

    def _untrained(self, name: str, split: Split, template: str) -> Iterator[tuple[str, Recall]]:
        """What the base answers to a split's held-out questions and after few shots."""
        from attnbalance.data.forms import in_form

        questions = {id(fact): p for fact, p in zip(self.facts, make_prompts(self.facts, template), strict=True)}
        asked = [questions.pop(id(fact)) for fact in split.heldout]
        part = "controlled" if name.startswith("controlled-") else "heldout"
        wording = "" if template == "qa" else f"-{hashlib.sha256(template.encode()).hexdigest()[:8]}"
        for form in ("question", "few-shot"):
            try:
                prompts = in_form(form, asked, self.seed, list(questions.values()))
                yield form, self._asked(f"{part}-{form}{wording}", prompts)
            except DataError as error:  # too few facts for shots, or prompts too long after them
                control = untrained(form)
                warnings.warn(f"the control {control!r} of split {name} is left out: {error}", stacklevel=3)

    def _asked(self, name: str, prompts: Sequence[Prompt]) -> Recall:
        """What the base answers to prompts, kept in a file of that name.

        Raises `OutputError` for a file that holds answers to other prompts, or of another model.
        """
        from attnbalance.models.load import load_model
        from attnbalance.readings.recall import recall

        kept = self.folder.with_name(f"{self.folder.name}-{name}.json")
        saved = read_saved(kept)
        version = metadata.version("attnbalance")
        asked = {
            "prompts_sha256": hash_prompts(prompts),
            "model_files": files_fingerprint(self.base),
            "dtype": self.dtype,
        }
        if saved:
            if any(saved.get(what) != value for what, value in asked.items()):
                raise OutputError(
                    f"{kept} holds answers to other prompts, or of another model or dtype; remove it to ask the base "
                    "again"
                )
            if (made_by := saved["attnbalance_version"]) != version:
                warnings.warn(
                    f"{kept} was made by attnbalance {made_by}, and this is {version}; remove it to ask the base again",
                    stacklevel=3,
                )
            return Recall.from_json(saved, kept)
        answers = recall(load_model(self.base, dtype=self.dtype), prompts, batch_size=128, progress=self.progress)
        write_saved(kept, asdict(answers) | asked | {"attnbalance_version": version})
        return answers

    def split(self, name: str) -> Split:
        """One of the splits of the world's facts."""
        return split_facts(self.facts, name, seed=self.seed)


def _warn_of_better_forms(split: str, scores: Mapping[str, Recall]) -> None:
    """Warn where the base answers measurably more in another form than by statement, and than a constant answer."""
    by_statement = scores[untrained("statement")]
    for control, answers in scores.items():
        if all(_gain(answers, other).low > 0 for other in (by_statement, scores[CONSTANT])):
            warnings.warn(
                f"'kept' and 'extraction ratio' count the facts that the base completes by statement, "
                f"{by_statement.accuracy().mean:.1%} of the held-out facts of split {split}; it answers more of them "
                f"otherwise: {answers.accuracy().mean:.1%} by the control {control!r}",
                stacklevel=3,
            )


def _gain(answers: Recall, other: Recall) -> Interval:
    gains = [int(now) - int(before) for now, before in zip(answers.correct, other.correct, strict=True)]
    return gain_interval(gains, answers.subjects)
