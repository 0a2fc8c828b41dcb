"""Attention of a tile of queries over its list of blocks, and over the means of the blocks that are not in it.

A program first goes through the blocks that some of its rows lie in, where causality needs a mask, then through the
rest of its list, then through the means: each mean of a block that is not kept stands for all keys of that block, as
one pseudo-key, in the same online softmax (FlashPrefill V2, step 5). A row always sees itself, so that past the first
part every row has a finite maximum.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from uniprefill_fx.kernels.block_sparse_attention.quantise_blocks import QuantisedBlocks
from uniprefill_fx.kernels.block_sparse_attention.select_key_blocks import KeyBlocks
from uniprefill_fx.kernels.block_sparse_attention.tiles import (
    TILE_ROWS,
    AttentionTiles,
    positions_of_tile,
    request_of,
)
from uniprefill_fx.kernels.common import on_device, tanh


@triton.jit
def _logits(q_tile, k_tile, capped, SOFTCAP: tl.constexpr):
    """The product that, times its unit, is the logits to base 2; `capped` is what the cap divides by, times scale."""
    # for float32 inputs the default, tf32, would lose 13 bits
    product = tl.dot(q_tile, tl.trans(k_tile), input_precision="tf32x3")
    if SOFTCAP:
        product = tanh(product * capped)
    return product


@triton.jit
def _accumulate(product, v_tile, acc, highest, total, unit, added, FP8: tl.constexpr):
    """One step of the online softmax over the logits `product` * unit + added."""
    # the unit is positive, so the largest product belongs to the largest logit
    above = tl.maximum(highest, tl.max(product, 1) * unit + added)
    # weights in eight bits become up to 2^8, so that small ones are no subnormal numbers: the factor cancels
    lift: tl.constexpr = 8.0 if FP8 else 0.0
    weights = tl.exp2(product * unit - (above - added - lift)[:, None])
    shrink = tl.exp2(highest - above)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision="tf32x3")
    return acc, above, total


@triton.jit
def _load_block(x, start, at, length, row_stride, MASKED: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
                DIM_PAD: tl.constexpr):  # fmt: skip
    """Rows [at, at + KEYS) of a request of one head; zeros past its end if MASKED."""
    row, dim = tl.arange(0, KEYS), tl.arange(0, DIM_PAD)
    rows = x + (start + at).to(tl.int64) * row_stride + row[:, None] * row_stride + dim[None, :]
    if MASKED:
        return tl.load(rows, mask=(at + row < length)[:, None] & (dim < DIM)[None, :], other=0.0)
    if DIM == DIM_PAD:
        return tl.load(rows)
    return tl.load(rows, mask=(dim < DIM)[None, :], other=0.0)


@triton.jit
def _load_keys_and_values(
    k, v, start, at, length, k_row_stride, v_row_stride, MASKED: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """KEYS keys and values from position `at` of the request, in eight bits from the blocks of `QuantisedBlocks`."""
    if FP8:
        row, dim, v_dim = tl.arange(0, KEYS), tl.arange(0, DIM_PAD), tl.arange(0, V_PAD)
        k_tile = tl.load(k + at.to(tl.int64) * DIM_PAD + row[:, None] * DIM_PAD + dim[None, :])
        block = (at // BLOCK).to(tl.int64) * (BLOCK * V_PAD) + at % BLOCK
        v_tile = tl.trans(tl.load(v + block + v_dim[:, None] * BLOCK + row[None, :]))
    else:
        k_tile = _load_block(k, start, at, length, k_row_stride, MASKED, KEYS, DIM, DIM_PAD)
        v_tile = _load_block(v, start, at, length, v_row_stride, MASKED, KEYS, V_DIM, V_PAD)
    return k_tile, v_tile


# what may change with the number of tokens is not specialized: a new length compiles nothing
@triton.jit(do_not_specialize=["queries", "tokens", "blocks", "columns", "window_blocks", "correction"])
def _block_sparse_attention_kernel(
    q, k, v, k_means, v_means, largest, counts, indices, kept, bounds, sinks, out,
    queries, tokens, blocks, columns, scale, softcap, window_blocks, correction,
    q_batch_stride, q_head_stride, q_row_stride, k_batch_stride, k_head_stride, k_row_stride,
    v_batch_stride, v_head_stride, v_row_stride, out_batch_stride, out_row_stride,
    GROUPS: tl.constexpr, POSITIONS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, LOG_BLOCK: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr, BOUNDS: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, FP8: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MEANS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS rows of a tile of queries of one kv head: rows of a tile go by position, then by head."""
    PARTS: tl.constexpr = TILE // ROWS
    STEPS: tl.constexpr = BLOCK // KEYS
    LOG2E: tl.constexpr = 1.4426950408889634
    # late tiles see the most blocks, and the last ones keep them all: they go first, so that none is the last to end
    part = tl.num_programs(0) - 1 - tl.program_id(0)
    tile, tiles = part // PARTS, tl.num_programs(0) // PARTS
    kv_head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start, length = request_of(bounds, batch, tokens, BOUNDS)
    first, stop = positions_of_tile(start, length, tile, queries, tokens, POSITIONS)
    row = part % PARTS * ROWS + tl.arange(0, ROWS)
    if (stop <= first) | (first + part % PARTS * ROWS // GROUPS >= stop):
        return
    exists = (row < POSITIONS * GROUPS) & (first + row // GROUPS < stop)
    position = tl.minimum(first + row // GROUPS, stop - 1)  # rows that do not exist see what the last one sees
    own_head = kv_head * GROUPS + row % GROUPS
    column = (position + start - (tokens - queries)).to(tl.int64)
    dim, v_dim = tl.arange(0, DIM_PAD), tl.arange(0, V_PAD)
    q_rows = q + batch * q_batch_stride + own_head * q_head_stride + column * q_row_stride
    q_tile = tl.load(q_rows[:, None] + dim[None, :], mask=exists[:, None] & (dim < DIM)[None, :], other=0.0)

    head = batch * tl.num_programs(1) + kv_head
    if FP8:
        scale *= tl.load(largest + head) / 448.0
        most = tl.max(tl.max(tl.abs(q_tile.to(tl.float32)), 1), 0)
        most = tl.where(most > 0.0, most, 1.0)
        q_tile = (q_tile.to(tl.float32) * (448.0 / most)).to(tl.float8e4nv)
        scale *= most / 448.0
        k += head * blocks * (BLOCK * DIM_PAD)
        v += head * blocks * (BLOCK * V_PAD)
        k_means += head * columns * DIM_PAD
        v_means += head * columns * V_PAD
    else:
        k += batch * k_batch_stride + kv_head * k_head_stride
        v += batch * v_batch_stride + kv_head * v_head_stride
        k_means += head * blocks * DIM
        v_means += head * blocks * V_DIM
    unit = scale * LOG2E  # from what `_logits` returns to logits of base 2
    capped = scale
    if SOFTCAP:
        unit, capped = softcap * LOG2E, scale / softcap

    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SINKS:  # a logit of weight 1 that has no value; in eight bits a weight of 1 is 2^8
        highest = tl.load(sinks + own_head, mask=exists, other=0.0).to(tl.float32) * LOG2E
        total = tl.full((ROWS,), 256.0 if FP8 else 1.0, tl.float32)
    acc = tl.zeros((ROWS, V_PAD), tl.float32)

    number = head * tiles + tile
    listed = tl.load(counts + number)
    indices += number * blocks
    # the last entries of the list: the blocks that rows lie in. All rows see the first key of them
    masked = (stop - 1) // BLOCK - first // BLOCK + 1
    for i in tl.range((listed - masked) * STEPS, listed * STEPS, num_stages=1):
        at = tl.load(indices + i // STEPS) * BLOCK + i % STEPS * KEYS
        k_tile, v_tile = _load_keys_and_values(
            k, v, start, at, length, k_row_stride, v_row_stride, True, KEYS, BLOCK, DIM, DIM_PAD, V_DIM, V_PAD, FP8
        )
        product = _logits(q_tile, k_tile, capped, SOFTCAP)
        sees = (at + tl.arange(0, KEYS))[None, :] <= position[:, None]
        product = tl.where(sees, product, float("-inf"))
        acc, highest, total = _accumulate(product, v_tile, acc, highest, total, unit, 0.0, FP8)
    for i in tl.range(0, (listed - masked) * STEPS, num_stages=STAGES):
        at = tl.load(indices + i // STEPS) * BLOCK + i % STEPS * KEYS
        k_tile, v_tile = _load_keys_and_values(
            k, v, start, at, length, k_row_stride, v_row_stride, False, KEYS, BLOCK, DIM, DIM_PAD, V_DIM, V_PAD, FP8
        )
        product = _logits(q_tile, k_tile, capped, SOFTCAP)
        acc, highest, total = _accumulate(product, v_tile, acc, highest, total, unit, 0.0, FP8)
    # blocks that are not kept lie before the window, and are whole
    limit = tl.maximum(first // BLOCK - window_blocks + 1, 0)
    if (correction == 0) | (listed == (stop - 1) // BLOCK + 1):
        limit = 0
    kept += number * blocks
    for at in tl.range(0, limit, MEANS, num_stages=STAGES):
        block = at + tl.arange(0, MEANS)
        if FP8:
            k_tile = tl.load(k_means + block[:, None] * DIM_PAD + dim[None, :])
            v_tile = tl.trans(tl.load(v_means + v_dim[:, None] * columns + block[None, :]))
        else:
            inside = (block < blocks)[:, None]
            k_tile = tl.load(k_means + block[:, None] * DIM + dim[None, :], mask=inside & (dim < DIM)[None, :], other=0.0)
            v_tile = tl.load(
                v_means + block[:, None] * V_DIM + v_dim[None, :], mask=inside & (v_dim < V_DIM)[None, :], other=0.0
            )
        product = _logits(q_tile, k_tile, capped, SOFTCAP)
        skipped = tl.load(kept + block, mask=block < limit, other=1) == 0
        product = tl.where(skipped[None, :], product, float("-inf"))
        acc, highest, total = _accumulate(product, v_tile, acc, highest, total, unit, LOG_BLOCK, FP8)

    if FP8:
        total *= 448.0 / tl.load(largest + tl.num_programs(1) * tl.num_programs(2) + head)
    result = acc / total[:, None]
    out_rows = out + batch * out_batch_stride + column * out_row_stride + own_head * V_DIM
    stored = exists[:, None] & (v_dim < V_DIM)[None, :]
    tl.store(out_rows[:, None] + v_dim[None, :], result.to(out.dtype.element_ty), mask=stored)


def attend_key_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_means: Tensor,
    v_means: Tensor,
    blocks: KeyBlocks,
    token_bounds: Tensor | None,
    scale: float,
    block_size: int,
    window_blocks: int,
    correction: bool,
    softcap: float | None,
    sinks: Tensor | None,
    quantised: QuantisedBlocks | None,
    tiles: AttentionTiles,
) -> Tensor:
    """Attention over the kept blocks, and over the means of the others if `correction` (FlashPrefill V2, steps 5 and 6).

    Args:
        q: (batch, heads, queries, head_dim), k: (batch, kv_heads, tokens, head_dim), v: (batch, kv_heads, tokens,
            v_dim), stride 1 in the last dimension; k_means, v_means: of `block_means`; blocks: of `select_key_blocks`.
        token_bounds: (batch, 2) int32 on the same device, [start, end) columns of each request; None: all columns.
        window_blocks: as `blocks` were selected with. sinks: `heads` elements, contiguous.
        quantised: what is read in place of k, v and the means; q and the weights are then rounded to e4m3 as well.

    Returns:
        (batch, heads, queries, v_dim) in the type of q, laid out as (batch, queries, heads, v_dim); zeros in padding.
    """
    (batch, heads, queries, head_dim), (kv_heads, tokens, v_dim) = q.shape, v.shape[1:]
    groups = heads // kv_heads
    fp8 = quantised is not None
    allocate = torch.empty if token_bounds is None else torch.zeros  # padding is nobody's tile
    out = allocate(batch, queries, heads, v_dim, dtype=q.dtype, device=q.device)
    k_read, v_read, k_means, v_means, largest = quantised or (k, v, k_means, v_means, q)
    steps = TILE_ROWS // tiles.rows
    least = 32 if fp8 else 16
    with on_device(q.device):
        _block_sparse_attention_kernel[(blocks.counts.shape[2] * steps, kv_heads, batch)](
            q, k_read, v_read, k_means, v_means, largest, blocks.counts, blocks.indices, blocks.kept,
            q if token_bounds is None else token_bounds, q if sinks is None else sinks, out,
            queries, tokens, blocks.indices.shape[3], k_means.shape[2], scale, softcap or 1.0, window_blocks,
            int(correction), *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:2],
            GROUPS=groups, POSITIONS=TILE_ROWS // groups, TILE=TILE_ROWS,
            BLOCK=block_size, LOG_BLOCK=block_size.bit_length() - 1,
            DIM=head_dim, DIM_PAD=max(least, triton.next_power_of_2(head_dim)),
            V_DIM=v_dim, V_PAD=max(least, triton.next_power_of_2(v_dim)),
            BOUNDS=token_bounds is not None, SOFTCAP=softcap is not None, SINKS=sinks is not None, FP8=fp8,
            ROWS=tiles.rows, KEYS=min(tiles.keys, block_size), MEANS=tiles.means, STAGES=tiles.stages,
            num_warps=tiles.warps, maxnreg=tiles.registers,
        )  # fmt: skip
    return out.transpose(1, 2)
