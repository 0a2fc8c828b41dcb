"""Where the tokens of each prompt lie in a padded batch."""

from __future__ import annotations

import torch
from torch import Tensor

from uniprefill_fx.errors import Category, refuse


def whole_token_bounds(batch: int, columns: int) -> Tensor:
    """The token_bounds of prompts without padding."""
    return torch.tensor([[0, columns]] * batch)


def token_bounds_of(mask: Tensor) -> Tensor:
    """First column and past the last one of each prompt. One host synchronisation on an accelerator.

    Args:
        mask: (batch, columns), nonzero where a column is a token and not padding.

    Returns:
        (batch, 2) int64 on the CPU; a prompt of no tokens is (columns, columns).

    Raises:
        RefusalError: there is padding between the tokens of a prompt.
    """
    real = mask.bool()
    columns = real.shape[1]
    place = torch.arange(columns, device=real.device)
    first = torch.where(real, place, columns).amin(1)
    past = torch.maximum(torch.where(real, place + 1, 0).amax(1), first)
    first, past, tokens = torch.stack((first, past, real.sum(1))).cpu()
    if not torch.equal(past - first, tokens):
        raise refuse(
            Category.PADDING,
            "an attention mask with padding between the tokens of a prompt",
            "pad on the left or on the right; such a call stays dense",
        )
    return torch.stack((first, past), 1)
