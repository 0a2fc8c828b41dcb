"""Moving rows between the whole stream and the kept one.

`rows` is (batch, kept) int64: for each request the kept columns of the earlier stream, -1 where it keeps fewer than
others do. Batches of one have no such padding.

These ops are composite: a graph shows each as one node, and the inner backend sees the torch operations that it is made
of. So Inductor can read the kept rows where the next operation needs them (the residual add, the rotary embedding)
instead of copying them first, and nothing is launched that moves a few numbers only.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("uniprefill", "FRAGMENT")
_library.define("compact(Tensor x, Tensor rows, int dim, int? batch_dim=None, int fill=0) -> Tensor")
_library.define("restore(Tensor frozen, Tensor x, Tensor rows, Tensor spans, int dim, int? batch_dim=None) -> Tensor")
_library.define("clear_pads(Tensor x, Tensor rows, int dim, int batch_dim) -> Tensor")


@torch.library.impl(_library, "compact", "CompositeImplicitAutograd")
def compact(x: Tensor, rows: Tensor, dim: int, batch_dim: int | None = None, fill: int = 0) -> Tensor:
    """The kept rows of `x` along its token axis.

    Args:
        x: (..., tokens, ...), the token axis is `dim`. rows: (batch, kept).
        batch_dim: the axis of the requests; its size may be 1, for values that all requests share. None: one request.
        fill: what padding holds. 0 keeps masks false and states of linear recurrences as they are.

    Returns:
        `x` with `kept` rows along `dim`, and `batch` along `batch_dim`.
    """
    if batch_dim is None:
        return x.index_select(dim, rows[0])
    moved = x.movedim((batch_dim, dim), (0, 1))
    columns = rows.clamp(min=0)
    request = torch.arange(rows.shape[0], device=rows.device)[:, None]
    out = moved[0, columns] if x.shape[batch_dim] == 1 else moved[request, columns]
    padding = (rows < 0).reshape(*rows.shape, *(1,) * (x.ndim - 2))
    return out.masked_fill(padding, fill).movedim((0, 1), (batch_dim, dim))


@torch.library.impl(_library, "restore", "CompositeImplicitAutograd")
def restore(frozen: Tensor, x: Tensor, rows: Tensor, spans: Tensor, dim: int, batch_dim: int | None = None) -> Tensor:
    """Kept rows `x` scattered over the frozen states of the dropped ones (paper Eq. 8).

    Args:
        frozen: (..., tokens, ...) the residual stream that entered the drop layer.
        x: (..., kept, ...) the stream of the kept rows. rows: (batch, kept) their columns in `frozen`.
        spans: (batch, 2) int64 on the CPU, the columns of `x` that are no padding.
        batch_dim: the axis of the requests; None: one request.
    """
    if batch_dim is None:
        return frozen.index_copy(dim, rows[0], x.to(frozen.dtype))
    return restore_requests(frozen, x, rows, spans, dim, batch_dim)


@torch.library.custom_op("uniprefill::restore_requests", mutates_args=())
def restore_requests(frozen: Tensor, x: Tensor, rows: Tensor, spans: Tensor, dim: int, batch_dim: int) -> Tensor:
    """`restore` of a batch, request by request: a boolean mask of its padding would wait for the device."""
    restored = frozen.clone(memory_format=torch.contiguous_format)
    whole, kept = (t.movedim((batch_dim, dim), (0, 1)) for t in (restored, x))
    for r, (start, end) in enumerate(spans.tolist()):
        whole[r].index_copy_(0, rows[r, start:end], kept[r, start:end].to(frozen.dtype))
    return restored


@restore_requests.register_fake
def _(frozen, x, rows, spans, dim, batch_dim):  # type: ignore[no-untyped-def]
    return torch.empty_like(frozen, memory_format=torch.contiguous_format)


@torch.library.impl(_library, "clear_pads", "CompositeImplicitAutograd")
def clear_pads(x: Tensor, rows: Tensor, dim: int, batch_dim: int) -> Tensor:
    """`x` with zeros in the rows that are padding: what convolutions and recurrences along the tokens may run over."""
    shape = [1] * x.ndim
    shape[batch_dim], shape[dim] = rows.shape
    padding = rows < 0 if batch_dim < dim else (rows < 0).T
    return x.masked_fill(padding.reshape(shape), 0)
