"""The naive twin of `block_scores`: the same result from logits that exist in full, one head at a time."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import torch
from torch import Tensor

from uniprefill_fx.kernels.tiles import FP8_MAX, Tiles, blocks_of_a_tile, default_tiles


def block_scores_reference(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    last_n: int,
    block_size: int,
    softcap: float | None = None,
    dtype: Literal["input", "fp8"] = "input",
    sinks: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """As `block_scores`, with float32 operands and sums. `tiles` only matters to "fp8": it says what shares a scale."""
    (heads, tokens, head_dim), kv_heads = q.shape, k.shape[0]
    groups, bounds = heads // kv_heads, cu_seqlens.tolist()
    tiles = tiles or default_tiles(head_dim, q.element_size(), groups * last_n, dtype == "fp8")
    scores = torch.zeros(tokens // block_size + len(bounds) - 1, device=q.device)
    for r, (start, end) in enumerate(itertools.pairwise(bounds)):
        length = end - start
        if length == 0:
            continue
        n = min(last_n, length)
        mass = torch.zeros(length, device=q.device)
        hidden = torch.ones(n, length, dtype=torch.bool, device=q.device).triu(length - n + 1)
        for kv_head in range(kv_heads):
            queries = q.new_zeros(groups, last_n, head_dim, dtype=torch.float32)
            queries[:, :n] = q[kv_head * groups : (kv_head + 1) * groups, end - n : end]
            keys = k[kv_head, start:end].float()
            if dtype == "fp8":
                queries = _through_fp8(queries.flatten(0, 1), tiles.rows).view_as(queries)
                keys = _through_fp8(keys, blocks_of_a_tile(tiles, block_size) * block_size)
            for group in range(groups):
                logits = (queries[group, :n] @ keys.T) * scale
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                logits.masked_fill_(hidden, -torch.inf)
                if sinks is not None:
                    sink = sinks.reshape(-1)[kv_head * groups + group].float().expand(n, 1)
                    logits = torch.cat([logits, sink], 1)
                mass += logits.softmax(-1)[:, :length].sum(0)
        first, blocks = start // block_size + r, math.ceil(length / block_size)
        padded = torch.nn.functional.pad(mass, (0, blocks * block_size - length))
        scores[first : first + blocks] = padded.view(blocks, block_size).sum(-1)
    return scores


def _through_fp8(x: Tensor, rows: int) -> Tensor:
    """x rounded to e4m3, with one scale for every `rows` rows: the largest magnitude is the largest e4m3 number."""
    tiles = []
    for tile in x.split(rows):
        largest = tile.abs().amax()
        largest = torch.where(largest > 0, largest, 1.0)
        tiles.append((tile * (FP8_MAX / largest)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float())
        tiles[-1] *= largest / FP8_MAX
    return torch.cat(tiles)
