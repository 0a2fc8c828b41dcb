"""A mask whose maker is known: what a frontend writes around a mask, so that nobody has to read it."""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("uniprefill", "FRAGMENT")
_library.define("known_mask(Tensor(a) mask, Tensor? padding, bool cached, int? window) -> Tensor(a)")


@torch.library.impl(_library, "known_mask", "CompositeImplicitAutograd")
def known_mask(mask: Tensor, padding: Tensor | None, cached: bool, window: int | None) -> Tensor:
    """`mask` itself, said to be causal.

    Args:
        mask: (batch, 1, queries, keys), boolean or added to the logits.
        padding: (batch, keys), nonzero where a key is a token; None: all are.
        cached: whether keys of earlier tokens come before those of the queries, which are the last ones. Otherwise
            queries and keys are the same tokens.
        window: a query sees itself and the `window` - 1 tokens before it; None: all before it.
    """
    return mask
