"""What shapes the logits of attention beyond their product and scale."""

from __future__ import annotations

import torch
from torch import Tensor


def with_terms(scores: Tensor, softcap: float | None, bias: Tensor | None, positions: Tensor | None) -> Tensor:
    """Soft-capping, then the bias of the key positions: scores (batch, heads, queries, keys), positions (keys,)."""
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        by_position = bias.reshape(-1, scores.shape[1], 1, bias.shape[-1])
        scores = scores + (by_position if positions is None else by_position[..., positions]).to(scores.dtype)
    return scores


def bias_of_columns(bias: Tensor, heads: int, positions: Tensor | None) -> Tensor:
    """A bias (..., heads, 1, positions) by column: (1 or batch, heads, columns).

    positions: (1 or batch, columns) int64, negative where a column is padding (whose bias means nothing); absent:
    columns are positions.
    """
    by_position = bias.reshape(-1, heads, bias.shape[-1])
    if positions is None:
        return by_position
    several = max(by_position.shape[0], positions.shape[0])
    index = positions.clamp(min=0)[:, None].expand(several, heads, -1)
    return by_position.expand(several, -1, -1).gather(2, index)
