"""Triton kernels for the inserted ops on CUDA; importing this registers them beside the plain torch ones.

What a kernel does not cover (float64 scores, unusual block sizes) stays with plain torch, which any device has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uniprefill_fx.kernels.block_scores import block_scores
from uniprefill_fx.kernels.select_blocks import select_blocks
from uniprefill_fx.ops import scoring

BLOCK_SIZES = range(16, 129)
MAX_HEAD_DIM = 256


@scoring.score.register_kernel("cuda")
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
    slots: Tensor | None = None,
) -> Tensor:
    # float32 keys have three tf32 products a tile, and wide ones do not fit; such models are tests, not loads
    covered = score_dtype == torch.float32 and block_size in BLOCK_SIZES and q.shape[-1] <= MAX_HEAD_DIM
    if not covered or q.dtype not in (torch.bfloat16, torch.float16) or sinks is not None or bias is not None:
        return scoring.score_reference(
            q, k, cu_seqlens, scale, last_n, block_size, score_dtype, softcap, sinks, bias, slots
        )
    return block_scores(q[0], k[0], cu_seqlens, scale, last_n, block_size, softcap)


@scoring.select.register_kernel("cuda")
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
