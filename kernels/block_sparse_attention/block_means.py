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
    x, means, largest, start, length, block, number, row_stride,
    BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Store the mean of a block's rows of one head, zeros where the block does not exist; raise `largest`."""
    dim = tl.arange(0, DIM_PAD)
    row = block * BLOCK + tl.arange(0, BLOCK)
    count = tl.minimum(tl.maximum(length - block * BLOCK, 0), BLOCK)
    rows = x + (start + row).to(tl.int64) * row_stride
    tile = tl.load(rows[:, None] + dim[None, :], mask=(row < length)[:, None] & (dim < DIM)[None, :], other=0.0)
    tile = tile.to(tl.float32)
    mean = tl.sum(tile, 0) / tl.maximum(count, 1).to(tl.float32)
    tl.store(means + number * DIM + dim, mean.to(means.dtype.element_ty), mask=dim < DIM)
    if LARGEST:
        tl.atomic_max(largest, tl.max(tl.max(tl.abs(tile), 1), 0))


@triton.jit(do_not_specialize=["tokens"])
def _block_means_kernel(
    k, v, bounds, k_means, v_means, largest, tokens,
    k_batch_stride, k_head_stride, k_row_stride, v_batch_stride, v_head_stride, v_row_stride,
    BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr,
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
        k, k_means, largest + head, start, length, block, number, k_row_stride, BLOCK, DIM, DIM_PAD, LARGEST
    )
    _mean_of_rows(
        v, v_means, largest + heads + head, start, length, block, number, v_row_stride, BLOCK, V_DIM, V_PAD, LARGEST
    )


def block_means(
    k: Tensor, v: Tensor, token_bounds: Tensor | None, block_size: int, largest: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Means of the keys and of the values of each block (FlashPrefill V2, step 2).

    Args:
        k: (batch, kv_heads, tokens, head_dim), v: (batch, kv_heads, tokens, v_dim), stride 1 in the last dimension.
        token_bounds: (batch, 2) int32 on the same device, [start, end) columns of each request; None: all columns.
        block_size: tokens a block, counted from the start of the request.
        largest: (2, batch, kv_heads) float32 zeros, which become the largest magnitudes of keys and of values.

    Returns:
        (batch, kv_heads, blocks, head_dim) and (batch, kv_heads, blocks, v_dim) in the type of the inputs, with
        blocks = ceil(tokens / block_size). Sums are float32, over the tokens that the block has; blocks past the end of
        a request are zeros.
    """
    (batch, kv_heads, tokens, head_dim), v_dim = k.shape, v.shape[3]
    blocks = triton.cdiv(tokens, block_size)
    k_means = torch.empty(batch, kv_heads, blocks, head_dim, dtype=k.dtype, device=k.device)
    v_means = torch.empty(batch, kv_heads, blocks, v_dim, dtype=v.dtype, device=v.device)
    with on_device(k.device):
        _block_means_kernel[(blocks, kv_heads, batch)](
            k, v, k if token_bounds is None else token_bounds, k_means, v_means, k_means if largest is None else largest,
            tokens, *k.stride()[:3], *v.stride()[:3], BLOCK=block_size,
            DIM=head_dim, DIM_PAD=triton.next_power_of_2(head_dim), V_DIM=v_dim, V_PAD=triton.next_power_of_2(v_dim),
            BOUNDS=token_bounds is not None, LARGEST=largest is not None, num_warps=4,
        )  # fmt: skip
    return k_means, v_means
