"""The embeddings that one rank holds, where the rows of the table are split over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from uniprefill_fx.torch_internals import group_named


@torch.library.custom_op("uniprefill::vocab_rows", mutates_args=())
def vocab_rows(ids: Tensor, table: Tensor, group: str) -> Tensor:
    """Embeddings of the ids that this rank's part of a table holds, and zeros for all others.

    Over the ranks they add up to the embeddings. The number of the rank is looked up at each call: a compiled graph
    that is kept on disk serves any.

    Args:
        ids: (...) integers. table: (rows, hidden), the part of this rank; all parts have as many rows.
        group: the name of the process group whose ranks hold the parts, in their order.

    Returns:
        (..., hidden) in the dtype of `table`.
    """
    own = ids - group_named(group).rank() * table.shape[0]
    held = (own >= 0) & (own < table.shape[0])
    rows = torch.nn.functional.embedding(torch.where(held, own, 0), table)
    return rows.masked_fill(~held[..., None], 0)


@vocab_rows.register_fake
def _(ids: Tensor, table: Tensor, group: str) -> Tensor:
    return table.new_empty((*ids.shape, table.shape[1]))
