"""Block-sparse attention in plain torch, float32, some tiles at a time: what the kernels compute, by their signature.

Only blocks that a tile keeps are multiplied, so that fewer blocks take less time on devices without the kernels too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from uniprefill_fx.specs import TILE_ROWS

FP8_MAX = 448.0
AT_ONCE = 2**19
"""Most logits that are formed at a time: 2 MiB."""


@dataclass(frozen=True)
class _Request:
    """Keys and values of one request in float32, in whole blocks (zeros behind its end), and the means of blocks."""

    k: Tensor
    """(kv_heads, blocks, block_size, head_dim)"""
    v: Tensor
    k_means: Tensor
    """(kv_heads, blocks, head_dim)"""
    v_means: Tensor
    scale: float
    softcap: float | None

    def logits(self, q: Tensor, keys: Tensor) -> Tensor:
        """(…, rows, keys) of queries (…, rows, head_dim) and keys (…, keys, head_dim)."""
        logits = torch.matmul(q, keys.transpose(-1, -2)) * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


@dataclass(frozen=True)
class _Tiles:
    """Neighbouring tiles of queries of one request, for all kv heads; a row is a position and a head of the group."""

    request: int
    columns: slice
    """The queries' columns among the queries of the call."""
    q: Tensor
    """(kv_heads, tiles, rows, head_dim) float32; the rows behind the end of the request are zeros"""
    at: Tensor
    """(tiles, rows): positions in the request"""
    kept: Tensor
    """(kv_heads, tiles, blocks) bool"""
    visible: Tensor
    """(tiles, blocks) bool: the blocks that the last query of a tile sees"""

    def by_query(self, x: Tensor, group: int) -> Tensor:
        """(kv_heads, tiles, rows, dim) to (queries, heads, dim)."""
        by_head = x.unflatten(2, (-1, group)).permute(1, 2, 0, 3, 4).flatten(2, 3).flatten(0, 1)
        return by_head[: self.columns.stop - self.columns.start]


def _in_blocks(x: Tensor, size: int) -> Tensor:
    """(heads, tokens, dim) to (heads, blocks, size, dim), with zeros behind the end."""
    return F.pad(x, (0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size))


def _means(x: Tensor, size: int) -> Tensor:
    """(heads, tokens, dim) to (heads, blocks, dim), each over the tokens that there are, rounded to the type of x."""
    sums = _in_blocks(x.float(), size).sum(2)
    counts = (x.shape[1] - torch.arange(0, x.shape[1], size, device=x.device)).clamp(max=size)
    return (sums / counts[:, None]).to(x.dtype)


def _rounded(x: Tensor, largest: Tensor) -> Tensor:
    """x as e4m3 with `largest` at the end of the range, in float32 again."""
    unit = torch.where(largest > 0, largest, 1.0) / FP8_MAX
    return (x.float() / unit).to(torch.float8_e4m3fn).float() * unit


def _magnitude(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x.float().abs().amax(dims, keepdim=True)


def _request(k: Tensor, v: Tensor, block_size: int, scale: float, softcap: float | None, fp8: bool) -> _Request:
    k_means, v_means = _means(k, block_size), _means(v, block_size)
    operands = k, v, k_means, v_means
    if fp8:
        of_k, of_v = _magnitude(k, (1, 2)), _magnitude(v, (1, 2))
        operands = _rounded(k, of_k), _rounded(v, of_v), _rounded(k_means, of_k), _rounded(v_means, of_v)
    keys, values, k_means, v_means = (x.float() for x in operands)
    return _Request(_in_blocks(keys, block_size), _in_blocks(values, block_size), k_means, v_means, scale, softcap)


def _tiles(
    q: Tensor, k: Tensor, v: Tensor, token_bounds: Tensor | None, scale: float, softcap: float | None, alpha: float,
    block_size: int, sink_blocks: int, window_blocks: int, last_tokens: int, parts: int, fp8: bool,
) -> Iterator[tuple[_Tiles, _Request]]:  # fmt: skip
    """All tiles, as many at a time as `AT_ONCE` allows, with what they attend to."""
    (batch, heads, queries, head_dim), (kv_heads, tokens) = q.shape, k.shape[1:3]
    group = heads // kv_heads
    positions, offset = TILE_ROWS // group, tokens - queries
    log_alpha = math.log(alpha) if alpha > 0 else -math.inf
    for request in range(batch):
        start, end = (0, tokens) if token_bounds is None else token_bounds[request].tolist()
        length, begin = end - start, max(offset - start, 0)
        if length <= begin:
            continue
        own = _request(k[request, :, start:end], v[request, :, start:end], block_size, scale, softcap, fp8)
        size = block_size // parts
        part_means = _means(k[request, :, start:end], size).float()
        part = torch.arange(part_means.shape[1], device=q.device)
        block = torch.arange(own.k.shape[1], device=q.device)
        step = positions * max(AT_ONCE // (kv_heads * positions * group * length), 1)
        for first in range(begin, length, step):
            stop = min(first + step, length)
            columns = slice(first + start - offset, stop + start - offset)
            own_q = F.pad(q[request, :, columns].float(), (0, 0, 0, (first - stop) % positions))
            own_q = own_q.view(kv_heads, group, -1, positions, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
            tile_first = torch.arange(first, stop, positions, device=q.device)[:, None]
            tile_stop = (tile_first + positions).clamp(max=length)
            at = tile_first + torch.arange(positions, device=q.device).repeat_interleave(group)

            seen = (part * size <= at[..., None]) & (at < length)[..., None]
            energies = own.logits(own_q, part_means[:, None]).masked_fill(~seen, -math.inf)
            energies = F.pad(energies, (0, len(block) * parts - len(part)), value=-math.inf)
            energies = energies.unflatten(3, (-1, parts)).logsumexp((2, 4))
            visible = block * block_size < tile_stop
            kept = ~(energies < energies.amax(2, keepdim=True) + log_alpha)
            kept = kept | (block < sink_blocks) | (block > tile_first // block_size - window_blocks)
            kept = (kept | (tile_stop > length - last_tokens)) & visible

            if fp8:
                most = _magnitude(own_q, (2, 3))
                lifted = torch.exp2(torch.floor(torch.log2(FP8_MAX / torch.where(most > 0, most, 1.0))))
                own_q = (own_q * lifted).to(torch.float8_e4m3fn).float() / lifted
            yield _Tiles(request, columns, own_q, at, kept, visible), own


def _sink_logits(sinks: Tensor, tiles: _Tiles) -> Tensor:
    """The logits of the sinks, one more key for each row of the tiles."""
    kv_heads, many, rows = tiles.q.shape[:3]
    by_head = sinks.float().reshape(kv_heads, 1, 1, -1)
    return by_head.repeat(1, many, rows // by_head.shape[3], 1).flatten(2)[..., None]


def _attend(tiles: _Tiles, own: _Request, correction: bool, sinks: Tensor | None) -> Tensor:
    """(kv_heads, tiles, rows, v_dim): attention over the kept blocks, gathered, and over the means of the others."""
    block_size = own.k.shape[2]
    taken, blocks = tiles.kept.byte().sort(dim=2, descending=True, stable=True)
    most = int(tiles.kept.sum(2).max())
    taken = taken[..., :most].bool()
    blocks = torch.where(taken, blocks[..., :most], 0)  # where a tile keeps fewer than another: masked
    head = torch.arange(len(own.k), device=blocks.device)[:, None, None]
    place = (blocks[..., None] * block_size + torch.arange(block_size, device=blocks.device)).flatten(2)
    seen = (place[:, :, None] <= tiles.at[..., None]) & taken.repeat_interleave(block_size, 2)[:, :, None]
    logits = [own.logits(tiles.q, own.k[head, blocks].flatten(2, 3)).masked_fill(~seen, -math.inf)]
    if correction:
        pseudo = own.logits(tiles.q, own.k_means[:, None]) + math.log(block_size)
        logits.append(pseudo.masked_fill((tiles.kept | ~tiles.visible)[:, :, None], -math.inf))
    if sinks is not None:
        logits.append(_sink_logits(sinks, tiles))
    weights = torch.cat(logits, -1).softmax(-1)
    keys = seen.shape[-1]
    out = torch.matmul(weights[..., :keys], own.v[head, blocks].flatten(2, 3))
    if correction:
        out += torch.matmul(weights[..., keys : keys + own.v_means.shape[1]], own.v_means[:, None])
    return out


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
    totals = torch.zeros(2, dtype=torch.int64, device=q.device)
    options = (alpha, block_size, sink_blocks, window_blocks, last_tokens, parts, dtype == "fp8")
    for tiles, own in _tiles(q, k, v, token_bounds, scale, softcap, *options):
        found = _attend(tiles, own, correction, sinks)
        out[tiles.request, tiles.columns] = tiles.by_query(found, heads // kv_heads).to(out.dtype)
        totals += torch.stack((tiles.kept.sum(), tiles.visible.sum() * kv_heads))
    return out.transpose(1, 2), totals


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
    (batch, heads, queries, head_dim), kv_heads = q.shape, k.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    missing = torch.zeros(batch, queries, heads, device=q.device)
    options = (alpha, block_size, sink_blocks, window_blocks, last_tokens, parts, False)
    for tiles, own in _tiles(q, k, k, token_bounds, scale, softcap, *options):
        place = torch.arange(own.k.shape[1] * block_size, device=q.device)
        logits = own.logits(tiles.q, own.k.flatten(1, 2)[:, None])
        terms = [logits.masked_fill(place > tiles.at[..., None], -math.inf)]
        if sinks is not None:
            terms.append(_sink_logits(sinks, tiles))
        weights = torch.cat(terms, -1).softmax(-1)[..., : len(place)]
        left_out = ~tiles.kept.repeat_interleave(block_size, 2)[:, :, None]
        skipped = (weights * left_out).sum(-1, keepdim=True)
        missing[tiles.request, tiles.columns] = tiles.by_query(skipped, heads // kv_heads)[..., 0]
    return missing.transpose(1, 2)
