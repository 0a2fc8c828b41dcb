"""Block-sparse attention in float64, tile by tile, from the description of FlashPrefill V2 (arXiv 2603.06199).

Shares no code with the kernels or their twin. Slow on purpose: every step is the sentence that describes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

Key = tuple[int, int, int]  # request, kv head, tile


@dataclass
class Result:
    """What attention gives, and how it was chosen."""

    out: Tensor
    """(batch, heads, queries, v_dim) float64"""
    missing: Tensor
    """(batch, heads, queries) float64: mass of dense attention on keys of blocks that were not kept"""
    kept: dict[Key, list[int]] = field(default_factory=dict)
    causal: dict[Key, int] = field(default_factory=dict)
    """How many blocks the last query of the tile sees."""
    margin: float = math.inf
    """How near an energy came to the threshold, as a factor's logarithm: nearer than rounding, and sets may differ."""


def reference(
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
) -> Result:
    batch, heads, queries, head_dim = q.shape
    kv_heads, tokens = k.shape[1], k.shape[2]
    group = heads // kv_heads
    factor = 1 / math.sqrt(head_dim) if scale is None else scale
    shape = (batch, heads, queries, v.shape[3])
    result = Result(torch.zeros(shape, dtype=torch.float64), torch.zeros(shape[:3], dtype=torch.float64))
    for b in range(batch):
        bounds = [0, tokens] if token_bounds is None else token_bounds[b].tolist()
        for h in range(kv_heads):
            # the request alone: padding is cut off, position 0 is its first token
            keys, values = (x[b, h, bounds[0] : bounds[1]] for x in (k, v))
            rows = [column for column in range(tokens - queries, tokens) if bounds[0] <= column < bounds[1]]
            own_q = q[b, h * group : (h + 1) * group].double()
            tile_positions = 128 // group
            for tile, begin in enumerate(range(0, len(rows), tile_positions)):
                places = [column - bounds[0] for column in rows[begin : begin + tile_positions]]
                own = [column - (tokens - queries) for column in rows[begin : begin + tile_positions]]
                _one_tile(
                    result, (b, h, tile), own_q[:, own], keys, values, places, own, factor, softcap,
                    None if sinks is None else sinks.flatten()[h * group : (h + 1) * group].double(),
                    alpha, block_size, sink_blocks, window_blocks, last_tokens, correction, parts,
                )  # fmt: skip
    return result


def _one_tile(
    result: Result, key: Key, q: Tensor, keys: Tensor, values: Tensor, places: list[int], rows: list[int],
    factor: float, softcap: float | None, sinks: Tensor | None, alpha: float, block_size: int, sink_blocks: int,
    window_blocks: int, last_tokens: int, correction: bool, parts: int,
) -> None:  # fmt: skip
    """q: (group, positions, head_dim) float64 of one tile; keys, values: of its request."""

    def logit(many: Tensor) -> Tensor:
        x = q @ many.double().T * factor
        return x if softcap is None else softcap * torch.tanh(x / softcap)

    length, place = len(keys), torch.tensor(places)
    blocks = [list(range(j, min(j + block_size, length))) for j in range(0, places[-1] + 1, block_size)]
    # means of the whole block, also of keys that a query does not see yet, stored in the type of the keys
    k_means = torch.stack([keys[i].double().mean(0).to(keys.dtype) for i in blocks])
    v_means = torch.stack([values[i].double().mean(0).to(values.dtype) for i in blocks])
    s = logit(k_means)
    # a block's energy: over its parts, and over the rows that see the first key of a part
    size = block_size // parts
    sums = []
    for block in blocks:
        terms = []
        for part in [block[i : i + size] for i in range(0, len(block), size)]:
            mean = keys[part].double().mean(0).to(keys.dtype)
            terms.append(logit(mean[None])[:, place >= part[0], 0].flatten())
        sums.append(torch.cat(terms))
    top = max(term.max() for term in sums)
    energies = [torch.exp(term - top).sum().item() for term in sums]
    most = max(energies)
    kept = []
    for j, block in enumerate(blocks):
        if alpha > 0 and energies[j] > 0:
            result.margin = min(result.margin, abs(math.log(energies[j] / (alpha * most))))
        first_block = places[0] // block_size
        if (
            energies[j] >= alpha * most
            or j < sink_blocks
            or j >= first_block - (window_blocks - 1)
            or places[-1] >= length - last_tokens
        ):
            kept.append(j)
        else:
            assert block[-1] < places[0] and len(block) == block_size
    result.kept[key], result.causal[key] = kept, len(blocks)

    b, h, _ = key
    group = len(q)
    all_logits = logit(keys)
    is_kept = torch.zeros(length, dtype=torch.bool)
    for j in kept:
        is_kept[blocks[j]] = True
    for g in range(group):
        head = h * group + g
        for i, at in enumerate(places):
            causal = torch.arange(length) <= at
            seen = all_logits[g, i]
            logits = [seen[causal & is_kept]]
            worth = [values[causal & is_kept].double()]
            everything = [seen[causal]]
            if correction:
                left = [j for j in range(len(blocks)) if j not in kept]
                if left:
                    logits.append(s[g, i, left] + math.log(block_size))
                    worth.append(v_means[left].double())
            if sinks is not None:
                logits.append(sinks[g : g + 1])
                everything.append(sinks[g : g + 1])
                worth.append(torch.zeros(1, values.shape[1], dtype=torch.float64))
            weights = torch.softmax(torch.cat(logits), 0)
            result.out[b, head, rows[i]] = weights @ torch.cat(worth)
            dense = torch.softmax(torch.cat(everything), 0)[: at + 1]
            result.missing[b, head, rows[i]] = dense[~is_kept[: at + 1]].sum()
