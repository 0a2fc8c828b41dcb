"""Block-sparse attention over a prompt: what the passes put in place of full attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from uniprefill_fx.kernels.block_sparse_attention.naive import block_sparse_attention_naive
from uniprefill_fx.ops.attention import attention_reference
from uniprefill_fx.specs import AttentionSpec, SparseSpec


@torch.library.custom_op("uniprefill::block_sparse_attention", mutates_args=())
def block_sparse_attention(
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
    """Causal attention that leaves out blocks of keys which hardly matter (FlashPrefill, arXiv 2603.06199, and its V2).

    Args:
        q: (batch, heads, columns, head_dim); k: (batch, kv_heads, columns, head_dim); v: (batch, kv_heads, columns,
            v_dim): the rows of a prompt, or those of it that were kept. They ascend by position: causality is by row.
        token_bounds: (batch, 2) int64 on the CPU: the columns of each request that are no padding.
        options: (layers, 8) float64 on the CPU, a `SparseSpec` a row; row: which one counts here. They are a tensor so
            that a call may have others without a compilation.
        scale, softcap, sinks: as for `uniprefill::attention`.

    Returns:
        (batch, heads, columns, v_dim), laid out as (batch, columns, heads, v_dim), and (2,) int64 on the device: blocks
        computed, and blocks that causality allows; zeros where every block was computed without a choice.
    """
    sparse = SparseSpec.of_numbers(options[row].tolist())
    if sparse.every_block(q.shape[2]):
        return dense(q, k, v, token_bounds, scale, softcap, sinks)
    return block_sparse_attention_naive(q, k, v, token_bounds, scale, softcap, sinks, **arguments(sparse))


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    token_bounds: Tensor,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The same with every block computed."""
    spec = AttentionSpec(scale=scale, softcap=softcap, sinks=sinks)
    return attention_reference(q, k, v, None, None, token_bounds, spec), no_choice(q)


def no_choice(q: Tensor) -> Tensor:
    """The totals of attention that chose no blocks."""
    return torch.zeros(2, dtype=torch.int64, device=q.device)


def arguments(sparse: SparseSpec) -> dict[str, Any]:
    """The options of the kernels."""
    return sparse.choice() | {"correction": sparse.correction, "dtype": "fp8" if sparse.fp8 else "input"}


@block_sparse_attention.register_fake
def _(q, k, v, token_bounds, options, row, scale, softcap, sinks):  # type: ignore[no-untyped-def]
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    return out, q.new_empty(2, dtype=torch.int64)
