"""How the kernels cut up the logits, and what shares a scale in the fp8 mode of `block_scores`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import triton

NARROW = 512  # a window for which heads share a tile of queries
FP8_MAX = 448.0  # the largest finite e4m3 number


@dataclass(frozen=True)
class Tiles:
    """How the logits are cut up. No field may depend on the sequence length: each set of values is a compilation."""

    keys: int
    """Columns. In `block_scores`, the keys of as many whole blocks as fit, at least one, each block padded to a power
    of two."""
    rows: int
    """Queries of one head, or (query, head) pairs; in `block_scores`, (head of the group, query) pairs, one head's
    queries after another's."""
    warps: int
    stages: int
    """Tiles in flight of what the loop loads: keys and values, in `block_scores` queries."""
    registers: int | None = None
    """Limit for a thread."""
    heads: int = 1
    """Heads of a group that share a tile of `position_attention`, a power of two."""


THREAD_REGISTERS = 255  # the most that a thread of any NVIDIA GPU has
OTHER_REGISTERS = 32  # of a thread, for operands and addresses of a product; a Hopper one of 256 columns takes 30
OTHER_MEMORY = 2560  # bytes of shared memory that sums across warps take beside the operands


def _compiles(tiles: Tiles, columns: int, operands: int, shared_memory: int) -> bool:
    """Whether a program's accumulators, of `columns` float32 a row, and its operands, in bytes, have room.

    The compiler spills what is too much of anything but the accumulator of one matrix product: where that does not fit
    under a limit of registers, there is no code. Accumulators that spill as a whole are no use either.
    """
    registers = tiles.rows * columns // (32 * tiles.warps) + OTHER_REGISTERS
    return registers <= (tiles.registers or THREAD_REGISTERS) and operands + OTHER_MEMORY <= shared_memory


def fit_scores(tiles: Tiles, head_dim: int, itemsize: int, fp8: bool, block_size: int, shared_memory: int) -> bool:
    """Whether `block_scores` compiles with these tiles, in `shared_memory` bytes a program."""
    dim, item = max(16, triton.next_power_of_2(head_dim)), 1 if fp8 else itemsize
    columns = blocks_of_a_tile(tiles, block_size) * triton.next_power_of_2(block_size)
    keys = 2 * columns if item == 4 else columns  # the parts of a float32 key lie side by side
    return _compiles(tiles, columns, (keys + tiles.stages * tiles.rows) * dim * item, shared_memory)


def score_tiles(head_dim: int, itemsize: int, fp8: bool, block_size: int, shared_memory: int) -> Tiles | None:
    """Tiles of `block_scores` that fit in `shared_memory` bytes a program; None if there are none.

    The first choices are those of which two programs fit on a Hopper multiprocessor (228 KB of shared memory, 65,536
    registers): one program's exponentials then overlap with the other's matrix products. The exception is float32,
    which is multiplied in three tf32 products and needs twice the room for its operands. Wide tiles of keys read the
    queries from the L2 cache less often, high tiles of rows the keys from shared memory.
    """
    narrow = triton.next_power_of_2(head_dim) <= 128
    if fp8:
        choices = [Tiles(128, 64, 4, 2, registers=128 if narrow else None), Tiles(64, 64, 4, 1), Tiles(16, 16, 4, 1)]
    elif itemsize == 4:
        choices = [Tiles(64, 64, 8, 1), Tiles(16, 16, 4, 1)]
    else:
        choices = [Tiles(256, 64, 8, 2)] if narrow else []
        choices += [Tiles(128, 64, 8, 1), Tiles(64, 32, 4, 1), Tiles(16, 16, 4, 1)]
    fitting = (t for t in choices if fit_scores(t, head_dim, itemsize, fp8, block_size, shared_memory))
    return next(fitting, None)


def blocks_of_a_tile(tiles: Tiles, block_size: int) -> int:
    """Whole blocks in the columns of a tile."""
    return max(1, tiles.keys // triton.next_power_of_2(block_size))


def fit_attention(tiles: Tiles, head_dim: int, v_dim: int, itemsize: int, shared_memory: int) -> bool:
    """Whether `position_attention` compiles with these tiles, in `shared_memory` bytes a program."""
    dim, v_dim = max(16, triton.next_power_of_2(head_dim)), max(16, triton.next_power_of_2(v_dim))
    loaded = (tiles.rows * dim + tiles.stages * tiles.keys * (dim + v_dim)) * itemsize
    loaded *= 2 if itemsize == 4 else 1  # float32 operands are split in two
    return _compiles(tiles, tiles.keys + v_dim, loaded, shared_memory)


def attention_tiles(
    head_dim: int, v_dim: int, itemsize: int, queries: int, groups: int, window: int | None, shared_memory: int
) -> Tiles | None:
    """Tiles of `position_attention` that fit in `shared_memory` bytes a program; None if there are none.

    128 queries on 8 warps are two warp groups, each with the 64 rows of a Hopper matrix instruction, and the
    accumulator of the widest heads takes half of their registers. Fewer keys at a time serve the card no better,
    except where memory is short. A handful of queries (a decode step, drafted tokens) gets the lowest tile there is.

    A tile goes through the window of each of its queries. Where that is narrow, the tile is of 16 queries or more and
    of as many of the `groups` heads that read the same keys as fill it: 4 heads with a window of 128 go through 144
    keys, not 192. Heads up to 64 wide then take the smallest tiles: less of them lies outside the window.
    """
    widest = triton.next_power_of_2(max(head_dim, v_dim))
    if itemsize == 4:
        choices = [Tiles(32, 64, 4 if widest <= 128 else 8, 1), Tiles(32, 32, 4, 1)]
    elif widest <= 64:
        choices = [Tiles(64, 128, 8, 3) if window is None or window > NARROW else Tiles(32, 64, 4, 3)]
    else:
        choices = [Tiles(128 if widest <= 128 else 64, 128, 8, 2), Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2)]
    if queries <= 16:
        choices = [dataclasses.replace(tiles, rows=16, warps=4) for tiles in choices]
    elif window is not None and window <= NARROW:
        choices = [dataclasses.replace(tiles, heads=math.gcd(groups, tiles.rows // 16)) for tiles in choices]
    choices.append(Tiles(16, 16, 4, 1))
    return next((t for t in choices if fit_attention(t, head_dim, v_dim, itemsize, shared_memory)), None)
