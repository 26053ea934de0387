"""Proposition 1 and Theorem 1 of Goyal et al. (2024) during training: context use rises, then falls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attnbalance.papers.figure import (
    Cell,
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
from attnbalance.papers.goyal_runs import (
    ARMS,
    AUGMENTED,
    DOUBLED,
    EXACT,
    FILTERED,
    LEADING,
    LIMITS,
    PLAIN,
    RATES,
    RECALLED,
    TRAINED,
    VALUES,
    WEAK,
    WEAK_VALUES,
    WORLDS,
    run_proposition_1,
    run_theorem_1,
)
from attnbalance.papers.sources import Sources
from attnbalance.theory.context_points import CRITICAL, OVERLAPPING

SCALES: Mapping[str, Mapping[str, float]] = {
    "tiny": {"points": 4, "tests": 4, "subjects": 30, "answers": 70, "steps": 20, "learning_rate": 1.5},
    "small": {"points": 10, "tests": 10, "subjects": 60, "answers": 130, "steps": 400, "learning_rate": 1.5},
    "paper": {"points": 30, "tests": 20, "subjects": 170, "answers": 300, "steps": 1200, "learning_rate": 1.5},
}
"""`points` is the number of C, of C+S and of S points; the seed varies it and the number of answers slightly."""


SMALL_AND_NOISY = (
    Condition("steps of at least eta*", "hundreds of small steps", met=False),
    Condition("Assumptions 5 and 6", "scores and values with noise", met=False),
)
"""Where the worlds of goyal-thm1 leave the setting of Theorem 1."""

LOST = "M_C at its peak minus end"
LEAST = 0.01
"""The smallest change of M_C that counts as an inversion."""


def _frozen(arm: str) -> Condition:
    """Whether an arm leaves W_V as it is."""
    trained = arm in TRAINED
    return Condition("W_V is frozen", "trained" if trained else "frozen", met=not trained)


def _cells(name: str, arms: Sequence[str]) -> Callable[[str, Sequence[int], Sources], list[Cell]]:
    def cells(scale: str, seeds: Sequence[int], sources: Sources) -> list[Cell]:
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
        Panel("Small steps: attention", "step", "attention on context", tuple(attention), log=True),
        Panel("Small steps: pull", "step", "part of -gradient", tuple(pulls), log=True),
    ]
    balances = [result.values["balance"] for result in plain if result.values["balance"] is not None]
    if balances:
        line = Series("contexts, theta_C", RATES, over_seeds(balances, shares=False))
        panels.append(Panel("After one step of a large rate", "learning rate / eta*", "pull, from -1 to 1", (line,)))
    return panels


def _proposition_1_claims(results: Sequence[CellResult]) -> list[Claim]:
    exact = _arm(results, EXACT)
    rise, fall = _turn(exact, "test")
    low = tuple(-min(result.values["theta_C"]) for result in exact)
    proposition = {"place": "Proposition 1", "setting": (_frozen(EXACT), _assumed(exact))}  # it states signs alone
    far = {"place": "Proposition 1", "setting": (_frozen(LEADING), _assumed(_arm(results, LEADING)))}
    theorem = {"place": "Theorem 1", "setting": (*proposition["setting"], *_theorem(exact))}
    small = {"place": "Section 4.2", "setting": proposition["setting"]}
    overlapping = _turn(exact, OVERLAPPING)[1]
    noisy = _arm(results, PLAIN)
    return [
        _first_phase("First phase: contexts gain score and subjects lose it", exact, **proposition),
        _first_phase("The same where memory leads the context by far", _arm(results, LEADING), **far),
        _second_phase("Second phase: after one step at a large rate, the reverse", exact, **proposition),
        _leap("One large step raises M_C in conflicts", exact, 1, **theorem),
        _leap("The second large step lowers M_C again", exact, -1, **theorem),
        Claim(
            "First phase, small steps: attention to the context rises",
            "test points, peak minus step 0",
            rise,
            least=LEAST,
            **small,
        ),
        Claim(
            "Second phase, small steps: the gradient changes sign",
            "minus the minimum of theta_C's part",
            low,
            **small,
        ),
        Claim(
            "Second phase, small steps: attention to the context falls",
            "test points, peak minus end",
            fall,
            least=LEAST,
            **small,
        ),
        Claim(
            "Second phase: attention falls most in C+S points",
            "C+S minus test points, peak minus end",
            minus(overlapping, fall),
        ),
        _first_phase("First phase in noisy worlds", noisy),
        _second_phase("Second phase in noisy worlds", noisy),
        _leap("In noisy worlds, one large step raises M_C in conflicts", noisy, 1),
        _leap("In noisy worlds, the second large step lowers M_C again", noisy, -1),
    ]


def _first_phase(says: str, runs: Sequence[CellResult], **more: Any) -> Claim:
    values = tuple(min(-on_subjects, on_contexts) for on_subjects, on_contexts in _phase(runs, 0))
    return Claim(says, "the lesser of theta_C's part of -gradient and minus theta_S's, at t = 0", values, **more)


def _second_phase(says: str, runs: Sequence[CellResult], **more: Any) -> Claim:
    signs = tuple(1.0 if on_subjects > 0 > on_contexts else -1.0 for on_subjects, on_contexts in _phase(runs, 1))
    measured = "1 if theta_S's part of -gradient is above 0 and theta_C's below, after a step of 1.01 eta*; else -1"
    return Claim(says, measured, signs, level=True, **more)


def _phase(runs: Sequence[CellResult], t: int) -> list[tuple[float, float]]:
    """theta_S's and theta_C's parts of -gradient at a timestep of Proposition 1, run by run."""
    return [tuple(result.values["phases"][t]) for result in runs]


def _leap(says: str, runs: Sequence[CellResult], sign: int, **more: Any) -> Claim:
    """M_C after one step of 2 eta*, against before (`sign` 1) or against after two (-1)."""
    leaps = [result.values["leap"] or [0.0] * 3 for result in runs]
    values = tuple(once - (before if sign > 0 else twice) for before, once, twice in leaps)
    return Claim(says, f"M_C after one step of 2 eta*, minus {'before' if sign > 0 else 'after two'}", values, **more)


def _assumed(runs: Sequence[CellResult]) -> Condition:
    """Whether all runs meet what the paper assumes."""
    failed = {name for result in runs for name, met in result.values["assumptions"].items() if not met}
    measured = f"not met: {'; '.join(sorted(failed))}" if failed else "met in all runs"
    return Condition("Assumptions 1 to 6, Definitions 2 and 3, |D_C| >= |D_C+S|", measured, met=not failed)


def _theorem(runs: Sequence[CellResult]) -> tuple[Condition, Condition]:
    """Whether the model remembers the conflicts' facts, which it then answers from memory, and whether eta* exists."""
    highest, without = max(result.values["M_C"] for result in runs), [not result.values["leap"] for result in runs]
    return (
        Condition(
            "the conflicts' facts are memorised", f"M_C before training at most {highest:.3g}", met=highest < 0.5
        ),
        Condition("eta* exists", f"in {without.count(False)} of {len(without)} runs", met=not any(without)),
    )


def _theorem_1_panels(results: Sequence[CellResult]) -> list[Panel]:
    axes = (
        ("Knowledge conflicts", "M_C", "M_C", ARMS),
        ("Attention in conflicts", "attention on context", "attention", ARMS),
        ("Other settings of the theorem", "M_C", "M_C", (PLAIN, *LIMITS)),
        ("W_V trained or frozen", "M_C", "M_C", (PLAIN, VALUES, WEAK, WEAK_VALUES)),
    )
    panels = []
    for title, y, name, arms in axes:
        present = [arm for arm in arms if _arm(results, arm)]
        lines = tuple(_line(arm, _arm(results, arm), name) for arm in present)
        panels.append(Panel(title, "step", y, lines, log=True))
    return panels


def _later(results: Sequence[CellResult], arm: str, reference: str) -> tuple[float, ...]:
    """An arm's mean M_C over the steps after the reference arm's peak, whose step is chosen on the other seeds."""
    peaks = best_elsewhere([result.values["M_C"] for result in _arm(results, reference)])
    means = []
    for result, k in zip(_arm(results, arm), peaks, strict=True):
        steps, row = result.values["steps"], result.values["M_C"]
        spans = [(steps[i] - steps[i - 1], row[i]) for i in range(k + 1, len(steps))]  # observed less often later on
        means.append(sum(span * value for span, value in spans) / (steps[-1] - steps[k]) if spans else row[-1])
    return tuple(means)


def _theorem_1_claims(results: Sequence[CellResult]) -> list[Claim]:
    present = (*ARMS, *LIMITS, *TRAINED)
    turns = {arm: _turn(_arm(results, arm), "M_C") for arm in (PLAIN, DOUBLED, WEAK, VALUES, WEAK_VALUES)}
    weak = (WEAK, WEAK_VALUES)
    later = {arm: _later(results, arm, WEAK if arm in weak else PLAIN) for arm in present}
    ends = {arm: [result.values["M_C"][-1] for result in _arm(results, arm)] for arm in present}

    def inversion(says: str, arm: str, **more: Any) -> Claim:
        return Claim(says, f"{arm}: {LOST}", turns[arm][1], least=LEAST, **more)

    theorem = {"place": "Theorem 1", "setting": (_frozen(PLAIN), *SMALL_AND_NOISY)}

    def compared(says: str, better: str, other: str, table: Mapping[str, Sequence[float]]) -> Claim:
        number = "M_C at the end" if table is ends else "mean M_C after the peak without the change"
        return Claim(says, f"{number}: {better} minus {other}", minus(table[better], table[other]), least=LEAST)

    return [
        Claim("M_C rises at first", "plain: M_C at its peak minus step 0", turns[PLAIN][0], least=LEAST, **theorem),
        inversion("Context-parametric inversion: M_C falls afterwards", PLAIN, **theorem),
        inversion("Inversion with |D_C| = 2 |D_C+S|", DOUBLED),
        inversion("Inversion with weaker memory", WEAK),
        compared("S points lower M_C at the end", PLAIN, RECALLED, ends),
        compared("Training on C points only mitigates the inversion", FILTERED, PLAIN, later),
        compared("10% of counterfactual points mitigate the inversion", AUGMENTED, PLAIN, later),
        inversion("Inversion if W_V learns too", VALUES),
        inversion("Inversion if W_V learns too, with weaker memory", WEAK_VALUES),
        compared("Training attention only mitigates the inversion", PLAIN, VALUES, later),
        compared("Training attention only mitigates the inversion with weaker memory, too", WEAK, WEAK_VALUES, later),
    ]


_PAPER = "Goyal et al. 2024"

GOYAL_PROP1 = PaperFigure(
    name="goyal-prop1",
    paper=_PAPER,
    number="Proposition 1 and Theorem 1",
    about=(
        "A simulation of the one-layer model with W_V frozen: about 10 C and 10 C+S points, 60 subjects and 130 to "
        "156 answers (30, 30, 170 and 300 to 360 at paper scale). The claims come first from worlds whose values and "
        "scores are as alike as the paper assumes, then, as an extension, from worlds in which they are noisy; the "
        "panels show the noisy ones. Lemma 6 lacks a condition: where memory leads the context by 2.5 to 3 times "
        "as much as the context leads chance, the first phase is reversed, although all that is printed is met. The "
        "proposition and the theorem are about one large step, of at least eta*, and the step after it; this figure "
        "shows these and hundreds of small steps. theta_C and theta_S are the directions shared by all contexts and by "
        "all subjects."
    ),
    cells=_cells("goyal-prop1", WORLDS),
    run=run_proposition_1,
    panels=_proposition_1_panels,
    claims=_proposition_1_claims,
)

GOYAL_THM1 = PaperFigure(
    name="goyal-thm1",
    paper=_PAPER,
    number="section 4.3",
    about=(
        "M_C is the probability of the context's answer divided by that of the context's and the memorised answer, in "
        "conflicts between the two. A simulation of the one-layer model with the sizes of goyal-prop1; the test "
        "points are knowledge conflicts that share only the token r with training. Steps are small, where the theorem "
        "takes one large step (see goyal-prop1); r gets a little attention, so that S points have an effect; and "
        "memory's lead over the context is 0.85 to 0.98 of the context's lead over chance (0.3 to 0.5 for weak "
        "memory). Each point moves the weights as far in every arm. The claims about S points at the end, filters, "
        "counterfactuals and trained values are ours: the paper states the first for one gradient (Proposition 2), the "
        "others for language models (sections 3.4 and 5)."
    ),
    cells=_cells("goyal-thm1", ARMS + LIMITS + TRAINED),
    run=run_theorem_1,
    panels=_theorem_1_panels,
    claims=_theorem_1_claims,
)

FIGURES = (GOYAL_PROP1, GOYAL_THM1)
