"""How the kernels of block-sparse attention cut up their work, and where a tile of queries lies in its request."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

BLOCK_SIZES = (64, 128)

MEANS_PAD = 128
"""Columns of means in eight bits come in multiples of this, so that no load of them needs a mask."""


@dataclass(frozen=True)
class AttentionTiles:
    """How the attention kernel cuts up a tile of queries. No field may depend on the sequence length."""

    rows: int
    """Rows of a tile of queries that a program holds: a power of two up to `TILE_ROWS`."""
    keys: int
    """Keys, or pseudo-keys, at a time: at most a block."""
    warps: int
    stages: int
    """Blocks of keys and values in flight."""
    registers: int | None = None
    """Limit for a thread."""
    descriptors: bool = False
    """Whether the copy engine (TMA) reads keys and values, where it can."""


@dataclass(frozen=True)
class EnergyTiles:
    """How the kernel of energies cuts up the means of a request's keys."""

    rows: int
    """Rows of a tile of queries at a time: a power of two up to `TILE_ROWS`."""
    blocks: int
    """Means at a time."""
    warps: int
    stages: int


def attention_tiles(
    head_dim: int, v_dim: int, itemsize: int, fp8: bool, copy_engine: bool, wide: bool, shared_memory: int
) -> AttentionTiles:
    """Tiles that fit in `shared_memory` bytes a program.

    `wide`: the card has matrix instructions for warp groups (Hopper), which leave operands in shared memory; older ones
    need registers for them. There, 128 rows on 8 warps are two warp groups with 64 rows each. With the copy engine no
    addresses take registers, and 128 registers a thread are enough for two programs on a multiprocessor, so that one
    multiplies while the other is at its exponentials. float32 operands are multiplied as three products of TF32 and
    need twice the room.
    """
    dim, value = triton.next_power_of_2(head_dim), triton.next_power_of_2(v_dim)
    widest = max(dim, value)
    if fp8:
        itemsize = 1
        choices = [AttentionTiles(64, 128, 4, 2, None, copy_engine) if widest <= 128 else AttentionTiles(128, 64, 8, 2)]
        if not wide:
            choices = [AttentionTiles(64, 64 if widest <= 128 else 32, 4 if widest <= 128 else 8, 2)]
    elif itemsize == 4:
        choices = [AttentionTiles(64, 32, 4 if widest <= 128 else 8, 1)]
    elif not wide:
        choices = [AttentionTiles(64, 64 if widest <= 128 else 32, 4 if widest <= 128 else 8, 2)]
    elif copy_engine:
        registers = 128 if widest <= 128 else None
        choices = [AttentionTiles(128, 64, 8, 3 if widest <= 64 else 2, registers, True)]
    else:
        choices = [AttentionTiles(128, 128 if widest <= 128 else 64, 8, 2)]
    choices += [AttentionTiles(64, 32, 4, 2), AttentionTiles(32, 32, 4, 1)]
    for tiles in choices:
        loaded = (tiles.rows * dim + tiles.stages * tiles.keys * (dim + value)) * itemsize
        if loaded * (2 if itemsize == 4 else 1) <= shared_memory - 2048:
            return tiles
    return AttentionTiles(16, 16, 4, 1)


def energy_tiles(head_dim: int, itemsize: int, shared_memory: int) -> EnergyTiles:
    """Tiles that fit in `shared_memory` bytes a program, and leave room for several programs on a multiprocessor."""
    dim = triton.next_power_of_2(head_dim)
    if itemsize == 4:
        choices = [EnergyTiles(32, 64, 4, 1), EnergyTiles(16, 64, 4, 1)]
    else:
        choices = [EnergyTiles(128, 64, 4, 1), EnergyTiles(64, 64, 4, 1)]
    for tiles in choices:
        loaded = (tiles.rows + tiles.blocks) * dim * itemsize
        if loaded * (2 if itemsize == 4 else 1) <= shared_memory:
            return tiles
    return EnergyTiles(16, 16, 4, 1)


@triton.jit
def request_of(bounds, batch, tokens, BOUNDS: tl.constexpr):
    """The first column of a request, and the number of its tokens."""
    start, end = tl.full((), 0, tl.int32), tokens
    if BOUNDS:
        start, end = tl.load(bounds + 2 * batch), tl.load(bounds + 2 * batch + 1)
    return start, end - start


@triton.jit
def positions_of_tile(start, length, tile, queries, tokens, POSITIONS: tl.constexpr):
    """[first, stop): the positions in the request of the queries of a tile; none where stop <= first.

    The queries are the last of the tokens; tiles are counted from the first query of the request.
    """
    first = tl.maximum(tokens - queries - start, 0) + tile * POSITIONS
    return first, tl.minimum(first + POSITIONS, length)
