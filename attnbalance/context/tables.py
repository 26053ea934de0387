"""What models answer to conflicts: as a table in Markdown, as JSON, fact by fact, and in a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from attnbalance.readings.curves import Curve, layer_curve
from attnbalance.readings.mentions import CONTEXT_ANSWER, KINDS
from attnbalance.readings.reading import Reading
from attnbalance.readings.reliance import CONTEXT, MEMORY, SIDES, Reliance
from attnbalance.report.wording import markdown, percent, percent_interval, points
from attnbalance.statistics.intervals import Interval
from attnbalance.statistics.shares import gain_interval

CAPTION = """Conflicts: questions whose context gives another answer than memory. "from context": the output contains
the context's answer, as whole words; "from memory": it contains the remembered answer alone. "context's first": of both
answers, the context's comes first. "contains": the answer stands anywhere in the output, also inside a word; both may
(Goyal et al. 2024). "without context": what the same question alone gives; the context's answer there is a guess.
"of remembered": of the conflicts whose remembered answer the model gives without the context (their number in
parentheses), the share answered from the context. "M_C": p(context's answer) / (p(context's answer) + p(remembered
answer)), whole answers, mean over conflicts. "attention": share of the last token's attention on the context and on the
subject (or the whole question), mean over layers and heads. "attention: context's and remembered answer": the share on
all mentions of either answer in the context, in conflicts whose context says both (their number in parentheses); an
answer that is said more often, or takes more tokens, gets more. 95% intervals, clustered by subject."""

HEAD = (
    "model", "conflicts", "from context", "from memory", "neither", "context's first", "contains context's",
    "contains memory's", "from context, of remembered", "without context: memory", "without context: context's", "M_C",
    "attention: context", "attention: subject", "attention: context's and remembered answer",
)  # fmt: skip


def table(measured: Mapping[str, Reliance], seed: int = 0) -> str:
    """One row for each model; `seed` is that of the intervals of M_C."""
    return f"{markdown([HEAD, *(_row(*pair, seed) for pair in measured.items())])}\n\n{CAPTION}\n"


def answer(measured: Mapping[str, Reliance]) -> str:
    """How often each model answers from the context, and how far each further one differs from the first."""
    first, *others = measured
    sentences = [_sentence(*pair) for pair in measured.items()]
    for label in others:
        gain = _gain(measured[first], measured[label])
        sentences.append(f"From the context: {label} {points(gain)} against {first}.")
    return " ".join(sentences)


def as_json(reliance: Reliance, seed: int = 0) -> dict[str, object]:
    """What one model answers, over all conflicts and over those that it remembers, for JSON."""
    remembering = reliance.remembering()
    return {
        "conflicts": len(reliance.prompts),
        **_shares(reliance, seed),
        "without_context": {MEMORY: reliance.remembered().as_dict(), CONTEXT: reliance.guessed().as_dict()},
        "remembered": remembering and {"conflicts": len(remembering.prompts), **_shares(remembering, seed)},
        "attention": {role: curve.as_dict() for role, curve in attention_curves(reliance, seed).items()},
    }


def attention_curves(reliance: Reliance, seed: int = 0) -> dict[str, Curve]:
    """By layer, the share of the last token's attention on each part of the prompt in `Reliance.attention`."""
    return {role: layer_curve(reading, seed=seed) for role, reading in reliance.attention.items()}


def lines(label: str, reliance: Reliance) -> Iterator[dict[str, object]]:
    """What a model answers to each conflict, as lines of answers.jsonl."""
    columns = {
        "output": reliance.outputs,
        "without_context": reliance.without,
        "from": reliance.sides,
        "first": reliance.first,
        "remembers": reliance.remembers,
        "log_odds": reliance.log_odds.tolist(),
    }
    for i, prompt in enumerate(reliance.prompts):
        yield {"model": label, **prompt.as_dict(), **{name: column[i] for name, column in columns.items()}}


def _shares(reliance: Reliance, seed: int) -> dict[str, object]:
    return {
        "from": {side: reliance.share(side).as_dict() for side in SIDES},
        "first": {side: reliance.first_share(side).as_dict() for side in SIDES},
        "contains": {CONTEXT: reliance.counterfactual().as_dict(), MEMORY: reliance.parametric().as_dict()},
        "m_c": reliance.m_c(seed).as_dict(),
    }


def _row(label: str, reliance: Reliance, seed: int) -> list[str]:
    remembering = reliance.remembering()
    known = f"{percent_interval(remembering.share(CONTEXT))} ({len(remembering.prompts)})" if remembering else "(0)"
    contains = [reliance.counterfactual(), reliance.parametric()]
    shares = [*map(reliance.share, SIDES), reliance.first_share(CONTEXT), *contains]
    alone = [reliance.remembered(), reliance.guessed()]
    attention = [*(percent(_mean(reliance.attention[role])) for role in (CONTEXT, "subject")), _on_answers(reliance)]
    counted = [*map(percent_interval, shares), known, *map(percent_interval, alone)]
    return [label, str(len(reliance.prompts)), *counted, _number(reliance.m_c(seed)), *attention]


def _number(interval: Interval) -> str:
    return str(interval).removesuffix(" (no interval)")


def _on_answers(reliance: Reliance) -> str:
    """The attention on both answers in the context, and the number of conflicts in which it is read."""
    if CONTEXT_ANSWER not in reliance.attention:
        return "(0)"
    own, remembered = (reliance.attention[kind] for kind in KINDS)
    return f"{percent(_mean(own))} and {percent(_mean(remembered))} ({len(own.prompt_ids)})"


def _mean(reading: Reading) -> float:
    return float(reading.values.double().mean())


def _sentence(label: str, reliance: Reliance) -> str:
    remembering, n = reliance.remembering(), len(reliance.prompts)
    text = (
        f"Of {n} conflicts {label} answers {percent_interval(reliance.share(CONTEXT))} from the context and "
        f"{percent_interval(reliance.share(MEMORY))} from memory"
    )
    if remembering is None:
        return f"{text}; without the context it remembers none of the answers."
    return (
        f"{text}; of the {len(remembering.prompts)} that it remembers without the context, "
        f"{percent_interval(remembering.share(CONTEXT))} from the context."
    )


def _gain(first: Reliance, other: Reliance) -> Interval:
    """The paired difference in the share answered from the context."""
    gained = [(b == CONTEXT) - (a == CONTEXT) for a, b in zip(first.sides, other.sides, strict=True)]
    return gain_interval(np.array(gained, dtype=int), [prompt.fact.composed_subject for prompt in first.prompts])
