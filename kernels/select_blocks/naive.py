"""The naive twin of `select_blocks`: a stable sort and float64 cumulative sums, a request at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def select_blocks_reference(
    scores: Tensor,
    token_bounds: Tensor,
    prompt_lengths: Tensor,
    block_size: int,
    last_n: int,
    sink_tokens: int,
    p: float | Tensor | None,
    keep_ratio: float | Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `select_blocks`, for scores of any dtype, with bounds and lengths of any integer dtype on any device."""
    batch, kept = scores.shape[0], []
    fractions, lengths = _by_request(p, batch), prompt_lengths.tolist()
    ratios = _by_request(keep_ratio, batch)
    for r, (start, end) in enumerate(token_bounds.tolist()):
        length = end - start
        mass = scores[r, : -(-length // block_size)].double()
        ordered, order = mass.sort(descending=True, stable=True)
        total = mass.sum()
        if ratios is not None:
            chosen = torch.arange(len(order), device=order.device) < ratios[r] * lengths[r] / block_size
        else:
            assert fractions is not None
            chosen = (ordered.cumsum(0) - ordered < fractions[r] * total) | (fractions[r] == 1.0)
        chosen |= ~total.isfinite()
        row = torch.arange(length, device=order.device)
        whole = torch.zeros_like(chosen).index_put((order,), chosen)
        stays = whole[row // block_size] | (row < sink_tokens) | (row >= length - last_n)
        kept.append(start + row[stays])
    most = max(len(rows) for rows in kept)
    kept_indices = torch.stack([torch.nn.functional.pad(rows, (most - len(rows), 0), value=-1) for rows in kept])
    return kept_indices, torch.tensor([[most - len(rows), most] for rows in kept])


def _by_request(fraction: float | Tensor | None, batch: int) -> list[float] | None:
    if fraction is None:
        return None
    values: list[float] = fraction.tolist() if isinstance(fraction, Tensor) else [fraction] * batch
    return values
