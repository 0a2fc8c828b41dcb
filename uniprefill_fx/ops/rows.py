"""Moving rows between the whole stream and the kept one.

Both ops are composite: a graph shows each as one node, and the inner backend sees the torch operations that it is made
of. So Inductor can read the kept rows where the next operation needs them (the residual add, the rotary embedding)
instead of copying them first, and nothing is launched that moves a few numbers only.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("uniprefill", "FRAGMENT")
_library.define("compact(Tensor x, Tensor rows, int dim) -> Tensor")
_library.define("restore(Tensor frozen, Tensor x, Tensor rows, int dim) -> Tensor")


@torch.library.impl(_library, "compact", "CompositeImplicitAutograd")
def compact(x: Tensor, rows: Tensor, dim: int) -> Tensor:
    """The kept rows of `x` along its token axis `dim`: (..., tokens, ...) and (kept,) int64 -> (..., kept, ...)."""
    return x.index_select(dim, rows)


@torch.library.impl(_library, "restore", "CompositeImplicitAutograd")
def restore(frozen: Tensor, x: Tensor, rows: Tensor, dim: int) -> Tensor:
    """Kept rows `x` scattered over the frozen states of the dropped ones (paper Eq. 8).

    Args:
        frozen: (..., tokens, ...) the residual stream that entered the drop layer.
        x: (..., kept, ...) the stream of the kept rows. rows: (kept,) int64 their rows in `frozen`.
    """
    return frozen.index_copy(dim, rows, x.to(frozen.dtype))
