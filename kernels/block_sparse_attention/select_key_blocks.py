"""Which blocks of keys each tile of queries attends to, as counts and lists, decided on the device."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from uniprefill_fx.kernels.block_sparse_attention.tiles import positions_of_tile, request_of
from uniprefill_fx.kernels.common import on_device


class KeyBlocks(NamedTuple):
    """The blocks that each tile of queries keeps."""

    counts: Tensor
    """(batch, kv_heads, tiles) int32: how many."""
    indices: Tensor
    """(batch, kv_heads, tiles, blocks) int32: their numbers, ascending; entries past the count are not written."""
    pseudo: Tensor
    """(batch, kv_heads, tiles, blocks) float32: what comes to the logit of a block's mean: 0 where the block is not
    kept, so that its mean can stand for it, -inf where it is; blocks that no row sees are not written."""
    totals: Tensor
    """(2,) int64: kept blocks, and blocks that causality allows, over the whole call."""


@triton.jit(do_not_specialize=["queries", "tokens", "blocks", "sink_blocks", "window_blocks", "last_tokens"])
def _select_key_blocks_kernel(
    energies, bounds, counts, indices, totals, queries, tokens, blocks,
    log_alpha, sink_blocks, window_blocks, last_tokens,
    POSITIONS: tl.constexpr, BLOCK: tl.constexpr, BOUNDS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A program takes one tile of queries; LANES blocks at a time."""
    tile, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    number = (batch * tl.num_programs(1) + kv_head).to(tl.int64) * tl.num_programs(0) + tile
    start, length = request_of(bounds, batch, tokens, BOUNDS)
    first, stop = positions_of_tile(start, length, tile, queries, tokens, POSITIONS)
    if stop <= first:
        tl.store(counts + number, 0)
        return
    energies += number * blocks
    indices += number * blocks
    visible = (stop - 1) // BLOCK + 1
    lane = tl.arange(0, LANES)
    highest = tl.full((LANES,), float("-inf"), tl.float32)
    for at in range(0, visible, LANES):
        energy = tl.load(energies + at + lane, mask=at + lane < visible, other=float("-inf"))
        highest = tl.maximum(highest, energy)
    threshold = tl.max(highest, 0) + log_alpha
    window = first // BLOCK - window_blocks + 1  # every block that a row of the tile lies in belongs to it
    everything = stop > length - last_tokens
    count = tl.zeros((), tl.int32)
    for at in range(0, visible, LANES):
        block = at + lane
        energy = tl.load(energies + block, mask=block < visible, other=float("-inf"))
        # not `energy >= threshold`: what is not a number is kept, so that it reaches the output as in dense attention
        keep = ~(energy < threshold) | (block < sink_blocks) | (block >= window) | everything
        keep = ((block < visible) & keep).to(tl.int32)
        tl.store(indices + count + tl.cumsum(keep, 0) - keep, block, mask=keep != 0)
        # in the place of the energies, each of which only this program reads
        tl.store(energies + block, tl.where(keep != 0, float("-inf"), 0.0), mask=block < visible)
        count += tl.sum(keep, 0)
    tl.store(counts + number, count)
    tl.atomic_add(totals, tl.cast(count, tl.int64))
    tl.atomic_add(totals + 1, visible.to(tl.int64))


def select_key_blocks(
    energies: Tensor,
    token_bounds: Tensor | None,
    queries: int,
    tokens: int,
    positions: int,
    block_size: int,
    alpha: float,
    sink_blocks: int,
    window_blocks: int,
    last_tokens: int,
) -> KeyBlocks:
    """The blocks J with E_J >= alpha · max E, and those that are always kept (FlashPrefill V2, step 4).

    Always kept are the first `sink_blocks` of a request, the blocks that a row of the tile lies in, the
    `window_blocks` - 1 before these, and all blocks for the tiles that hold one of the last `last_tokens` positions.

    Args:
        energies: (batch, kv_heads, tiles, blocks) float32, logarithms to base 2: see `block_energies`. Overwritten:
            they become `KeyBlocks.pseudo`.
        token_bounds: (batch, 2) int32 on the same device, [start, end) columns of each request; None: all columns.
        positions: query positions a tile. alpha: 0 keeps every block; below 1.

    Nothing is sorted, and nothing waits for the host.
    """
    batch, kv_heads, tiles, blocks = energies.shape
    device = energies.device
    counts = torch.empty(batch, kv_heads, tiles, dtype=torch.int32, device=device)
    indices = torch.empty(energies.shape, dtype=torch.int32, device=device)
    totals = torch.zeros(2, dtype=torch.int64, device=device)
    with on_device(device):
        _select_key_blocks_kernel[(tiles, kv_heads, batch)](
            energies, energies if token_bounds is None else token_bounds, counts, indices, totals,
            queries, tokens, blocks, math.log2(alpha) if alpha > 0 else -math.inf,
            sink_blocks, window_blocks, last_tokens,
            POSITIONS=positions, BLOCK=block_size, BOUNDS=token_bounds is not None, LANES=512, num_warps=4,
        )  # fmt: skip
    return KeyBlocks(counts, indices, energies, totals)
