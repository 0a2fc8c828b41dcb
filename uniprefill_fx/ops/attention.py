"""Attention by original token index: what the passes put in place of the model's attention and its s x s mask."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from uniprefill_fx.ops.logits import with_terms
from uniprefill_fx.specs import AttentionSpec

# cuDNN plans anew for every number of keys, which in decode is every step of every length that layers hold.
STEP_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
QUERY_ROWS = 256  # rows of queries that get an explicit mask at a time: bounds the mask to QUERY_ROWS x visible keys


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    token_bounds: Tensor | None,
    spec: AttentionSpec,
) -> Tensor:
    """Causal attention in which a row's place is its position (its original index), not its index in the tensor.

    Args:
        q: (batch, heads, queries, head_dim); k: (batch, kv_heads, keys, head_dim); v: (batch, kv_heads, keys, v_dim).
        q_positions, k_positions: (1 or batch, queries), (1 or batch, keys) int64, ascending; -1 marks a key that is
            padding. Absent: keys are 0, 1, ..., and the queries are the last of them.
        token_bounds: (batch, 2) int64 on the CPU, of a prompt (queries and keys are the same tokens): the columns that
            are no padding. Others are not seen, and their output is 0. Absent: there is no padding but that of the
            positions.
        spec: which keys a query sees, and the terms of its logits.

    Returns:
        (batch, heads, queries, v_dim), laid out as (batch, queries, heads, v_dim).
    """
    batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    bounds = [] if token_bounds is None else [tuple(span) for span in token_bounds.tolist()]
    by_position = (spec.chunk, spec.key_mask, spec.bias, spec.sequence_ids)
    if bounds and k_positions is None and any(term is not None for term in by_position):
        # by column: a request may begin behind padding
        q_positions = k_positions = torch.arange(keys, device=k.device)[None]
    own_positions = batch > 1 and k_positions is not None and k_positions.shape[0] > 1
    if bounds and not spec.masked and spec.bias is None and bounds == [(0, keys)] * batch:
        out = _attend(q, k, v, None, None, spec)  # order is all that counts, and is the same for all requests
    elif token_bounds is None and own_positions and queries == 1 and spec.bias is None and spec.sequence_ids is None:
        out = _step(q, k, v, q_positions, k_positions, spec)
    elif (bounds and bounds != [(0, keys)]) or own_positions:
        out = q.new_zeros(batch, queries, q.shape[1], v.shape[3]).transpose(1, 2)
        for r, (start, end) in enumerate(bounds or [(0, keys)] * batch):
            if end == start:
                continue
            rows, columns = slice(start, end) if bounds else slice(None), slice(start, end)
            operands = (q[r : r + 1, :, rows], k[r : r + 1, :, columns], v[r : r + 1, :, columns])
            places = (_of_request(q_positions, r, rows), _of_request(k_positions, r, columns))
            out[r, :, rows] = _attend(*operands, *places, spec.of_request(r, q.shape[1]), padded=not bounds)[0]
    else:
        places = (_of_request(q_positions, 0, slice(None)), _of_request(k_positions, 0, slice(None)))
        out = _attend(q, k, v, *places, spec)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor? q_positions, Tensor? k_positions, Tensor? token_bounds"


@torch.library.custom_op(
    "uniprefill::attention", mutates_args=(), schema=f"({OPERANDS}, {AttentionSpec.SCHEMA}) -> Tensor"
)
def attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """`attention_reference` as an op: the three operands of places, then the fields of an `AttentionSpec`."""
    return attention_reference(q, k, v, rest[0], rest[1], rest[2], AttentionSpec(*rest[3:]))


@attention.register_fake
def _(q, k, v, *rest):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)


def _of_request(positions: Tensor | None, request: int, columns: slice) -> Tensor | None:
    return None if positions is None else positions[request if positions.shape[0] > 1 else 0, columns]


def _step(
    q: Tensor, k: Tensor, v: Tensor, q_positions: Tensor | None, k_positions: Tensor | None, spec: AttentionSpec
) -> Tensor:
    """One query a request, over keys whose positions differ by request."""
    assert q_positions is not None and k_positions is not None
    start = None if spec.chunk_start is None else spec.chunk_start[:, None]
    seen = (k_positions >= 0) & _related(q_positions, k_positions, spec, start)
    if spec.key_mask is not None:
        seen &= spec.key_mask.expand(q.shape[0], -1).gather(1, k_positions.clamp(min=0))
    return _masked(q, k, v, seen[:, None, None], None, spec)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    spec: AttentionSpec,
    padded: bool = False,
) -> Tensor:
    """`attention` of requests that share their positions: (queries,) and (keys,) int64.

    No mask larger than `QUERY_ROWS` x keys is formed. `padded`: some positions of keys may be -1.
    """
    queries, keys = q.shape[2], k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    if spec.plain and not spec.masked and not padded and queries in (1, keys):
        # The fast path: SDPA picks its best kernel when there is no mask. Slots ascend, so order is enough.
        with sdpa_kernel(STEP_BACKENDS) if queries == 1 and q.is_cuda else contextlib.nullcontext():
            return F.scaled_dot_product_attention(q, k, v, is_causal=queries > 1, scale=spec.scale, enable_gqa=grouped)
    if k_positions is None or q_positions is None:
        k_positions = torch.arange(keys, device=k.device)
        q_positions = k_positions[keys - queries :]
    parts = []
    start = None if spec.chunk_start is None else spec.chunk_start[:, None, None]
    for first, last, low, high in _visible(q_positions, k_positions, spec):
        a, b = q_positions[first:last], k_positions[low:high]
        seen = _related(a[:, None], b, spec, start)
        mask = seen.reshape(-1, 1, *seen.shape[-2:])
        if padded:
            mask = mask & (b >= 0)
        if spec.key_mask is not None:
            mask = mask & spec.key_mask[:, b][:, None, None]
        if spec.sequence_ids is not None:
            sequence_ids = spec.sequence_ids
            mask = mask & (sequence_ids[:, a][:, None, :, None] == sequence_ids[:, b][:, None, None])
        parts.append(_masked(q[:, :, first:last], k[:, :, low:high], v[:, :, low:high], mask, b, spec))
    return torch.cat(parts, dim=2)


def _related(q_positions: Tensor, k_positions: Tensor, spec: AttentionSpec, chunk_start: Tensor | None) -> Tensor:
    """Whether each query may see each key, by their places alone; the arguments broadcast."""
    seen = k_positions <= q_positions
    if spec.window is not None:
        seen = seen & (q_positions - k_positions < spec.window)
    if spec.chunk is not None:
        start = 0 if chunk_start is None else chunk_start
        seen = seen & ((q_positions - start) // spec.chunk == (k_positions - start) // spec.chunk)
    return seen


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, k_positions: Tensor | None, spec: AttentionSpec) -> Tensor:
    if not spec.plain:
        return _spelled_out(q, k, v, mask, k_positions, spec)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale, enable_gqa=grouped)


def _spelled_out(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, k_positions: Tensor | None, spec: AttentionSpec
) -> Tensor:
    """Attention with terms that SDPA has no argument for; softmax in float32."""
    groups = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    scores = (q @ k.repeat_interleave(groups, 1).transpose(2, 3)).float() * scale
    # Not minus infinity: a padding row sees nothing, and NaN there would reach other rows through its values.
    lowest = torch.finfo(scores.dtype).min
    scores = with_terms(scores, spec.softcap, spec.bias, k_positions).masked_fill(~mask, lowest)
    if spec.sinks is not None:
        sinks = spec.sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.to(v.dtype) @ v.repeat_interleave(groups, 1)


def _visible(q_positions: Tensor, k_positions: Tensor, spec: AttentionSpec) -> list[tuple[int, int, int, int]]:
    """For each run of query rows, the key rows that any of them sees: [(first, last, low, high)]."""
    queries = q_positions.shape[0]
    starts = torch.arange(0, queries, QUERY_ROWS, device=q_positions.device)
    ends = (starts + QUERY_ROWS).clamp(max=queries)
    oldest = torch.zeros_like(starts)
    if spec.window is not None:
        oldest = torch.maximum(oldest, q_positions[starts] - (spec.window - 1))
    if spec.chunk is not None:
        begins = q_positions.new_zeros(1) if spec.chunk_start is None else spec.chunk_start
        chunks = (q_positions[starts, None] - begins) // spec.chunk * spec.chunk + begins  # (runs, 1 or batch)
        oldest = torch.maximum(oldest, chunks.amin(1))
    low = torch.searchsorted(k_positions, oldest)
    high = torch.searchsorted(k_positions, q_positions[ends - 1], right=True)
    return [tuple(row) for row in torch.stack((starts, ends, low, high), 1).tolist()]
