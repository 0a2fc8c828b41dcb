"""The naive twin of `block_scores`, which the op runs where there is no kernel: logits exist in full, for some heads at
a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from uniprefill_fx.kernels.tiles import Tiles  # Triton need not be there

LOGITS = 1 << 20  # how many exist at once (they fit in a cache), unless those of one head are more
FP8 = torch.float8_e4m3fn


def block_scores_reference(
    q: Tensor,
    k: Tensor,
    token_bounds: Tensor,
    scale: float,
    last_n: int,
    block_size: int,
    softcap: float | None = None,
    dtype: Literal["input", "fp8"] = "input",
    sinks: Tensor | None = None,
    tiles: Tiles | None = None,
    bias: Tensor | None = None,
    sums: torch.dtype = torch.float32,
) -> Tensor:
    """As `block_scores`, without its limits on sizes. `tiles` only matters to "fp8": it says what shares a scale.

    Beyond the kernel's arguments, bias: (1 or batch, heads, columns), added to the logits by head and key; sums: the
    dtype of operands (but for fp8's rounding), logits, softmax, sums and scores. token_bounds: any integers, anywhere.
    """
    batch, heads, columns, _ = q.shape
    last_n = queries_at_most(last_n, columns)
    scores = torch.zeros(batch, -(-columns // block_size), dtype=sums, device=q.device)
    for r, (start, end) in enumerate(token_bounds.tolist()):
        length = end - start
        n = min(last_n, length)
        queries, keys = q[r, :, end - n : end].to(sums), k[r, :, start:end].to(sums)
        if dtype == "fp8" and length:
            queries, keys = _rounded(queries, keys, last_n, block_size, tiles)
        hidden = torch.ones(n, length, dtype=torch.bool, device=q.device).triu(length - n + 1)
        mass = torch.zeros(length, dtype=sums, device=q.device)
        for own in torch.arange(heads, device=q.device).split(max(1, LOGITS // max(1, n * length))):
            logits = queries[own] @ keys[own // (heads // k.shape[1])].mT * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            if bias is not None:
                logits = logits + bias[r if bias.shape[0] > 1 else 0, own, None, start:end].to(sums)
            logits = logits.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                sink = sinks.reshape(-1)[own].to(sums)[:, None, None].expand(-1, n, 1)
                logits = torch.cat([logits, sink], -1)
            mass += logits.softmax(-1)[..., :length].sum((0, 1))
        blocks = -(-length // block_size)
        width = min(block_size, length)  # a longer block would only be padding
        padded = torch.nn.functional.pad(mass, (0, blocks * width - length))
        scores[r, :blocks] = padded.view(blocks, width).sum(-1)
    return scores


def queries_at_most(last_n: int, columns: int) -> int:
    """`last_n`, or less where no request has so many queries: memory must not grow with queries that are not there.

    A power of two, so that kernels are compiled for few lengths, and no less than 1,024, so that which rows of a short
    request share a scale of fp8 does not hang on what else is in its batch.
    """
    return min(last_n, 1 << max(columns - 1, 1023).bit_length())


def _rounded(queries: Tensor, keys: Tensor, last_n: int, block_size: int, tiles: Tiles | None) -> tuple[Tensor, Tensor]:
    """The (heads, n, head_dim) queries and (kv_heads, tokens, head_dim) keys of a request, as e4m3 holds them."""
    from uniprefill_fx.kernels.checks import tiles_for_scores
    from uniprefill_fx.kernels.tiles import blocks_of_a_tile

    (heads, n, head_dim), kv_heads = queries.shape, keys.shape[0]
    groups = heads // kv_heads
    tiles = tiles_for_scores(queries, "fp8", block_size, tiles)
    rows = queries.new_zeros(kv_heads, groups, last_n, head_dim)  # where a request is short, the kernel's tiles have 0
    rows[:, :, :n] = queries.view(kv_heads, groups, n, head_dim)
    rows = torch.stack([_through_fp8(own.flatten(0, 1), tiles.rows).view_as(own) for own in rows])
    at_once = blocks_of_a_tile(tiles, block_size) * block_size
    return rows[:, :, :n].reshape_as(queries), torch.stack([_through_fp8(own, at_once) for own in keys])


def _through_fp8(x: Tensor, rows: int) -> Tensor:
    """x rounded to e4m3, with one scale for every `rows` rows: the largest magnitude is the largest e4m3 number."""
    tiles, most = [], torch.finfo(FP8).max
    for tile in x.split(rows):
        largest = tile.abs().amax()
        largest = torch.where(largest > 0, largest, 1.0)
        tiles.append((tile * (most / largest)).clamp(-most, most).to(FP8).to(x.dtype) * (largest / most))
    return torch.cat(tiles)
