"""How much of a tile's attention a block of keys can hold, judged by the mean of its keys."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from uniprefill_fx.kernels.block_sparse_attention.tiles import (
    EnergyTiles,
    energy_tiles,
    positions_of_tile,
    request_of,
)
from uniprefill_fx.kernels.common import on_device, shared_memory, tanh
from uniprefill_fx.specs import TILE_ROWS


@triton.jit
def _load_queries(
    q, row, first, stop, before, head_stride, row_stride,
    GROUPS: tl.constexpr, POSITIONS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """(DIM_PAD, ROWS): rows of a tile from `row`, zeros where there is none; position 0 is column `before`."""
    row += tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PAD)
    position = first + row // GROUPS
    exists = (row < POSITIONS * GROUPS) & (position < stop)
    rows = q + (row % GROUPS).to(tl.int64) * head_stride + (position + before).to(tl.int64) * row_stride
    return tl.trans(tl.load(rows[:, None] + dim[None, :], mask=exists[:, None] & (dim < DIM)[None, :], other=0.0))


@triton.jit(do_not_specialize=["queries", "tokens", "blocks"])
def _block_energies_kernel(
    q, k_means, bounds, energies, queries, tokens, blocks, scale, softcap, q_batch_stride, q_head_stride, q_row_stride,
    GROUPS: tl.constexpr, POSITIONS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BOUNDS: tl.constexpr, SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr, MEANS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program holds one tile of queries and goes through the means of the blocks that its last query sees.

    Means are the rows of the product and queries its columns: all logits of a block then lie in one warp, and its
    maximum and sum pass through no shared memory.
    """
    # late tiles see the most blocks: they go first, so that none of them is the last to end
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start, length = request_of(bounds, batch, tokens, BOUNDS)
    first, stop = positions_of_tile(start, length, tile, queries, tokens, POSITIONS)
    if stop <= first:
        return
    q += batch * q_batch_stride + kv_head * GROUPS * q_head_stride
    before = start - (tokens - queries)
    dim = tl.arange(0, DIM_PAD)
    q_tile = _load_queries(
        q, 0, first, stop, before, q_head_stride, q_row_stride, GROUPS, POSITIONS, ROWS, DIM, DIM_PAD
    )
    head = batch * tl.num_programs(1) + kv_head
    means = k_means + head * blocks * (PARTS * DIM)
    energies += (head * tl.num_programs(0) + tile) * blocks
    unit = scale * 1.4426950408889634  # log2(e)
    if SOFTCAP:
        unit = softcap * 1.4426950408889634
    SIZE: tl.constexpr = BLOCK // PARTS  # tokens that a mean is of
    visible = (stop - 1) // BLOCK + 1
    partial = (stop < first + POSITIONS) | (POSITIONS * GROUPS < TILE)
    for at in tl.range(0, visible * PARTS, MEANS, num_stages=STAGES):
        number = at + tl.arange(0, MEANS)
        mean = tl.load(
            means + number[:, None] * DIM + dim[None, :],
            mask=(number < blocks * PARTS)[:, None] & (dim < DIM)[None, :], other=0.0,
        )  # fmt: skip
        highest = tl.full((MEANS,), float("-inf"), tl.float32)
        energy = tl.zeros((MEANS,), tl.float32)
        for part in tl.static_range(TILE // ROWS):
            if ROWS < TILE:
                q_tile = _load_queries(
                    q, part * ROWS, first, stop, before, q_head_stride, q_row_stride, GROUPS, POSITIONS, ROWS, DIM,
                    DIM_PAD,
                )  # fmt: skip
            # for float32 inputs the default, tf32, would lose 13 bits
            product = tl.dot(mean, q_tile, input_precision="tf32x3")
            if SOFTCAP:
                product = tanh(product * (scale / softcap))
            if partial | ((at + MEANS - 1) * SIZE > first):
                row = part * ROWS + tl.arange(0, ROWS)
                position = first + row // GROUPS
                exists = (row < POSITIONS * GROUPS) & (position < stop)
                sees = exists[None, :] & (number[:, None] * SIZE <= position[None, :])
                product = tl.where(sees, product, float("-inf"))
            # the unit is positive, so the largest product belongs to the largest logit
            above = tl.maximum(highest, tl.max(product, 1) * unit)
            finite = tl.where(above == float("-inf"), 0.0, above)
            energy = energy * tl.exp2(highest - finite) + tl.sum(tl.exp2(product * unit - finite[:, None]), 1)
            highest = above
        energy = tl.where(energy > 0.0, highest + tl.log2(energy), float("-inf"))
        if PARTS > 1:
            energy = tl.reshape(energy, (MEANS // PARTS, PARTS))
            highest = tl.max(energy, 1)
            finite = tl.where(highest == float("-inf"), 0.0, highest)
            energy = highest + tl.log2(tl.sum(tl.exp2(energy - finite[:, None]), 1))
        block = at // PARTS + tl.arange(0, MEANS // PARTS)
        tl.store(energies + block, energy, mask=block < visible)


def block_energies(
    q: Tensor,
    part_means: Tensor,
    token_bounds: Tensor | None,
    tokens: int,
    scale: float,
    block_size: int,
    softcap: float | None = None,
    tiles: EnergyTiles | None = None,
) -> Tensor:
    """Logarithms of the energies of blocks for each tile of queries (FlashPrefill V2, steps 1 and 3).

    log2 E_J = log2 Σ exp(q_r · mean · scale), over the rows r of a tile and the means of the parts of block J whose
    first key a row sees. A tile is TILE_ROWS // group positions times the group's heads. With one part a block this is
    the papers' energy. They keep Σ exp(s − M) for the tile's maximum M, running and then rescaled; here each block is
    relative to its own maximum, so that nothing is rescaled and nothing underflows.

    Args:
        q: (batch, heads, queries, head_dim), the last `queries` of `tokens` positions; stride 1 in the last dimension.
        part_means: (batch, kv_heads, blocks * parts, head_dim), contiguous, of the type of q.
        token_bounds: (batch, 2) int32 on the same device, [start, end) columns of each request; None: all columns.
        scale: positive factor on the logits. softcap: logits become softcap · tanh(logit / softcap).
        tiles: for measurements; `energy_tiles` otherwise.

    Returns:
        (batch, kv_heads, tiles, blocks) float32, to base 2. Blocks that no row of a tile sees are not written.
    """
    (batch, heads, queries, head_dim), (kv_heads, means) = q.shape, part_means.shape[1:3]
    blocks = triton.cdiv(tokens, block_size)
    groups = heads // kv_heads
    positions = TILE_ROWS // groups
    tiles = tiles or energy_tiles(head_dim, q.element_size(), shared_memory(q.device))
    energies = torch.empty(
        batch, kv_heads, triton.cdiv(queries, positions), blocks, dtype=torch.float32, device=q.device
    )
    with on_device(q.device):
        _block_energies_kernel[(energies.shape[2], kv_heads, batch)](
            q, part_means, q if token_bounds is None else token_bounds, energies, queries, tokens, blocks,
            scale, softcap or 1.0, *q.stride()[:3], GROUPS=groups, POSITIONS=positions, TILE=TILE_ROWS,
            BLOCK=block_size, PARTS=means // blocks, DIM=head_dim, DIM_PAD=max(16, triton.next_power_of_2(head_dim)),
            BOUNDS=token_bounds is not None, SOFTCAP=softcap is not None,
            ROWS=tiles.rows, MEANS=tiles.blocks, STAGES=tiles.stages, num_warps=tiles.warps,
        )  # fmt: skip
    return energies
