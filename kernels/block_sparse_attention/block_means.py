"""Means of keys and of values by block: what stands for a block in its selection and in the correction."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from uniprefill_fx.kernels.block_sparse_attention.tiles import request_of
from uniprefill_fx.kernels.common import on_device


@triton.jit
def _mean_of_rows(
    x, means, part_means, largest, start, length, block, number, row_stride,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Store the mean of a block's rows of one head and, with PARTS above 1, of each part; zeros where there is no row.
    Raise `largest`.
    """
    dim, part = tl.arange(0, DIM_PAD), tl.arange(0, PARTS)
    SIZE: tl.constexpr = BLOCK // PARTS
    row = block * BLOCK + tl.arange(0, BLOCK)
    rows = x + (start + row).to(tl.int64) * row_stride
    tile = tl.load(rows[:, None] + dim[None, :], mask=(row < length)[:, None] & (dim < DIM)[None, :], other=0.0)
    tile = tile.to(tl.float32)
    sums = tl.sum(tl.reshape(tile, (PARTS, SIZE, DIM_PAD)), 1)
    counts = tl.minimum(tl.maximum(length - block * BLOCK - part * SIZE, 0), SIZE)
    mean = tl.sum(sums, 0) / tl.maximum(tl.sum(counts, 0), 1).to(tl.float32)
    tl.store(means + number * DIM + dim, mean.to(means.dtype.element_ty), mask=dim < DIM)
    if PARTS > 1:
        mean = sums / tl.maximum(counts, 1).to(tl.float32)[:, None]
        at = (number * PARTS + part)[:, None] * DIM + dim[None, :]
        tl.store(part_means + at, mean.to(means.dtype.element_ty), mask=(dim < DIM)[None, :] & (part >= 0)[:, None])
    if LARGEST:
        tl.atomic_max(largest, tl.max(tl.max(tl.abs(tile), 1), 0))


@triton.jit(do_not_specialize=["tokens"])
def _block_means_kernel(
    k, v, bounds, k_means, v_means, part_means, largest, tokens,
    k_batch_stride, k_head_stride, k_row_stride, v_batch_stride, v_head_stride, v_row_stride,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr,
    BOUNDS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """A program takes one block of one kv head."""
    block, kv_head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start, length = request_of(bounds, batch, tokens, BOUNDS)
    head = batch * tl.num_programs(1) + kv_head
    number = head * tl.num_programs(0) + block
    k += batch * k_batch_stride + kv_head * k_head_stride
    v += batch * v_batch_stride + kv_head * v_head_stride
    heads = tl.num_programs(1) * tl.num_programs(2)
    _mean_of_rows(
        k, k_means, part_means, largest + head, start, length, block, number, k_row_stride,
        BLOCK, PARTS, DIM, DIM_PAD, LARGEST,
    )  # fmt: skip
    _mean_of_rows(
        v, v_means, v_means, largest + heads + head, start, length, block, number, v_row_stride,
        BLOCK, 1, V_DIM, V_PAD, LARGEST,
    )  # fmt: skip


def block_means(
    k: Tensor,
    v: Tensor,
    token_bounds: Tensor | None,
    block_size: int,
    parts: int = 1,
    largest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Means of the keys and of the values of each block (FlashPrefill V2, step 2), and of equal parts of its keys.

    Args:
        k: (batch, kv_heads, tokens, head_dim), v: (batch, kv_heads, tokens, v_dim), stride 1 in the last dimension.
        token_bounds: (batch, 2) int32 on the same device, [start, end) columns of each request; None: all columns.
        block_size: tokens a block, counted from the start of the request. parts: a power of two.
        largest: (2, batch, kv_heads) float32 zeros, which become the largest magnitudes of keys and of values.

    Returns:
        (batch, kv_heads, blocks, head_dim), (batch, kv_heads, blocks, v_dim) and (batch, kv_heads, blocks * parts,
        head_dim) in the type of the inputs, with blocks = ceil(tokens / block_size). Sums are float32, over the tokens
        that there are; what lies past the end of a request is zero. With one part, the last is the first.
    """
    (batch, kv_heads, tokens, head_dim), v_dim = k.shape, v.shape[3]
    blocks = triton.cdiv(tokens, block_size)
    k_means = torch.empty(batch, kv_heads, blocks, head_dim, dtype=k.dtype, device=k.device)
    v_means = torch.empty(batch, kv_heads, blocks, v_dim, dtype=v.dtype, device=v.device)
    part_means = k_means
    if parts > 1:
        part_means = torch.empty(batch, kv_heads, blocks * parts, head_dim, dtype=k.dtype, device=k.device)
    with on_device(k.device):
        _block_means_kernel[(blocks, kv_heads, batch)](
            k, v, k if token_bounds is None else token_bounds, k_means, v_means, part_means,
            k_means if largest is None else largest, tokens, *k.stride()[:3], *v.stride()[:3],
            BLOCK=block_size, PARTS=parts, DIM=head_dim, DIM_PAD=triton.next_power_of_2(head_dim),
            V_DIM=v_dim, V_PAD=triton.next_power_of_2(v_dim),
            BOUNDS=token_bounds is not None, LARGEST=largest is not None, num_warps=4,
        )  # fmt: skip
    return k_means, v_means, part_means
