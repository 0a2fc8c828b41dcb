"""Triton kernels for the inserted ops on CUDA; importing this registers them beside the plain torch ones.

What a kernel does not cover (float64 scores, unusual block sizes, heads too wide for the GPU's shared memory) stays
with plain torch, which any device has. `devices.runs_kernels` says where this module may be imported.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from uniprefill_fx.kernels.block_scores.kernel import block_scores
from uniprefill_fx.kernels.block_sparse_attention.api import block_sparse_attention
from uniprefill_fx.kernels.checks import MAX_BLOCK, MIN_BLOCK, has_tiles
from uniprefill_fx.kernels.common import shared_memory
from uniprefill_fx.kernels.position_attention.kernel import position_attention
from uniprefill_fx.kernels.select_blocks.kernel import select_blocks
from uniprefill_fx.kernels.tiles import attention_tiles
from uniprefill_fx.ops import attention, score, select
from uniprefill_fx.ops import block_sparse_attention as block_sparse
from uniprefill_fx.specs import MAX_HEAD_DIM, AttentionSpec, SparseSpec

BLOCK_SIZES = range(MIN_BLOCK, MAX_BLOCK + 1)


@score.score.register_kernel("cuda")
def _score(
    q: Tensor,
    k: Tensor,
    positions: Tensor | None,
    token_bounds: Tensor,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    last_n: int,
    block_size: int,
    score_dtype: torch.dtype,
) -> Tensor:
    # operands of 32 bits are not rounded: whoever holds them wants them exact
    fp8 = score_dtype == torch.float8_e4m3fn and q.element_size() == 2
    if bias is not None or not _scored_by_kernel(q, k, scale, block_size, score_dtype, fp8):
        return score.score_reference(
            q, k, positions, token_bounds, scale, softcap, sinks, bias, last_n, block_size, score_dtype
        )
    mode: Literal["input", "fp8"] = "fp8" if fp8 else "input"
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    bounds = _sent(token_bounds.to(torch.int32), q.device)
    return block_scores(q, k, bounds, scale, last_n, block_size, softcap, mode, sinks)


def _scored_by_kernel(
    q: Tensor, k: Tensor, scale: float | None, block_size: int, score_dtype: torch.dtype, fp8: bool
) -> bool:
    """Whether `block_scores` takes these operands."""
    covered = score_dtype in (torch.float8_e4m3fn, torch.float32) and block_size in BLOCK_SIZES
    dtypes = q.dtype == k.dtype and q.dtype in (torch.bfloat16, torch.float16, torch.float32)
    dims = 1 <= q.shape[3] <= MAX_HEAD_DIM and q.stride(3) == k.stride(3) == 1
    return covered and dtypes and dims and has_tiles(q, block_size, fp8) and (scale is None or scale > 0)


@select.select.register_kernel("cuda")
def _select(
    scores: Tensor,
    token_bounds: Tensor,
    prompt_bounds: Tensor,
    block_size: int,
    last_n: int,
    sink_tokens: int,
    p: float | None,
    keep_ratio: float | None,
) -> tuple[Tensor, Tensor]:
    if scores.dtype != torch.float32 or block_size not in BLOCK_SIZES:
        return select.select_reference(
            scores, token_bounds, prompt_bounds, block_size, last_n, sink_tokens, p, keep_ratio
        )
    prompts = prompt_bounds[:, 1] - prompt_bounds[:, 0]
    bounds, prompts = _sent(torch.cat((token_bounds.flatten(), prompts)).to(torch.int32), scores.device).split(
        (token_bounds.numel(), prompts.numel())
    )
    return select_blocks(scores, bounds.view(-1, 2), prompts, block_size, last_n, sink_tokens, p, keep_ratio)


def _sent(numbers: Tensor, device: torch.device) -> Tensor:
    """A few numbers of the host, on the device; an ordinary copy would wait for all that is queued there."""
    return numbers.to(device, non_blocking=True)


@block_sparse.block_sparse_attention.register_kernel("cuda")
def _block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    token_bounds: Tensor,
    options: Tensor,
    row: int,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    sparse = SparseSpec.of_numbers(options[row].tolist())
    if sparse.every_block(q.shape[2]) or not _covered(q, k, v, scale):
        return block_sparse.dense(q, k, v, token_bounds, scale, softcap, sinks)
    bounds = None if token_bounds.tolist() == [[0, q.shape[2]]] * q.shape[0] else token_bounds

    def dense() -> Tensor:
        return block_sparse.dense(q, k, v, token_bounds, scale, softcap, sinks)[0]

    return block_sparse_attention(
        q, k, v, bounds, scale, softcap, sinks, **block_sparse.arguments(sparse),
        dense=None if sparse.fp8 else dense,  # in eight bits all blocks are faster than dense attention in sixteen
    )  # fmt: skip


@attention.attention.register_kernel("cuda")
def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    q_positions, k_positions, token_bounds = rest[:3]
    spec = AttentionSpec(*rest[3:])
    queries, keys = q.shape[2], k.shape[2]
    by_request = (
        token_bounds is None and k_positions is not None and k_positions.shape[0] > 1
    )  # such positions hold padding
    # SDPA has the faster kernels where it needs no mask, also request by request. A single query that sees all keys
    # has too little work for ours, which gives each head to one multiprocessor.
    fast = spec.plain and not spec.masked and not by_request and queries == keys
    step = queries == 1 and (by_request or spec.full)
    if fast or step or not _covered(q, k, v, spec.scale):
        return attention.attention_reference(q, k, v, q_positions, k_positions, token_bounds, spec)
    if token_bounds is not None and token_bounds.tolist() == [[0, keys]] * q.shape[0]:
        token_bounds = None
    return position_attention(q, k, v, q_positions, k_positions, token_bounds, spec)


def _covered(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> bool:
    """Whether `position_attention` takes these operands."""
    dtypes = q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float16, torch.float32)
    dims = max(q.shape[3], v.shape[3]) <= MAX_HEAD_DIM and q.stride(3) == k.stride(3) == v.stride(3) == 1
    if not (dtypes and dims and (scale is None or scale > 0)):
        return False
    shape, groups = (q.shape[3], v.shape[3], q.element_size(), q.shape[2]), q.shape[1] // k.shape[1]
    return attention_tiles(*shape, groups, None, shared_memory(q.device)) is not None
