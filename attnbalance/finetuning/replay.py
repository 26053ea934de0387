"""Replay: facts that are trained on beside new ones, so that less of what the base says is forgotten."""

from __future__ import annotations

from dataclasses import replace
from types import NoneType

from attnbalance.arguments import expects
from attnbalance.data.facts import FactSet
from attnbalance.data.forms import in_form
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Template, make_prompts
from attnbalance.errors import DataError
from attnbalance.finetuning.examples import examples_of
from attnbalance.finetuning.generated import generated_facts, subject_key
from attnbalance.finetuning.objectives.best_forms import completions, rate_forms
from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.finetuning.settings import FinetuneSettings
from attnbalance.finetuning.splits import Split
from attnbalance.models.hooked import HookedModel
from attnbalance.progress import progress_bar
from attnbalance.seeds import check_seed

SHARE = 0.75
"""The share of replayed facts: of all training facts, or of each batch where they are held to the base."""

GENERATED = "generated"
"""The name of facts that the model generates itself."""

ASKED_FOR_EACH = 4
"""Facts that `replay` asks for each one that it adds: a model may know a quarter of them."""

ASKED_AT_LEAST = 500
"""Facts that `replay` asks at least: of a few facts of many relations no few-shot form can be asked."""


@expects(model=HookedModel, split=Split, facts=(FactSet, NoneType), objective=str)
def replay(
    model: HookedModel,
    split: Split,
    facts: FactSet | None = None,
    share: float = SHARE,
    *,
    objective: str = "ce",
    template: str | Template = "qa",
    batch_size: int = 64,
    seed: int = 0,
    progress: bool = False,
) -> tuple[Split, str]:
    """A split that also trains on other facts, and a sentence that says what was asked and found.

    If the objective, the one that will be trained on, keeps the base's answers (`kl`, `recommended`), these are all
    facts about other subjects, known or not: they are held to what the base says. `share` is then their share of each
    batch.

    Else their answers are learned, so they are facts that the model knows, and `share` is their share of all training
    facts. The model is asked `ASKED_FOR_EACH` times as many as this needs, at least `ASKED_AT_LEAST`, or all if there
    are fewer. `known_facts` and `with_replay` do this in two steps.

    Without `facts` the model generates as many as make up the share of all training facts (see `generated_facts`). They
    may be about held-out subjects: this is not a leak, since held-out facts that the model happens to generate are part
    of what it knows. The sentence says how many they are.

    The other arguments are those of `known_facts`. The errors are those of the functions named here.
    """
    settings = {"template": template, "batch_size": batch_size, "seed": check_seed(seed)}
    wanted, held = count_of(split, share), parse_objective(objective).keeps_answers
    if facts is None:
        given = FactSet(tuple(dict.fromkeys((*split.train, *split.validation))))  # without validation they are the same
        made = generated_facts(model, given, wanted, **settings, progress=progress)
        mixed = replace(split, replay=made, replay_share=share if held else None)
        return mixed, (
            f"Replay: {len(made)} facts that the model generated are added ({wanted} were wanted), "
            f"{replayed_heldout(mixed)} of them about held-out subjects."
        )
    if held:
        mixed = replace(split, replay=beside(split, facts), replay_share=share)
        left_out = len(facts) - len(mixed.replay)
        why = f" ({left_out} others are about subjects of the split)" if left_out else ""
        return mixed, (
            f"Replay: {share:.0%} of each batch are facts of {facts.name}, drawn from {len(mixed.replay)}{why}, which "
            "are held to what the model says."
        )
    others = beside(split, facts).sample(max(ASKED_FOR_EACH * wanted, ASKED_AT_LEAST), seed)
    known = known_facts(model, others, **settings, progress=progress)
    mixed = with_replay(split, known, share, seed=seed)
    added = f"{len(mixed.replay)} are added" + (f" ({wanted} were wanted)" if len(mixed.replay) < wanted else "")
    return mixed, f"Replay: the model knows {len(known)} of {len(others)} facts of {facts.name}; {added}."


def replayed_heldout(split: Split) -> int:
    """The number of replayed facts that are about held-out subjects: generated ones may be."""
    tested = {subject_key(fact.subject) for fact in split.heldout}
    return sum(subject_key(fact.subject) in tested for fact in split.replay)


@expects(model=HookedModel, facts=FactSet)
def known_facts(
    model: HookedModel,
    facts: FactSet,
    *,
    template: str | Template = "qa",
    batch_size: int = 64,
    seed: int = 0,
    progress: bool = False,
) -> FactSet:
    """The facts whose first answer the model completes, asked in the form that suits their relation best.

    An answer is completed if each of its tokens is the most probable one after the right ones before it. The form is
    chosen for each relation from at most 50 of its facts (see `rate_forms`). Lucky guesses count as known.

    Args:
        model: The model that is going to be finetuned.
        facts: Facts of which it may know some.
        template: Name or text of the questions' template (see `Template`).
        batch_size: Prompts of one forward pass.
        seed: Seed of the few shots.
        progress: Whether to draw a progress bar.

    Raises `BadRowsError` for facts that cannot be asked; `DataError` if none is known.
    """
    examples = examples_of(PromptSet.of(make_prompts(facts, template), model.tokenizer), model.tokenizer)
    check_seed(seed)
    forms, known = rate_forms(examples, model, batch_size, seed, progress), set[int]()
    with progress_bar("what is known", total=len(facts), unit="fact", shown=progress) as bar:
        for relation, rated in forms.items():
            own = facts.of_relations([relation])
            prompts = in_form(rated.form, make_prompts(own, template), seed)
            asked = examples_of(prompts, model.tokenizer, end=False, max_positions=model.max_positions)
            hits = completions(asked, model, batch_size)
            known |= {id(fact) for fact, hit in zip(own, hits, strict=True) if hit}
            bar.update(len(own))
    if not known:
        raise DataError(
            f"the model completes none of the {len(facts)} facts; replay facts of relations that it knows "
            "(`attnbalance knowledge` shows which), or hold any facts to what it says (objective `recommended`)"
        )
    return facts.where(lambda fact: id(fact) in known)


@expects(split=Split, facts=FactSet)
def with_replay(split: Split, facts: FactSet, share: float = SHARE, *, seed: int = 0) -> Split:
    """A split that also trains on other facts, drawn so that they are a share of all its training facts.

    Facts about a subject that the split trains, validates or tests on are left out, even if the subject is spelled in
    another case, with an article, without accents, or with other punctuation or spaces. Facts of the half that the
    split leaves out may be drawn. If there are fewer facts than the share asks for, all are taken. Raises `DataError`
    for a share outside (0, 1), and if no fact is left.
    """
    return replace(split, replay=beside(split, facts).sample(count_of(split, share), seed), replay_share=None)


def beside(split: Split, facts: FactSet) -> FactSet:
    """The facts about no subject of a split, however spelled; raises `DataError` where none is left."""
    subjects = {subject_key(fact.subject) for part in (split.train, split.validation, split.heldout) for fact in part}
    others = facts.where(lambda fact: subject_key(fact.subject) not in subjects)
    if not len(others):
        raise DataError(f"all {len(facts)} facts of {facts.name} are about subjects of the split; replay needs others")
    return others


def count_of(split: Split, share: float) -> int:
    """The number of replayed facts that are a share of all training facts; raises `DataError` outside (0, 1)."""
    if not 0 < share < 1:
        raise DataError(f"the share of replay must be above 0 and below 1, got {share}")
    return max(1, round(share / (1 - share) * len(split.train)))


def check_replay(settings: FinetuneSettings, *, held: bool = False) -> None:
    """Raise `DataError` for settings that do not go with replay.

    A curriculum ranks facts, and replayed ones may come from another source. An objective must learn the answers given:
    what it holds to the base are the replayed facts alone. If these are a share of each batch (`held`), it must hold
    them: their labels are not to be learned, since the model need not know them.
    """
    objective = parse_objective(settings.objective)
    if held and not objective.keeps_answers:
        raise DataError(
            f"the replayed facts are to be held to what the base says, which objective {objective.text!r} does not do; "
            "add kl(best) to it, or call `replay` with this objective"
        )
    if not objective.learns_answers:
        raise DataError(
            f"with replay, objective {objective.text!r} would learn nothing about the new facts; add ce to it, or "
            "replay nothing"
        )
    if settings.curriculum != "shuffled":
        raise DataError(
            f"curriculum {settings.curriculum} ranks facts by popularity, which facts of two sources do not share; "
            "leave it out, or replay nothing"
        )
