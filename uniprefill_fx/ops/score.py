"""Block scores of a padded batch (UniPrefill, arXiv 2605.06221, Eq. 3 and 4).

`token_bounds` says where the tokens of each request lie: (batch, 2) int64 on the CPU, first column and past the last
one; all other columns are padding. The host knows them, so that nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uniprefill_fx.kernels.block_scores.naive import block_scores_reference
from uniprefill_fx.ops.logits import bias_of_columns


def sums_dtype(score_dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax, sums and scores: 8 bits are for operands only."""
    return torch.float32 if score_dtype == torch.float8_e4m3fn else score_dtype


def score_reference(
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
    """Attention mass that the last queries of each request give to each block of its keys.

    Args:
        q: (batch, heads, columns, head_dim), k: (batch, kv_heads, columns, head_dim), both after rotary.
        positions: (1 or batch, columns) int64, what `bias` is read by; absent: columns.
        token_bounds: (batch, 2) int64 on the CPU.
        scale: factor on the logits; absent: head_dim ** -0.5. softcap, sinks, bias: as for `uniprefill::attention`.
        last_n: queries a request is scored with (fewer when it is shorter). block_size: tokens a block.
        score_dtype: dtype of softmax and sums; float8_e4m3fn: they are float32, and an implementation may round the
            operands of q·kᵀ to e4m3. This one does not.

    Returns:
        (batch, ceil(columns / block_size)) in `sums_dtype(score_dtype)`. The blocks of a request are counted from its
        own first token; entries behind its last block are 0.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    by_column = None if bias is None else bias_of_columns(bias, q.shape[1], positions)
    return block_scores_reference(
        q,
        k,
        token_bounds,
        scale,
        last_n,
        block_size,
        softcap,
        sinks=sinks,
        bias=by_column,
        sums=sums_dtype(score_dtype),
    )


score = torch.library.custom_op("uniprefill::score", score_reference, mutates_args=())


@score.register_fake
def _(q, k, positions, token_bounds, scale, softcap, sinks, bias, last_n, block_size, score_dtype):  # type: ignore[no-untyped-def]
    blocks = (q.shape[2] + block_size - 1) // block_size
    return q.new_empty(q.shape[0], blocks, dtype=sums_dtype(score_dtype))
