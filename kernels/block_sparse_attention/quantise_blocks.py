"""Keys, values and their means in eight bits, block by block, in the order in which the products read them."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from uniprefill_fx.kernels.block_sparse_attention.tiles import MEANS_PAD, request_of
from uniprefill_fx.kernels.common import on_device

FP8_MAX = 448.0  # the largest finite e4m3 number


class QuantisedBlocks(NamedTuple):
    """e4m3 keys and values by block of their request, zeros where a block has no token, then means by block.

    Means come as further blocks, so that attention finds them as it finds keys. Values lie with the tokens of a block
    side by side: matrix instructions on eight bits want that of both operands.
    """

    k: Tensor
    """(batch, kv_heads, blocks + blocks of means, block_size, head_dim padded to a power of two)"""
    v: Tensor
    """(batch, kv_heads, blocks + blocks of means, v_dim padded to a power of two, block_size)"""
    largest: Tensor
    """(2, batch, kv_heads) float32: the magnitudes of keys and of values that became FP8_MAX."""


@triton.jit
def _to_fp8(x, largest):
    return (x.to(tl.float32) * (448.0 / tl.where(largest > 0.0, largest, 1.0))).to(tl.float8e4nv)


@triton.jit(do_not_specialize=["tokens", "blocks"])
def _quantise_blocks_kernel(
    k, v, k_means, v_means, bounds, largest, k8, v8, tokens, blocks,
    k_batch_stride, k_head_stride, k_row_stride, v_batch_stride, v_head_stride, v_row_stride,
    BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr,
    BOUNDS: tl.constexpr,
):  # fmt: skip
    """A program takes one block of one kv head; those past the last block write the zeros of the padded means."""
    block, kv_head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start, length = request_of(bounds, batch, tokens, BOUNDS)
    head = batch * tl.num_programs(1) + kv_head
    k_largest = tl.load(largest + head)
    v_largest = tl.load(largest + tl.num_programs(1) * tl.num_programs(2) + head)
    dim, v_dim = tl.arange(0, DIM_PAD), tl.arange(0, V_PAD)
    k8 += head * (blocks + tl.num_programs(0) // BLOCK) * (BLOCK * DIM_PAD)
    v8 += head * (blocks + tl.num_programs(0) // BLOCK) * (BLOCK * V_PAD)
    exists = tl.minimum(blocks - block, 1)  # above 0 where there is such a block
    mean = tl.load(k_means + (head * blocks + block) * DIM + dim, mask=dim < DIM * exists, other=0.0)
    tl.store(k8 + (blocks * BLOCK + block).to(tl.int64) * DIM_PAD + dim, _to_fp8(mean, k_largest))
    mean = tl.load(v_means + (head * blocks + block) * V_DIM + v_dim, mask=v_dim < V_DIM * exists, other=0.0)
    at = (blocks + block // BLOCK).to(tl.int64) * (BLOCK * V_PAD) + block % BLOCK
    tl.store(v8 + at + v_dim * BLOCK, _to_fp8(mean, v_largest))
    if block >= blocks:
        return
    lane = tl.arange(0, BLOCK)
    row = block * BLOCK + lane
    exists = (row < length)[:, None]
    number = block.to(tl.int64)
    rows = k + batch * k_batch_stride + kv_head * k_head_stride + (start + row).to(tl.int64) * k_row_stride
    tile = tl.load(rows[:, None] + dim[None, :], mask=exists & (dim < DIM)[None, :], other=0.0)
    at = number * (BLOCK * DIM_PAD) + lane[:, None] * DIM_PAD + dim[None, :]
    tl.store(k8 + at, _to_fp8(tile, k_largest))
    rows = v + batch * v_batch_stride + kv_head * v_head_stride + (start + row).to(tl.int64) * v_row_stride
    tile = tl.load(rows[:, None] + v_dim[None, :], mask=exists & (v_dim < V_DIM)[None, :], other=0.0)
    at = number * (BLOCK * V_PAD) + v_dim[:, None] * BLOCK + lane[None, :]
    tl.store(v8 + at, tl.trans(_to_fp8(tile, v_largest)))


def quantise_blocks(
    k: Tensor, v: Tensor, k_means: Tensor, v_means: Tensor, token_bounds: Tensor | None, block_size: int, largest: Tensor
) -> QuantisedBlocks:
    """Keys, values and means as e4m3 with one scale a batch row and kv head (FlashPrefill V2, step 6).

    Args:
        k: (batch, kv_heads, tokens, head_dim), v: (batch, kv_heads, tokens, v_dim), stride 1 in the last dimension.
        k_means, v_means: of `block_means`, which also found `largest`: (2, batch, kv_heads) float32.
        token_bounds: (batch, 2) int32 on the same device, [start, end) columns of each request; None: all columns.
    """
    (batch, kv_heads, tokens, head_dim), v_dim, blocks = k.shape, v.shape[3], k_means.shape[2]
    dim_pad, v_pad = max(32, triton.next_power_of_2(head_dim)), max(32, triton.next_power_of_2(v_dim))
    columns = triton.cdiv(blocks, MEANS_PAD) * MEANS_PAD
    many = blocks + columns // block_size
    k8 = torch.empty(batch, kv_heads, many, block_size, dim_pad, dtype=torch.float8_e4m3fn, device=k.device)
    v8 = torch.empty(batch, kv_heads, many, v_pad, block_size, dtype=torch.float8_e4m3fn, device=k.device)
    with on_device(k.device):
        _quantise_blocks_kernel[(columns, kv_heads, batch)](
            k, v, k_means, v_means, k if token_bounds is None else token_bounds, largest, k8, v8, tokens, blocks,
            *k.stride()[:3], *v.stride()[:3], BLOCK=block_size, DIM=head_dim, DIM_PAD=dim_pad, V_DIM=v_dim, V_PAD=v_pad,
            BOUNDS=token_bounds is not None, num_warps=4,
        )  # fmt: skip
    return QuantisedBlocks(k8, v8, largest)
