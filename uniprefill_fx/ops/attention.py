"""Attention by original token index: what the passes put in place of the model's attention and its s x s mask."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from uniprefill_fx.ops.scoring import requests, with_terms

# cuDNN plans anew for every number of keys, which in decode is every step of every length that layers hold.
STEP_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
QUERY_ROWS = 256  # rows of queries that get an explicit mask at a time: bounds the mask to QUERY_ROWS x visible keys


def attention_reference(
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
) -> Tensor:
    """Causal attention in which a row's place is its slot (its original index), not its index in the tensor.

    Query slot a sees key slot b when b <= a, and a - b < window, and both lie in one chunk (counted from chunk_start),
    and key_mask[b], and segments[a] == segments[b], and both belong to the same request. No mask larger than
    `QUERY_ROWS` x keys is formed.

    Args:
        q: (batch, heads, queries, head_dim); k: (batch, kv_heads, keys, head_dim); v: (batch, kv_heads, keys, v_dim).
        q_slots, k_slots: (queries,), (keys,) int64, ascending within a request. Absent: keys are 0, 1, ..., and the
            queries are the last of them.
        cu_seqlens: (requests + 1,) int32 when requests are packed along the token axis (batch is 1 and queries are
            keys); absent: each batch row is one request.
        key_mask: (batch, slots) bool, False where a token is padding; absent: none is.
        scale: factor on the logits; absent: head_dim ** -0.5.
        softcap: logits become softcap * tanh(logits / softcap), before bias and mask.
        sinks: `heads` elements: one more logit a head that takes part in the softmax and has no value.
        bias: (..., heads, 1, slots), added to the logits by head and key slot (alibi).
        segments: (batch, slots), equal for the tokens of one prompt where several are packed in a row.
        chunk_start: (batch,) int64, the slot at which the chunks of a request begin; absent: 0.

    Returns:
        (batch, heads, queries, v_dim), laid out as (batch, queries, heads, v_dim).
    """
    if cu_seqlens is None or cu_seqlens.shape[0] == 2:
        spans = [(0, k.shape[2])]
    else:
        spans = [(start, end) for start, end in requests(cu_seqlens) if start < end]
    terms = Terms(key_mask, scale, window, chunk, softcap, sinks, bias, segments, chunk_start)
    if len(spans) == 1:
        out = _one_request(q, k, v, q_slots, k_slots, terms)
    else:
        parts = []
        for start, end in spans:
            a = None if q_slots is None else q_slots[start:end]
            b = None if k_slots is None else k_slots[start:end]
            parts.append(_one_request(q[:, :, start:end], k[:, :, start:end], v[:, :, start:end], a, b, terms))
        out = torch.cat(parts, dim=2)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


attention = torch.library.custom_op("uniprefill::attention", attention_reference, mutates_args=())


@attention.register_fake
def _(q, k, v, q_slots, k_slots, cu_seqlens, key_mask, scale, window, chunk, *terms):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)


class Terms(NamedTuple):
    """What shapes the logits of one attention; see `attention`."""

    key_mask: Tensor | None
    scale: float | None
    window: int | None
    chunk: int | None
    softcap: float | None
    sinks: Tensor | None
    bias: Tensor | None
    segments: Tensor | None
    chunk_start: Tensor | None


def _one_request(
    q: Tensor, k: Tensor, v: Tensor, q_slots: Tensor | None, k_slots: Tensor | None, terms: Terms
) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    masked = any(t is not None for t in (terms.window, terms.chunk, terms.key_mask, terms.segments))
    plain = terms.softcap is None and terms.sinks is None and terms.bias is None
    if plain and not masked and queries in (1, keys):
        # The fast path: SDPA picks its best kernel when there is no mask. Slots ascend, so order is enough.
        with sdpa_kernel(STEP_BACKENDS) if queries == 1 and q.is_cuda else contextlib.nullcontext():
            return F.scaled_dot_product_attention(q, k, v, is_causal=queries > 1, scale=terms.scale, enable_gqa=grouped)
    if k_slots is None or q_slots is None:
        k_slots = torch.arange(keys, device=k.device)
        q_slots = k_slots[keys - queries :]
    parts = []
    for first, last, low, high in _visible(q_slots, k_slots, terms):
        a, b = q_slots[first:last, None], k_slots[None, low:high]
        seen = b <= a
        if terms.window is not None:
            seen &= a - b < terms.window
        if terms.chunk is not None:
            start = 0 if terms.chunk_start is None else terms.chunk_start[:, None, None]
            seen = seen & ((a - start) // terms.chunk == (b - start) // terms.chunk)
        mask = seen.reshape(-1, 1, *seen.shape[-2:])
        if terms.key_mask is not None:
            mask = mask & terms.key_mask[:, k_slots[low:high]][:, None, None]
        if terms.segments is not None:
            own, theirs = terms.segments[:, q_slots[first:last]], terms.segments[:, k_slots[low:high]]
            mask = mask & (own[:, None, :, None] == theirs[:, None, None])
        rows, some_k, some_v = q[:, :, first:last], k[:, :, low:high], v[:, :, low:high]
        if plain:
            out = F.scaled_dot_product_attention(
                rows, some_k, some_v, attn_mask=mask, scale=terms.scale, enable_gqa=grouped
            )
        else:
            out = _spelled_out(rows, some_k, some_v, mask, k_slots[low:high], terms)
        parts.append(out)
    return torch.cat(parts, dim=2)


def _spelled_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, k_slots: Tensor, terms: Terms) -> Tensor:
    """Attention with terms that SDPA has no argument for; softmax in float32."""
    groups = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if terms.scale is None else terms.scale
    scores = (q @ k.repeat_interleave(groups, 1).transpose(2, 3)).float() * scale
    scores = with_terms(scores, terms.softcap, terms.bias, k_slots).masked_fill(~mask, -torch.inf)
    if terms.sinks is not None:
        sinks = terms.sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.to(v.dtype) @ v.repeat_interleave(groups, 1)


def _visible(q_slots: Tensor, k_slots: Tensor, terms: Terms) -> list[tuple[int, int, int, int]]:
    """For each run of query rows, the key rows that any of them sees: [(first, last, low, high)]."""
    queries = q_slots.shape[0]
    starts = torch.arange(0, queries, QUERY_ROWS, device=q_slots.device)
    ends = (starts + QUERY_ROWS).clamp(max=queries)
    oldest = torch.zeros_like(starts)
    if terms.window is not None:
        oldest = torch.maximum(oldest, q_slots[starts] - (terms.window - 1))
    if terms.chunk is not None:
        begins = q_slots.new_zeros(1) if terms.chunk_start is None else terms.chunk_start
        chunks = (q_slots[starts, None] - begins) // terms.chunk * terms.chunk + begins  # (runs, 1 or batch)
        oldest = torch.maximum(oldest, chunks.amin(1))
    low = torch.searchsorted(k_slots, oldest)
    high = torch.searchsorted(k_slots, q_slots[ends - 1], right=True)
    return [tuple(row) for row in torch.stack((starts, ends, low, high), 1).tolist()]
