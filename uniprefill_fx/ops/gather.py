"""Moving rows between the whole stream and the kept one.

`kept_indices` is (batch, kept) int64: for each request the kept columns of the earlier stream, -1 where it keeps fewer
than
others do. Batches of one have no such padding.

These ops are composite: a graph shows each as one node, and the inner backend sees the torch operations that it is made
of. So Inductor can read the kept rows where the next operation needs them (the residual add, the rotary embedding)
instead of copying them first, and nothing is launched that moves a few numbers only.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("uniprefill", "FRAGMENT")
_library.define("compact(Tensor x, Tensor kept_indices, int dim, int? batch_dim=None, int fill=0) -> Tensor")
_library.define("restore(Tensor frozen, Tensor x, Tensor kept_indices, int dim, int? batch_dim=None) -> Tensor")
_library.define("clear_pads(Tensor x, Tensor kept_indices, int dim, int batch_dim) -> Tensor")


@torch.library.impl(_library, "compact", "CompositeImplicitAutograd")
def compact(x: Tensor, kept_indices: Tensor, dim: int, batch_dim: int | None = None, fill: int = 0) -> Tensor:
    """The kept rows of `x` along its token axis.

    Args:
        x: (..., tokens, ...), the token axis is `dim`. kept_indices: (batch, kept).
        batch_dim: the axis of the requests; its size may be 1, for values that all requests share. None: one request.
        fill: what padding holds. 0 keeps masks false and states of linear recurrences as they are.

    Returns:
        `x` with `kept` rows along `dim`, and `batch` along `batch_dim`.
    """
    if batch_dim is None:
        return x.index_select(dim, kept_indices[0])
    moved = x.movedim((batch_dim, dim), (0, 1))
    columns = kept_indices.clamp(min=0)
    request = torch.arange(kept_indices.shape[0], device=kept_indices.device)[:, None]
    out = moved[0, columns] if x.shape[batch_dim] == 1 else moved[request, columns]
    padding = (kept_indices < 0).reshape(*kept_indices.shape, *(1,) * (x.ndim - 2))
    return out.masked_fill(padding, fill).movedim((0, 1), (batch_dim, dim))


@torch.library.impl(_library, "restore", "CompositeImplicitAutograd")
def restore(frozen: Tensor, x: Tensor, kept_indices: Tensor, dim: int, batch_dim: int | None = None) -> Tensor:
    """Kept rows `x` over the frozen states of the dropped ones (paper Eq. 8).

    Each token looks up which kept row it is, so that Inductor writes the result once, with what reads it next. To
    scatter `x`, it would copy `frozen` first.

    Args:
        frozen: (..., tokens, ...) the residual stream that entered the drop layer.
        x: (..., kept, ...) the stream of the kept rows. kept_indices: (batch, kept) their columns in `frozen`.
        batch_dim: the axis of the requests; None: one request.
    """
    tokens, kept = (
        frozen.shape[dim],
        torch.arange(kept_indices.shape[1], device=kept_indices.device).expand_as(kept_indices),
    )
    columns = torch.where(kept_indices < 0, tokens, kept_indices)  # padding has a column of its own, which goes
    place = kept_indices.new_full((kept_indices.shape[0], tokens + 1), -1).scatter(1, columns, kept)[:, :tokens]
    chosen = compact(x.to(frozen.dtype), place.clamp(min=0), dim, batch_dim)
    return torch.where(_along(place >= 0, frozen.ndim, dim, batch_dim), chosen, frozen)


@torch.library.impl(_library, "clear_pads", "CompositeImplicitAutograd")
def clear_pads(x: Tensor, kept_indices: Tensor, dim: int, batch_dim: int) -> Tensor:
    """`x` with zeros in the rows that are padding: what convolutions and recurrences along the tokens may run over."""
    return x.masked_fill(_along(kept_indices < 0, x.ndim, dim, batch_dim), 0)


def _along(mask: Tensor, ndim: int, dim: int, batch_dim: int | None) -> Tensor:
    """`mask` (batch, tokens) with its axes at `batch_dim` and `dim`, broadcast over the others of `ndim`."""
    shape = [1] * ndim
    shape[dim] = mask.shape[1]
    if batch_dim is not None:
        shape[batch_dim] = mask.shape[0]
    return (mask if batch_dim is None or batch_dim < dim else mask.T).reshape(shape)
