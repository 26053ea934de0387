"""An explanation as JSON, and as a Parquet table with one row for each question."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbalance.explanation.conclusions import TOP, CausalCheck, ChangeByCause, Explanation, FactChange, HiddenAnswers
from attnbalance.explanation.sentences import headline, left_out
from attnbalance.files.outputs import replacing
from attnbalance.models.weights import PARTS

if TYPE_CHECKING:
    import pyarrow as pa


def explanation_json(explanation: Explanation) -> dict[str, Any]:
    """The content of `explain.json`; intervals that are not known are null, logits are nats."""
    before, after = explanation.labels
    return {
        "before": before,
        "after": after,
        "answer": headline(explanation),
        "left_out": left_out(explanation),
        "scoring": scoring_of(explanation),
        "ambiguous": explanation.ambiguous,
        "settings": {name: list(values) for name, values in explanation.settings.items()},
        "groups": {name: _group(change) for name, change in explanation.groups.items()},
        "components": {part: dict(columns) for part, columns in explanation.components.items()},
        "edges": [
            {"layer": edge.layer, "attention": edge.by_attention.as_dict(), "readout": edge.by_readout.as_dict()}
            for edge in explanation.edges
        ],
        "checks": {label: [_check(check) for check in checks] for label, checks in explanation.checks.items()},
        "hidden": {label: _hidden(hidden) for label, hidden in explanation.hidden.items()},
        "examples": [example_json(explanation.facts[i], explanation.labels) for i in explanation.examples],
    }


def scoring_of(explanation: Explanation) -> str | None:
    """What made an answer right, one of `SCORINGS`."""
    asked = explanation.comparison[explanation.labels[0]].recall
    return asked and asked.scoring


def example_json(fact: FactChange, labels: tuple[str, str]) -> dict[str, Any]:
    """What became of one fact, as in `explain.json`; `labels` are those of the models before and after."""
    prompt, outputs = fact.prompt, [output.strip() for output in fact.outputs]
    return {
        "prompt_id": prompt.prompt_id,
        "text": prompt.text,
        "subject": prompt.fact.subject,
        "relation": prompt.fact.relation,
        "answers": list(prompt.fact.answers),
        "said": {label: list(pair) for label, pair in zip(labels, zip(outputs, fact.right, strict=True), strict=True)},
        "margin": list(fact.margin),
        "causes": {cause: fact.causes[cause] for cause in ("qk", "ov+mlp", "rest")},
        "readout_rank": dict(zip(labels, fact.readout_rank, strict=True)),
        "candidates": fact.candidates,
        "wrong_in": fact.wrong_in,
        "comes_back": list(fact.comes_back),
    }


def write_changes(explanation: Explanation, path: Path) -> None:
    """Write one row for each question: right or not, margins before and after, causes, readout ranks."""
    import pyarrow.parquet as pq

    with replacing(path) as temporary:
        pq.write_table(_changes(explanation.facts), temporary, compression="zstd")


def _changes(facts: tuple[FactChange, ...]) -> pa.Table:
    import pyarrow as pa

    def single(numbers: list[float]) -> pa.Array:
        return pa.array(numbers, pa.float32())

    columns: dict[str, Any] = {
        "prompt_id": [fact.prompt.prompt_id for fact in facts],
        "subject": [fact.prompt.fact.subject for fact in facts],
        "relation": [fact.prompt.fact.relation for fact in facts],
        "popularity": [fact.prompt.fact.popularity for fact in facts],
    }
    ends = list(enumerate(("before", "after")))
    columns |= {f"right_{name}": [fact.right[i] for fact in facts] for i, name in ends}
    columns |= {f"margin_{name}": single([fact.margin[i] for fact in facts]) for i, name in ends}
    columns |= {part: single([fact.causes[part] for fact in facts]) for part in PARTS}
    columns |= {f"readout_rank_{name}": [fact.readout_rank[i] for fact in facts] for i, name in ends}
    return pa.table(columns | {"candidates": [fact.candidates for fact in facts]})


def _group(change: ChangeByCause) -> dict[str, Any]:
    return {
        "n": change.n,
        "change": change.total.as_dict(),
        "causes": {cause: interval.as_dict() for cause, interval in change.causes.items()},
        "shares": {cause: interval.as_dict() for cause, interval in change.shares.items()},
    }


def _check(check: CausalCheck) -> dict[str, Any]:
    rescue, over_control = check.rescue, check.rescue.over_control
    return {
        "name": check.name,
        "kind": check.kind,
        "alpha": check.alpha,
        "accuracy": check.accuracy.mean,
        "rescued": None if rescue.rescued is None else rescue.rescued.as_dict(),
        "broken": None if rescue.broken is None else rescue.broken.as_dict(),
        "net": rescue.net.interval.as_dict() | {"p_value": rescue.net.p_value},
        "over_control": over_control and over_control.interval.as_dict() | {"p_value": over_control.p_value},
    }


def _hidden(hidden: HiddenAnswers | None) -> dict[str, Any] | None:
    if hidden is None:
        return None
    intervals = {"share": hidden.share, "control": hidden.control, "difference": hidden.difference}
    return {"wrong": hidden.wrong, "top": TOP, "chance": hidden.chance} | {
        name: interval.as_dict() for name, interval in intervals.items()
    }
