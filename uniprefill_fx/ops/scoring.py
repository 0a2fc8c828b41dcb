"""Block scores and token selection (UniPrefill, arXiv 2605.06221, Eq. 3 to 5), packed by `cu_seqlens`.

`ops.selection` calls these for a batch; a device may have kernels for them (`lowering.cuda`).

Blocks of request r start at `cu_seqlens[r] // block_size + r` of the score vector, so that the vector's length,
`total // block_size + requests`, is known without reading `cu_seqlens`. Entries that no block uses are 0.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor


def requests(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    """[(start, end)] of each request of a packed stream. One host synchronisation on an accelerator."""
    bounds = cu_seqlens.tolist()
    return list(itertools.pairwise(bounds))


def block_bounds(start: int, end: int, request: int, block_size: int) -> tuple[int, int]:
    """Where the blocks of one request lie in the score vector: [first, past the last)."""
    first = start // block_size + request
    return first, first + math.ceil((end - start) / block_size)


def with_terms(scores: Tensor, softcap: float | None, bias: Tensor | None, positions: Tensor | None) -> Tensor:
    """Soft-capping, then the bias of the key positions: scores (batch, heads, queries, keys), positions (keys,)."""
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        by_position = bias.reshape(-1, scores.shape[1], 1, bias.shape[-1])
        scores = scores + (by_position if positions is None else by_position[..., positions]).to(scores.dtype)
    return scores


def sums_dtype(score_dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax, sums and scores: 8 bits are for operands only."""
    return torch.float32 if score_dtype == torch.float8_e4m3fn else score_dtype


def bias_of_request(bias: Tensor, heads: int, request: int) -> Tensor:
    """The (1, heads, 1, positions) part of a bias (..., heads, 1, positions) that belongs to one request, or to all."""
    by_request = bias.reshape(-1, heads, 1, bias.shape[-1])
    return by_request[request : request + 1] if by_request.shape[0] > 1 else by_request


def score_reference(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    last_n: int,
    block_size: int,
    score_dtype: torch.dtype,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Attention mass that the last queries of each request give to each block of its keys.

    Args:
        q: (1, heads, tokens, head_dim), k: (1, kv_heads, tokens, head_dim), both after rotary.
        cu_seqlens: (requests + 1,) int32, first 0, last `tokens`.
        scale: factor on the logits. last_n: queries a request is scored with (fewer when it is shorter).
        block_size: tokens a block.
        score_dtype: dtype of softmax and sums; float8_e4m3fn: they are float32, and an implementation may round the
            operands of q·kᵀ to e4m3. This one does not.
        softcap, sinks, bias: as for `uniprefill::attention`; positions: (tokens,) int64, what `bias` is read by.

    Returns:
        (tokens // block_size + requests,) in `sums_dtype(score_dtype)`; see the module docstring for the order.
    """
    score_dtype = sums_dtype(score_dtype)
    heads, tokens = q.shape[1], q.shape[2]
    by_head = None if bias is None else bias.reshape(1, heads, 1, bias.shape[-1])
    groups = heads // k.shape[1]
    scores = torch.zeros(tokens // block_size + cu_seqlens.shape[0] - 1, dtype=score_dtype, device=q.device)
    for r, (start, end) in enumerate(requests(cu_seqlens)):
        length = end - start
        n = min(last_n, length)
        queries, keys = q[0, :, end - n : end].to(score_dtype), k[0, :, start:end].to(score_dtype)
        hidden = torch.ones(n, length, dtype=torch.bool, device=q.device).triu(length - n + 1)
        mass = torch.zeros(length, dtype=score_dtype, device=q.device)
        for head in range(heads):  # a head at a time: the n x N score matrix of all heads need not exist at once
            logits = (queries[head] @ keys[head // groups].T) * scale
            own = None if by_head is None else by_head[:, head : head + 1].to(score_dtype)
            logits = with_terms(logits[None, None], softcap, own, None if positions is None else positions[start:end])[
                0, 0
            ]
            logits = logits.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                logits = torch.cat([logits, sinks.reshape(-1)[head].to(score_dtype).expand(n, 1)], 1)
            mass += logits.softmax(-1)[:, :length].sum(0)
        first, last = block_bounds(start, end, r, block_size)
        padded = torch.nn.functional.pad(mass, (0, (last - first) * block_size - length))
        scores[first:last] = padded.view(last - first, block_size).sum(-1)
    return scores


packed_score = torch.library.custom_op("uniprefill::packed_score", score_reference, mutates_args=())


@packed_score.register_fake
def _(q, k, cu_seqlens, scale, last_n, block_size, score_dtype, softcap=None, sinks=None, bias=None, positions=None):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape[2] // block_size + cu_seqlens.shape[0] - 1, dtype=sums_dtype(score_dtype))


def select_reference(
    block_scores: Tensor,
    cu_seqlens: Tensor,
    prompt_lengths: Tensor,
    block_size: int,
    last_n: int,
    sink_tokens: int,
    p: float | None,
    keep_ratio: float | None,
) -> tuple[Tensor, Tensor]:
    """Rows to keep: the smallest set of blocks that holds a fraction `p` of the mass, plus the forced rows.

    A block is kept when the mass of all higher blocks is below p of the total (Eq. 5); ties go to the lower block
    index; cumulative sums are float64. With `keep_ratio` instead of `p`: the
    ceil(keep_ratio * prompt length / block_size) highest blocks. The first `sink_tokens` and the last `last_n` rows
    of a request always stay. p = 1 keeps everything, and so does a total that is not finite.

    Args:
        block_scores: as `score` returns them. cu_seqlens: (requests + 1,) int32 of the stream as it is.
        prompt_lengths: (requests,) tokens of each request before any drop (what `keep_ratio` counts from).

    Returns:
        rows: (kept,) int64, ascending, into the packed stream; cu_seqlens of the kept stream, int32.
    """
    keep = torch.zeros(int(cu_seqlens[-1]), dtype=torch.bool, device=block_scores.device)
    for r, (start, end) in enumerate(requests(cu_seqlens)):
        first, last = block_bounds(start, end, r, block_size)
        mass = block_scores[first:last].double()
        order = torch.sort(mass, descending=True, stable=True).indices
        total = mass.sum()
        if p == 1.0 or not bool(torch.isfinite(total)):
            keep[start:end] = True
            continue
        if p is not None:
            higher = mass[order].cumsum(0) - mass[order]
            chosen = order[higher < p * total]
        else:
            assert keep_ratio is not None
            chosen = order[: math.ceil(keep_ratio * int(prompt_lengths[r]) / block_size)]
        blocks = torch.zeros(last - first, dtype=torch.bool, device=keep.device)
        blocks[chosen] = True
        keep[start:end] = blocks.repeat_interleave(block_size)[: end - start]
        keep[start : min(end, start + sink_tokens)] = True
        keep[max(start, end - last_n) : end] = True
    before = torch.nn.functional.pad(keep.cumsum(0, dtype=torch.int32), (1, 0))
    return keep.nonzero().squeeze(1), before[cu_seqlens.long()].cpu()


packed_select = torch.library.custom_op("uniprefill::packed_select", select_reference, mutates_args=())


@packed_select.register_fake
def _(block_scores, cu_seqlens, prompt_lengths, block_size, last_n, sink_tokens, p, keep_ratio):  # type: ignore[no-untyped-def]
    kept = torch.library.get_ctx().new_dynamic_size()
    return block_scores.new_empty(kept, dtype=torch.int64), torch.empty_like(cu_seqlens)
