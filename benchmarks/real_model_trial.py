"""One seed of `real_model.py`: what the base knows before, and how each row is trained and asked."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from peft.tuners.lora import LoraLayer
from real_model_rows import CONSTANT, ROWS, Row
from real_model_scores import DRIFT, SECONDS, Answers, Before, measure
from torch.optim.optimizer import register_optimizer_step_post_hook

from attnbalance.data.facts import FactSet
from attnbalance.data.forms import FEW_SHOT, FORMS, in_form, too_few_subjects
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt, make_prompts
from attnbalance.data.statements import statement_prompts
from attnbalance.errors import DataError
from attnbalance.files.outputs import provenance, read_saved, write_saved
from attnbalance.files.seals import hash_file
from attnbalance.finetuning.finetune import finetune
from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.finetuning.replay import beside, replay
from attnbalance.finetuning.settings import FinetuneSettings
from attnbalance.finetuning.splits import Split, split_facts
from attnbalance.models.config import load_config
from attnbalance.models.fingerprint import files_fingerprint
from attnbalance.models.generate import generate
from attnbalance.models.hooked import HookedModel
from attnbalance.models.load import load_model
from attnbalance.readings.drift import read_drift
from attnbalance.readings.passes import passes
from attnbalance.readings.recall import answer_budgets, score
from attnbalance.statistics.intervals import Interval, mean_intervals
from attnbalance.studies.controls import constant


@dataclass(frozen=True)
class Protocol:
    """What all rows share."""

    model: str
    facts: FactSet
    out: Path
    options: argparse.Namespace

    @cached_property
    def base(self) -> HookedModel:
        """The model before training."""
        return load_model(self.model, dtype="float32")

    def settings(self, row: Row, seed: int) -> FinetuneSettings:
        """How a row is trained."""
        last = load_config(self.model).num_hidden_layers - 1
        own = dict(row.settings)
        if "train" in own:
            own["train"] = own["train"].format(middle=(last + 1) // 2, last=last)
        options = self.options
        steps = round(options.steps * row.times.get("steps", 1))
        rate = options.lr * row.times.get("learning_rate", 1)
        general: dict[str, Any] = {"steps": steps, "learning_rate": rate, "seed": seed}
        general |= {
            "checkpoint_every": steps,
            "patience": None,
            "batch_size": options.batch_size,
            "lora_rank": options.lora_rank,
            "dtype": "float32",
        }
        return FinetuneSettings(**{**general, **own})

    def ask(self, model: HookedModel, form: str, prompts: Sequence[Prompt]) -> list[str]:
        """Greedy answers; after few shots an answer ends with its line."""
        asked, one_line = PromptSet.of(prompts, model.tokenizer), form not in ("question", "statement")
        budgets, size = answer_budgets(asked), self.options.ask_batch
        return generate(model, asked, max_new_tokens=budgets, batch_size=size, first_line=one_line, progress=True)


class Trial:
    """The rows of one seed and split: its facts, and what the base knows of them, asked when first needed."""

    def __init__(self, protocol: Protocol, seed: int, split: str) -> None:
        self.protocol, self.seed = protocol, seed
        self.split = split_facts(protocol.facts, split, seed=seed, train_relations=protocol.options.train_relations)
        train = self.split.train.sample(protocol.options.train_limit, seed)
        self.split = replace(self.split, train=train)
        heldout = self.split.heldout.sample(protocol.options.heldout_limit, seed)
        self.heldout, self.train = make_prompts(heldout), make_prompts(train)
        _check_subjects("held-out", heldout)
        _check_subjects("training", train)

    @cached_property
    def heldout_said(self) -> dict[str, list[str]]:
        """The base's greedy answers about the held-out facts, by pass of `knowledge`."""
        asked = passes(self.heldout, self.protocol.base.tokenizer, FORMS, self.seed)
        return {name: self._said("heldout", name, prompts) for name, prompts in asked.items()}

    @cached_property
    def said(self) -> dict[str, list[str]]:
        """The base's answers about the training facts, by form."""
        return {form: self._said(self.split.name, form, in_form(form, self.train, self.seed)) for form in FORMS}

    def _said(self, part: str, name: str, prompts: Sequence[Prompt]) -> list[str]:
        """The base's answers to prompts, kept in a file; killed, it goes on after the last file."""
        file = self.protocol.out / "base" / f"{part}-seed-{self.seed}-{name.replace(' ', '-')}.json"
        answers = [(prompt.text, prompt.fact.answers) for prompt in prompts]  # long answers get more tokens
        asked = {"model": files_fingerprint(self.protocol.model), "prompts": json.loads(json.dumps(answers))}
        saved = read_saved(file)
        if saved.get("asked") != asked:
            saved = {"asked": asked, "outputs": self.protocol.ask(self.protocol.base, name, prompts)}
            write_saved(file, saved)
        return saved["outputs"]

    @cached_property
    def before(self) -> Before:
        """Which held-out facts the base knows, and which training facts it does not."""
        right = [score(self.train, texts, {}).correct for texts in self.said.values()]
        draws = [texts for name, texts in self.heldout_said.items() if name == FEW_SHOT or name not in FORMS]
        greedy = [score(self.heldout, texts, {}).correct for texts in draws]
        unknown = [not any(hits) for hits in zip(*right, strict=True)]
        return Before(self.heldout, [all(hits) for hits in zip(*greedy, strict=True)], self.train, unknown)

    def key(self, row: Row) -> dict[str, Any]:
        """What decides a row's result."""
        text = self.protocol.options.text
        parts = {"train": self.split.train, "heldout": FactSet(tuple(prompt.fact for prompt in self.heldout))}
        key = {
            "model": files_fingerprint(self.protocol.model),
            "facts_sha256": {part: facts.sha256 for part, facts in parts.items()},
            "row": {name: value for name, value in asdict(row).items() if value != asdict(Row())[name]},
            "settings": self.protocol.settings(row, self.seed).record(),
            "text": text and hash_file(Path(text)),
            "replay_from": None,
        }
        if row.replay and not row.generated:
            key["replay_from"] = beside(self.split, self._replayed_from(self.protocol.settings(row, self.seed))).sha256
        return json.loads(json.dumps(key))

    def result(self, name: str) -> dict[str, Any]:
        """The result of a row: the saved one if its settings are equal."""
        saved = self.saved(name)
        if saved is None:
            made = self._untrained(ROWS[name]) if ROWS[name].form else self._trained(name)
            said = made.pop("outputs")
            write_saved(self.protocol.out / "outputs" / self._file(name).name, said)
            saved = {"row": name, "seed": self.seed, "key": self.key(ROWS[name]), **made, **provenance()}
            write_saved(self._file(name), saved)
        return saved

    def saved(self, name: str) -> dict[str, Any] | None:
        """The saved result of a row; None if there is none of these settings."""
        saved = read_saved(self._file(name))
        return saved if saved.get("key") == self.key(ROWS[name]) else None

    def _file(self, name: str) -> Path:
        return self.protocol.out / f"{name}-seed-{self.seed}.json"

    def _untrained(self, row: Row) -> dict[str, Any]:
        shortcuts = self.split.train.most_frequent_answers()
        if row.form == CONSTANT:
            said, learned = (constant(prompts, shortcuts).outputs for prompts in (self.heldout, self.train))
            answers = Answers(said, said, learned, learned)
        else:
            heldout = self.heldout_said
            answers = Answers(heldout[row.form], heldout[FEW_SHOT], self.said[row.form], self.said["statement"])
        return self._scored(answers, shortcuts, {DRIFT: None, SECONDS: None})

    def _trained(self, name: str) -> dict[str, Any]:
        row = ROWS[name]
        out = self.protocol.out / "runs" / f"{row.of or name}-seed-{self.seed}"
        split = self._known_only() if row.known_only else self.split
        if row.replay:
            settings = self.protocol.settings(row, self.seed)
            split, about = replay(
                self.protocol.base,
                split,
                None if row.generated else self._replayed_from(settings),
                row.replay,
                objective=settings.objective,
                batch_size=self.protocol.options.ask_batch,
                seed=self.seed,
                progress=True,
            )
            print(about, flush=True)
        with step_ends() as ends:
            run = finetune(self.protocol.model, split, out, self.protocol.settings(row, self.seed), progress=True)
        between = [after - before for before, after in pairwise(ends)]
        step = Interval(statistics.median(between), float("nan"), float("nan"), len(between)) if between else None
        model = load_model(run.path, dtype="float32")
        scale_adapters(model, row.scaled)
        extra = {DRIFT: self._drift(model), SECONDS: step}
        about = {"trained": run.trained, "best_step": run.best_step, "validation": sorted(run.validation_loss.items())}
        return about | self._scored(self._answers(model), run.shortcuts, extra)

    def _replayed_from(self, settings: FinetuneSettings) -> FactSet:
        """The facts that a row may replay: all; if they are held to the base, none of --train-relations."""
        taught = self.protocol.options.train_relations or ()
        held = parse_objective(settings.objective).keeps_answers
        return self.protocol.facts.where(lambda fact: not (held and fact.relation in taught))

    def _known_only(self) -> Split:
        """The split without the training facts that the base answers in no form."""
        known = [fact for fact, wrong in zip(self.split.train, self.before.unknown, strict=True) if not wrong]
        if not known:
            raise DataError(
                f"expected training facts that the base answers in some form, got none of {len(self.train)}"
            )
        train = replace(self.split.train, facts=tuple(known))
        return replace(self.split, name=f"{self.split.name}, known", train=train)

    def _answers(self, model: HookedModel) -> Answers:
        few_shot = passes(self.heldout, model.tokenizer, [FEW_SHOT], self.seed)[FEW_SHOT]
        return Answers(
            self.protocol.ask(model, "question", self.heldout),
            self.protocol.ask(model, FEW_SHOT, few_shot),
            self.protocol.ask(model, "question", self.train),
            self.protocol.ask(model, "statement", in_form("statement", self.train)),
        )

    def _drift(self, model: HookedModel) -> Interval:
        if self.protocol.options.text:
            whole = Path(self.protocol.options.text).read_text(encoding="utf-8")
            texts = [part.strip() for part in whole.split("\n\n") if part.strip()]
            clusters = [str(index) for index in range(len(texts))]
        else:
            stated = statement_prompts(prompt.fact for prompt in self.heldout)
            texts = [f"{prompt.text} {prompt.fact.answer}." for prompt in stated]
            clusters = [prompt.fact.composed_subject for prompt in stated]
        drift = read_drift(model, self.protocol.base, texts, batch_size=8)
        return mean_intervals(drift[:, None].numpy(), clusters)[0]

    def _scored(
        self, answers: Answers, shortcuts: Mapping[str, Sequence[str]], extra: Mapping[str, Interval | None]
    ) -> dict[str, Any]:
        scores = {**measure(self.before, answers, shortcuts), **extra}
        saved = {name: interval and interval.as_dict() for name, interval in scores.items()}
        return {"scores": saved, "outputs": asdict(answers)}


def scale_adapters(model: HookedModel, factors: Mapping[str, float]) -> None:
    """Scale the LoRA adapters of layers whose names end so."""
    for name, module in model.model.named_modules():
        for ending, factor in factors.items():
            if isinstance(module, LoraLayer) and name.endswith(ending):
                module.scaling = {adapter: factor * scale for adapter, scale in module.scaling.items()}


def _check_subjects(part: str, facts: FactSet) -> None:
    """Raise `DataError` for relations with too few subjects for few-shot."""
    if few := too_few_subjects(facts):
        counts = ", ".join(f"{relation!r} has {subjects}" for relation, subjects in few.items())
        raise DataError(
            f"few-shot needs at least 5 subjects of each relation; of the {part} facts {counts}: leave such relations "
            "out of --relations, or give more facts or a larger --heldout-limit"
        )


@contextmanager
def step_ends() -> Iterator[list[float]]:
    """The times, in seconds, at which optimizer steps end inside the block."""
    ends = list[float]()
    hook = register_optimizer_step_post_hook(lambda *_: ends.append(time.perf_counter()))
    try:
        yield ends
    finally:
        hook.remove()
