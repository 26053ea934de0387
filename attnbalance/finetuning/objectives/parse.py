"""From an expression to an objective: looks its terms up in the registry."""

from __future__ import annotations

from attnbalance.arguments import expects
from attnbalance.errors import DataError
from attnbalance.finetuning.objectives.expression import WrittenTerm, parse_expression, unknown_term
from attnbalance.finetuning.objectives.gradients import PROJECT
from attnbalance.finetuning.objectives.objective import Objective, Term
from attnbalance.finetuning.objectives.registry import TERMS


@expects(text=str)
def parse_objective(text: str) -> Objective:
    """The objective of an expression such as "ce + 0.3*row-anchor(question) + 3*kl(statement)".

    Terms are joined by "+", each with an optional weight > 0 and "*", and an optional argument in brackets.
    "recommended" stands for `expression.RECOMMENDED`. Raises `DataError` for any other text, with the list of terms.

    >>> parse_objective("recommended + 0.5*floor").text
    'ce + kl(best) + 0.5*floor(0.5)'
    """
    terms = tuple(_term(written, text) for written in parse_expression(text).terms)
    keys = [term.key for term in terms]
    repeated = next((key for key in keys if keys.count(key) > 1), None)
    if repeated:
        raise DataError(f"objective {text!r} names {repeated} twice; give it one weight")
    if all(term.kind.loss is None for term in terms):
        raise DataError(f"objective {text!r} has no loss, only {keys[0]}, which changes gradients; add e.g. ce")
    return Objective(" + ".join(term.text for term in terms), terms)


def _term(written: WrittenTerm, text: str) -> Term:
    kind = TERMS.get(written.name)
    if kind is None:
        raise unknown_term(written.text, text)
    try:
        argument = kind.read_argument(written.argument)
    except ValueError:
        got = f"{written.name}({written.argument or ''})"
        raise DataError(f"objective {text!r}: expected {kind.usage}, got {got}") from None
    if kind is PROJECT and written.weight != 1:
        raise DataError(f"objective {text!r}: project removes a direction from gradients, and takes no weight")
    return Term(kind, argument, written.weight)
