"""Splits of facts for finetuning: by popularity, without a subject shared by training and held-out facts."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType

from attnbalance.arguments import expects
from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.scoring import is_match
from attnbalance.errors import DataError
from attnbalance.seeds import check_seed

SPLITS = ("top", "bottom", "random", "whole", "controlled-top", "controlled-bottom")
TIED = 0.1
"""The share of a half above which ties with facts outside it are warned of."""
CONTROLLED_RELATIONS = ("country", "sport", "occupation")


@dataclass(frozen=True)
class Split:
    """Facts to train on, to validate on and to test on.

    No subject is in two of these parts, unless the training facts are themselves validated on. Subjects are compared as
    they are written: "NOiSE" is not "Noise".
    """

    name: str
    """The kind of split, and what is unusual about it."""
    train: FactSet
    """Facts to train on."""
    validation: FactSet
    """Facts to validate on, drawn from the same half, or the training facts themselves."""
    heldout: FactSet
    """Facts to test on; may be empty."""
    left_out: int
    """The number of facts in none of these parts, e.g. the other half of the training facts."""
    replay: FactSet = field(default_factory=lambda: FactSet(()))
    """Facts that are trained on as well, so that the model keeps what it says of them (see `replay`)."""
    replay_share: float | None = None
    """The share of each batch that is drawn from the replayed facts; None: new and replayed facts are one pool."""

    def __post_init__(self) -> None:
        if self.replay_share is not None and not (0 < self.replay_share < 1 and len(self.replay)):
            raise DataError(
                "`replay_share` must be between 0 and 1, with at least one replayed fact, got "
                f"{self.replay_share} and {len(self.replay)} facts"
            )

    @property
    def parts(self) -> dict[str, FactSet]:
        """The parts by name; "replay" only where there are such facts."""
        parts = {"train": self.train, "validation": self.validation, "heldout": self.heldout}
        return parts | ({"replay": self.replay} if len(self.replay) else {})


@expects(
    facts=FactSet,
    name=str,
    heldout=(int, float),
    validation=(int, float),
    share=(int, float),
    train_relations=([str], NoneType),
)
def split_facts(
    facts: FactSet,
    name: str,
    *,
    heldout: float = 0.5,
    validation: float = 0.1,
    seed: int = 0,
    scores: Sequence[float] | None = None,
    share: float = 0.5,
    train_relations: Collection[str] | None = None,
    controlled_answers: Mapping[str, str] | None = None,
) -> Split:
    """Draw a split of one of the kinds of `SPLITS`; every kind has the same held-out subjects for the same seed.

    Some subjects are held out first. Of the facts about the others, "top" and "bottom" are the more and the less
    popular half (Ghosal et al. 2024, section 5.2: over all relations together), "random" a random half, "whole" all.
    Some of the half's subjects then become the validation part.

    "controlled-top" and "controlled-bottom" are PopQA-Controlled (section 5.1): of the relations country, sport and
    occupation, train only on facts whose answer is the relation's most frequent one, halved by popularity within each
    relation; the held-out facts are those for which it is wrong, by whole words. No subjects are held out
    first, but a training fact whose subject is also held out is left out. The paper names the three answers USA, soccer
    and actor; here they are counted, unless `controlled_answers` names them; PopQA's most frequent occupation is
    "politician".

    Raises `DataError` for an unknown kind, shares outside (0, 1), missing popularity, and an empty part.

    Args:
        facts: The facts to split.
        name: One of `SPLITS`.
        heldout: The share of the subjects that is held out, from 0 to below 1.
        validation: The share of the half's subjects that early stopping uses, from 0 to below 1. At 0 it uses the
            training facts themselves: the best checkpoint is the one that has learned them best.
        seed: Seed of all draws.
        scores: One for each fact, instead of popularity (see `rank_facts`). "random" and "whole" rank no facts, so they
            are the same with any scores.
        share: The share of a "half": 0.3 gives the top or bottom 30% (Figure 5).
        train_relations: The relations to train and validate on; None: all. The held-out facts keep all relations, and
            show what finetuning does to questions whose phrasing it did not cover (Xu & Chen 2025).
        controlled_answers: For a controlled split, the relations and the answer of each to train on. None: the most
            frequent answers to `CONTROLLED_RELATIONS`.
    """
    check_seed(seed)
    if name not in SPLITS:
        raise DataError(f"no split {name!r}; there are {', '.join(SPLITS)}")
    if not (0 <= heldout < 1 and 0 <= validation < 1 and 0 < share < 1):
        raise DataError(
            "`heldout`, `validation` and `share` must be shares between 0 and 1 (`share` above 0), got "
            f"{heldout}, {validation} and {share}"
        )
    if name == "whole" and share != 0.5:
        raise DataError(f"split whole takes all facts; use `share` {share:g} with top, bottom or random")
    if name.startswith("controlled-") and heldout != 0.5:
        raise DataError(f"split {name} holds out facts by their answers; leave `heldout` {heldout:g} out")
    if controlled_answers is not None and not name.startswith("controlled-"):
        raise DataError(f"`controlled_answers` are for controlled splits, got split {name!r}")
    if scores is not None and (len(scores) != len(facts) or not all(map(math.isfinite, scores))):
        raise DataError(f"`scores` must be one finite number for each fact, got {len(scores)} for {len(facts)} facts")
    if name not in ("random", "whole") and scores is None:
        _need_popularity(facts, name)
    ranks = dict(
        zip(map(id, facts), scores if scores is not None else [f.popularity or 0.0 for f in facts], strict=True)
    )
    if name.startswith("controlled-"):
        pool, test = _controlled(facts, controlled_answers)
        pool = pool if train_relations is None else pool.of_relations(train_relations)
        halves = [_half(pool.of_relations([relation]).facts, name, seed, ranks, share) for relation in pool.relations]
        chosen_set = replace(pool, facts=tuple(fact for half in halves for fact in half))
    else:
        test, pool = part_by_subject(facts, heldout, seed)
        pool = pool if train_relations is None else pool.of_relations(train_relations)
        chosen_set = replace(pool, facts=_half(pool.facts, name, seed, ranks, share))
    held_in, train = part_by_subject(chosen_set, validation, seed + 1)
    left_out = len(facts) - len(train) - len(held_in) - len(test)
    called = _called(name, share, train_relations)
    split = Split(called, train, held_in if validation else train, test, left_out)
    for part in ("train", "validation", "heldout"):
        if not len(getattr(split, part)) and (heldout or part != "heldout"):
            raise DataError(
                f"the {part} part of split {name!r} of {len(facts)} facts is empty; use more facts or other shares"
            )
    return split


def _called(name: str, share: float, relations: Collection[str] | None) -> str:
    """The split's name, with what is unusual about it."""
    part = "" if share == 0.5 or name == "whole" else f" {100 * share:g}%"
    return f"{name}{part}" + ("" if relations is None else f" of {', '.join(sorted(relations))}")


def _need_popularity(facts: FactSet, name: str) -> None:
    unknown = [fact for fact in facts if fact.popularity is None]
    if unknown:
        raise DataError(
            f"split {name!r} sorts by popularity, but {len(unknown)} of {len(facts)} facts have none "
            f"(first: {unknown[0].subject!r}); add a popularity column or use random or whole"
        )


def part_by_subject(facts: FactSet, share: float, seed: int) -> tuple[FactSet, FactSet]:
    """The facts of a random share of the subjects, and the rest."""
    subjects = sorted({fact.composed_subject for fact in facts})
    random.Random(seed).shuffle(subjects)  # noqa: S311
    apart = set(subjects[: max(1, round(share * len(subjects)))] if share else ())
    return facts.where(lambda fact: fact.composed_subject in apart), facts.where(
        lambda fact: fact.composed_subject not in apart
    )


def _half(facts: Sequence[Fact], name: str, seed: int, ranks: Mapping[int, float], share: float) -> tuple[Fact, ...]:
    """The half (or other share) of the facts that the split is named after; ties in rank are broken by random subject.

    Shares of at most a half of top and of bottom have no fact in common; of an odd number, top has the middle one.
    """
    if name == "whole":
        return tuple(facts)
    subjects = sorted({fact.subject for fact in facts})
    random.Random(seed + 2).shuffle(subjects)  # noqa: S311
    order = {subject: position for position, subject in enumerate(subjects)}

    def rank(i: int) -> tuple[float, int]:
        return 0.0 if name == "random" else -ranks[id(facts[i])], order[facts[i].subject]

    ranked, last = sorted(range(len(facts)), key=rank), name.endswith("bottom")
    exact = round(share * len(facts), 9)  # 0.07 * 100 is a little more than 7
    size = math.floor(exact) if last else math.ceil(exact)
    half, others = (ranked[len(facts) - size :], ranked[:-size]) if last else (ranked[:size], ranked[size:])
    if name != "random":
        warn_of_ties(f"split {name!r}", [ranks[id(facts[i])] for i in half], {ranks[id(facts[i])] for i in others})
    return tuple(facts[i] for i in sorted(half))


def warn_of_ties(what: str, half: Sequence[float], others: Collection[float]) -> None:
    """Warn where more than a share `TIED` of a half is as popular as facts outside it: these were drawn at random."""
    tied = sum(rank in others for rank in half)
    if tied > TIED * len(half):
        warnings.warn(
            f"{tied} of the {len(half)} facts of {what} are as popular as facts outside it, or rank alike: "
            "these were drawn at random",
            stacklevel=4,
        )


def _controlled(facts: FactSet, answers: Mapping[str, str] | None) -> tuple[FactSet, FactSet]:
    """Facts whose answer is the one of their relation, and facts for which it is wrong, by whole words."""
    some = facts.of_relations(CONTROLLED_RELATIONS if answers is None else list(answers))
    usual = {relation: given[0] for relation, given in some.most_frequent_answers().items()}
    taught = usual if answers is None else answers
    test = some.where(lambda fact: not is_match(taught[fact.relation], fact.answers))
    tested = {fact.composed_subject for fact in test}
    pool = some.where(lambda fact: fact.answer == taught[fact.relation] and fact.composed_subject not in tested)
    if missing := sorted(set(taught) - set(pool.relations)):
        raise DataError(f"no fact of relation {missing[0]!r} has the answer {taught[missing[0]]!r}")
    return pool, test
