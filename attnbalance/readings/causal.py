"""Causal checks: does an answer come back with attention raised, or with another model's rows or weights put in?"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from attnbalance.errors import BadRowsError, DataError
from attnbalance.models.edits import Edit, Span, boost, random_tokens, rows_of_model, tokens_of
from attnbalance.models.hooked import HookedModel
from attnbalance.models.parts import changed_parts, check_shapes, transplants, weight_parts
from attnbalance.prompts import Prompt
from attnbalance.readings.intervals import Interval, share_interval
from attnbalance.readings.recall import NEW_TOKENS, PairedAccuracy, Recall, compare_accuracy, recall
from attnbalance.tokens import check_lengths, encode

ALPHAS = (0.25, 2.0, 4.0, 8.0, 16.0)
"""Factors by which attention to a span is multiplied, before the row is made to sum to what it did."""

STRENGTH = 4.0
"""The factor at which rescue is reported: fixed beforehand, not the best of `ALPHAS`."""

BANDS = 4
"""Runs of layers whose rows are transplanted together, at most."""


WEIGHTS = {
    "attention": "W_Q and W_K",
    "values": "W_V and W_O",
    "mlp": "MLPs",
    "rest": "embeddings and norms",
}
"""How a report names the parts of the weights."""


@dataclass(frozen=True)
class Arm:
    """One causal check on a model: its name, what kind it is, and a function that asks the prompts under it.

    `kind` is "boost" (attention to the subject), "control" (attention to as many other tokens), "other subject" (see
    `with_other_subject`), "rows" or "weights" (taken from the other model). `alpha` is the factor of a boost, `control`
    the name of an earlier check to compare with.
    """

    name: str
    kind: str
    alpha: float | None
    ask: Callable[[], Recall]
    control: str | None = None


@dataclass(frozen=True)
class Rescue:
    """What a check brings back of the answers that a model lost, and what it costs.

    `rescued` is the share right under the check among the facts that the model gets wrong and the other one right,
    `broken` the share wrong under it among those that the model gets right. `net` compares the accuracy under the check
    with that without it, on all facts. `over_control` compares check and control on the lost facts alone, where
    there is a control. None where there are no such facts.
    """

    rescued: Interval | None
    broken: Interval | None
    net: PairedAccuracy
    over_control: PairedAccuracy | None


def rescue(plain: Recall, other: Recall, treated: Recall, control: Recall | None = None, *, seed: int = 0) -> Rescue:
    """Compare a model's answers with and without a check; `other` is the model that knew what this one lost.

    All recalls are of the same prompts. Raises `DataError` where they are not.
    """
    names = plain.prompt_ids
    right, knew, now = (dict(zip(r.prompt_ids, r.correct, strict=True)) for r in (plain, other, treated))
    if not set(names) == set(knew) == set(now):
        raise DataError("a rescue compares recalls of the same prompts")
    lost = [name for name in names if knew[name] and not right[name]]
    kept = [name for name in names if right[name]]
    subject = dict(zip(names, plain.subjects, strict=True))

    def share(some: Sequence[str], hit: bool) -> Interval | None:
        hits = [now[name] == hit for name in some]
        return share_interval(hits, [subject[name] for name in some], seed=seed) if some else None

    over = compare_accuracy(treated.at(lost), control.at(lost), seed) if control is not None and lost else None
    return Rescue(share(lost, True), share(kept, False), compare_accuracy(treated, plain, seed), over)


def steer_attention(
    model: HookedModel,
    prompts: Sequence[Prompt],
    alphas: Sequence[float] = ALPHAS,
    *,
    span: Span | None = None,
    heads: Mapping[int, Sequence[int]] | None = None,
    shortcuts: Mapping[str, Sequence[str]] | None = None,
    batch_size: int = 64,
) -> dict[float, Recall]:
    """The recall of every prompt under each factor on attention to a span (default: the subject); see `edits.boost`.

    `heads` names the heads of each layer number that are meant, by default all. Raises as `recall` and `boost` do.
    """
    unknown = sorted(set(heads or ()) - set(model.layers))
    if unknown:
        raise DataError(f"{model.name} has no attention layer {unknown[0]}; it has {', '.join(map(str, model.layers))}")
    return {
        alpha: recall(model, prompts, shortcuts, batch_size=batch_size, edit=boost(alpha, span, heads))
        for alpha in alphas
    }


def arms(
    model: HookedModel,
    other: HookedModel,
    prompts: Sequence[Prompt],
    ask: Callable[[HookedModel, Sequence[Prompt], Edit | None], Recall],
    *,
    seed: int = 0,
) -> Iterator[Arm]:
    """All checks of a model against another checkpoint of the same shape, in the order in which a report tells them.

    `ask(model, prompts, edit)` gives the recall. Checks by rows and boosts are left out for models whose rows cannot be
    edited. Raises `ModelError` for models of different shapes.
    """
    check_shapes(model, other)
    if model.kernel == "sdpa":
        for alpha in ALPHAS:
            other_tokens, edit = f"attention to other tokens x{alpha:g}", boost(alpha, random_tokens(seed))
            yield Arm(other_tokens, "control", alpha, _later(ask, model, prompts, edit))
            name = f"attention to the subject x{alpha:g}"
            yield Arm(name, "boost", alpha, _later(ask, model, prompts, boost(alpha)), other_tokens)
        two = with_other_subject(prompts, seed)
        if two and _fit(model, two):
            first = "another subject before the question"
            yield Arm(first, "other subject", None, _later(ask, model, two, None))
            stranger, own = (f"{first}, attention to {one} x{STRENGTH:g}" for one in ("it", "the asked one"))
            edits = (boost(STRENGTH, tokens_of(role)) for role in ("other", "subject"))
            for name, edit, control in zip((stranger, own), edits, (None, stranger), strict=True):
                yield Arm(name, "other subject", STRENGTH, _later(ask, model, two, edit), control)
        every = dict.fromkeys(model.layers)
        yield Arm("rows of all layers", "rows", None, _later(ask, model, prompts, rows_of_model(other, every)))
        for band in bands(model.layers):
            name = f"rows of layer {band[0]}" if len(band) == 1 else f"rows of layers {band[0]} to {band[-1]}"
            yield Arm(name, "rows", None, _later(ask, model, prompts, rows_of_model(other, dict.fromkeys(band))))
    masks = weight_parts(model)
    for part in changed_parts(model, other, masks):
        yield Arm(WEIGHTS[part], "weights", None, _hybrid(ask, model, other, prompts, masks, part))


def bands(layers: Sequence[int]) -> list[list[int]]:
    """The layers in at most `BANDS` runs of about equal length."""
    count = min(BANDS, len(layers))
    ends = [round(i * len(layers) / count) for i in range(count + 1)]
    return [list(layers[start:end]) for start, end in pairwise(ends)]


def with_other_subject(prompts: Sequence[Prompt], seed: int = 0) -> tuple[Prompt, ...]:
    """The prompts with the subject of another fact of the relation, and a full stop, before them: a role "other".

    Empty where that cannot be done for all: rendered chats, and relations with one subject.
    """
    subjects: dict[str, list[str]] = {}
    for prompt in prompts:
        subjects.setdefault(prompt.fact.relation, []).append(prompt.fact.subject)
    result = []
    for prompt in prompts:
        own = prompt.fact.subject
        strangers = [name for name in subjects[prompt.fact.relation] if name != own and name not in prompt.text]
        if not strangers or prompt.has_special_tokens:
            return ()
        name = random.Random(f"{seed} {prompt.prompt_id}").choice(strangers)  # noqa: S311
        shift = len(name) + 2
        spans = {role: (start + shift, end + shift) for role, (start, end) in prompt.spans.items()}
        spans["other"] = (0, len(name))
        result.append(Prompt(f"{name}. {prompt.text}", spans, prompt.prompt_id, prompt.fact))
    return tuple(result)


def _fit(model: HookedModel, prompts: Sequence[Prompt]) -> bool:
    """Whether prompts can be asked: tokenized, and short enough with an answer."""
    try:
        check_lengths(encode(prompts, model.tokenizer), model.max_positions, extra=NEW_TOKENS)
    except BadRowsError:
        return False
    return True


def _later(
    ask: Callable[[HookedModel, Sequence[Prompt], Edit | None], Recall],
    model: HookedModel,
    prompts: Sequence[Prompt],
    edit: Edit | None,
) -> Callable[[], Recall]:
    return lambda: ask(model, prompts, edit)


def _hybrid(
    ask: Callable[[HookedModel, Sequence[Prompt], Edit | None], Recall],
    model: HookedModel,
    other: HookedModel,
    prompts: Sequence[Prompt],
    masks: Mapping,
    part: str,
) -> Callable[[], Recall]:
    return lambda: ask(next(transplants(model, other, masks, [(part,)])), prompts, None)
