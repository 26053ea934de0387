"""Forward passes as terms see them."""

from __future__ import annotations

import pytest
import torch
from objective_oracle import (
    hand_rows,
    losses,
    made,
)

from attnbalance.errors import ModelError


def test_shares_by_hand() -> None:
    forward_pass = made(hand_rows())
    expected = {
        "subject": [[[0.1, 0.3], [0.8, 0.6]], [[0.2, 0.2], [0.6, 0.4]]],
        "relation": [[[0.6, 0.2], [0.1, 0.0]], [[0.4, 0.4], [0.3, 0.5]]],
    }
    for role, numbers in expected.items():
        torch.testing.assert_close(forward_pass.share(role), torch.tensor(numbers))


def test_rows_and_states_that_were_not_asked_for_are_named() -> None:
    with pytest.raises(ModelError, match="needs attention rows, and the forward pass gave none"):
        losses("floor", made())
    with pytest.raises(ModelError, match="needs the residual stream, and the forward pass gave none"):
        losses("state-anchor", made(targets={"state-anchor(statement)": torch.zeros(2, 2, 2)}))
