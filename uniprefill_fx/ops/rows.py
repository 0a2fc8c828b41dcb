"""Moving rows between the whole stream and the kept one."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("uniprefill::compact", mutates_args=())
def compact(x: Tensor, rows: Tensor, dim: int) -> Tensor:
    """The kept rows of `x` along its token axis `dim`: (..., tokens, ...) and (kept,) int64 -> (..., kept, ...)."""
    return x.index_select(dim, rows)


@compact.register_fake
def _(x, rows, dim):  # type: ignore[no-untyped-def]
    return x.new_empty(*x.shape[:dim], rows.shape[0], *x.shape[dim + 1 :])


@torch.library.custom_op("uniprefill::restore", mutates_args=())
def restore(frozen: Tensor, x: Tensor, rows: Tensor, dim: int) -> Tensor:
    """Kept rows `x` scattered over the frozen states of the dropped ones (paper Eq. 8).

    Args:
        frozen: (..., tokens, ...) the residual stream that entered the drop layer.
        x: (..., kept, ...) the stream of the kept rows. rows: (kept,) int64 their rows in `frozen`.
    """
    return frozen.index_copy(dim, rows, x.to(frozen.dtype))


@restore.register_fake
def _(frozen, x, rows, dim):  # type: ignore[no-untyped-def]
    return torch.empty_like(frozen, memory_format=torch.contiguous_format)
