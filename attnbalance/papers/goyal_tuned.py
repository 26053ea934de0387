"""Goyal et al. (2024), sections 2, 3 and 5: context reliance while a language model is tuned on instructions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from attnbalance.errors import ModelError
from attnbalance.papers.figure import (
    CellResult,
    Claim,
    Condition,
    Panel,
    PaperFigure,
    Series,
    best_elsewhere,
    minus,
    over_seeds,
)
from attnbalance.papers.finetuned import grid_condition, model_condition, tuned, untrained
from attnbalance.papers.instructed import (
    CRITICAL,
    QK,
    SWAPPED,
    UNNAMED,
    WHOLE,
    WITH_INPUT,
    instructed_cells,
    instructed_workload,
    run_instructed,
)
from attnbalance.readings.reliance import CONTEXT, MEMORY

LABELS = {
    WHOLE: "all instructions",
    UNNAMED: "those that name nothing tested",
    WITH_INPUT: "those with an input",
    CRITICAL: "context-critical ones",
    SWAPPED: "counterfactuals added",
    QK: "only W_Q and W_K trained",
}
"""The arms, in words."""

LEAST = 0.01
"""The smallest difference in a share of answers or of attention that counts: one percentage point."""

PARAMETERS = (6e9, 8e9)
"""What counts as a model of the paper's size."""


def _share(name: str) -> Callable[[Mapping[str, Any]], float]:
    """The function that takes what `_ask` gives to the mean of one of its numbers."""
    return lambda values: float(np.mean(values[name]))


def from_context(values: Mapping[str, Any]) -> float:
    """The share of outputs that take the answer from the context, by whole words."""
    return float(np.mean([side == CONTEXT for side in values["from"]]))


def from_memory(values: Mapping[str, Any]) -> float:
    """The share of outputs with the remembered answer alone, by whole words."""
    return float(np.mean([side == MEMORY for side in values["from"]]))


MEASURES = {
    "counterfactual accuracy": _share("counterfactual"),
    "parametric accuracy": _share("parametric"),
    "from the context": from_context,
    "from memory": from_memory,
    "attention to the context": _share("attention"),
    "M_C": _share("m_c"),
}
"""What is drawn along the steps: the paper's containment, ours by whole words, attention's mean over layers, M_C."""


def along(results: Sequence[CellResult], arm: str, measure: str) -> dict[int, list[float]]:
    """By step, a measure of each seed, in order of seeds; step 0 is the model before training.

    The learning rate of each seed is that with the lowest validation loss. Raises `ModelError` for seeds with
    checkpoints at different steps.
    """
    value, fits = MEASURES[measure], list(tuned(results, arm).values())
    if len({tuple(fit.values["steps"]) for fit in fits}) > 1:
        raise ModelError(f"the seeds of {LABELS[arm]} have checkpoints at different steps; give more instructions")
    columns = {0: [value(start) for start in untrained(results, "start")]}
    for i, step in enumerate(fits[0].values["steps"]):
        columns[step] = [value(fit.values["measured"][i]) for fit in fits]
    return columns


def rise_and_fall(columns: Mapping[int, Sequence[float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """For each seed, how much higher the peak is than the start, and than the end.

    The step of the peak is chosen on the other seeds, so that chance makes no peak.
    """
    rows = list(zip(*columns.values(), strict=True))
    peaks = [row[index] for row, index in zip(rows, best_elsewhere(rows), strict=True)]
    return minus(peaks, [row[0] for row in rows]), minus(peaks, [row[-1] for row in rows])


def _setting(results: Sequence[CellResult]) -> tuple[Condition, ...]:
    return (
        model_condition(results, "a base model of 7 billion parameters", *PARAMETERS),
        grid_condition(results, "LoRA of rank 128, up to 2 epochs of the instructions"),
    )


def _panels(arms: Sequence[str], measures: Sequence[str], results: Sequence[CellResult]) -> list[Panel]:
    panels = []
    for measure in measures:
        lines = []
        for arm in arms:
            columns = along(results, arm, measure)
            lines.append(Series(LABELS[arm], tuple(columns), over_seeds(list(zip(*columns.values(), strict=True)))))
        panels.append(Panel(measure, "steps", measure, tuple(lines)))
    return panels


def _inverts(results: Sequence[CellResult], arm: str, measure: str, place: str, printed: str) -> list[Claim]:
    """Two claims: the measure first rises, and then falls."""
    rise, fall = rise_and_fall(along(results, arm, measure))
    about: dict[str, Any] = {"place": place, "least": LEAST, "printed": printed, "setting": _setting(results)}
    of = "" if arm == WHOLE else f" ({LABELS[arm]})"
    return [
        Claim(f"{measure} first rises{of}", "peak minus start, the peak chosen on other seeds", rise, **about),
        Claim(f"{measure} then falls{of}", "peak minus end, the peak chosen on other seeds", fall, **about),
    ]


def _less_fall(results: Sequence[CellResult], arm: str, against: str, place: str, printed: str) -> Claim:
    """The fall of counterfactual accuracy is smaller in an arm than in another."""
    falls = [rise_and_fall(along(results, name, "counterfactual accuracy"))[1] for name in (against, arm)]
    return Claim(
        f"counterfactual accuracy falls less ({LABELS[arm]}) than with {LABELS[against]}",
        "difference of peak minus end",
        minus(*falls),
        place=place,
        least=LEAST,
        printed=printed,
        setting=_setting(results),
    )


def _higher_end(results: Sequence[CellResult], arm: str, place: str, printed: str) -> Claim:
    """Counterfactual accuracy after training is higher in an arm than in plain tuning."""
    ends = [list(along(results, name, "counterfactual accuracy").values())[-1] for name in (arm, WHOLE)]
    return Claim(
        f"counterfactual accuracy ends higher ({LABELS[arm]}) than with {LABELS[WHOLE]}",
        "difference after the last step",
        minus(*ends),
        place=place,
        least=LEAST,
        printed=printed,
        setting=_setting(results),
    )


def _claims_2(results: Sequence[CellResult]) -> list[Claim]:
    own = _inverts(results, WHOLE, "from the context", "", "")
    return [*_inverts(results, WHOLE, "counterfactual accuracy", "Figure 2(c)", "40% to almost 90%, then down"), *own]


def _claims_3(results: Sequence[CellResult]) -> list[Claim]:
    return _inverts(results, WHOLE, "attention to the context", "Figure 3(b)", "rises and falls")


def _claims_4(results: Sequence[CellResult]) -> list[Claim]:
    return [
        _inverts(results, UNNAMED, "counterfactual accuracy", "Figure 4(a)", "a drop, as without the filter")[1],
        _inverts(results, WITH_INPUT, "counterfactual accuracy", "Figure 4(b)", "a drop")[1],
        _less_fall(results, CRITICAL, WITH_INPUT, "Figure 4(b)", "barely drops"),
    ]


def _claims_4c(results: Sequence[CellResult]) -> list[Claim]:
    return [
        _inverts(results, WHOLE, "counterfactual accuracy", "Figure 4(c)", "rises, then a drop")[1],
        _less_fall(results, CRITICAL, WHOLE, "Figure 4(c)", "no drop"),
    ]


def _claims_5(results: Sequence[CellResult]) -> list[Claim]:
    return [
        _higher_end(results, SWAPPED, "Figure 5(a)", "a notable improvement on data like the added"),
        _higher_end(results, QK, "Figure 5(c)", "counterfactual gains"),
    ]


_ABOUT = (
    "A real language model (--model) is tuned on instructions ({given}; only outputs carry loss) and asked, before and "
    "at each checkpoint, about knowledge conflicts (--conflicts) in the same form. "
    "Counterfactual accuracy: the output contains the context's answer; parametric: it contains the remembered one "
    "(which stands in most of the authors' contexts too). 'From the context' and 'from memory' count whole words, as "
    "`attnbalance context` does. At paper scale the learning rate of each arm and seed, 1e-5 or 1e-4, is that with the "
    "lowest loss on validation instructions (the paper: by benchmarks). The peak's step is chosen on the other seeds. "
    "Departures: the prompts lack Alpaca's first sentence; the paper prints no batch size; conflicts too long for the "
    "model are left out. {about} At small scale 1,000 instructions and 40 conflicts are drawn for each seed, "
    "instructions of more than 160 tokens are left out, and LoRA of rank 16 is trained for 24 steps of 8 at 1e-3."
)
_FILTERS = (
    "Names that are left out are the tested answers, and the subjects where the conflicts name them. Context-critical: "
    "the three quarters of the instructions with an input whose output costs the base most without it; the others with "
    "an input stand beside."
)
_SQUAD = (
    "SQuAD's questions have the form of instructions with an input: the context, which holds the answer. "
    "Context-critical: the three quarters of them whose answer costs the base most without the context."
)
_MITIGATION = (
    "For each ten instructions, one question of --facts is added whose context states another fact's answer, about "
    "nothing that is tested (the paper swaps entities in passages of Natural Questions)."
)


_GIVEN_BY = {"instructions": "--instructions, with Alpaca's columns", "squad": "--squad"}


def _figure(
    name: str,
    number: str,
    about: str,
    arms: Sequence[str],
    measures: Sequence[str],
    claims: Callable[[Sequence[CellResult]], list[Claim]],
    trained_on: str = "instructions",
) -> PaperFigure:
    return PaperFigure(
        name,
        "Goyal et al. 2024",
        number,
        " ".join(_ABOUT.format(about=about, given=_GIVEN_BY[trained_on]).split()),
        partial(instructed_cells, arms, trained_on=trained_on),
        run_instructed,
        partial(_panels, arms, measures),
        claims,
        needs=("model", trained_on, "conflicts"),
        workload=instructed_workload,
    )


FILTERS, ACCURACY = (WHOLE, UNNAMED, WITH_INPUT, CRITICAL), ("counterfactual accuracy",)

FIGURES = (
    _figure("goyal-fig2", "Figure 2", "", (WHOLE,), tuple(MEASURES)[:4], _claims_2),
    _figure("goyal-fig3", "Figure 3(b)", "", (WHOLE,), ("attention to the context", "M_C"), _claims_3),
    _figure("goyal-fig4", "Figure 4(a), (b)", _FILTERS, FILTERS, ACCURACY, _claims_4),
    _figure("goyal-fig4c", "Figure 4(c)", _SQUAD, (WHOLE, CRITICAL), ACCURACY, _claims_4c, trained_on="squad"),
    _figure("goyal-fig5", "Figure 5", _MITIGATION, (WHOLE, SWAPPED, QK), ACCURACY, _claims_5),
)
