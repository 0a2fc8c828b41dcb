"""The naive twin of `slot_attention`: logits and mask exist in full, one request, batch row and head at a time."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def slot_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_slots: Tensor | None,
    k_slots: Tensor | None,
    cu_seqlens: Tensor | None,
    key_mask: Tensor | None,
    scale: float | None,
    window: int | None,
    chunk: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    segments: Tensor | None = None,
    chunk_start: Tensor | None = None,
    padded: bool = False,
) -> Tensor:
    """As `slot_attention`, with float32 operands, weights and sums (float64 if the inputs are)."""
    batch, heads, queries, head_dim = q.shape
    groups, exact = heads // k.shape[1], torch.promote_types(q.dtype, torch.float32)
    scale = head_dim**-0.5 if scale is None else scale
    out = q.new_zeros(batch, queries, heads, v.shape[3])
    if cu_seqlens is None:
        spans = [((0, queries), (0, k.shape[2]))]
    else:
        spans = [(span, span) for span in itertools.pairwise(cu_seqlens.tolist())]
    for (q_start, q_end), (k_start, k_end) in spans:
        if q_slots is not None and k_slots is not None:
            a, b = q_slots[q_start:q_end, None], k_slots[None, k_start:k_end]
        else:
            place = torch.arange(k_end - k_start, device=q.device)
            a, b = place[len(place) - (q_end - q_start) :, None], place[None]
        seen = (b <= a) & (b >= 0) if padded else b <= a
        if window is not None:
            seen &= a - b < window
        for row, head in itertools.product(range(batch), range(heads)):
            visible = seen if key_mask is None else seen & key_mask.expand(batch, -1)[row, b]
            if chunk is not None:
                start = 0 if chunk_start is None else chunk_start.expand(batch)[row]
                visible = visible & ((a - start) // chunk == (b - start) // chunk)
            if segments is not None:
                visible = visible & (segments.expand(batch, -1)[row, a] == segments.expand(batch, -1)[row, b])
            keys, values = (x[row, head // groups, k_start:k_end].to(exact) for x in (k, v))
            logits = (q[row, head, q_start:q_end].to(exact) @ keys.T) * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            if bias is not None:
                by_head = bias.reshape(-1, heads, bias.shape[-1])
                logits = logits + by_head.expand(batch, -1, -1)[row, head, b].to(exact)
            weights = torch.where(visible, logits, -torch.inf)
            if sinks is not None:
                sink = sinks.reshape(-1)[head].to(exact).expand(len(weights), 1)
                weights = torch.cat([weights, sink], 1)
            weights = weights.softmax(-1)[:, : k_end - k_start]
            weights = torch.where(visible, weights, 0.0)  # of a query that sees nothing, the softmax is NaN
            out[row, q_start:q_end, head] = (weights @ values).to(out.dtype)
    return out.transpose(1, 2)
