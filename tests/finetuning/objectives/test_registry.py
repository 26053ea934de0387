"""The registry of terms."""

from __future__ import annotations

from attnbalance.finetuning.objectives.registry import TERMS


def test_each_kind_says_what_it_does() -> None:
    def named(wanted: str) -> set[str]:
        return {name for name, kind in TERMS.items() if getattr(kind, wanted)}

    assert named("by_token") == {"ce", "kl", "weighted-ce"}
    assert named("make_targets") == {"kl", "state-anchor", "row-anchor", "weighted-ce"}
    assert named("learns_answers") == {"ce", "weighted-ce"}
    assert set(TERMS) - named("loss") == {"project", "weight-anchor"}
    assert all(name == kind.name for name, kind in TERMS.items())
