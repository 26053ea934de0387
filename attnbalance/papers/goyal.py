"""Proposition 1 and Theorem 1 of Goyal et al. (2024) during training: context use rises, then falls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attnbalance.papers.figure import (
    Cell,
    CellResult,
    Claim,
    Panel,
    PaperFigure,
    Series,
    best_elsewhere,
    minus,
    over_seeds,
)
from attnbalance.papers.goyal_runs import (
    ARMS,
    ATTENTION_ONLY,
    AUGMENTED,
    DOUBLED,
    FILTERED,
    LIMITS,
    PLAIN,
    RATES,
    RECALLED,
    WEAK,
    WEAK_ATTENTION,
    run_proposition_1,
    run_theorem_1,
)
from attnbalance.theory.context_points import CRITICAL, OVERLAPPING

SCALES: Mapping[str, Mapping[str, float]] = {
    "small": {"points": 10, "tests": 10, "subjects": 60, "answers": 130, "steps": 400, "learning_rate": 1.5},
    "paper": {"points": 30, "tests": 20, "subjects": 170, "answers": 300, "steps": 1200, "learning_rate": 1.5},
}
"""`points` is the number of C, of C+S and of S points; the seed varies it and the number of answers slightly."""


LOST = "M_C at its peak minus end, minus 0.01"


def _cells(name: str, arms: Sequence[str]) -> Callable[[str, Sequence[int], str], list[Cell]]:
    def cells(scale: str, seeds: Sequence[int], facts: str) -> list[Cell]:
        return [
            Cell(f"{name}-{scale}-{arm.replace(' ', '-')}-{seed}", {"seed": seed, "arm": arm, **SCALES[scale]})
            for seed in seeds
            for arm in arms
        ]

    return cells


def _arm(results: Sequence[CellResult], arm: str) -> list[CellResult]:
    """An arm's results in the order of seeds."""
    chosen = [result for result in results if result.settings["arm"] == arm]
    return sorted(chosen, key=lambda result: result.settings["seed"])


def _line(label: str, results: Sequence[CellResult], name: str, *, shares: bool = True) -> Series:
    x = tuple(float(step) for step in results[0].values["steps"])
    return Series(label, x, over_seeds([result.values[name] for result in results], shares=shares))


def _turn(results: Sequence[CellResult], name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Each seed's gain up to the step that is best on average over the other seeds, and its loss after it."""
    rows = [result.values[name] for result in results]
    chosen = list(zip(rows, best_elsewhere(rows), strict=True))
    return tuple(row[k] - row[0] for row, k in chosen), tuple(row[k] - row[-1] for row, k in chosen)


def _proposition_1_panels(results: Sequence[CellResult]) -> list[Panel]:
    plain = _arm(results, PLAIN)
    attention = [_line(f"{name} points", plain, name) for name in ("test", CRITICAL, OVERLAPPING)]
    directions = (("contexts, theta_C", "theta_C"), ("subjects, theta_S", "theta_S"))
    pulls = [_line(label, plain, name, shares=False) for label, name in directions]
    panels = [
        Panel("Small steps: attention", "step", "attention on context", tuple(attention)),
        Panel("Small steps: pull", "step", "part of -gradient", tuple(pulls)),
    ]
    balances = [result.values["balance"] for result in plain if result.values["balance"] is not None]
    if balances:
        line = Series("contexts, theta_C", RATES, over_seeds(balances, shares=False))
        panels.append(Panel("After one step of a large rate", "learning rate / eta*", "pull, from -1 to 1", (line,)))
    return panels


def _proposition_1_claims(results: Sequence[CellResult]) -> list[Claim]:
    plain = _arm(results, PLAIN)
    rise, fall = _turn(plain, "test")
    start = tuple(min(result.values["theta_C"][0], -result.values["theta_S"][0]) for result in plain)
    low = tuple(-min(result.values["theta_C"]) for result in plain)
    overlapping = _turn(plain, OVERLAPPING)[1]
    large = tuple(-1.0 if result.values["balance"] is None else 1.0 for result in plain)
    pulls = "the lesser of theta_C's part of -gradient and minus theta_S's, at step 0"
    return [
        Claim("First phase: contexts gain score and subjects lose it", pulls, start),
        Claim("First phase: attention to the context rises", "test points, peak minus step 0", rise),
        Claim("Second phase: the gradient changes sign during small steps", "minus the minimum of theta_C's part", low),
        Claim("Second phase: attention to the context falls", "test points, peak minus end", fall),
        Claim(
            "Second phase: attention falls most in C+S points",
            "C+S minus test points, peak minus end",
            minus(overlapping, fall),
        ),
        Claim("One step at a rate eta* changes the sign", "1 if eta* exists, else -1", large),
    ]


def _theorem_1_panels(results: Sequence[CellResult]) -> list[Panel]:
    axes = (
        ("Knowledge conflicts", "M_C", "M_C", ARMS),
        ("Attention in conflicts", "attention on context", "attention", ARMS),
        ("Other settings of the theorem", "M_C", "M_C", LIMITS),
    )
    panels = []
    for title, y, name, arms in axes:
        present = [arm for arm in arms if _arm(results, arm)]
        panels.append(Panel(title, "step", y, tuple(_line(arm, _arm(results, arm), name) for arm in present)))
    return panels


def _theorem_1_claims(results: Sequence[CellResult]) -> list[Claim]:
    turns = {arm: _turn(_arm(results, arm), "M_C") for arm in (PLAIN, *LIMITS)}
    inverted = {arm: tuple(x - 0.01 for x in fall) for arm, (_, fall) in turns.items()}
    ends = {arm: [result.values["M_C"][-1] for result in _arm(results, arm)] for arm in ARMS + LIMITS}
    tops = {arm: [max(result.values["M_C"]) for result in _arm(results, arm)] for arm in (PLAIN, RECALLED)}
    compared = (
        ("Training attention only mitigates the inversion", ATTENTION_ONLY, PLAIN, ends),
        ("10% of counterfactual points mitigate the inversion", AUGMENTED, PLAIN, ends),
        ("Training on C points only mitigates the inversion", FILTERED, PLAIN, ends),
        ("S points lower M_C at the end", PLAIN, RECALLED, ends),
        ("S points lower the highest M_C", PLAIN, RECALLED, tops),
        ("Training attention only mitigates the inversion with weaker memory, too", WEAK_ATTENTION, WEAK, ends),
    )
    return [
        Claim("M_C rises at first", "plain: M_C at its peak minus step 0", turns[PLAIN][0]),
        Claim("Context-parametric inversion: M_C falls afterwards", f"plain: {LOST}", inverted[PLAIN]),
        *(
            Claim(
                says,
                f"{'highest M_C' if table is tops else 'M_C at the end'}: {better} minus {other}",
                minus(table[better], table[other]),
            )
            for says, better, other, table in compared
        ),
        Claim("Inversion with |D_C| = 2 |D_C+S|", f"{DOUBLED}: {LOST}", inverted[DOUBLED]),
        Claim("Inversion with weaker memory", f"{WEAK}: {LOST}", inverted[WEAK]),
    ]


_SOURCE = "Goyal et al. 2024, {}"

GOYAL_PROP1 = PaperFigure(
    name="goyal-prop1",
    source=_SOURCE.format("Proposition 1"),
    about=(
        "A simulation of the one-layer model with W_V frozen: about 10 C and 10 C+S points, 60 subjects and 130 to "
        "156 answers (30, 30, 170 and 300 to 360 at paper scale). Values and W_KQ are noisy; the assumptions have "
        "them equal. The proposition is about one step at the large rate eta*; this figure shows that step and "
        "hundreds of ordinary steps. theta_C and theta_S are the directions shared by all contexts and by all "
        "subjects."
    ),
    cells=_cells("goyal-prop1", (PLAIN,)),
    run=run_proposition_1,
    panels=_proposition_1_panels,
    claims=_proposition_1_claims,
)

GOYAL_THM1 = PaperFigure(
    name="goyal-thm1",
    source=_SOURCE.format("Theorem 1 and sections 4.2, 5"),
    about=(
        "M_C is the probability of the context's answer divided by that of the context's and the memorised answer, in "
        "conflicts between the two. A simulation of the one-layer model with the sizes of goyal-prop1; the test "
        "points are knowledge conflicts that share only the token r with training. Differences from the theorem: W_V "
        "learns too, at W_KQ's rate; steps are small; r gets a little attention, so that S points have an effect; and "
        "memory's lead over the context is 0.85 to 0.98 of the context's lead over chance, near the maximum that "
        "Proposition 1 allows (0.3 to 0.5 for weak memory). Mitigation is judged at the end; earlier, training "
        "attention only may be below plain."
    ),
    cells=_cells("goyal-thm1", ARMS + LIMITS),
    run=run_theorem_1,
    panels=_theorem_1_panels,
    claims=_theorem_1_claims,
)

FIGURES = (GOYAL_PROP1, GOYAL_THM1)
