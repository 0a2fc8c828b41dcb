"""Scoring and selecting in a batch of prompts.

`token_bounds` says where the tokens of each request lie: (batch, 2) int64 on the CPU, first column and past the last
one; all
other columns are padding. Behind a drop a batch is an ordinary left-padded one: K columns, K the most that any request
keeps, each request's kept rows at the end. The host knows the token_bounds, so that nothing downstream waits for the
device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uniprefill_fx.ops.scoring import bias_of_request, packed_score, packed_select, sums_dtype


@torch.library.custom_op("uniprefill::score", mutates_args=())
def score(
    q: Tensor,
    k: Tensor,
    token_bounds: Tensor,
    scale: float,
    last_n: int,
    block_size: int,
    score_dtype: torch.dtype,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Attention mass that the last queries of each request give to each block of its keys (`ops.scoring`).

    Args:
        q: (batch, heads, columns, head_dim), k: (batch, kv_heads, columns, head_dim), both after rotary.
        token_bounds: (batch, 2) int64 on the CPU. softcap, sinks, bias: as for `uniprefill::attention`.
        positions: (1 or batch, columns) int64, what `bias` is read by.

    Returns:
        (batch * columns // block_size + batch,) in `score_dtype`, ordered as in `ops.scoring`; padding scores nothing.
    """
    bounds = token_bounds.tolist()
    batch, columns = q.shape[0], q.shape[2]
    scores = torch.zeros(batch * columns // block_size + batch, dtype=sums_dtype(score_dtype), device=q.device)
    packed = 0
    for r, (start, end) in enumerate(bounds):
        length = end - start
        if length == 0:
            continue
        cu = _sent(torch.tensor([0, length], dtype=torch.int32), q.device)
        own_bias = None if bias is None else bias_of_request(bias, q.shape[1], r)
        own_positions = None if positions is None else positions[r if positions.shape[0] > 1 else 0, start:end]
        rows = slice(start, end)
        part = packed_score(
            q[r : r + 1, :, rows],
            k[r : r + 1, :, rows],
            cu,
            scale,
            last_n,
            block_size,
            score_dtype,
            softcap,
            sinks,
            own_bias,
            own_positions,
        )
        if batch == 1 and length == columns:
            return part
        first = packed // block_size + r
        scores[first : first + part.shape[0]] = part
        packed += length
    return scores


def _sent(numbers: Tensor, device: torch.device) -> Tensor:
    """A few numbers of the host, on the device; an ordinary copy would wait for all that is queued there."""
    return numbers.to(device, non_blocking=True)


@score.register_fake
def _(q, k, token_bounds, scale, last_n, block_size, score_dtype, softcap=None, sinks=None, bias=None, positions=None):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape[0] * q.shape[2] // block_size + q.shape[0], dtype=sums_dtype(score_dtype))


@torch.library.custom_op("uniprefill::select", mutates_args=())
def select(
    scores: Tensor,
    token_bounds: Tensor,
    prompt_bounds: Tensor,
    block_size: int,
    last_n: int,
    sink_tokens: int,
    p: float | None,
    keep_ratio: float | None,
) -> tuple[Tensor, Tensor]:
    """The rows that each request keeps (`ops.scoring`), as a left-padded batch.

    Args:
        scores: as `score` returns them. token_bounds: of the stream as it is; prompt_bounds: before any drop.

    Returns:
        kept_indices: (batch, kept) int64, ascending columns of the stream as it is; -1 where a request keeps fewer.
        token_bounds: (batch, 2) int64 on the CPU, of the kept stream.
    """
    lengths, prompts = (s[:, 1] - s[:, 0] for s in (token_bounds, prompt_bounds))
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    device = scores.device
    packed, kept_cu = packed_select(
        scores, _sent(cu.int(), device), _sent(prompts, device), block_size, last_n, sink_tokens, p, keep_ratio
    )
    starts = token_bounds[:, 0].tolist()
    if len(starts) == 1:
        kept = packed.shape[0]
        return (packed + starts[0])[None], torch.tensor([[0, kept]])
    kept_bounds, bounds = kept_cu.tolist(), cu.tolist()
    counts = torch.tensor(kept_bounds).diff()
    kept = int(counts.max())
    kept_indices = packed.new_full((len(starts), kept), -1)
    for r, start in enumerate(starts):
        own = packed[kept_bounds[r] : kept_bounds[r + 1]]
        kept_indices[r, kept - own.shape[0] :] = own + (start - bounds[r])
    return kept_indices, torch.stack((kept - counts, torch.full_like(counts, kept)), 1)


@select.register_fake
def _(scores, token_bounds, prompt_bounds, block_size, last_n, sink_tokens, p, keep_ratio):  # type: ignore[no-untyped-def]
    kept = torch.library.get_ctx().new_dynamic_size()
    return scores.new_empty(token_bounds.shape[0], kept, dtype=torch.int64), torch.empty_like(token_bounds)
