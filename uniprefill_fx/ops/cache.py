"""What the cache layers of `frontends.cache` put into a graph: which tokens a layer holds, and a view of all of them.

A compact layer holds fewer rows than tokens were seen. `slots` are the original indices of its rows. Model code and its
masks think in original indices, so they are handed `logical_view`; the passes take the view away again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uniprefill_fx.errors import CompactCacheError


@torch.library.custom_op("uniprefill::bind_slots", mutates_args=())
def bind_slots(slots: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`slots`, tied by data flow to the cache rows they index, so that a cut that compacts those compacts them too.

    slots: (batch, tokens) int64; keys, values: (batch, ..., tokens, dim), what the layer stores. Returns a copy of
    `slots`.
    """
    return slots.clone()


@bind_slots.register_fake
def _(slots, keys, values):  # type: ignore[no-untyped-def]
    return torch.empty_like(slots)


@torch.library.custom_op("uniprefill::logical_view", mutates_args=())
def logical_view(stored: Tensor, slots: Tensor, seen: int, expected: int) -> Tensor:
    """The rows of one layer laid out by original index: (batch, heads, rows, dim) -> (batch, heads, seen, dim).

    `slots` are (batch, rows), -1 for rows that are padding. `expected` is how many rows a cache without dropping would
    hold. Rows it does not hold lie outside the sliding window, are masked by the model, and are left 0.

    Raises:
        CompactCacheError: the layer holds fewer rows than `expected`: tokens were dropped, the model's own mask would
            attend to the zeros in their place.
    """
    rows = stored.shape[-2]
    if rows != expected or not bool((slots[:, -1] - slots[:, 0] == rows - 1).all()):  # ascending: no gap, no padding
        held = int((slots > seen - 1 - expected).sum(1).min())
        raise CompactCacheError(
            f"this KV cache holds {held} of {expected} tokens: uniprefill dropped the others, and the code "
            "that reads it now does not know which. Run the model that is compiled with backend='uniprefill' on it "
            "(uniprefill_fx.disabled() keeps new prompts dense), or start again with an empty cache."
        )
    if rows == seen:
        return stored.clone()
    view = stored.new_zeros(*stored.shape[:-2], seen, stored.shape[-1])
    request = torch.arange(slots.shape[0], device=slots.device)[:, None]
    view.transpose(1, 2)[request, slots] = stored.transpose(1, 2)
    return view


@logical_view.register_fake
def _(stored, slots, seen, expected):  # type: ignore[no-untyped-def]
    return stored.new_empty(*stored.shape[:-2], seen, stored.shape[-1])
