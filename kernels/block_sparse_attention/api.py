"""Block-sparse causal attention for prefill: the kernels in their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import triton
from torch import Tensor

from uniprefill_fx.kernels.block_sparse_attention.block_energies import block_energies
from uniprefill_fx.kernels.block_sparse_attention.block_means import block_means
from uniprefill_fx.kernels.block_sparse_attention.checks import check_inputs, check_options
from uniprefill_fx.kernels.block_sparse_attention.kernel import attend_key_blocks
from uniprefill_fx.kernels.block_sparse_attention.quantise_blocks import quantise_blocks
from uniprefill_fx.kernels.block_sparse_attention.select_key_blocks import KeyBlocks, select_key_blocks
from uniprefill_fx.kernels.block_sparse_attention.tiles import (
    AttentionTiles,
    EnergyTiles,
)
from uniprefill_fx.specs import TILE_ROWS

PAYS_UP_TO = 0.75
"""Part of the blocks above which dense attention is as fast: .71 of them at 8,192 tokens, .83 at 16,384 and .93 at
131,072 on an H200 against cuDNN (benchmarks/block_sparse_notes.md)."""


class Selection(NamedTuple):
    """The blocks that each tile keeps, and the means that they were chosen by."""

    blocks: KeyBlocks
    k_means: Tensor
    v_means: Tensor
    part_means: Tensor
    largest: Tensor | None
    """(2, batch, kv_heads) float32: largest magnitudes of keys and values; there for eight bits alone."""


def select_blocks_of_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    token_bounds: Tensor | None,
    scale: float,
    softcap: float | None,
    alpha: float,
    block_size: int,
    sink_blocks: int,
    window_blocks: int,
    last_tokens: int,
    parts: int,
    dtype: Literal["input", "fp8"],
    tiles: EnergyTiles | None = None,
) -> Selection:
    """What comes before attention: means, energies and lists. Arguments as of `block_sparse_attention`, checked."""
    (batch, heads, queries, _), (kv_heads, tokens) = q.shape, k.shape[1:3]
    largest = torch.zeros(2, batch, kv_heads, dtype=torch.float32, device=q.device) if dtype == "fp8" else None
    k_means, v_means, part_means = block_means(k, v, token_bounds, block_size, parts, largest)
    energies = block_energies(q, part_means, token_bounds, tokens, scale, block_size, softcap, tiles)
    positions = TILE_ROWS // (heads // kv_heads)
    blocks = select_key_blocks(
        energies, token_bounds, queries, tokens, positions, block_size, alpha, sink_blocks, window_blocks, last_tokens
    )
    return Selection(blocks, k_means, v_means, part_means, largest)


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    token_bounds: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alpha: float = 0.1,
    block_size: int = 128,
    sink_blocks: int = 2,
    window_blocks: int = 4,
    last_tokens: int = 256,
    correction: bool = True,
    parts: int = 2,
    dtype: Literal["input", "fp8"] = "input",
    tiles: AttentionTiles | None = None,
    energy_tiles: EnergyTiles | None = None,
    dense: Callable[[], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention that computes, for each tile of queries, only the blocks of keys that matter (FlashPrefill V2).

    A tile is 128 // group query positions of all heads of a group. A block J of keys has the energy E_J =
    Σ exp(q · mean · scale) over the rows of the tile and the means of its `parts`. Kept are the blocks with
    E_J >= alpha · max E; the first `sink_blocks` of the request; the blocks that the tile lies in and the
    `window_blocks` - 1 before; and all blocks for the tiles that hold one of the last `last_tokens` positions. With
    `correction`, any other block enters the softmax as one pseudo-key with the logit q · mean_J · scale + ln |J| and
    the mean of its values.

    Causality is by row, so the rows of a compact stream, which ascend by position, need nothing more.

    Args:
        q: (batch, heads, queries, head_dim); k: (batch, kv_heads, tokens, head_dim); v: (batch, kv_heads, tokens,
            v_dim): one dtype of float32, float16 and bfloat16, any strides but 1 in the last dimension; dims up to 256.
            The queries are the last of the tokens.
        token_bounds: (batch, 2) integers: the [start, end) columns of each request's tokens; other columns are padding,
            which is not read and gives zeros. Blocks and tiles are counted from the start of a request. May lie on the
            CPU; where it lies on the device, the host does not read it. None: there is no padding.
        scale: positive factor on the logits; None: head_dim ** -0.5.
        softcap: logits become softcap · tanh(logit / softcap), of keys and of means.
        sinks: `heads` elements: one more logit a head that takes part in the softmax and has no value.
        alpha: in [0, 1); 0 keeps every block, which is dense attention. block_size: 64 or 128 tokens.
        parts: equal parts of a block that have a mean of their own in its energy: 1 as published, or 2, which finds
            more of what is relevant in the same number of blocks.
        dtype: type of the operands of the products: that of the inputs, or "fp8": e4m3, keys and values with one scale
            a batch row and kv head, queries with a power of two a tile, weights times 2^8. Selection keeps the type of
            the inputs.
        tiles, energy_tiles: for measurements; usual ones otherwise.
        dense: gives dense attention over the same rows. It is taken where more than `PAYS_UP_TO` of the blocks would be
            computed, to find out which the host waits for the counts. None: never, and nothing waits.

    Returns:
        (batch, heads, queries, v_dim) in the dtype of q, laid out as (batch, queries, heads, v_dim), and (2,) int64 on
        its device: how many blocks were computed and how many causality allows, over tiles and kv heads. Accumulation,
        softmax and sums are float32; weights are rounded to the type of the product before they multiply values.

    Raises:
        ValueError: for arguments outside what is said here, and for "fp8" on a card before compute capability 8.9.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    check_inputs(q, k, v, sinks, token_bounds)
    check_options(scale, softcap, alpha, block_size, sink_blocks, window_blocks, last_tokens, parts, dtype, q.device)
    result_dtype = q.dtype
    if triton.knobs.runtime.interpret and result_dtype == torch.bfloat16:
        q, k, v = q.float(), k.float(), v.float()  # the interpreter multiplies the bit patterns of bfloat16 operands
    if token_bounds is not None:
        token_bounds = token_bounds.to(q.device, torch.int32, non_blocking=True).contiguous()
    if sinks is not None:
        sinks = sinks.reshape(-1).contiguous()
    selection = select_blocks_of_keys(
        q, k, v, token_bounds, scale, softcap, alpha, block_size, sink_blocks, window_blocks, last_tokens, parts, dtype,
        energy_tiles,
    )  # fmt: skip
    blocks, k_means, v_means, _, largest = selection
    if dense is not None:
        kept, allowed = blocks.totals.tolist()
        if kept > PAYS_UP_TO * allowed:
            return dense().to(result_dtype), blocks.totals[1:].repeat(2)
    quantised = None
    if largest is not None:
        quantised = quantise_blocks(k, v, k_means, v_means, token_bounds, block_size, largest)
    out = attend_key_blocks(
        q, k, v, k_means, v_means, blocks, token_bounds, scale, block_size, window_blocks, correction, softcap, sinks,
        quantised, tiles,
    )  # fmt: skip
    return out.to(result_dtype), blocks.totals
