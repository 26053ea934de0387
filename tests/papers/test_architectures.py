"""Table 3 of Xu & Chen (2025): the values of its cells and the verdicts on its claims."""

from __future__ import annotations

import pytest

from attnbalance.papers.architectures import FEW, NAMES, NOISY, TABLE_3, run
from attnbalance.papers.figure import CellResult
from attnbalance.papers.sources import Sources


def test_every_architecture_gives_its_loss_above_the_entropy() -> None:
    sizes = {"pairs": 4, "universe": 5, "seed": 0, "tuning_steps": 2, "tuning_rate": 1e-3}
    standard = sizes | {"d_model": 8, "rate": 1e-2, "steps": 3}
    simplified = sizes | {"neurons": 2, "scale_factor": 2.0, "spread": 0.1}
    simplified |= {"rates": [0.1, 0.1, 0.1], "stage_steps": [1, 1, 1]}
    for name in NAMES:
        part = simplified if name.startswith("simplified") else standard
        values = run(part | {"architecture": name, "context": name in NOISY})
        assert values["entropy"] == pytest.approx(0.8047, abs=1e-4)
        assert values["loss"] > values["entropy"]
        assert 0 <= values["accuracy"] <= 1


def test_table_3_is_judged_from_its_losses() -> None:
    results = []
    for cell in TABLE_3.cells("small", (0, 1), Sources()):
        name = cell.settings["architecture"]
        loss = {"attention only": 3.0, "simplified": 0.83, "attention only, no values": 5.32}.get(name, 0.81)
        accuracy = 0.5 if name == FEW else 1.0
        results.append(CellResult(cell.settings, {"entropy": 0.8, "tokens": 207, "loss": loss, "accuracy": accuracy}))
    claims = TABLE_3.claims(results)
    expected = ["seen", "seen", "seen", "seen", "absent", "seen", "seen", "seen", "absent", "opposite"]
    expected += ["opposite", "absent", "seen", "seen"]
    assert [claim.verdict for claim in claims] == expected
    assert claims[-1].values == pytest.approx((0.5, 0.5))
    assert not any(claim.scored for claim in claims)  # the paper's sizes cannot be read
    assert [len(panel.series) for panel in TABLE_3.panels(results)] == [2, 2]


def test_few_pairs_share_more_phrases_and_so_do_those_with_the_context_token() -> None:
    for scale in ("small", "paper"):
        for cell in TABLE_3.cells(scale, (0,), Sources()):
            settings = cell.settings
            few = settings["context"] or settings["architecture"] == FEW
            assert settings["universe"] == (10 if few else 5), cell.name
