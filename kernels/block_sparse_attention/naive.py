"""Block-sparse attention in plain torch, tile by tile in float32: what the kernels compute, with their signature."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

TILE_ROWS = 128
FP8_MAX = 448.0


@dataclass(frozen=True)
class _Tile:
    """One tile of queries of one request, for all kv heads at once."""

    request: int
    columns: slice
    """The queries' columns among the queries of the call."""
    q: Tensor
    """(kv_heads, positions, group, head_dim)"""
    logits: Tensor
    """(kv_heads, positions, group, keys) of the keys that the last query sees, -inf where another does not"""
    mean_logits: Tensor
    """(kv_heads, positions, group, blocks)"""
    kept: Tensor
    """(kv_heads, blocks) bool, of the blocks that the last query sees"""


def _mean(x: Tensor, block_size: int) -> Tensor:
    """(heads, tokens, dim) to (heads, blocks, dim) in the type of x, each over the tokens that there are."""
    return torch.stack([part.float().mean(1).to(x.dtype) for part in x.split(block_size, 1)], 1)


def _rounded(x: Tensor, largest: Tensor) -> Tensor:
    """x as e4m3 with `largest` at the end of the range, in float32 again."""
    unit = torch.where(largest > 0, largest, 1.0) / FP8_MAX
    return (x.float() / unit).to(torch.float8_e4m3fn).float() * unit


def _magnitude(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x.float().abs().amax(dims, keepdim=True)


def _tiles(
    q: Tensor, k: Tensor, v: Tensor, token_bounds: Tensor | None, scale: float, softcap: float | None, alpha: float,
    block_size: int, sink_blocks: int, window_blocks: int, last_tokens: int, parts: int, fp8: bool,
) -> Iterator[tuple[_Tile, Tensor, Tensor]]:  # fmt: skip
    """Each tile, with the values that it may attend to and their means, (kv_heads, keys or blocks, v_dim) float32."""
    (batch, heads, queries, head_dim), (kv_heads, tokens) = q.shape, k.shape[1:3]
    group = heads // kv_heads
    positions, offset = TILE_ROWS // group, tokens - queries

    def logits_of(q_tile: Tensor, keys: Tensor) -> Tensor:
        logits = torch.einsum("hpgd,hkd->hpgk", q_tile, keys) * scale
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    for request in range(batch):
        start, end = (0, tokens) if token_bounds is None else token_bounds[request].tolist()
        length = end - start
        keys, values = k[request, :, start:end], v[request, :, start:end]
        if length <= 0:
            continue
        k_means, v_means = _mean(keys, block_size).float(), _mean(values, block_size).float()
        size = block_size // parts
        part_means = _mean(keys, size).float()
        read = keys.float(), values.float(), k_means, v_means
        if fp8:
            of_k, of_v = _magnitude(keys, (1, 2)), _magnitude(values, (1, 2))
            read = _rounded(keys, of_k), _rounded(values, of_v), _rounded(k_means, of_k), _rounded(v_means, of_v)
        for first in range(max(offset - start, 0), length, positions):
            stop = min(first + positions, length)
            at = torch.arange(first, stop, device=q.device)
            columns = slice(first + start - offset, stop + start - offset)
            q_tile = q[request, :, columns].float().reshape(kv_heads, group, stop - first, head_dim).transpose(1, 2)
            visible = (stop - 1) // block_size + 1
            block = torch.arange(visible, device=q.device)
            part = torch.arange((stop - 1) // size + 1, device=q.device)
            sees = (part * size <= at[:, None])[:, None]
            by_part = logits_of(q_tile, part_means[:, : len(part)]).masked_fill(~sees, -math.inf)
            by_part = torch.nn.functional.pad(by_part, (0, visible * parts - len(part)), value=-math.inf)
            energies = by_part.flatten(1, 2).unflatten(2, (visible, parts)).logsumexp((1, 3))
            log_alpha = math.log(alpha) if alpha > 0 else -math.inf
            kept = ~(energies < energies.amax(1, keepdim=True) + log_alpha)
            kept |= (block < sink_blocks) | (block > first // block_size - window_blocks)
            kept |= stop > length - last_tokens
            if fp8:
                most = _magnitude(q_tile, (1, 2, 3))
                lifted = torch.exp2(torch.floor(torch.log2(FP8_MAX / torch.where(most > 0, most, 1.0))))
                q_tile = (q_tile * lifted).to(torch.float8_e4m3fn).float() / lifted
            causal = (torch.arange(stop, device=q.device) <= at[:, None])[:, None]
            logits = logits_of(q_tile, read[0][:, :stop]).masked_fill(~causal, -math.inf)
            mean_logits = logits_of(q_tile, read[2][:, :visible])
            tile = _Tile(request, columns, q_tile, logits, mean_logits, kept)
            yield tile, read[1][:, :stop], read[3][:, :visible]


def _by_key(kept: Tensor, block_size: int, keys: int) -> Tensor:
    """(kv_heads, blocks) to (kv_heads, 1, 1, keys)."""
    return kept.repeat_interleave(block_size, 1)[:, None, None, :keys]


def _sink_logits(sinks: Tensor, tile: _Tile) -> Tensor:
    """The logits of the sinks, one more key for each query of a tile."""
    kv_heads, positions = tile.logits.shape[:2]
    return sinks.reshape(kv_heads, 1, -1, 1).float().expand(-1, positions, -1, -1)


def block_sparse_attention_naive(
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
) -> tuple[Tensor, Tensor]:
    """The plain twin of `block_sparse_attention`: the same arguments, result and rule for ties (they are kept).

    Products, softmax and sums are float32, on operands in the type of the inputs or, with "fp8", rounded to e4m3 with
    the kernel's scales; weights stay float32.
    """
    (batch, heads, queries, head_dim), kv_heads, v_dim = q.shape, k.shape[1], v.shape[3]
    scale = head_dim**-0.5 if scale is None else scale
    out = q.new_zeros(batch, queries, heads, v_dim)
    kept_blocks, causal_blocks = 0, 0
    options = (alpha, block_size, sink_blocks, window_blocks, last_tokens, parts, dtype == "fp8")
    for tile, values, v_means in _tiles(q, k, v, token_bounds, scale, softcap, *options):
        logits = tile.logits.masked_fill(~_by_key(tile.kept, block_size, values.shape[1]), -math.inf)
        terms, worth = [logits], [values]
        if correction:
            pseudo = tile.mean_logits + math.log(block_size)
            terms.append(pseudo.masked_fill(tile.kept[:, None, None], -math.inf))
            worth.append(v_means)
        if sinks is not None:
            terms.append(_sink_logits(sinks, tile))
            worth.append(values.new_zeros(kv_heads, 1, v_dim))
        weights = torch.cat(terms, -1).softmax(-1)
        result = torch.einsum("hpgk,hkd->phgd", weights, torch.cat(worth, 1))
        out[tile.request, tile.columns] = result.reshape(-1, heads, v_dim).to(out.dtype)
        kept_blocks += int(tile.kept.sum())
        causal_blocks += tile.kept.numel()
    return out.transpose(1, 2), torch.tensor([kept_blocks, causal_blocks], device=q.device)


def mass_not_computed(
    q: Tensor,
    k: Tensor,
    token_bounds: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alpha: float = 0.1,
    block_size: int = 128,
    sink_blocks: int = 2,
    window_blocks: int = 4,
    last_tokens: int = 256,
    parts: int = 2,
) -> Tensor:
    """Softmax mass of the keys in blocks that are not kept, of dense causal attention, by query.

    With values of norm at most V, attention without the correction is off by at most 2 · V times this: the mass that
    is missing, and as much again that the others get. Arguments as of `block_sparse_attention`.

    Returns:
        (batch, heads, queries) float32 in [0, 1]; 0 in padding.
    """
    batch, heads, queries, head_dim = q.shape
    scale = head_dim**-0.5 if scale is None else scale
    missing = torch.zeros(batch, queries, heads, device=q.device)
    options = (alpha, block_size, sink_blocks, window_blocks, last_tokens, parts, False)
    for tile, _, _ in _tiles(q, k, k, token_bounds, scale, softcap, *options):
        terms = [tile.logits]
        if sinks is not None:
            terms.append(_sink_logits(sinks, tile))
        weights = torch.cat(terms, -1).softmax(-1)[..., : tile.logits.shape[3]]
        skipped = weights.masked_fill(_by_key(tile.kept, block_size, weights.shape[3]), 0.0).sum(-1)
        missing[tile.request, tile.columns] = skipped.transpose(0, 1).reshape(-1, heads)
    return missing.transpose(1, 2)
