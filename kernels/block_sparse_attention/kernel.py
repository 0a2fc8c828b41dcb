"""Attention of a tile of queries over its list of blocks, and over the means of the blocks that are not in it.

A program first goes through the blocks that some of its rows lie in, where causality needs a mask, then through the
rest of its list, then through the means: each mean of a block that is not kept stands for all keys of that block, as
one pseudo-key, in the same online softmax (FlashPrefill V2, step 5). One loop for the three, with a branch, was slower.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from uniprefill_fx.kernels.block_sparse_attention.quantise_blocks import QuantisedBlocks
from uniprefill_fx.kernels.block_sparse_attention.select_key_blocks import KeyBlocks
from uniprefill_fx.kernels.block_sparse_attention.tiles import (
    AttentionTiles,
    attention_tiles,
    positions_of_tile,
    request_of,
)
from uniprefill_fx.kernels.common import on_device, shared_memory, tanh
from uniprefill_fx.specs import TILE_ROWS


@triton.jit
def _step(
    q_tile, k_tile, v_tile, acc, highest, total, unit, capped, visible, hidden,
    LOG_BLOCK: tl.constexpr, CAUSAL: tl.constexpr, PSEUDO: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: over keys that all rows see, over `visible` ones if CAUSAL, or over pseudo-keys
    of LOG_BLOCK more to their logits if PSEUDO, less those whose `hidden` is -inf. v_tile is transposed if FP8.
    """
    # for float32 inputs the default, tf32, would lose 13 bits
    product = tl.dot(q_tile, tl.trans(k_tile), input_precision="tf32x3")
    if SOFTCAP:
        product = tanh(product * capped)
    if CAUSAL:
        product = tl.where(visible, product, float("-inf"))
    added: tl.constexpr = LOG_BLOCK if PSEUDO else 0.0
    if PSEUDO:
        product += hidden[None, :]
    # the unit is positive, so the largest product belongs to the largest logit
    above = tl.maximum(highest, tl.max(product, 1) * unit + added)
    # weights in eight bits become up to 2^8, so that small ones are no subnormal numbers: the factor cancels
    lift: tl.constexpr = added + (8.0 if FP8 else 0.0)
    weights = tl.exp2(product * unit - (above - lift)[:, None])
    shrink = tl.exp2(highest - above)
    total = total * shrink + tl.sum(weights, 1)
    if FP8:
        v_tile = tl.trans(v_tile)
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision="tf32x3")
    return acc, above, total


@triton.jit
def _load_rows(
    x, first, end, row_stride, KEYS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, MASKED: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """(KEYS, DIM_PAD): rows from `first` of one head, zeros from row `end` on if MASKED."""
    if DESCRIBED:
        tile = tl.reshape(x.load([tl.program_id(2), tl.program_id(1), first, 0]), (KEYS, DIM_PAD))
    else:
        row, dim = tl.arange(0, KEYS), tl.arange(0, DIM_PAD)
        rows = x + tl.cast(first, tl.int64) * row_stride + row[:, None] * row_stride + dim[None, :]
        if MASKED:
            tile = tl.load(rows, mask=(row < end - first)[:, None] & (dim < DIM)[None, :], other=0.0)
        elif DIM == DIM_PAD:
            tile = tl.load(rows)
        else:
            tile = tl.load(rows, mask=(dim < DIM)[None, :], other=0.0)
    return tile


@triton.jit
def _load_block(
    k, v, start, block, within, length, k_row_stride, v_row_stride, KEYS: tl.constexpr, BLOCK: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr,
    MASKED: tl.constexpr, FP8: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """KEYS keys and values of a block, from its row `within`; `start`: the request's first column, or if FP8 the number
    of the kv head's first block.
    """
    if FP8:
        if DESCRIBED:
            number = start + block  # of all blocks of all heads
            k_tile = k.load([number * BLOCK + within, 0])
            v_tile = v.load([number * V_PAD, within])
        else:
            row, dim, v_dim = tl.arange(0, KEYS), tl.arange(0, DIM_PAD), tl.arange(0, V_PAD)
            number = (start + block).to(tl.int64)
            k_tile = tl.load(k + number * (BLOCK * DIM_PAD) + within * DIM_PAD + row[:, None] * DIM_PAD + dim[None, :])
            v_tile = tl.load(v + number * (BLOCK * V_PAD) + within + v_dim[:, None] * BLOCK + row[None, :])
    else:
        at, end = start + block * BLOCK + within, start + length
        k_tile = _load_rows(k, at, end, k_row_stride, KEYS, DIM, DIM_PAD, MASKED, DESCRIBED)
        v_tile = _load_rows(v, at, end, v_row_stride, KEYS, V_DIM, V_PAD, MASKED, DESCRIBED)
    return k_tile, v_tile


# what may change with the number of tokens is not specialized: a new length compiles nothing
@triton.jit(do_not_specialize=["queries", "tokens", "blocks", "window_blocks", "correction"])
def _block_sparse_attention_kernel(
    q, k, v, k_means, v_means, largest, counts, indices, pseudo, bounds, sinks, out,
    queries, tokens, blocks, scale, softcap, window_blocks, correction,
    q_batch_stride, q_head_stride, q_row_stride, k_batch_stride, k_head_stride, k_row_stride,
    v_batch_stride, v_head_stride, v_row_stride, out_batch_stride, out_row_stride,
    GROUPS: tl.constexpr, POSITIONS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, LOG_BLOCK: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr, BOUNDS: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, FP8: tl.constexpr, DESCRIBED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
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
    head = batch * tl.num_programs(1) + kv_head
    listed = tl.load(counts + head * tiles + tile)
    exists = (row < POSITIONS * GROUPS) & (first + row // GROUPS < stop)
    position = tl.minimum(first + row // GROUPS, stop - 1)  # rows that do not exist see what the last one sees
    own_head = kv_head * GROUPS + row % GROUPS
    column = (position + start - (tokens - queries)).to(tl.int64)
    dim, v_dim = tl.arange(0, DIM_PAD), tl.arange(0, V_PAD)
    q_rows = q + batch * q_batch_stride + own_head * q_head_stride + column * q_row_stride
    q_tile = tl.load(q_rows[:, None] + dim[None, :], mask=exists[:, None] & (dim < DIM)[None, :], other=0.0)

    if FP8:
        most = tl.max(tl.max(tl.abs(q_tile.to(tl.float32)), 1), 0)
        # a power of two, so that rounding does not depend on how many rows the program holds
        lifted = tl.exp2(tl.floor(tl.log2(448.0 / tl.where(most > 0.0, most, 1.0))))
        q_tile = (q_tile.to(tl.float32) * lifted).to(tl.float8e4nv)
        scale *= tl.load(largest + head) / (448.0 * lifted)
        start = head.to(tl.int32) * (blocks + tl.cdiv(blocks, 128) * (128 // BLOCK))
    elif not DESCRIBED:
        k += batch * k_batch_stride + kv_head * k_head_stride
        v += batch * v_batch_stride + kv_head * v_head_stride
        k_means += head * blocks * DIM
        v_means += head * blocks * V_DIM
    unit = scale * LOG2E  # from products, as `_step` has them, to logits of base 2
    capped = scale
    if SOFTCAP:
        unit, capped = softcap * LOG2E, scale / softcap

    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SINKS:  # a logit of weight 1 that has no value; in eight bits a weight of 1 is 2^8
        highest = tl.load(sinks + own_head, mask=exists, other=0.0).to(tl.float32) * LOG2E
        total = tl.full((ROWS,), 256.0 if FP8 else 1.0, tl.float32)
    acc = tl.zeros((ROWS, V_PAD), tl.float32)
    indices += (head * tiles + tile) * blocks
    lane = tl.arange(0, KEYS)
    # the last entries of the list are the blocks that rows of the tile lie in. Every row sees the first key of the
    # first of them: from then on all maxima are finite
    whole = listed - ((stop - 1) // BLOCK - first // BLOCK + 1)
    for i in tl.range(whole * STEPS, listed * STEPS, num_stages=1):
        block, within = tl.load(indices + i // STEPS), i % STEPS * KEYS
        k_tile, v_tile = _load_block(
            k, v, start, block, within, length, k_row_stride, v_row_stride,
            KEYS, BLOCK, DIM, DIM_PAD, V_DIM, V_PAD, True, FP8, DESCRIBED,
        )  # fmt: skip
        visible = (block * BLOCK + within + lane)[None, :] <= position[:, None]
        acc, highest, total = _step(
            q_tile, k_tile, v_tile, acc, highest, total, unit, capped, visible, 0.0,
            LOG_BLOCK, True, False, SOFTCAP, FP8,
        )  # fmt: skip
    for i in tl.range(0, whole * STEPS, num_stages=STAGES):
        block, within = tl.load(indices + i // STEPS), i % STEPS * KEYS
        k_tile, v_tile = _load_block(
            k, v, start, block, within, length, k_row_stride, v_row_stride,
            KEYS, BLOCK, DIM, DIM_PAD, V_DIM, V_PAD, False, FP8, DESCRIBED,
        )  # fmt: skip
        acc, highest, total = _step(
            q_tile, k_tile, v_tile, acc, highest, total, unit, capped, True, 0.0,
            LOG_BLOCK, False, False, SOFTCAP, FP8,
        )  # fmt: skip
    # blocks that are not kept lie before the window, and are full
    limit = tl.maximum(first // BLOCK - window_blocks + 1, 0)
    if (correction == 0) | (listed == (stop - 1) // BLOCK + 1):
        limit = 0
    pseudo += (head * tiles + tile) * blocks
    for at in tl.range(0, limit, KEYS, num_stages=STAGES):
        if FP8:  # means lie behind the keys, as further blocks
            k_tile, v_tile = _load_block(
                k, v, start, blocks + at // BLOCK, at % BLOCK, length, k_row_stride, v_row_stride,
                KEYS, BLOCK, DIM, DIM_PAD, V_DIM, V_PAD, False, FP8, DESCRIBED,
            )  # fmt: skip
        else:
            k_tile = _load_rows(k_means, at, blocks, DIM, KEYS, DIM, DIM_PAD, True, DESCRIBED)
            v_tile = _load_rows(v_means, at, blocks, V_DIM, KEYS, V_DIM, V_PAD, True, DESCRIBED)
        hidden = tl.load(pseudo + at + lane, mask=at + lane < limit, other=float("-inf"))
        acc, highest, total = _step(
            q_tile, k_tile, v_tile, acc, highest, total, unit, capped, True, hidden,
            LOG_BLOCK, False, True, SOFTCAP, FP8,
        )  # fmt: skip

    if FP8:
        total *= 448.0 / tl.load(largest + tl.num_programs(1) * tl.num_programs(2) + head)
    result = acc / total[:, None]
    out_rows = out + batch * out_batch_stride + column * out_row_stride + own_head * V_DIM
    stored = exists[:, None] & (v_dim < V_DIM)[None, :]
    tl.store(out_rows[:, None] + v_dim[None, :], result.to(out.dtype.element_ty), mask=stored)


def multiplies_by_warp_group(device: torch.device) -> bool:
    """Whether matrix instructions take their operands from shared memory, as from Hopper on, and TMA is there."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def _usual_tiles(q: Tensor, v: Tensor, fp8: bool, described: bool) -> AttentionTiles:
    wide, room = multiplies_by_warp_group(q.device), shared_memory(q.device)
    return attention_tiles(q.shape[3], v.shape[3], q.element_size(), fp8, described and wide, wide, room)


def _describable(x: Tensor) -> bool:
    """Whether the copy engine can read x: it wants addresses that are multiples of 16 bytes."""
    return all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:3]) and x.data_ptr() % 16 == 0


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
    tiles: AttentionTiles | None = None,
) -> Tensor:
    """Attention over kept blocks, and over the means of the others if `correction` (FlashPrefill V2, steps 5, 6).

    Args:
        q: (batch, heads, queries, head_dim), k: (batch, kv_heads, tokens, head_dim), v: (batch, kv_heads, tokens,
            v_dim), stride 1 in the last dimension; k_means, v_means: of `block_means`; blocks: of `select_key_blocks`.
        token_bounds: (batch, 2) int32 on the same device, [start, end) columns of each request; None: all columns.
        window_blocks: as `blocks` were selected with. sinks: `heads` elements, contiguous.
        quantised: what is read in place of k, v and the means; q and the weights are then rounded to e4m3 as well.
        tiles: for measurements; `attention_tiles` otherwise.

    Returns:
        (batch, heads, queries, v_dim) in the type of q, laid out as (batch, queries, heads, v_dim); zeros in padding.
    """
    (batch, heads, queries, head_dim), (kv_heads, tokens, v_dim) = q.shape, v.shape[1:]
    groups = heads // kv_heads
    fp8 = quantised is not None
    allocate = torch.empty if token_bounds is None else torch.zeros  # padding is nobody's tile
    out = allocate(batch, queries, heads, v_dim, dtype=q.dtype, device=q.device)
    k_read, v_read, largest = quantised or (k, v, q)
    least = 32 if fp8 else 16
    dim_pad, v_pad = max(least, triton.next_power_of_2(head_dim)), max(least, triton.next_power_of_2(v_dim))
    # the copy engine cannot stop at the end of a request, and what is past it may not be a number
    described = fp8 or (token_bounds is None and all(_describable(x) for x in (k, v, k_means, v_means)))
    tiles = tiles or _usual_tiles(q, v, fp8, described)
    parts, keys = TILE_ROWS // tiles.rows, min(tiles.keys, block_size)
    described = described and tiles.descriptors
    if described and fp8:
        k_read = TensorDescriptor.from_tensor(k_read.view(-1, dim_pad), [keys, dim_pad])
        v_read = TensorDescriptor.from_tensor(v_read.view(-1, block_size), [v_pad, keys])
    elif described:
        k_read, k_means = (TensorDescriptor.from_tensor(x, [1, 1, keys, dim_pad]) for x in (k, k_means))
        v_read, v_means = (TensorDescriptor.from_tensor(x, [1, 1, keys, v_pad]) for x in (v, v_means))
    with on_device(q.device):
        _block_sparse_attention_kernel[(blocks.counts.shape[2] * parts, kv_heads, batch)](
            q, k_read, v_read, k_means, v_means, largest, blocks.counts, blocks.indices, blocks.pseudo,
            q if token_bounds is None else token_bounds, q if sinks is None else sinks, out,
            queries, tokens, blocks.indices.shape[3], scale, softcap or 1.0, window_blocks,
            int(correction), *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:2],
            GROUPS=groups, POSITIONS=TILE_ROWS // groups, TILE=TILE_ROWS,
            BLOCK=block_size, LOG_BLOCK=math.log2(block_size), DIM=head_dim, DIM_PAD=dim_pad, V_DIM=v_dim, V_PAD=v_pad,
            BOUNDS=token_bounds is not None, SOFTCAP=softcap is not None, SINKS=sinks is not None, FP8=fp8,
            DESCRIBED=described, ROWS=tiles.rows, KEYS=keys, STAGES=tiles.stages,
            num_warps=tiles.warps, maxnreg=tiles.registers,
        )  # fmt: skip
    return out.transpose(1, 2)
