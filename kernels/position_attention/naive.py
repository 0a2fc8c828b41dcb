"""The naive twin of `position_attention`: logits and mask exist in full, one request and head at a time."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from uniprefill_fx.specs import AttentionSpec


def position_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    token_bounds: Tensor | None,
    spec: AttentionSpec,
) -> Tensor:
    """As `position_attention`, with float32 operands, weights and sums (float64 if the inputs are)."""
    batch, heads, queries, head_dim = q.shape
    groups, exact = heads // k.shape[1], torch.promote_types(q.dtype, torch.float32)
    scale = head_dim**-0.5 if spec.scale is None else spec.scale
    out = q.new_zeros(batch, queries, heads, v.shape[3])
    if q_positions is None or k_positions is None:
        k_positions = torch.arange(k.shape[2], device=q.device)[None]
        q_positions = k_positions[:, k.shape[2] - queries :]
    for row, head in itertools.product(range(batch), range(heads)):
        q_rows, k_rows = slice(None), slice(None)
        if token_bounds is not None:
            q_rows = k_rows = slice(*token_bounds[row].tolist())
        a, b = q_positions.expand(batch, -1)[row, q_rows, None], k_positions.expand(batch, -1)[row, None, k_rows]
        visible = (b <= a) & (b >= 0)
        if spec.window is not None:
            visible &= a - b < spec.window
        if spec.key_mask is not None:
            visible = visible & spec.key_mask.expand(batch, -1)[row, b]
        if spec.chunk is not None:
            start = 0 if spec.chunk_start is None else spec.chunk_start.expand(batch)[row]
            visible = visible & ((a - start) // spec.chunk == (b - start) // spec.chunk)
        if spec.sequence_ids is not None:
            visible = visible & (
                spec.sequence_ids.expand(batch, -1)[row, a] == spec.sequence_ids.expand(batch, -1)[row, b]
            )
        keys, values = (x[row, head // groups, k_rows].to(exact) for x in (k, v))
        logits = (q[row, head, q_rows].to(exact) @ keys.T) * scale
        if spec.softcap is not None:
            logits = spec.softcap * torch.tanh(logits / spec.softcap)
        if spec.bias is not None:
            by_head = spec.bias.reshape(-1, heads, spec.bias.shape[-1])
            logits = logits + by_head.expand(batch, -1, -1)[row, head, b].to(exact)
        weights = torch.where(visible, logits, -torch.inf)
        if spec.sinks is not None:
            sink = spec.sinks.reshape(-1)[head].to(exact).expand(len(weights), 1)
            weights = torch.cat([weights, sink], 1)
        weights = weights.softmax(-1)[:, : len(keys)]
        weights = torch.where(visible, weights, 0.0)  # of a query that sees nothing, the softmax is NaN
        out[row, q_rows, head] = (weights @ values).to(out.dtype)
    return out.transpose(1, 2)
