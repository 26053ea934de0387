"""Figures of Xu & Chen (2025): accuracy on facts not in finetuning, against K, beta, M and steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from attnbalance.papers import architectures
from attnbalance.papers.extraction import curve_name, run
from attnbalance.papers.figure import (
    Cell,
    CellResult,
    Claim,
    Panel,
    PaperFigure,
    Series,
    best_elsewhere,
    by_seed,
)
from attnbalance.papers.sources import Sources
from attnbalance.papers.xu_chen_setting import SIZES, UNNAMED, setting_of
from attnbalance.statistics.intervals import Interval, seed_interval

MODELS = ("one-layer", "GPT-2")

LEAST = 0.01
"""The smallest difference in accuracy that counts: one percentage point."""
PLACES = {"multiplicity": "Figures 2(a), 3(a)", "share": "Figures 2(a), 3(a)", "universe": "Figures 2(b), 3(b)"}
SWEPT = {"multiplicity": "multiplicity K", "share": "finetuning share beta", "universe": "universal phrases M"}


def _cell(scale: str, model: str, seed: int, **more: Any) -> Cell:
    sizes = SIZES[scale]
    settings = sizes["data"] | sizes[model] | {"architecture": model, "seed": seed} | more
    parts = [] if settings["pairs"] == sizes["data"]["pairs"] else [f"N{settings['pairs']}"]
    parts += [f"K{settings['multiplicity']}", f"M{settings['universe']}", f"steps{settings['tuning_steps']}"]
    parts += ["beta" + "-".join(f"{share:g}" for share in settings["shares"])]
    parts += ["-".join(settings["ranks"]).replace(" ", "")]
    return Cell(f"xu-chen-{scale}-{model}-{'-'.join(parts)}-{seed}", settings)


def figure_2_cells(scale: str, seeds: Sequence[int], sources: Sources) -> list[Cell]:
    """One cell per model, K, M and seed of the two sweeps, each of which finetunes on every share.

    GPT-2's second sweep of M follows, which finetunes on the centre's share only.
    """
    sizes = SIZES[scale]
    centre = {name: sizes["centre"][name] for name in ("multiplicity", "universe")}
    worlds = [centre | {name: value} for name in centre for value in sizes[name]]
    unique = list({tuple(world.items()): world for world in worlds}.values())
    more = {"shares": list(sizes["share"]), "ranks": ["full"]}
    cells = [_cell(scale, model, seed, **world, **more) for model in MODELS for world in unique for seed in seeds]
    second_sweep = sizes["harder"] | {"shares": [sizes["centre"]["share"]], "ranks": ["full"]}
    return cells + [
        _cell(scale, "GPT-2", seed, universe=M, **second_sweep) for M in sizes["universe"] for seed in seeds
    ]


def steps_cells(scale: str, seeds: Sequence[int], sources: Sources) -> list[Cell]:
    """One cell per model and seed at the centre of the sweeps, with long finetuning."""
    sizes, cells = SIZES[scale], []
    world = {name: sizes["centre"][name] for name in ("multiplicity", "universe")}
    for model in MODELS:
        ranks = ["full", "rank 1"] if model == "one-layer" else ["full"]
        more = {"shares": [sizes["centre"]["share"]], "ranks": ranks, "tuning_steps": sizes["long"][model]}
        cells += [_cell(scale, model, seed, **world, **more) for seed in seeds]
    return cells


def _best(result: CellResult, share: float, part: str = "test") -> float:
    """Accuracy at the finetuning step with the highest accuracy on all test questions."""
    curve = result.values[curve_name(share)]
    return curve[part][max(range(len(curve["test"])), key=lambda k: curve["test"][k])]


def _scale(results: Sequence[CellResult]) -> dict[str, Any]:
    """The sizes of the scale that the results were run at."""
    pairs = {result.settings["pairs"] for result in results}
    return next(sizes for sizes in SIZES.values() if sizes["data"]["pairs"] in pairs)


def _swept(
    results: Sequence[CellResult], model: str, name: str, value: float | int, part: str = "test"
) -> tuple[float, ...]:
    """Accuracy per seed if one of K, beta and M has this value and the others have the centre's."""
    sizes = _scale(results)
    where = sizes["centre"] | {"pairs": sizes["data"]["pairs"], name: value}
    share = where.pop("share")
    return by_seed(results, lambda result: _best(result, share, part), architecture=model, **where)


def _harder(results: Sequence[CellResult], universe: int, part: str = "test") -> tuple[float, ...]:
    """GPT-2's accuracy per seed at this value of M in its second sweep."""
    sizes = _scale(results)
    where = sizes["harder"] | {"universe": universe}
    return by_seed(results, lambda result: _best(result, sizes["centre"]["share"], part), architecture="GPT-2", **where)


def _lines(label: str, x_values: Sequence[float], value: Callable[[Any, str], Sequence[float]]) -> list[Series]:
    """Accuracy at each x, for all test questions, for frequent pairs and for rare pairs."""
    numbers = tuple(float(x) for x in x_values)
    return [
        Series(label + suffix, numbers, tuple(seed_interval(value(x, part)) for x in x_values))
        for part, suffix in (("test", ""), ("frequent", ", frequent"), ("rare", ", rare"))
    ]


def figure_2_panels(results: Sequence[CellResult]) -> list[Panel]:
    """Accuracy against K, beta and M: on all test questions, on frequent pairs and on rare pairs."""
    sizes, drawn = _scale(results), []
    for name, label in SWEPT.items():
        series: list[Series] = []
        for model in MODELS:
            swept = partial(_swept, results, model, name)
            series += _lines(model, sizes[name], swept)
        drawn.append(Panel(f"Accuracy against {label}", label, "accuracy", tuple(series), log=True))
    harder, label = sizes["harder"], SWEPT["universe"]
    title = f"Accuracy against {label}, K = {harder['multiplicity']}, {harder['pairs']} pairs"
    lines = _lines("GPT-2", sizes["universe"], partial(_harder, results))
    return [*drawn, Panel(title, label, "accuracy", tuple(lines), log=True)]


def figure_2_claims(results: Sequence[CellResult]) -> list[Claim]:
    """Three trends per model, and M's twice for GPT-2: accuracy at one end of a sweep minus that at the other."""
    sizes, claims = _scale(results), []

    def trend(says: str, name: str, swept: Callable[[Any], Sequence[float]], model: str, place: str = "") -> Claim:
        low, high = (swept(sizes[name][end]) for end in (0, -1))
        values = tuple((a - b) if name == "universe" else (b - a) for a, b in zip(low, high, strict=True))
        measured = f"difference between {sizes[name][0]:g} and {sizes[name][-1]:g}"
        return Claim(says, measured, values, place=place, least=LEAST, setting=setting_of(results, model))

    for model in MODELS:
        for name, label in SWEPT.items():
            verb = "falls" if name == "universe" else "rises"
            says = f"{model}: accuracy on pairs not finetuned {verb} with {label}"
            claims.append(trend(says, name, partial(_swept, results, model, name), model, PLACES[name]))
    harder = sizes["harder"]
    says = f"{claims[-1].says}, with K = {harder['multiplicity']} and {harder['pairs']} pairs"
    return [*claims, trend(says, "universe", partial(_harder, results), "GPT-2")]


def _curves(results: Sequence[CellResult]) -> dict[str, list[Mapping[str, Any]]]:
    """The accuracy curves of each model and rank, seed by seed."""
    share, curves = _scale(results)["centre"]["share"], {}
    for result in sorted(results, key=lambda result: result.settings["seed"]):
        for rank in result.settings["ranks"]:
            curves.setdefault(f"{result.settings['architecture']}, {rank}", []).append(
                result.values[curve_name(share, rank)]
            )
    return curves


def lost_by_the_end(curves: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """For each seed, accuracy at the step that is best for the other seeds, minus accuracy at the end."""
    rows = [curve["test"] for curve in curves]
    return tuple(row[k] - row[-1] for row, k in zip(rows, best_elsewhere(rows), strict=True))


def steps_panels(results: Sequence[CellResult]) -> list[Panel]:
    """Accuracy during finetuning, with one panel per model, since their steps are not comparable."""
    drawn = []
    for model in MODELS:
        series = []
        for label, curves in _curves(results).items():
            if label.startswith(model):
                steps = tuple(float(step) for step in curves[0]["steps"])
                y: tuple[Interval, ...] = tuple(
                    seed_interval([curve["test"][k] for curve in curves]) for k in range(len(steps))
                )
                series.append(Series(label, steps[1:], y[1:]))  # a logarithmic axis has no 0
        drawn.append(Panel(f"{model}: accuracy during finetuning", "step", "accuracy", tuple(series), log=True))
    return drawn


def steps_claims(results: Sequence[CellResult]) -> list[Claim]:
    """Much longer finetuning lowers accuracy; rank 1 extracts no less than full gradients."""
    curves = _curves(results)
    claims = [
        Claim(
            f"{label}: long finetuning lowers accuracy on pairs not finetuned",
            "best step minus end",
            lost_by_the_end(by_rank),
            place="Appendix D" if label == "one-layer, full" else "",
            least=LEAST,
            printed="may decrease" if label == "one-layer, full" else "",
            setting=(*setting_of(results, label.partition(",")[0]), UNNAMED),
        )
        for label, by_rank in curves.items()
    ]
    full, low = ([max(curve["test"]) for curve in curves[f"one-layer, {rank}"]] for rank in ("full", "rank 1"))
    values = tuple(b - a for a, b in zip(full, low, strict=True))
    says = "one-layer: rank-1 finetuning extracts at most 0.05 less than full finetuning"
    return [
        *claims,
        Claim(says, "rank 1 minus full, each at its best step", values, least=-0.05),
    ]


FIGURES = (
    PaperFigure(
        "xu-chen-fig2",
        "Xu & Chen 2025",
        "Figures 2 and 3",
        "Accuracy on questions about pairs that are not finetuned, against the multiplicity K, the share beta of "
        "frequent pairs in finetuning, and the number M of universal phrases; for the one-layer model and a GPT-2 "
        "without positions. Each value is the best of 25 to 35 evaluations during finetuning, chosen on these same "
        "questions, as in the paper; this favours curves that fluctuate. All shares are tested on the same questions. "
        "A rare pair's phrase is one of the universal ones; with its own phrase it is never extracted. GPT-2 sweeps M "
        "twice. The second sweep has K = 1, so that no other phrase compensates for one that finetuning does not "
        "cover, and more pairs, since with few pairs it extracts almost nothing at any M; it is an extension.",
        figure_2_cells,
        run,
        figure_2_panels,
        figure_2_claims,
    ),
    PaperFigure(
        "xu-chen-steps",
        "Xu & Chen 2025",
        "appendix D, Figure 6",
        "Accuracy on pairs not finetuned, during finetuning far beyond convergence of its loss. The best step is "
        "chosen on the other seeds, so that the choice does not bias the difference to the end. In the one-layer "
        "model, rates of 0.1 and 0.3 do not lower accuracy either; a rate of 1, above those of pretraining, lost one "
        "and three of 36 questions in 16000 steps on two other seeds.",
        steps_cells,
        run,
        steps_panels,
        steps_claims,
    ),
    architectures.TABLE_3,
)
