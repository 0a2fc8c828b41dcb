"""Prefill attention in which a row's place is its position (its original index): what `uniprefill::attention` means.

A program holds a tile of queries of one request, of one head or of several that read the same keys, and goes through
the keys that any query of it sees, with a running softmax in float32. Slots ascend, so those keys are one range of
rows, and so are the keys that all of the tile's queries see; only tiles of keys outside the second range need a mask.
Both ranges are searched for in the positions on the device: nothing here waits for the host, and windows cost what they
hold, whatever the prompt's length.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from uniprefill_fx.kernels.checks import check_attention, tiles_for_attention
from uniprefill_fx.kernels.common import on_device, tanh
from uniprefill_fx.kernels.tiles import Tiles
from uniprefill_fx.specs import AttentionSpec


@triton.jit
def _first_at_least(positions, low, high, wanted, LANES: tl.constexpr = 256):
    """The first row of [low, high) whose position is at least `wanted`, or `high`; LANES rows are compared at a
    time."""
    lane = tl.arange(0, LANES)
    while low < high:
        step = (high - low + LANES - 1) // LANES
        row = low + lane * step
        exists = row < high
        position = tl.load(positions + row, mask=exists, other=0)
        below = tl.sum((exists & (position < wanted)).to(tl.int32), 0)
        high = tl.minimum(high, low + below * step)
        low = tl.where(below == 0, high, low + (below - 1) * step + 1)
    return low


@triton.jit
def _oldest(position, window, chunk, chunk_start, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first position that a query at `position` sees."""
    oldest = position * 0
    if WINDOW:
        oldest = tl.maximum(oldest, position - window + 1)
    if CHUNK:
        # division rounds towards 0: what lies before the first chunk (padding) is counted from one chunk earlier
        distance = tl.where(position < chunk_start, position - chunk_start - chunk + 1, position - chunk_start)
        oldest = tl.maximum(oldest, chunk_start + distance // chunk * chunk)
    return oldest


# what may change with the number of tokens is not specialized: a new length compiles nothing
@triton.jit(
    do_not_specialize=[
        "queries", "keys", "window", "chunk", "q_slots_batch_stride", "k_slots_batch_stride", "mask_batch_stride",
        "bias_batch_stride", "bias_head_stride", "sequence_ids_batch_stride", "key_sequence_ids_batch_stride",
    ]
)  # fmt: skip
def _attention_kernel(
    q, k, v, out, q_positions, k_positions, token_bounds, key_mask, sinks, bias, sequence_ids, key_sequence_ids,
    chunk_starts,
    queries, keys, scale, softcap, window, chunk,
    q_batch_stride, q_head_stride, q_row_stride, k_batch_stride, k_head_stride, k_row_stride,
    v_batch_stride, v_head_stride, v_row_stride, out_batch_stride, out_row_stride,
    q_slots_batch_stride, k_slots_batch_stride, mask_batch_stride, bias_batch_stride, bias_head_stride,
    sequence_ids_batch_stride, key_sequence_ids_batch_stride, chunk_starts_batch_stride,
    GROUPS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr,
    SPANS: tl.constexpr, SLOTS: tl.constexpr, SAME_ROWS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    KEY_MASK: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, BIAS: tl.constexpr, SEGMENTS: tl.constexpr,
    CHUNK_STARTS: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out[batch, row, head] for a tile of ROWS (query, head) pairs of one request; KEYS keys at a time.

    The heads of a tile are HEADS of one group, so that they read the same keys.

    `key_mask`, `bias` and `key_sequence_ids` hold a column for each key, `sequence_ids` one for each position.
    """
    # late queries see the most keys: those tiles go first, so that none of them is the last to end
    tile, head, batch = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1) * HEADS, tl.program_id(2)
    batch, kv_head = batch.to(tl.int64), (head // GROUPS).to(tl.int64)
    QUERIES: tl.constexpr = ROWS // HEADS
    q_start, q_end, k_start, k_end = 0, queries, 0, keys
    if SPANS:  # queries and keys are the same rows
        q_start, q_end = tl.load(token_bounds + 2 * batch), tl.load(token_bounds + 2 * batch + 1)
        k_start, k_end = q_start, q_end
    row = tile * QUERIES + tl.arange(0, ROWS) // HEADS
    own_head = head + tl.arange(0, ROWS) % HEADS
    first, last = tl.maximum(tile * QUERIES, q_start), tl.minimum(tile * QUERIES + QUERIES, q_end) - 1
    some = first <= last  # unless all of the tile is padding
    first, last = tl.minimum(first, queries - 1), tl.maximum(last, 0)
    # rows that do not exist, or are padding, repeat one that is there
    place = tl.minimum(tl.maximum(row, first), last)
    if SLOTS:
        q_positions += batch * q_slots_batch_stride
        k_positions += batch * k_slots_batch_stride
        position = tl.load(q_positions + place).to(tl.int32)
        first_slot, last_slot = tl.load(q_positions + first).to(tl.int32), tl.load(q_positions + last).to(tl.int32)
    else:
        shift = keys - queries  # queries are the last of the keys
        position, first_slot, last_slot = place + shift, first + shift, last + shift
    chunk_start = 0
    if CHUNK_STARTS:
        chunk_start = tl.load(chunk_starts + batch * chunk_starts_batch_stride).to(tl.int32)
    oldest = _oldest(position, window, chunk, chunk_start, WINDOW, CHUNK)
    # keys [low, high) are seen by some query of the tile, keys [inner_low, inner_high) by all of them
    low_slot = _oldest(first_slot, window, chunk, chunk_start, WINDOW, CHUNK)
    inner_slot = _oldest(last_slot, window, chunk, chunk_start, WINDOW, CHUNK)
    if SLOTS:
        if SAME_ROWS:  # a key is never further away in rows than in positions
            high, inner_high = last + 1, first + 1
            nearest = k_start
            if WINDOW:
                nearest = tl.maximum(k_start, first - window + 1)
        else:
            high = _first_at_least(k_positions, k_start, k_end, last_slot + 1)
            inner_high = _first_at_least(k_positions, k_start, high, first_slot + 1)
            nearest = k_start
        low, inner_low = nearest, nearest
        if WINDOW or CHUNK or not SPANS:  # without token_bounds, positions tell what is padding
            low = _first_at_least(k_positions, nearest, high, low_slot)
            inner_low = _first_at_least(k_positions, low, high, inner_slot)
    else:
        low, inner_low = tl.maximum(k_start, low_slot), tl.maximum(k_start, inner_slot)
        high, inner_high = last_slot + 1, first_slot + 1
    high = tl.where(some, high, low)

    dim, v_dim = tl.arange(0, DIM_PAD), tl.arange(0, V_PAD)
    q_rows = q + batch * q_batch_stride + own_head.to(tl.int64) * q_head_stride + place.to(tl.int64) * q_row_stride
    q_tile = tl.load(q_rows[:, None] + dim[None, :], mask=(dim < DIM)[None, :], other=0.0)
    k_head = k + batch * k_batch_stride + kv_head * k_head_stride
    v_head = v + batch * v_batch_stride + kv_head * v_head_stride
    if SEGMENTS:
        sequence = tl.load(sequence_ids + batch * sequence_ids_batch_stride + tl.maximum(position, 0))
    bias_row = bias + batch * bias_batch_stride + head.to(tl.int64) * bias_head_stride

    LOG2E: tl.constexpr = 1.4426950408889634
    unit = scale * LOG2E  # from what `product` is, at its end, to logits of base 2
    if SOFTCAP:
        unit = softcap * LOG2E
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SINKS:  # a logit of weight 1 that has no value
        highest = tl.load(sinks + own_head).to(tl.float32) * LOG2E
        total = tl.full((ROWS,), 1.0, tl.float32)
    acc = tl.zeros((ROWS, V_PAD), tl.float32)
    for at in tl.range(low, high, KEYS, num_stages=STAGES):
        key = at + tl.arange(0, KEYS)
        exists = key < high
        k_rows = k_head + key.to(tl.int64) * k_row_stride
        k_tile = tl.load(k_rows[:, None] + dim[None, :], mask=exists[:, None] & (dim < DIM)[None, :], other=0.0)
        # for float32 inputs the default, tf32, would lose 13 bits
        product = tl.dot(q_tile, tl.trans(k_tile), input_precision="tf32x3")
        if SOFTCAP:
            product = tanh(product * (scale / softcap))
        if BIAS:
            added = tl.load(bias_row + key, mask=exists, other=0.0)
            product += added.to(tl.float32)[None, :] * (LOG2E / unit)
        if (at < inner_low) | (at + KEYS > inner_high) | KEY_MASK | SEGMENTS:
            key_slot = key
            if SLOTS:
                key_slot = tl.load(k_positions + key, mask=exists, other=2147483647).to(tl.int32)
            visible = (key_slot[None, :] <= position[:, None]) & (key_slot[None, :] >= oldest[:, None])
            if KEY_MASK:
                valid = tl.load(key_mask + batch * mask_batch_stride + key, mask=exists, other=0)
                visible = visible & (valid != 0)[None, :]
            if SEGMENTS:
                theirs = tl.load(key_sequence_ids + batch * key_sequence_ids_batch_stride + key, mask=exists, other=0)
                visible = visible & (theirs[None, :] == sequence[:, None])
            product = tl.where(visible, product, float("-inf"))
        # the unit is positive, so the largest product belongs to the largest logit
        above = tl.maximum(highest, tl.max(product, 1) * unit)
        finite = tl.where(above == float("-inf"), 0.0, above)  # a query that has seen nothing so far
        weights = tl.exp2(product * unit - finite[:, None])
        shrink = tl.exp2(highest - finite)
        total = total * shrink + tl.sum(weights, 1)
        highest = above
        v_rows = v_head + key.to(tl.int64) * v_row_stride
        v_tile = tl.load(v_rows[:, None] + v_dim[None, :], mask=exists[:, None] & (v_dim < V_DIM)[None, :], other=0.0)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision="tf32x3")
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if SPANS:
        result = tl.where(((row >= q_start) & (row < q_end))[:, None], result, 0.0)
    out_rows = out + batch * out_batch_stride + row.to(tl.int64) * out_row_stride + own_head * V_DIM
    stored = (row < queries)[:, None] & (v_dim < V_DIM)[None, :]
    tl.store(out_rows[:, None] + v_dim[None, :], result.to(out.dtype.element_ty), mask=stored)


def position_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    token_bounds: Tensor | None,
    spec: AttentionSpec,
    tiles: Tiles | None = None,
) -> Tensor:
    """Causal attention in which a row's place is its position, not its index in the tensor.

    A query that sees nothing gives 0.

    Args:
        q: (batch, heads, queries, head_dim); k: (batch, kv_heads, keys, head_dim); v: (batch, kv_heads, keys, v_dim):
            one dtype of float32, float16 and bfloat16, any strides but 1 in the last dimension; dims up to 256.
        q_positions, k_positions: (batch or 1, queries), (batch or 1, keys) int64, strictly ascending, except for
            leading -1, which mark padding. Unless both are there, the keys are 0, 1, ..., and the queries are the last
            of them.
        token_bounds: (batch, 2) integers: the first row of each request and the one past its last, when queries and
            keys are the same rows; the others are padding. None: there is no padding but that of the positions.
            May lie on the CPU; where it lies on the device, the host does not read it.
        spec: which keys a query sees, and the terms of its logits; scale positive, window and chunk at least 1.
        tiles: for measurements; `attention_tiles` otherwise. Their heads must divide a group, and with a bias be 1.

    Returns:
        (batch, heads, queries, v_dim) in the dtype of q, laid out as (batch, queries, heads, v_dim). Accumulation,
        softmax and sums are float32; the weights are rounded to the dtype of v before they multiply it.
    """
    scale = q.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    check_attention(q, k, v, token_bounds, q_positions, k_positions, replace(spec, scale=scale))
    key_mask, sinks, bias, chunk_start = spec.key_mask, spec.sinks, spec.bias, spec.chunk_start
    dtype, groups = q.dtype, q.shape[1] // k.shape[1]
    tiles = tiles_for_attention(q, v, spec, groups, tiles)
    if triton.knobs.runtime.interpret and dtype == torch.bfloat16:
        q, k, v = q.float(), k.float(), v.float()  # the interpreter multiplies the bit patterns of bfloat16 operands
    (batch, heads, queries, head_dim), (keys, v_dim) = q.shape, v.shape[2:]
    sequence_ids = None if spec.sequence_ids is None else spec.sequence_ids.int()
    by_position, same_rows, key_sequence_ids = False, False, sequence_ids
    by_head = None if bias is None else bias.reshape(-1, heads, bias.shape[-1])
    if q_positions is not None and k_positions is not None:
        by_position = True
        same_rows = q_positions.shape == k_positions.shape and q_positions.data_ptr() == k_positions.data_ptr()
        terms = (key_mask, by_head, sequence_ids)
        key_mask, by_head, key_sequence_ids = (_of_keys(term, k_positions) for term in terms)

    def pointer(x: Tensor | None) -> Tensor:
        return q if x is None else x.contiguous()  # q in the place of what is not read

    out = torch.empty(batch, queries, heads, v_dim, dtype=q.dtype, device=q.device)
    grid = (triton.cdiv(queries, tiles.rows // tiles.heads), heads // tiles.heads, batch)
    if token_bounds is not None:
        token_bounds = token_bounds.to(q.device, torch.int32, non_blocking=True)
    with on_device(q.device):
        _attention_kernel[grid](
            q, k, v, out, pointer(q_positions), pointer(k_positions), pointer(token_bounds), pointer(key_mask),
            pointer(sinks), pointer(by_head), pointer(sequence_ids), pointer(key_sequence_ids), pointer(chunk_start),
            queries, keys, scale, spec.softcap or 1.0, spec.window or 0, spec.chunk or 0,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:2],
            _batch_stride(q_positions), _batch_stride(k_positions), _batch_stride(key_mask),
            _batch_stride(by_head), 0 if by_head is None else by_head.shape[2],
            _batch_stride(sequence_ids), _batch_stride(key_sequence_ids), _batch_stride(chunk_start),
            GROUPS=groups, DIM=head_dim, DIM_PAD=max(16, triton.next_power_of_2(head_dim)),
            V_DIM=v_dim, V_PAD=max(16, triton.next_power_of_2(v_dim)),
            SPANS=token_bounds is not None, SLOTS=by_position, SAME_ROWS=same_rows,
            WINDOW=spec.window is not None, CHUNK=spec.chunk is not None, KEY_MASK=key_mask is not None,
            SOFTCAP=spec.softcap is not None, SINKS=sinks is not None, BIAS=bias is not None,
            SEGMENTS=sequence_ids is not None, CHUNK_STARTS=chunk_start is not None,
            ROWS=tiles.rows, HEADS=tiles.heads, KEYS=tiles.keys, STAGES=tiles.stages,
            num_warps=tiles.warps, maxnreg=tiles.registers,
        )  # fmt: skip
    return out.to(dtype).transpose(1, 2)


def _of_keys(term: Tensor | None, k_positions: Tensor) -> Tensor | None:
    """(batch or 1, ..., positions) read by the positions (batch or 1, keys) of the keys: (batch or 1, ..., keys)."""
    if term is None:
        return None
    batch = max(len(term), len(k_positions))
    column = k_positions.clamp(min=0).reshape(-1, *[1] * (term.ndim - 2), k_positions.shape[1])
    return term.expand(batch, *term.shape[1:]).gather(-1, column.expand(batch, *term.shape[1:-1], -1))


def _batch_stride(x: Tensor | None) -> int:
    """Elements from one batch row of a contiguous tensor to the next; 0 when one row is there for all."""
    return 0 if x is None or x.shape[0] == 1 else x[0].numel()
