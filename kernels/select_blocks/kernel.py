"""Which rows of a packed stream stay, from the scores of its blocks (UniPrefill, arXiv 2605.06221, Eq. 5 and 14).

Eq. 14 sorts packed (score, index) keys. The order is all that is needed of the sort, and the kept blocks are a prefix
of it, so that one threshold says which they are: the bit pattern of a non-negative float32 orders as the number does,
and a bisection over the 31 bits finds the lowest key at which the mass of all higher keys is still below the limit.
Only blocks of exactly that score need their rank by index. No sort, no copy of the scores, and the same work whatever
the scores are. Sums are float64: exact in any order, ties included, while scores differ by less than
about 2^15.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import itertools
import math
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from uniprefill_fx.kernels.common import check_stream, find_request, on_device


@triton.jit
def _key(score):
    """An int32 that orders as the score does; the sign, which only a zero or a NaN can have, is left out."""
    return score.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _mass_above(block_scores, first, blocks, threshold, COUNT: tl.constexpr, TILE: tl.constexpr):
    """Float64 mass (number, if COUNT) of the blocks of a request whose key is above `threshold`."""
    lanes = tl.zeros((TILE,), tl.float64)
    for b in range(0, blocks, TILE):
        block = b + tl.arange(0, TILE)
        score = tl.load(block_scores + first + block, mask=block < blocks, other=0.0)
        above = (_key(score) > threshold) & (block < blocks)
        lanes += tl.where(above, 1.0 if COUNT else score.to(tl.float64), 0.0)
    return tl.sum(lanes, 0)


@triton.jit(do_not_specialize=["fraction_bits", "last_n", "sink_tokens"])
def _mark_kernel(
    block_scores, cu_seqlens, prompt_lengths, offsets, whole, kept, fraction_bits, last_n, sink_tokens,
    BLOCK_SIZE: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program a request. For each block: the kept rows before it, and whether all of its rows are kept."""
    request = tl.program_id(0)
    start = tl.load(cu_seqlens + request)
    length = tl.load(cu_seqlens + request + 1) - start
    first, blocks = start // BLOCK_SIZE + request, tl.cdiv(length, BLOCK_SIZE)
    fraction = fraction_bits.to(tl.float64, bitcast=True)
    fraction = fraction_bits.to(tl.int64).to(tl.float64, bitcast=True)

    lanes = tl.zeros((TILE,), tl.float64)
    for b in range(0, blocks, TILE):
        block = b + tl.arange(0, TILE)
        lanes += tl.load(block_scores + first + block, mask=block < blocks, other=0.0).to(tl.float64)
    total = tl.sum(lanes, 0)
    everything = total - total != 0.0  # infinite or not a number
    if TOP_K:  # a whole number is below ceil(x) exactly when it is below x
        limit = fraction * tl.load(prompt_lengths + request).to(tl.float64) / BLOCK_SIZE
    else:
        limit = fraction * total
        everything = everything | (fraction >= 1.0)

    # the lowest threshold above which lies less than the limit, at most that of infinity; -1 is below every key
    low = tl.where(everything, -1, 0)
    high = tl.where(everything, -1, 0x7F800000)
    while low < high:
        middle = low + (high - low) // 2
        if _mass_above(block_scores, first, blocks, middle, TOP_K, TILE) < limit:
            high = middle
        else:
            low = middle + 1
    higher = _mass_above(block_scores, first, blocks, low, TOP_K, TILE)
    unit = low.to(tl.float32, bitcast=True).to(tl.float64)
    if TOP_K:
        unit = tl.full((), 1.0, tl.float64)

    equal_before = 0
    rows_before = 0
    for b in range(0, blocks, TILE):
        block = b + tl.arange(0, TILE)
        exists = block < blocks
        key = _key(tl.load(block_scores + first + block, mask=exists, other=0.0))
        equal = (exists & (key == low)).to(tl.int32)
        rank = equal_before + tl.cumsum(equal, 0) - equal
        in_time = (equal == 1) & (higher + rank.to(tl.float64) * unit < limit)
        selected = exists & ((key > low) | in_time)
        # forced rows of the block: its part of [0, sink_tokens), and of [the later of sink_tokens and the tail, length)
        begin = block * BLOCK_SIZE
        size = tl.maximum(tl.minimum(length - begin, BLOCK_SIZE), 0)
        head = tl.minimum(tl.maximum(sink_tokens - begin, 0), size)
        tail = tl.maximum(begin + size - tl.maximum(begin, tl.maximum(length - last_n, sink_tokens)), 0)
        rows = tl.where(selected, size, tl.minimum(head + tail, size))
        at = first + block
        tl.store(offsets + at, rows_before + tl.cumsum(rows, 0) - rows, mask=exists)
        tl.store(whole + at, selected, mask=exists)
        equal_before += tl.sum(equal, 0)
        rows_before += tl.sum(rows, 0)
    tl.store(kept + request, rows_before)


@triton.jit(do_not_specialize=["requests", "last_n", "sink_tokens"])
def _write_kernel(
    cu_seqlens, offsets, whole, kept, rows, kept_cu_seqlens, requests, last_n, sink_tokens,
    BLOCK_SIZE: tl.constexpr, BLOCK_PAD: tl.constexpr,
):  # fmt: skip
    """One program a block: the numbers of its kept rows, behind those of all blocks before it."""
    entry = tl.program_id(0)
    request = find_request(cu_seqlens, requests, entry, BLOCK_SIZE)
    start = tl.load(cu_seqlens + request)
    length = tl.load(cu_seqlens + request + 1) - start
    base = 0
    for r in range(0, request, 64):
        earlier = r + tl.arange(0, 64)
        base += tl.sum(tl.load(kept + earlier, mask=earlier < request, other=0), 0)
    block = entry - (start // BLOCK_SIZE + request)
    if block == 0:  # every request has an entry 0, even an empty one
        tl.store(kept_cu_seqlens + request + 1, base + tl.load(kept + request))
        if request == 0:
            tl.store(kept_cu_seqlens, 0)
    within = tl.arange(0, BLOCK_PAD)
    row = block * BLOCK_SIZE + within
    used = block * BLOCK_SIZE < length
    offset = tl.load(offsets + entry, mask=used, other=0)
    # in a selected block every row counts as one of the first
    sinks = tl.where(tl.load(whole + entry, mask=used, other=0) != 0, length, sink_tokens)
    stays = (within < BLOCK_SIZE) & (row < length) & ((row < sinks) | (row >= length - last_n))
    at = base + offset + tl.cumsum(stays.to(tl.int32), 0) - 1
    tl.store(rows + at, (start + row).to(tl.int64), mask=stays)


def select_blocks(
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

    A block is kept when the mass of all higher blocks is below p of the request's total (UniPrefill, arXiv 2605.06221,
    Eq. 5); among equal scores the lower block index is the higher block (the order of Eq. 14). Sums are float64. With
    `keep_ratio` instead: the ceil(keep_ratio · prompt length / block_size) highest blocks. The first `sink_tokens` and
    the last `last_n` rows of a request always stay. p = 1 keeps everything, and so does a total that is not finite.

    Args:
        block_scores: (tokens // block_size + requests,) float32, not negative, in the order of
            `block_scores.block_scores`; entries that no block uses are not read.
        cu_seqlens: (requests + 1,) int32 of the stream as it is.
        prompt_lengths: (requests,) int32 or int64, tokens of each request before any drop (`keep_ratio` counts these).
        block_size, last_n, sink_tokens: in tokens. p, keep_ratio: one of them in (0, 1], the other None.

    Returns:
        rows: (kept,) int64, ascending, into the packed stream; cu_seqlens of the kept stream, (requests + 1,) int32, on
        the CPU: it is the one thing the host waits for, after everything is queued.
    """
    fraction = _check(block_scores, cu_seqlens, prompt_lengths, block_size, last_n, sink_tokens, p, keep_ratio)
    rows, kept_cu_seqlens = queue_selection(
        block_scores, cu_seqlens, prompt_lengths, block_size, last_n, sink_tokens, fraction, keep_ratio is not None
    )
    bounds = kept_cu_seqlens.cpu()
    return rows[: int(bounds[-1])], bounds


def queue_selection(
    block_scores: Tensor,
    cu_seqlens: Tensor,
    prompt_lengths: Tensor,
    block_size: int,
    last_n: int,
    sink_tokens: int,
    fraction: float,
    top_k: bool,
) -> tuple[Tensor, Tensor]:
    """`select_blocks` unchecked and without the wait: `rows` is longer than what is kept, and its end not written.

    `fraction` is p or, with `top_k`, keep_ratio.
    """
    offsets, whole, kept = mark_blocks(
        block_scores, cu_seqlens, prompt_lengths, block_size, last_n, sink_tokens, fraction, top_k
    )
    entries, requests = block_scores.shape[0], cu_seqlens.shape[0] - 1
    kept_cu_seqlens = torch.empty_like(cu_seqlens)
    # the number of tokens, rounded up: the host does not know it exactly
    rows = torch.empty((entries - requests + 1) * block_size, dtype=torch.int64, device=block_scores.device)
    with on_device(block_scores.device):
        _write_kernel[(entries,)](
            cu_seqlens, offsets, whole, kept, rows, kept_cu_seqlens, requests, last_n, sink_tokens,
            BLOCK_SIZE=block_size, BLOCK_PAD=triton.next_power_of_2(block_size), num_warps=1,
        )  # fmt: skip
    return rows, kept_cu_seqlens


def mark_blocks(
    block_scores: Tensor,
    cu_seqlens: Tensor,
    prompt_lengths: Tensor,
    block_size: int,
    last_n: int,
    sink_tokens: int,
    fraction: float,
    top_k: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The first half of `queue_selection`.

    Returns:
        For each entry of `block_scores`, the kept rows of its request before the block, int32, and whether all rows of
        the block are kept, int8; the kept rows of each request, int32. Entries that no block uses are not written.
    """
    entries, requests, device = block_scores.shape[0], cu_seqlens.shape[0] - 1, block_scores.device
    offsets = torch.empty(entries, dtype=torch.int32, device=device)
    whole = torch.empty(entries, dtype=torch.int8, device=device)
    kept = torch.empty(requests, dtype=torch.int32, device=device)
    bits = struct.unpack("<q", struct.pack("<d", fraction))[0]  # a plain float argument would be rounded to float32
    with on_device(device):
        _mark_kernel[(requests,)](
            block_scores, cu_seqlens, prompt_lengths, offsets, whole, kept, bits, last_n, sink_tokens,
            BLOCK_SIZE=block_size, TOP_K=top_k, TILE=2048, num_warps=8,
        )  # fmt: skip
    return offsets, whole, kept


def select_blocks_reference(
    block_scores: Tensor,
    cu_seqlens: Tensor,
    prompt_lengths: Tensor,
    block_size: int,
    last_n: int,
    sink_tokens: int,
    p: float | None,
    keep_ratio: float | None,
) -> tuple[Tensor, Tensor]:
    """The naive twin of `select_blocks`: a stable sort and float64 cumulative sums, a request at a time."""
    bounds, kept_rows, kept_bounds = cu_seqlens.tolist(), [], [0]
    for r, (start, end) in enumerate(itertools.pairwise(bounds)):
        length, first = end - start, start // block_size + r
        scores = block_scores[first : first + math.ceil(length / block_size)].double()
        ordered, order = scores.sort(descending=True, stable=True)
        if keep_ratio is not None:
            taken = torch.arange(len(order), device=order.device) < keep_ratio * int(prompt_lengths[r]) / block_size
        else:
            taken = ordered.cumsum(0) - ordered < (p or 0.0) * scores.sum()
        if p == 1.0 or not scores.sum().isfinite():
            taken = torch.ones_like(taken)
        row = torch.arange(length, device=order.device)
        stays = torch.isin(row // block_size, order[taken]) | (row < sink_tokens) | (row >= length - last_n)
        kept_rows.append(start + row[stays])
        kept_bounds.append(kept_bounds[-1] + len(kept_rows[-1]))
    return torch.cat(kept_rows), torch.tensor(kept_bounds, dtype=torch.int32)


def _check(
    block_scores: Tensor,
    cu_seqlens: Tensor,
    prompt_lengths: Tensor,
    block_size: int,
    last_n: int,
    sink_tokens: int,
    p: float | None,
    keep_ratio: float | None,
) -> float:
    """p or keep_ratio, whichever is given; ValueError for what the kernels do not handle."""
    check_stream(cu_seqlens, block_scores.device)
    requests = cu_seqlens.shape[0] - 1
    if block_scores.dtype != torch.float32 or block_scores.ndim != 1 or not block_scores.is_contiguous():
        raise ValueError(
            f"block_scores is {block_scores.dtype} of shape {tuple(block_scores.shape)}, strides "
            f"{block_scores.stride()}: wanted contiguous float32, (tokens // block_size + requests,)"
        )
    if block_scores.shape[0] < requests:
        raise ValueError(f"{block_scores.shape[0]} block scores: wanted at least one for each of {requests} requests")
    if prompt_lengths.shape != (requests,) or prompt_lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"prompt_lengths is {prompt_lengths.dtype} of shape {tuple(prompt_lengths.shape)}: wanted int32 or int64, "
            f"({requests},)"
        )
    if prompt_lengths.device != block_scores.device or not prompt_lengths.is_contiguous():
        raise ValueError(f"prompt_lengths on {prompt_lengths.device}: wanted contiguous on {block_scores.device}")
    if block_size < 1 or last_n < 0 or sink_tokens < 0:
        raise ValueError(
            f"block_size {block_size}, last_n {last_n}, sink_tokens {sink_tokens}: wanted at least 1, 0 and 0"
        )
    fraction = p if keep_ratio is None else keep_ratio
    if fraction is None or (p is not None and keep_ratio is not None) or not 0.0 < fraction <= 1.0:
        raise ValueError(f"p {p}, keep_ratio {keep_ratio}: wanted one of them in (0, 1] and the other None")
    return fraction
