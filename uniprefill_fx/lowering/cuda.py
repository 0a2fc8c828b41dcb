"""Triton kernels for the inserted ops on CUDA; importing this registers them beside the plain torch ones.

What a kernel does not cover (float64 scores, unusual block sizes) stays with plain torch, which any device has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from uniprefill_fx.kernels.block_scores.kernel import block_scores
from uniprefill_fx.kernels.checks import MAX_BLOCK, MAX_HEAD_DIM, MIN_BLOCK
from uniprefill_fx.kernels.position_attention.kernel import position_attention
from uniprefill_fx.kernels.select_blocks.kernel import select_blocks
from uniprefill_fx.ops import attention, scoring
from uniprefill_fx.ops.spec import AttentionSpec

BLOCK_SIZES = range(MIN_BLOCK, MAX_BLOCK + 1)


@scoring.packed_score.register_kernel("cuda")
def _score(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    last_n: int,
    block_size: int,
    score_dtype: torch.dtype,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    fp8 = score_dtype == torch.float8_e4m3fn
    covered = (fp8 or score_dtype == torch.float32) and block_size in BLOCK_SIZES and q.shape[-1] <= MAX_HEAD_DIM
    # float32 keys have three tf32 products a tile, and wide ones do not fit; such models are tests, not loads
    if not covered or q.dtype not in (torch.bfloat16, torch.float16) or bias is not None:
        return scoring.score_reference(
            q, k, cu_seqlens, scale, last_n, block_size, score_dtype, softcap, sinks, bias, positions
        )
    return block_scores(q[0], k[0], cu_seqlens, scale, last_n, block_size, softcap, "fp8" if fp8 else "input", sinks)


@scoring.packed_select.register_kernel("cuda")
def _select(
    block_scores: Tensor,
    cu_seqlens: Tensor,
    prompt_lengths: Tensor,
    block_size: int,
    last_n: int,
    sink_tokens: int,
    p: float | None,
    keep_ratio: float | None,
) -> tuple[Tensor, Tensor]:
    if block_scores.dtype != torch.float32 or block_size not in BLOCK_SIZES:
        return scoring.select_reference(
            block_scores, cu_seqlens, prompt_lengths, block_size, last_n, sink_tokens, p, keep_ratio
        )
    rows, kept = select_blocks(
        block_scores, cu_seqlens, prompt_lengths.int(), block_size, last_n, sink_tokens, p, keep_ratio
    )
    return rows, kept


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
    return dtypes and dims and (scale is None or scale > 0)
