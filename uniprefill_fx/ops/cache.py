"""What the cache layers of `frontends.cache` put into a graph: which tokens a layer holds, and a view of all of them.

A compact layer holds fewer rows than tokens were seen. `positions` are the original indices of its rows. Model code
and its
masks think in original indices, so they are handed `logical_view`; the passes take the view away again.

Some models have later layers read the keys of an earlier one (Gemma-3n). Such a layer attends to the tokens that enter
it, which may be fewer than the earlier layer holds; `dropped_after_layer` say which.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uniprefill_fx.errors import CompactCacheError

NEVER = 2**31 - 1  # more than any decoder layer: where a token departs that is never dropped


@torch.library.custom_op("uniprefill::bind_positions", mutates_args=())
def bind_positions(positions: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`positions`, tied by data flow to the cache rows they index, so that a cut that compacts those compacts them too.

    positions: (batch, tokens) int64; keys, values: (batch, ..., tokens, dim), what the layer stores. Returns a copy of
    `positions`.
    """
    return positions.clone()


@bind_positions.register_fake
def _(positions, keys, values):  # type: ignore[no-untyped-def]
    return torch.empty_like(positions)


@torch.library.custom_op("uniprefill::dropped_after_layer", mutates_args=())
def dropped_after_layer(positions: Tensor) -> Tensor:
    """The decoder layer behind which each token of a new prompt is dropped: `NEVER`, unless the passes drop some.

    positions: (batch, tokens) int64, the tokens' indices. Returns the same shape and dtype.
    """
    return torch.full_like(positions, NEVER)


@dropped_after_layer.register_fake
def _(positions):  # type: ignore[no-untyped-def]
    return torch.empty_like(positions)


def holds_all(positions: Tensor, expected: int) -> bool:
    """Whether a layer with these positions, (batch, rows), holds the last `expected` tokens of each request."""
    rows = positions.shape[1]
    # they ascend: no token and no padding between
    return rows == expected and bool((positions[:, -1] - positions[:, 0] == rows - 1).all())


def leave_later(dropped_after: Tensor | None) -> bool:
    """Whether a layer holds tokens that later layers which read it must not see."""
    return dropped_after is not None and bool((dropped_after != NEVER).any())


@torch.library.custom_op("uniprefill::logical_view", mutates_args=())
def logical_view(
    stored: Tensor, positions: Tensor, seen: int, expected: int, dropped_after: Tensor | None = None
) -> Tensor:
    """The rows of one layer laid out by original index: (batch, heads, rows, dim) -> (batch, heads, seen, dim).

    `positions` are (batch, rows), -1 for rows that are padding. `expected` is how many rows a cache without dropping
    would hold. Rows it does not hold lie outside the sliding window, are masked by the model, and are left 0.
    `dropped_after` is the `dropped_after_layer` of all tokens seen, where later layers read this one too.

    Raises:
        CompactCacheError: the layer, or a later one that reads it, holds fewer rows than `expected`: tokens were
            dropped, and the model's own mask would attend to them, or to the zeros in their place.
    """
    if not holds_all(positions, expected) or leave_later(dropped_after):
        stays = positions > seen - 1 - expected
        if dropped_after is not None:
            stays &= dropped_after.gather(1, positions.clamp(min=0)) == NEVER
        held = int(stays.sum(1).min())
        raise CompactCacheError(
            f"this KV cache holds {held} of {expected} tokens: uniprefill dropped the others, and the code "
            "that reads it now does not know which. Run the model that is compiled with backend='uniprefill' on it "
            "(uniprefill_fx.disabled() keeps new prompts dense), or start again with an empty cache."
        )
    if stored.shape[-2] == seen:
        return stored.clone()
    view = stored.new_zeros(*stored.shape[:-2], seen, stored.shape[-1])
    request = torch.arange(positions.shape[0], device=positions.device)[:, None]
    view.transpose(1, 2)[request, positions] = stored.transpose(1, 2)
    return view


@logical_view.register_fake
def _(stored, positions, seen, expected, dropped_after=None):  # type: ignore[no-untyped-def]
    return stored.new_empty(*stored.shape[:-2], seen, stored.shape[-1])
