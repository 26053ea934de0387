"""Causal checks: whether an answer comes back with raised attention, or with another model's rows or weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from types import NoneType

from attnbalance.arguments import expects
from attnbalance.data.batches import check_lengths
from attnbalance.data.facts import Fact
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt
from attnbalance.errors import BadRowsError, DataError
from attnbalance.models.hooked import HookedModel
from attnbalance.models.interventions import Edit, Heads, Span, boost_attention, patch_rows, random_tokens, tokens_of
from attnbalance.models.weights import changed_parts, check_shapes, transplants, weight_parts
from attnbalance.readings.paired_accuracy import PairedAccuracy, compare_accuracy
from attnbalance.readings.recall import Recall, answer_budgets, recall
from attnbalance.seeds import check_seed
from attnbalance.statistics.intervals import Interval
from attnbalance.statistics.shares import share_interval

ALPHAS = (0.25, 2.0, 4.0, 8.0, 16.0)
"""Factors by which attention to a span is multiplied, before the row is rescaled to its former sum."""

STRENGTH = 4.0
"""The factor at which rescue is reported: fixed in advance, not the best of `ALPHAS`."""

BANDS = 4
"""Largest number of runs of layers whose rows are transplanted together."""

WEIGHTS = {
    "qk": "W_Q and W_K",
    "ov": "W_V and W_O",
    "mlp": "MLPs",
    "rest": "embeddings, norms and configuration",
}
"""The parts of the weights, as reports name them."""

Ask = Callable[[HookedModel, Sequence[Prompt], Edit | None], Recall]
"""Asks a model some prompts under an edit."""


@dataclass(frozen=True)
class Treatment:
    """One causal check of a model, not yet carried out.

    Attributes:
        name: Names the check in reports.
        kind: "boost" (attention to the subject), "control" (attention to equally many other tokens), "other subject"
            (see `with_other_subject`), "rows" or "weights" (taken from the other model).
        alpha: The factor on attention, if there is one.
        ask: Asks the prompts under the treatment.
        control: The name of an earlier treatment to compare with.
    """

    name: str
    kind: str
    alpha: float | None
    ask: Callable[[], Recall]
    control: str | None = None


@dataclass(frozen=True)
class Rescue:
    """The share of lost answers that a check brings back, and what it costs.

    Attributes:
        rescued: Among facts that the model gets wrong and the other one right: the share right under the check. None
            without such facts.
        broken: Among facts that the model gets right: the share wrong under the check. None without such facts.
        net: Accuracy under the check minus accuracy without it, on all facts.
        over_control: Accuracy under the check minus accuracy under its control, on the lost facts alone. None without
            a control or lost facts.
    """

    rescued: Interval | None
    broken: Interval | None
    net: PairedAccuracy
    over_control: PairedAccuracy | None


@expects(plain=Recall, other=Recall, treated=Recall, control=(Recall, NoneType))
def rescue(plain: Recall, other: Recall, treated: Recall, control: Recall | None = None) -> Rescue:
    """Compare a model's answers with and without a check.

    Args:
        plain: The model's answers without the check.
        other: The answers of the model that knew what this one lost.
        treated: The model's answers under the check.
        control: The model's answers under the check's control.

    Raises `DataError` if the recalls are of different prompts or scorings.
    """
    names = plain.prompt_ids
    right, knew, now = (dict(zip(r.prompt_ids, r.correct, strict=True)) for r in (plain, other, treated))
    if not set(names) == set(knew) == set(now):
        raise DataError("rescue() needs recalls of the same prompts")
    if len({recall.scoring for recall in (plain, other, treated)}) > 1:
        raise DataError("rescue() needs recalls of one scoring; choose one with `Recall.by`")
    lost = [name for name in names if knew[name] and not right[name]]
    kept = [name for name in names if right[name]]
    subject = dict(zip(names, plain.subjects, strict=True))

    def share(prompts: Sequence[str], right_now: bool) -> Interval | None:
        hits = [now[name] == right_now for name in prompts]
        return share_interval(hits, [subject[name] for name in prompts]) if prompts else None

    over = compare_accuracy(treated.at(lost), control.at(lost)) if control is not None and lost else None
    return Rescue(share(lost, True), share(kept, False), compare_accuracy(treated, plain), over)


@expects(model=HookedModel, prompts=[Prompt], alphas=[Real], shortcuts=({str: [str]}, NoneType))
def steer_attention(
    model: HookedModel,
    prompts: Sequence[Prompt],
    alphas: Sequence[float] = ALPHAS,
    *,
    span: Span | None = None,
    heads: Heads | None = None,
    shortcuts: Mapping[str, Sequence[str]] | None = None,
    batch_size: int = 64,
) -> dict[float, Recall]:
    """The recall of every prompt under each factor on attention to a span (see `boost_attention`).

    Args:
        model: The model to ask.
        prompts: The prompts, each with the span.
        alphas: The factors.
        span: The tokens whose attention is multiplied; by default the subject's.
        heads: The heads of each layer number to edit; by default all.
        shortcuts: See `recall`.
        batch_size: Prompts in a batch.

    Raises what `recall` and `boost_attention` raise.
    """
    prompts = PromptSet.of(prompts, model.tokenizer)
    return {
        alpha: recall(model, prompts, shortcuts, batch_size=batch_size, edit=boost_attention(alpha, span, heads))
        for alpha in alphas
    }


def treatments(
    model: HookedModel,
    other: HookedModel,
    prompts: Sequence[Prompt],
    ask: Ask,
    *,
    seed: int = 0,
) -> Iterator[Treatment]:
    """All checks of a model against another checkpoint of the same shape, in the order of the report.

    Models whose rows cannot be edited have only the checks by weights. Raises `ModelError` for models of different
    shapes.

    model: the model that is treated.
    other: the checkpoint that rows and weights are taken from.
    prompts: what is asked.
    ask: asks a model, under an edit or without one.
    seed: of the controls' tokens and the other subjects.
    """
    check_shapes(model, other)
    if model.editable:
        yield from _boosts(model, prompts, ask, seed)
        yield from _other_subjects(model, prompts, ask, seed)
        yield from _row_patches(model, other, prompts, ask)
    masks = weight_parts(model)
    for part in changed_parts(model, other, masks):
        yield Treatment(WEIGHTS[part], "weights", None, _hybrid(ask, model, other, prompts, masks, part))


def _boosts(model: HookedModel, prompts: Sequence[Prompt], ask: Ask, seed: int) -> Iterator[Treatment]:
    for alpha in ALPHAS:
        control, edit = f"attention to other tokens x{alpha:g}", boost_attention(alpha, random_tokens(seed))
        yield Treatment(control, "control", alpha, _later(ask, model, prompts, edit))
        name = f"attention to the subject x{alpha:g}"
        yield Treatment(name, "boost", alpha, _later(ask, model, prompts, boost_attention(alpha)), control)


def _other_subjects(model: HookedModel, prompts: Sequence[Prompt], ask: Ask, seed: int) -> Iterator[Treatment]:
    prefixed = _encoded(model, with_other_subject(prompts, seed))
    if not prefixed:
        return
    plain = "another subject before the question"
    yield Treatment(plain, "other subject", None, _later(ask, model, prefixed, None))
    other, asked = (f"{plain}, attention to {subject} x{STRENGTH:g}" for subject in ("it", "the asked one"))
    edits = (boost_attention(STRENGTH, tokens_of(role)) for role in ("other", "subject"))
    for name, edit, control in zip((other, asked), edits, (None, other), strict=True):
        yield Treatment(name, "other subject", STRENGTH, _later(ask, model, prefixed, edit), control)


def _row_patches(model: HookedModel, other: HookedModel, prompts: Sequence[Prompt], ask: Ask) -> Iterator[Treatment]:
    every = dict.fromkeys(model.layers)
    yield Treatment("rows of all layers", "rows", None, _later(ask, model, prompts, patch_rows(other, every)))
    for band in bands(model.layers):
        name = f"rows of layer {band[0]}" if len(band) == 1 else f"rows of layers {band[0]} to {band[-1]}"
        yield Treatment(name, "rows", None, _later(ask, model, prompts, patch_rows(other, dict.fromkeys(band))))


def bands(layers: Sequence[int]) -> list[list[int]]:
    """The layers in at most `BANDS` runs of about equal length.

    >>> bands(range(6))
    [[0, 1], [2], [3], [4, 5]]
    """
    count = min(BANDS, len(layers))
    ends = [round(i * len(layers) / count) for i in range(count + 1)]
    return [list(layers[start:end]) for start, end in pairwise(ends)]


def with_other_subject(prompts: Sequence[Prompt], seed: int = 0) -> tuple[Prompt, ...]:
    """The prompts, each preceded by the subject of another fact of the relation (role "other") and a full stop.

    Empty if that is impossible for one of them: in rendered chats, and in relations with one subject.
    """
    facts: dict[str, list[Fact]] = {}
    check_seed(seed)
    for prompt in prompts:
        facts.setdefault(prompt.fact.relation, []).append(prompt.fact)
    result = []
    for prompt in prompts:
        own = prompt.fact.composed_subject
        strangers = [
            fact.subject
            for fact in facts[prompt.fact.relation]
            if fact.composed_subject != own and fact.subject not in prompt.text
        ]
        if not strangers or prompt.has_special_tokens:
            return ()
        name = random.Random(f"{seed} {prompt.prompt_id}").choice(strangers)  # noqa: S311
        shift = len(name) + 2
        spans = {role: (start + shift, end + shift) for role, (start, end) in prompt.spans.items()}
        spans["other"] = (0, len(name))
        result.append(Prompt(f"{name}. {prompt.text}", spans, prompt.prompt_id, prompt.fact))
    return tuple(result)


def _encoded(model: HookedModel, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """The prompts with their tokens; empty if they cannot be tokenized or are, with an answer, too long."""
    try:
        encoded = PromptSet.of(prompts, model.tokenizer)
        check_lengths(encoded.encodings, model.max_positions, extra=answer_budgets(encoded))
    except BadRowsError:
        return ()
    return encoded


def _later(ask: Ask, model: HookedModel, prompts: Sequence[Prompt], edit: Edit | None) -> Callable[[], Recall]:
    return lambda: ask(model, prompts, edit)


def _hybrid(
    ask: Ask, model: HookedModel, other: HookedModel, prompts: Sequence[Prompt], masks: Mapping, part: str
) -> Callable[[], Recall]:
    """Asks a copy of `model` with one part of the weights, given by `masks`, taken from `other`."""
    return lambda: ask(next(transplants(model, other, masks, [(part,)])), prompts, None)
