"""Attention mass of the last queries on each block of keys, in one pass over K (UniPrefill, arXiv 2605.06221, Eq. 3-4).

`_block_lse_kernel` computes the logits of a tile of keys against the last queries of all heads that share it, and
keeps one number for each (query, block): the logarithm of the block's sum of exponentials. From these the softmax
over the whole sequence follows exactly: `_row_lse_kernel` sums a query's blocks to its denominator, and
`_combine_kernel` sums exp(block - denominator) over queries and heads. Logarithms are to base 2, where the hardware
has exp2 and log2. Nothing is written twice or added atomically, so that results do not depend on timing.

A launch takes the whole batch. Blocks and tiles are counted from each request's own first token, so that padding
changes no score; programs behind the end of their request do nothing.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from uniprefill_fx.kernels.block_scores.naive import queries_at_most
from uniprefill_fx.kernels.checks import check_scores, tiles_for_scores
from uniprefill_fx.kernels.common import bounds_of, check_bounds, on_device, tanh
from uniprefill_fx.kernels.tiles import Tiles, blocks_of_a_tile

MIN_PROGRAMS = 512  # a few for each multiprocessor of the largest cards


@triton.jit
def _to_fp8(x):
    """x as e4m3 with one scale for the tile: the largest magnitude becomes the largest finite number."""
    largest = tl.max(tl.max(tl.abs(x.to(tl.float32)), 1), 0)
    largest = tl.where(largest > 0.0, largest, 1.0)
    return (x.to(tl.float32) * (448.0 / largest)).to(tl.float8e4nv), largest / 448.0


@triton.jit
def _load_queries(
    q, row, kv_head, start, length, q_head_stride, q_token_stride,
    LAST_N: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Queries `row` = group * LAST_N + i of one kv head's group; rows past the last, or past a short request, are 0."""
    n = tl.minimum(length, LAST_N)
    dim = tl.arange(0, DIM_PAD)
    exists = (row < GROUPS * LAST_N) & (row % LAST_N < n)
    head = (kv_head * GROUPS + row // LAST_N).to(tl.int64)
    token = (start + length - n + row % LAST_N).to(tl.int64)
    rows = q + head * q_head_stride + token * q_token_stride
    return tl.load(rows[:, None] + dim[None, :], mask=exists[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _quantise_queries_kernel(
    q, token_bounds, q8, q8_scale, q_batch_stride, q_head_stride, q_token_stride,
    LAST_N: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The last queries as e4m3 tiles, (batch, kv_heads, tiles, ROWS, DIM_PAD), so that it is done once, not for
    every tile of keys."""
    request, kv_head, tile = tl.program_id(2), tl.program_id(1), tl.program_id(0)
    start, length = bounds_of(token_bounds, request)
    q += request.to(tl.int64) * q_batch_stride
    row = tile * ROWS + tl.arange(0, ROWS)
    x = _load_queries(q, row, kv_head, start, length, q_head_stride, q_token_stride, LAST_N, GROUPS, HEAD_DIM, DIM_PAD)
    x8, scale = _to_fp8(x)
    number = ((request * tl.num_programs(1) + kv_head) * tl.num_programs(0) + tile).to(tl.int64)
    at = number * (ROWS * DIM_PAD) + tl.arange(0, ROWS)[:, None] * DIM_PAD + tl.arange(0, DIM_PAD)[None, :]
    tl.store(q8 + at, x8)
    tl.store(q8_scale + number, scale)


@triton.jit(do_not_specialize=["blocks", "shares"])
def _block_lse_kernel(
    q, q8, q8_scale, k, token_bounds, block_lse, blocks, shares, scale, softcap,
    q_batch_stride, q_head_stride, q_token_stride, k_batch_stride, k_head_stride, k_token_stride,
    LAST_N: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_PAD: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
    SOFTCAP: tl.constexpr, FP8: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """block_lse[request, block, head * LAST_N + i] = log2 of the sum of exp(logit) over the keys of a block.

    A program holds one tile of keys and goes through the tiles of queries; those are few and stay in the L2 cache,
    while every key is read from memory once. `shares` programs along axis 2 share the queries of one tile.
    """
    TOKENS: tl.constexpr = BLOCKS * BLOCK_SIZE
    GROUP_ROWS: tl.constexpr = GROUPS * LAST_N
    TILES: tl.constexpr = (GROUP_ROWS + ROWS - 1) // ROWS
    kv_head, request = tl.program_id(1), tl.program_id(2) // shares
    start, length = bounds_of(token_bounds, request)
    first_key = tl.program_id(0) * TOKENS
    if first_key >= length:
        return
    q += request.to(tl.int64) * q_batch_stride
    k += request.to(tl.int64) * k_batch_stride

    column = tl.arange(0, BLOCKS * BLOCK_PAD)
    within = column % BLOCK_PAD
    key = first_key + column // BLOCK_PAD * BLOCK_SIZE + within
    dim = tl.arange(0, DIM_PAD)
    keys = k + kv_head.to(tl.int64) * k_head_stride + (start + key).to(tl.int64) * k_token_stride
    exists = (key < length) & (within < BLOCK_SIZE)
    k_tile = tl.load(keys[:, None] + dim[None, :], mask=exists[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    if FP8:
        k_tile, k_scale = _to_fp8(k_tile)
    k_tile = tl.trans(k_tile)  # here rather than in the loop, where it would be written to shared memory each time

    n = tl.minimum(length, LAST_N)
    # the first query sees all keys of this tile, and then so do all: most tiles need no mask
    masked = (first_key + TOKENS > length - n + 1) | (BLOCK_SIZE != BLOCK_PAD)
    block = first_key // BLOCK_SIZE + tl.arange(0, BLOCKS)
    entry = request.to(tl.int64) * blocks + block
    line = tl.num_programs(1).to(tl.int64) * GROUP_ROWS
    for t in tl.range(tl.program_id(2) % shares, TILES, shares, num_stages=STAGES):
        row = t * ROWS + tl.arange(0, ROWS)
        if FP8:
            number = ((request * tl.num_programs(1) + kv_head) * TILES + t).to(tl.int64)
            at = number * (ROWS * DIM_PAD) + tl.arange(0, ROWS)[:, None] * DIM_PAD + dim[None, :]
            product = tl.dot(tl.load(q8 + at), k_tile)
            unit = scale * k_scale * tl.load(q8_scale + number)
        else:
            q_tile = _load_queries(
                q, row, kv_head, start, length, q_head_stride, q_token_stride, LAST_N, GROUPS, HEAD_DIM, DIM_PAD
            )
            # for float32 inputs the default, tf32, would lose 13 bits
            product = tl.dot(q_tile, k_tile, input_precision="tf32x3")
            unit = scale
        if SOFTCAP:
            product = tanh(product * (unit / softcap))
            unit = softcap
        unit *= 1.4426950408889634  # log2(e)
        if masked:
            position = tl.where(row % LAST_N < n, length - n + row % LAST_N, -1)
            visible = (key[None, :] <= position[:, None]) & (within < BLOCK_SIZE)[None, :]
            product = tl.where(visible, product, float("-inf"))
        # the unit is positive, so the largest product belongs to the largest logit
        product = tl.reshape(product, (ROWS, BLOCKS, BLOCK_PAD))
        highest = tl.max(product, 2) * unit
        highest = tl.where(highest == float("-inf"), 0.0, highest)
        mass = tl.sum(tl.exp2(product * unit - highest[:, :, None]), 2)
        where = block_lse + entry[None, :] * line + (kv_head * GROUP_ROWS + row)[:, None]
        stored = (row < GROUP_ROWS)[:, None] & (block * BLOCK_SIZE < length)[None, :]
        tl.store(where, highest + tl.log2(mass), mask=stored)


@triton.jit(do_not_specialize=["width"])
def _row_lse_kernel(
    block_lse, token_bounds, sinks, row_lse, width, LAST_N: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SINKS: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """row_lse[request, row] = log2 of the row's softmax denominator; +inf for rows that do not exist."""
    request = tl.program_id(1)
    _start, length = bounds_of(token_bounds, request)
    first, blocks = request.to(tl.int64) * width, tl.cdiv(length, BLOCK_SIZE)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = (row < HEADS * LAST_N) & (row % LAST_N < length)
    # a running sum in each lane, relative to the lane's own maximum; lanes are joined once, at the end
    highest = tl.full((SLOTS, ROWS), float("-inf"), tl.float32)
    mass = tl.zeros((SLOTS, ROWS), tl.float32)
    for b in range(0, blocks, SLOTS):
        block = b + tl.arange(0, SLOTS)
        at = (first + block)[:, None] * (HEADS * LAST_N) + row[None, :]
        x = tl.load(block_lse + at, mask=(block < blocks)[:, None] & exists[None, :], other=float("-inf"))
        above = tl.maximum(highest, x)
        finite = tl.where(above == float("-inf"), 0.0, above)
        mass = mass * tl.exp2(highest - finite) + tl.exp2(x - finite)
        highest = above
    top = tl.max(highest, 0)
    if SINKS:
        sink = tl.load(sinks + row // LAST_N, mask=exists, other=0.0).to(tl.float32) * 1.4426950408889634  # log2(e)
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(mass * tl.exp2(highest - top[None, :]), 0)
    if SINKS:
        total += tl.exp2(sink - top)
    result = tl.where(exists, top + tl.log2(total), float("inf"))
    tl.store(row_lse + request.to(tl.int64) * (HEADS * LAST_N) + row, result, mask=row < HEADS * LAST_N)


@triton.jit
def _combine_kernel(
    block_lse, row_lse, token_bounds, scores, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """scores[request, block] = sum over the rows of exp2(block_lse - row_lse); 0 behind the last block."""
    block, request = tl.program_id(0), tl.program_id(1)
    _start, length = bounds_of(token_bounds, request)
    entry = request.to(tl.int64) * tl.num_programs(0) + block
    mass = tl.zeros((TILE,), tl.float32)
    if block * BLOCK_SIZE < length:
        rows = row_lse + request.to(tl.int64) * ROWS
        for r in range(0, ROWS, TILE):
            row = r + tl.arange(0, TILE)
            x = tl.load(block_lse + entry * ROWS + row, mask=row < ROWS, other=float("-inf"))
            mass += tl.exp2(x - tl.load(rows + row, mask=row < ROWS, other=float("inf")))
    tl.store(scores + entry, tl.sum(mass, 0))


def block_scores(
    q: Tensor,
    k: Tensor,
    token_bounds: Tensor,
    scale: float,
    last_n: int,
    block_size: int,
    softcap: float | None = None,
    dtype: Literal["input", "fp8"] = "input",
    sinks: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Attention mass that the last queries of each request give to each block of its keys.

    s_b = Σ over heads, the last min(last_n, length) queries and the keys i of block b of softmax(q·kᵀ·scale)_i, causal
    within the request and normalised over all its keys (UniPrefill, arXiv 2605.06221, Eq. 3 and 4).

    Args:
        q: (batch, heads, columns, head_dim), k: (batch, kv_heads, columns, head_dim), both after rotary, float32,
            float16 or bfloat16; any strides but 1 in the last dimension. heads is a multiple of kv_heads, head_dim at
            most 256. A packed stream is `q[None].expand(batch, -1, -1, -1)`, with a stride of 0.
        token_bounds: (batch, 2) int32 on the same device, the first column of each request and the one past its last;
            not read by the host. Other columns are padding and are not read.
        scale: factor on the logits, positive. last_n: queries a request is scored with (fewer when it is shorter).
        block_size: tokens a block, 16 to 128. softcap: logits become softcap·tanh(logit / softcap).
        dtype: type of the operands of q·kᵀ: that of the inputs, or "fp8": e4m3, with one scale for each tile of
            queries and of keys. Accumulation, exponentials and sums are float32 either way.
        sinks: `heads` elements: one more logit a head that takes part in the softmax and belongs to no block.
        tiles: for measurements; `score_tiles` otherwise.

    Returns:
        (batch, ceil(columns / block_size)) float32, attention mass (a row sums to heads × queries, less what the sinks
        take). The blocks of a request are counted from its first token; entries behind its last block are 0.

    Raises:
        ValueError: shapes, dtypes, strides or numbers that the kernels do not handle.
    """
    check_scores(q, k, scale, last_n, block_size, softcap, dtype, sinks)
    check_bounds(token_bounds, q.shape[0], q.device)
    tiles = tiles_for_scores(q, dtype, block_size, tiles)
    if triton.knobs.runtime.interpret and q.dtype == torch.bfloat16:
        q, k = q.float(), k.float()  # the interpreter multiplies the bit patterns of bfloat16 operands
    (batch, heads, columns, head_dim), kv_heads = q.shape, k.shape[1]
    groups, fp8 = heads // kv_heads, dtype == "fp8"
    block_pad, dim_pad = triton.next_power_of_2(block_size), max(16, triton.next_power_of_2(head_dim))
    blocks_a_tile, blocks = blocks_of_a_tile(tiles, block_size), triton.cdiv(columns, block_size)
    last_n = queries_at_most(last_n, columns)
    key_tiles, row_tiles = triton.cdiv(blocks, blocks_a_tile), triton.cdiv(groups * last_n, tiles.rows)
    strides = q.stride()[:3]
    shape = {"LAST_N": last_n, "GROUPS": groups, "HEAD_DIM": head_dim, "DIM_PAD": dim_pad, "ROWS": tiles.rows}

    block_lse = torch.empty(batch, blocks, heads * last_n, dtype=torch.float32, device=q.device)
    row_lse = torch.empty(batch, heads * last_n, dtype=torch.float32, device=q.device)
    scores = torch.empty(batch, blocks, dtype=torch.float32, device=q.device)
    if scores.numel() == 0:
        return scores
    q8, q8_scale = q, q  # not read unless fp8
    with on_device(q.device):
        if fp8:
            q8 = q.new_empty(batch, kv_heads, row_tiles, tiles.rows, dim_pad, dtype=torch.float8_e4m3fn)
            q8_scale = torch.empty(batch, kv_heads, row_tiles, dtype=torch.float32, device=q.device)
            _quantise_queries_kernel[(row_tiles, kv_heads, batch)](q, token_bounds, q8, q8_scale, *strides, **shape)
        # short prompts have few tiles of keys: programs then share a tile, so that every multiprocessor has work
        turns = max(1, row_tiles * key_tiles * kv_heads * batch // MIN_PROGRAMS)
        shares = triton.cdiv(row_tiles, turns)
        _block_lse_kernel[(key_tiles, kv_heads, batch * shares)](
            q, q8, q8_scale, k, token_bounds, block_lse, blocks, shares, scale, softcap or 1.0,
            *strides, *k.stride()[:3], **shape,
            BLOCK_SIZE=block_size, BLOCK_PAD=block_pad, BLOCKS=blocks_a_tile, SOFTCAP=softcap is not None, FP8=fp8,
            STAGES=tiles.stages, num_warps=tiles.warps, maxnreg=tiles.registers,
        )  # fmt: skip
        _row_lse_kernel[(triton.cdiv(heads * last_n, 32), batch)](
            block_lse, token_bounds, row_lse if sinks is None else sinks.reshape(-1).contiguous(), row_lse, blocks,
            last_n, heads, block_size, SINKS=sinks is not None, ROWS=32, SLOTS=128, num_warps=8,
        )  # fmt: skip
        _combine_kernel[(blocks, batch)](
            block_lse, row_lse, token_bounds, scores, heads * last_n, block_size, TILE=1024, num_warps=4
        )
    return scores
