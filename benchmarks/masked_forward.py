"""Token dropping without the package, for experiments: an eager forward in which nobody attends to dropped rows.

A kept row never reads a dropped one, so what it computes is what it would compute if the others were gone. Each
attention therefore runs on the kept rows alone, and dropped rows go on as zeros that nobody reads. Tokens that follow
the prompt go through the same forward: they see, in every layer, the keys that entered it, as a decode over the compact
cache does.

Works on models of transformers whose layers hold full causal attention or a sliding window, one prompt at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, scaled_dot_product_attention

NAME = "masked_forward"


@dataclass(frozen=True)
class Layer:
    """What a selection may look at, of the prompt's rows that are left.

    Attributes:
        queries: (heads, rows, head_dim), keys and values: (kv_heads, rows, head_dim), after rotary. scale: on logits.
        project: (hidden, heads * head_dim), the weight of the output projection. ordinal: drops before this one.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    project: Tensor
    ordinal: int


class Selection(Protocol):
    def __call__(self, layer: Layer) -> Tensor:
        """(rows,) bool: what stays."""


@dataclass
class _Run:
    """One forward: the rows that are left (None: all), the prompt's length, and how many of it each drop kept."""

    prompt: int
    drop_layers: Sequence[int]
    select: Selection | None
    rows: Tensor | None = None
    kept: list[Tensor] = field(default_factory=list)


class MaskedForward:
    """A copy of a model that computes one sequence at once, with or without drops; the model stays as it is."""

    def __init__(self, model: Any, drop_layers: Sequence[int]) -> None:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
        self.model, self.drop_layers = copy.deepcopy(model), tuple(drop_layers)
        self.model.set_attn_implementation(NAME)
        text = model.config.get_text_config()
        self.layers = text.num_hidden_layers

    @torch.inference_mode()
    def __call__(
        self, prompt: Tensor, follow: Sequence[int] = (), select: Selection | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits (1 + len(follow), vocabulary) of the prompt's last row and of those that follow, and by drop the kept
        positions of the prompt, (kept,) int64. prompt: (1, tokens) int64."""
        run = _Run(prompt.shape[1], self.drop_layers, select)
        ids = torch.cat([prompt, torch.tensor([list(follow)], dtype=torch.int64, device=prompt.device)], 1)
        _Current.run = run
        try:
            out = self.model(ids, use_cache=False, logits_to_keep=1 + len(follow))
        finally:
            _Current.run = None
        return out.logits[0], run.kept

    def compute_fraction(self, tokens: int, kept: Sequence[Tensor]) -> float:
        """The share of the prompt's rows that are computed, averaged over layers."""
        counts = [tokens, *(len(rows) for rows in kept)]
        behind = [sum(drop < layer for drop in self.drop_layers) for layer in range(self.layers)]
        return sum(counts[min(drops, len(kept))] for drops in behind) / (tokens * self.layers)


class _Current:
    run: _Run | None = None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: (1, heads, tokens, head_dim) in, (1, tokens, heads, head_dim) out."""
    run = _Current.run
    assert run is not None and len(query) == 1, "wanted one prompt, through MaskedForward"
    tokens, rows = query.shape[2], run.rows
    q, k, v = (query, key, value) if rows is None else (x[:, :, rows] for x in (query, key, value))
    at = torch.arange(tokens, device=q.device) if rows is None else rows
    out = banded(q, k, v, at, sliding_window, scaling) if sliding_window else _causal(q, k, v, scaling)
    number = module.layer_idx
    if run.select is not None and number in run.drop_layers:
        assert not sliding_window, f"layer {number} holds no full attention"
        own = int((at < run.prompt).sum())
        layer = Layer(*(x[0, :, :own] for x in (q, k, v)), scaling, module.o_proj.weight, run.drop_layers.index(number))
        stays = pad(run.select(layer), (0, len(at) - own), value=True)
        run.rows = at[stays]
        run.kept.append(run.rows[run.rows < run.prompt])
    if rows is not None:
        out = torch.zeros_like(query).index_copy_(2, rows, out)
    return out.transpose(1, 2), None


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def banded(q: Tensor, k: Tensor, v: Tensor, at: Tensor, window: int, scale: float) -> Tensor:
    """Attention of rows at ascending positions `at` (rows,) to the `window` positions up to their own.

    No position is twice there, so a row sees no further back than `window` - 1 rows: tiles of `window` rows each see
    their own tile and the one before. q: (1, heads, rows, head_dim), k and v: (1, kv_heads, rows, head_dim).
    """
    rows, groups = q.shape[2], q.shape[1] // k.shape[1]
    tiles = -(-rows // window)
    room = tiles * window - rows

    def tiled(x: Tensor) -> Tensor:
        """(tiles, heads, window, head_dim)"""
        return pad(x[0], (0, 0, 0, room)).unflatten(1, (tiles, window)).transpose(0, 1)

    def with_last(x: Tensor) -> Tensor:
        return torch.cat([pad(x[:-1], (0, 0) * (x.dim() - 1) + (1, 0)), x], -2 if x.dim() > 2 else -1)

    def own(x: Tensor) -> Tensor:
        return with_last(tiled(x)).repeat_interleave(groups, 1)

    number = pad(torch.arange(1, rows + 1, device=q.device), (0, room)).view(tiles, window)  # 0: no row
    position = pad(at, (0, room)).view(tiles, window)
    keys_at, there = with_last(position), with_last(number) > 0
    ago = position[:, :, None] - keys_at[:, None, :]
    seen = (ago >= 0) & (ago < window) & there[:, None, :]
    seen |= (number == 0)[:, :, None]  # rows that are padding: anything, but no NaN
    out = scaled_dot_product_attention(tiled(q), own(k), own(v), attn_mask=seen[:, None], scale=scale)
    return out.transpose(0, 1).flatten(1, 2)[None, :, :rows]


class FloatHead(nn.Module):
    """A head in float32: logits of 20 in bfloat16 are off by 0.06, which alone makes a KL of 0.001."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(head.weight.detach().float(), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return linear(hidden.float(), self.weight)
