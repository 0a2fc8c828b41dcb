"""Public names that changed keep working for one version, with a warning."""

from __future__ import annotations

import pytest
import torch

from uniprefill_fx import Calibration, LastCall


@pytest.mark.parametrize(
    "old, new",
    [("rows", "num_tokens"), ("kept", "kept_indices"), ("spans", "token_bounds"), ("work", "compute_fraction")],
)
def test_names_of_last_call(old: str, new: str) -> None:
    call = LastCall(True, None, 4, (4, 2), {0: torch.tensor([0, 3])}, {0: (0, 2)}, {}, 4, ((0, 4),))
    with pytest.warns(DeprecationWarning, match=f"LastCall.{old} is called {new} now"):
        assert getattr(call, old) == getattr(call, new)


def test_names_of_a_calibration() -> None:
    found = Calibration({"drop_layers": [1], "p": [0.9]}, 0.0, 0.0, 0.01, 0.5, {1: 0.5}, 3)
    with pytest.warns(DeprecationWarning, match="Calibration.work is called compute_fraction now"):
        assert found.work == found.compute_fraction == 0.5
