"""Kept rows over frozen states, and zeros for padding: against a loop."""

from __future__ import annotations

import pytest
import torch

import uniprefill_fx.ops  # noqa: F401  registers torch.ops.uniprefill

ROWS = torch.tensor([[-1, -1, 0, 6], [1, 2, 3, 4], [-1, -1, -1, -1]])
AXES = pytest.mark.parametrize("batch_dim, dim", [(0, 1), (1, 0), (0, 2), (2, 1)])


@AXES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restore(batch_dim: int, dim: int, dtype: torch.dtype) -> None:
    """Each kept row lies in its column; all others are frozen. The kept stream may be of another dtype."""
    frozen, x = torch.randn(3, 7, 2, 5).to(dtype), torch.randn(3, 4, 2, 5)
    want = frozen.clone()
    for request, columns in enumerate(ROWS.tolist()):
        for row, column in enumerate(columns):
            if column >= 0:
                want[request, column] = x[request, row].to(dtype)
    frozen, x, want = (t.movedim((0, 1), (batch_dim, dim)) for t in (frozen, x, want))
    assert torch.equal(torch.ops.uniprefill.restore(frozen, x, ROWS, dim, batch_dim), want)


def test_restore_one_request() -> None:
    frozen, x = torch.randn(7, 5), torch.randn(4, 5)
    want = frozen.clone()
    want[1], want[2], want[3], want[4] = x
    assert torch.equal(torch.ops.uniprefill.restore(frozen, x, ROWS[1:2], 0), want)


@AXES
def test_clear_pads(batch_dim: int, dim: int) -> None:
    x = torch.full((3, 4, 2, 5), torch.nan)
    want = x.clone()
    want[0, :2] = want[2] = 0
    x, want = (t.movedim((0, 1), (batch_dim, dim)) for t in (x, want))
    assert torch.equal(torch.ops.uniprefill.clear_pads(x, ROWS, dim, batch_dim).nan_to_num(7), want.nan_to_num(7))
