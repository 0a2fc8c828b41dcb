"""Ways to rank tokens at a drop, for `masked_forward.py`: the published scores, variants of them, and rivals.

A selection either takes a p, as the package does, or as many tokens as another one kept at the same drop of the same
prompt: then all compute the same, and differ only in which tokens they keep. The first `SINK` and the last `LAST` rows
always stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from masked_forward import Layer
from torch import Tensor

SINK, LAST = 128, 128


@dataclass(frozen=True)
class Look:
    """What scores are made from: attention (heads, queries, rows) float32 of the last queries, and the layer."""

    attention: Tensor
    layer: Layer


def _value_norms(look: Look) -> Tensor:
    """(heads, 1, rows): the length of each row's value."""
    norms = look.layer.values.float().norm(dim=-1)
    return norms.repeat_interleave(len(look.attention) // len(norms), 0)[:, None]


def _output_norms(look: Look) -> Tensor:
    """(heads, 1, rows): the length of what each head's value adds to the stream, behind the output projection."""
    values, heads = look.layer.values.float(), len(look.attention)
    by_head = look.layer.project.float().unflatten(1, (heads, -1)).transpose(0, 1)  # (heads, hidden, head_dim)
    gram = by_head.mT @ by_head
    own = values.repeat_interleave(heads // len(values), 0)
    return (own @ gram * own).sum(-1).clamp_min(0).sqrt()[:, None]


def _latest_more(look: Look) -> Tensor:
    """(queries, 1): the last query counts twice as much as the one 16 before it, and so on."""
    ago = torch.arange(look.attention.shape[1] - 1, -1, -1, device=look.attention.device)
    return (0.5 ** (ago / 16))[:, None]


def _own_mass(look: Look) -> Tensor:
    """Attention to what might be dropped, as a share of it: forced rows hold most of the mass, and say nothing."""
    free = look.attention.clone()
    free[..., :SINK] = 0
    free[..., -LAST:] = 0
    return free / free.sum(-1, keepdim=True).clamp_min(1e-9)


TokenScores = Callable[[Look], Tensor]
TOKEN_SCORES: dict[str, TokenScores] = {
    "sum": lambda look: look.attention.sum((0, 1)),
    "value norms": lambda look: (look.attention * _value_norms(look)).sum((0, 1)),
    "output norms": lambda look: (look.attention * _output_norms(look)).sum((0, 1)),
    "later queries more": lambda look: (look.attention * _latest_more(look)).sum((0, 1)),
    "share of free mass": lambda look: _own_mass(look).sum((0, 1)),
}
"""(rows,) each, summed by block."""

BlockScores = Callable[[Look, int], Tensor]


def _by_block(x: Tensor, size: int) -> Tensor:
    """Sums of (..., rows) by block: (..., blocks)."""
    blocks = -(-x.shape[-1] // size)
    return torch.nn.functional.pad(x, (0, blocks * size - x.shape[-1])).unflatten(-1, (blocks, size)).sum(-1)


def union_rank(by_head: Tensor) -> Tensor:
    """(blocks,): 1 minus the least p at which some head's own top-p holds the block. by_head: (heads, blocks)."""
    ordered, order = (by_head / by_head.sum(-1, keepdim=True)).double().sort(descending=True, stable=True)
    above = torch.empty_like(ordered).scatter_(-1, order, ordered.cumsum(-1) - ordered)
    return 1 - above.amin(0)


def _neighbours(share: float) -> BlockScores:
    """A block has at least a share of what its neighbours have."""

    def scores(look: Look, size: int) -> Tensor:
        mass = _by_block(look.attention.sum((0, 1)), size)
        beside = torch.maximum(mass.roll(1), mass.roll(-1))
        beside[0], beside[-1] = mass[min(1, len(mass) - 1)], mass[max(-2, -len(mass))]
        return torch.maximum(mass, share * beside)

    return scores


BLOCK_SCORES: dict[str, BlockScores] = {
    "max over heads": lambda look, size: _by_block(look.attention.sum(1), size).amax(0),
    "union of heads": lambda look, size: union_rank(_by_block(look.attention.sum(1), size)),
    "union of heads, output norms": lambda look, size: union_rank(
        _by_block((look.attention * _output_norms(look)).sum(1), size)
    ),
    "max over queries": lambda look, size: _by_block(look.attention, size).amax((0, 1)),
    "sum over heads of max over queries": lambda look, size: _by_block(look.attention, size).amax(1).sum(0),
    "max over heads of free mass": lambda look, size: _by_block(_own_mass(look).sum(1), size).amax(0),
    "neighbours 0.5": _neighbours(0.5),
    "neighbours 0.25": _neighbours(0.25),
}
RIVALS = ("random blocks", "recent")


@dataclass
class Variant:
    """One way to select.

    Attributes:
        name: of a score above, or of a rival. last_n: how many queries score. block_size: tokens a block.
        p: one for each drop; or keep: rows to keep at each drop.
        seed: of random blocks.
    """

    name: str = "sum"
    last_n: int = LAST
    block_size: int = 64
    p: Sequence[float] | None = None
    keep: Sequence[int] | None = None
    seed: int = 0

    @property
    def label(self) -> str:
        more = [f"last_n={self.last_n}"] if self.last_n != LAST else []
        more += [f"block_size={self.block_size}"] if self.block_size != 64 else []
        return ", ".join([self.name, *more])

    def like(self, kept: Sequence[Tensor], seed: int) -> Variant:
        """The same, keeping as many rows as another selection did."""
        return replace(self, p=None, keep=[len(rows) for rows in kept], seed=seed)

    def __call__(self, layer: Layer) -> Tensor:
        rows = layer.keys.shape[1]
        at = torch.arange(rows, device=layer.keys.device)
        forced = (at < SINK) | (at >= rows - LAST)
        scores = self.scores(layer)
        block = at // self.block_size if len(scores) < rows else at
        if self.p is not None:
            ordered, order = scores.double().sort(descending=True, stable=True)
            p = self.p[layer.ordinal]
            chosen = torch.zeros_like(scores, dtype=torch.bool)
            chosen[order] = (ordered.cumsum(0) - ordered < p * ordered.sum()) | (p == 1.0)
            return chosen[block] | forced
        assert self.keep is not None
        wanted = scores.double()[block].masked_fill(forced, torch.inf)
        stays = torch.zeros_like(forced)
        stays[wanted.sort(descending=True, stable=True).indices[: self.keep[layer.ordinal]]] = True
        return stays

    def scores(self, layer: Layer) -> Tensor:
        """(blocks,), higher stays."""
        rows = layer.keys.shape[1]
        blocks, device = -(-rows // self.block_size), layer.keys.device
        if self.name == "random blocks":
            return torch.randperm(blocks, generator=torch.Generator().manual_seed(self.seed + layer.ordinal)).to(device)
        if self.name == "recent":
            return torch.arange(blocks, device=device)
        look = Look(attention_of_last(layer, self.last_n), layer)
        if self.name in BLOCK_SCORES:
            return BLOCK_SCORES[self.name](look, self.block_size)
        return _by_block(TOKEN_SCORES[self.name](look), self.block_size)


def attention_of_last(layer: Layer, last_n: int) -> Tensor:
    """(heads, min(last_n, rows), rows) float32: the causal softmax of the last queries."""
    queries, keys = layer.queries[:, -last_n:].float(), layer.keys.float()
    groups, n, rows = len(queries) // len(keys), queries.shape[1], keys.shape[1]
    logits = queries.unflatten(0, (-1, groups)) @ keys[:, None].mT * layer.scale
    hidden = torch.ones(n, rows, dtype=torch.bool, device=keys.device).triu(rows - n + 1)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1).flatten(0, 1)


VARIANTS = [
    *(Variant(name) for name in (*TOKEN_SCORES, *BLOCK_SCORES)),
    *(Variant(last_n=n) for n in (16, 32, 64, 256, 512)),
    *(Variant(block_size=size) for size in (16, 32, 128)),
]
