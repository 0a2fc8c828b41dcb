"""MiniMax: lightning attention, a method that loops over blocks, as one op; its cache is a `DynamicCache` with states.

The method holds projections and the cache as well, so it is traced in a form of its own around the recurrence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from uniprefill_fx.frontends.cache import ADOPTED
from uniprefill_fx.frontends.cache_argument import cache_of
from uniprefill_fx.frontends.mixers import register_mixer, replace_method


def lightning_attention(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Linear attention in which a key fades by exp(-slope) with each token (arXiv 2501.08313, section 2.2).

    Args:
        q, k, v: (batch, heads, tokens, dim). slopes: (heads, 1, 1). block: tokens that are computed at a time.

    Returns:
        (batch, heads, tokens, dim), and the state (batch, heads, dim, dim), both in the dtype of `v`.
    """
    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for queries, keys, values in zip(*(t.split(block, dim=2) for t in (q, k, v)), strict=True):
        count = queries.shape[2]
        place = torch.arange(count, device=v.device)[:, None]
        distance = place - place.T
        within = torch.exp(-slopes * distance).masked_fill(distance < 0, 0.0).to(v.dtype)
        before, after = (torch.exp(-slopes * n).to(v.dtype) for n in (place + 1, count - 1 - place))
        outputs.append((queries * before) @ state + ((queries @ keys.mT) * within) @ values)
        state = torch.exp(-slopes * count).to(v.dtype) * state + (keys * after).mT @ values
    return torch.cat(outputs, dim=2), state


def shapes(call: dict[str, Any]) -> list[Any]:
    """Of the output and the state."""
    v = call["v"]
    return [(tuple(v.shape), v.dtype), ((*v.shape[:2], call["k"].shape[-1], v.shape[-1]), v.dtype)]


def install(modeling: Any) -> None:
    """Teach Dynamo the method of transformers' `modeling_minimax`, once."""
    original = modeling.MiniMaxLightningAttention.forward

    def traced(
        self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, *rest: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        cache = rest[0] if rest else cache_of(kwargs)
        if cache is not None and cache.get_linear_cache(self.layer_idx) is not None:
            later: tuple[Tensor, Tensor] = original(
                self, hidden_states, position_embeddings, attention_mask, *rest, **kwargs
            )
            return later
        qkv = modeling.apply_mask_to_padding_states(self.act_fn(self.qkv_proj(hidden_states)), attention_mask)
        q, k, v = qkv.unflatten(-1, (self.num_attention_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        mixed, state = lightning_attention(q, k, v, self.slope_rate, self.block_size)
        if cache is not None:
            cache.set_linear_cache(self.layer_idx, state)
        gate = torch.sigmoid(self.output_gate(hidden_states))
        return self.out_proj(gate * self.norm(mixed.transpose(1, 2).flatten(2))), state

    replace_method(modeling.MiniMaxLightningAttention, "forward", traced)
    ADOPTED.add(modeling.MiniMaxCache)


register_mixer(lightning_attention, shapes)
