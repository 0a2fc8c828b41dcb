"""Which tokens of each request stay, from the scores of its blocks (UniPrefill, arXiv 2605.06221, Eq. 5 and 14).

Eq. 14 sorts packed (score, index) keys. The order is all that is needed of the sort, and the kept blocks are a prefix
of it, so that one threshold says which they are: the bit pattern of a non-negative float32 orders as the number does,
and a bisection over the 31 bits finds the lowest key at which the mass of all higher keys is still below the limit.
Only blocks of exactly that score need their rank by index. No sort, no copy of the scores, and the same work whatever
the scores are. Sums are float64: exact in any order, ties included, while scores differ by less than
about 2^15.

Two launches take the whole batch: one program a request marks its blocks and counts what it keeps, one program a block
writes its kept columns, the last of which end where the buffer ends. The host waits for the counts, and for nothing
else.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from uniprefill_fx.kernels.common import bounds_of, check_bounds, on_device


@triton.jit
def _key(score):
    """An int32 that orders as the score does; the sign, which only a zero or a NaN can have, is left out."""
    return score.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _mass_above(scores, blocks, threshold, COUNT: tl.constexpr, TILE: tl.constexpr):
    """Float64 mass (number, if COUNT) of the blocks of a request whose key is above `threshold`."""
    lanes = tl.zeros((TILE,), tl.float64)
    for b in range(0, blocks, TILE):
        block = b + tl.arange(0, TILE)
        score = tl.load(scores + block, mask=block < blocks, other=0.0)
        above = (_key(score) > threshold) & (block < blocks)
        lanes += tl.where(above, 1.0 if COUNT else score.to(tl.float64), 0.0)
    return tl.sum(lanes, 0)


# lengths come as a part of a tensor: where it begins depends on the number of requests
@triton.jit(do_not_specialize=["width", "last_n", "sink_tokens"], do_not_specialize_on_alignment=["prompt_lengths"])
def _mark_kernel(
    scores, token_bounds, prompt_lengths, fractions, offsets, whole, kept, width, last_n, sink_tokens,
    BLOCK_SIZE: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program a request. For each block: the kept rows before it, and whether all of its rows are kept."""
    request = tl.program_id(0)
    _start, length = bounds_of(token_bounds, request)
    blocks = tl.cdiv(length, BLOCK_SIZE)
    first = request.to(tl.int64) * width
    scores, offsets, whole = scores + first, offsets + first, whole + first
    fraction = tl.load(fractions + request)

    lanes = tl.zeros((TILE,), tl.float64)
    for b in range(0, blocks, TILE):
        block = b + tl.arange(0, TILE)
        lanes += tl.load(scores + block, mask=block < blocks, other=0.0).to(tl.float64)
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
        if _mass_above(scores, blocks, middle, TOP_K, TILE) < limit:
            high = middle
        else:
            low = middle + 1
    higher = _mass_above(scores, blocks, low, TOP_K, TILE)
    unit = low.to(tl.float32, bitcast=True).to(tl.float64)
    if TOP_K:
        unit = tl.full((), 1.0, tl.float64)

    equal_before = 0
    rows_before = 0
    for b in range(0, blocks, TILE):
        block = b + tl.arange(0, TILE)
        exists = block < blocks
        key = _key(tl.load(scores + block, mask=exists, other=0.0))
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
        tl.store(offsets + block, rows_before + tl.cumsum(rows, 0) - rows, mask=exists)
        tl.store(whole + block, selected, mask=exists)
        equal_before += tl.sum(equal, 0)
        rows_before += tl.sum(rows, 0)
    tl.store(kept + request, rows_before)


@triton.jit(do_not_specialize=["capacity", "last_n", "sink_tokens"])
def _write_kernel(
    token_bounds, offsets, whole, kept, columns, capacity, last_n, sink_tokens,
    BLOCK_SIZE: tl.constexpr, BLOCK_PAD: tl.constexpr,
):  # fmt: skip
    """One program a block: the columns of its kept rows, behind those of the request's blocks before it."""
    block, request = tl.program_id(0), tl.program_id(1)
    start, length = bounds_of(token_bounds, request)
    if block * BLOCK_SIZE >= length:
        return
    at = request.to(tl.int64) * tl.num_programs(0) + block
    within = tl.arange(0, BLOCK_PAD)
    row = block * BLOCK_SIZE + within
    # in a selected block every row counts as one of the first
    sinks = tl.where(tl.load(whole + at) != 0, length, sink_tokens)
    stays = (within < BLOCK_SIZE) & (row < length) & ((row < sinks) | (row >= length - last_n))
    place = capacity - tl.load(kept + request) + tl.load(offsets + at) + tl.cumsum(stays.to(tl.int32), 0) - 1
    tl.store(columns + request.to(tl.int64) * capacity + place, (start + row).to(tl.int64), mask=stays)


def select_blocks(
    scores: Tensor,
    token_bounds: Tensor,
    prompt_lengths: Tensor,
    block_size: int,
    last_n: int,
    sink_tokens: int,
    p: float | Tensor | None,
    keep_ratio: float | Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Tokens to keep: the smallest set of blocks that holds a fraction `p` of the mass, plus the forced ones.

    A block is kept when the mass of all higher blocks is below p of the request's total (UniPrefill, arXiv 2605.06221,
    Eq. 5); among equal scores the lower block index is the higher block (the order of Eq. 14). Sums are float64. With
    `keep_ratio` instead: the ceil(keep_ratio · prompt length / block_size) highest blocks. The first `sink_tokens` and
    the last `last_n` tokens of a request always stay. p = 1 keeps everything, and so does a total that is not finite.

    Args:
        scores: (batch, blocks) float32, not negative: blocks of each request counted from its own first token, as
            `block_scores` returns them; entries behind a request's last block are not read.
        token_bounds: (batch, 2) int32 on the same device: the first column of each request, and the one past its last.
        prompt_lengths: (batch,) int32 or int64, tokens of each request before any drop (`keep_ratio` counts these).
        block_size, last_n, sink_tokens: in tokens.
        p, keep_ratio: one of them in (0, 1], the other None; or (batch,) float64 on the device, one for each request.

    Returns:
        kept_indices: (batch, kept) int64, ascending columns of the stream, `kept` the most that any request keeps; -1
            in front where a request keeps fewer.
        token_bounds: (batch, 2) int64 on the CPU, of the kept stream. The host waits once, after all is queued.

    Raises:
        ValueError: shapes, dtypes or numbers that the kernels do not handle; values on the device are not looked at.
    """
    fraction = _check(scores, token_bounds, prompt_lengths, block_size, last_n, sink_tokens, p, keep_ratio)
    columns, kept = queue_selection(
        scores, token_bounds, prompt_lengths, block_size, last_n, sink_tokens, fraction, keep_ratio is not None
    )
    counts = kept.tolist()
    most = max(counts)
    # a copy: an aligned tensor without the room for what was dropped
    kept_indices = columns[:, columns.shape[1] - most :].clone(memory_format=torch.contiguous_format)
    return kept_indices, torch.tensor([[most - count, most] for count in counts])


def queue_selection(
    scores: Tensor,
    token_bounds: Tensor,
    prompt_lengths: Tensor,
    block_size: int,
    last_n: int,
    sink_tokens: int,
    fraction: float | Tensor,
    top_k: bool,
) -> tuple[Tensor, Tensor]:
    """`select_blocks` unchecked and without the wait. `fraction` is p or, with `top_k`, keep_ratio.

    Returns:
        (batch, blocks * block_size) int64, the kept columns at the end of each row, -1 before them; (batch,) int32, how
        many they are.
    """
    offsets, whole, kept = mark_blocks(
        scores, token_bounds, prompt_lengths, block_size, last_n, sink_tokens, fraction, top_k
    )
    batch, blocks = scores.shape
    columns = torch.full((batch, blocks * block_size), -1, dtype=torch.int64, device=scores.device)
    if blocks:
        with on_device(scores.device):
            _write_kernel[(blocks, batch)](
                token_bounds, offsets, whole, kept, columns, columns.shape[1], last_n, sink_tokens,
                BLOCK_SIZE=block_size, BLOCK_PAD=triton.next_power_of_2(block_size), num_warps=1,
            )  # fmt: skip
    return columns, kept


def mark_blocks(
    scores: Tensor,
    token_bounds: Tensor,
    prompt_lengths: Tensor,
    block_size: int,
    last_n: int,
    sink_tokens: int,
    fraction: float | Tensor,
    top_k: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The first half of `queue_selection`.

    Returns:
        For each entry of `scores`, the kept rows of its request before the block, int32, and whether all rows of the
        block are kept, int8; the kept rows of each request, int32. Entries that no block uses are not written.
    """
    (batch, blocks), device = scores.shape, scores.device
    offsets = torch.empty(batch, blocks, dtype=torch.int32, device=device)
    whole = torch.empty(batch, blocks, dtype=torch.int8, device=device)
    kept = torch.empty(batch, dtype=torch.int32, device=device)
    if not isinstance(fraction, Tensor):  # as an argument of the kernel it would be rounded to float32
        fraction = torch.full((batch,), fraction, dtype=torch.float64, device=device)
    with on_device(device):
        _mark_kernel[(batch,)](
            scores, token_bounds, prompt_lengths, fraction, offsets, whole, kept, blocks, last_n, sink_tokens,
            BLOCK_SIZE=block_size, TOP_K=top_k, TILE=2048, num_warps=8,
        )  # fmt: skip
    return offsets, whole, kept


def _check(
    scores: Tensor,
    token_bounds: Tensor,
    prompt_lengths: Tensor,
    block_size: int,
    last_n: int,
    sink_tokens: int,
    p: float | Tensor | None,
    keep_ratio: float | Tensor | None,
) -> float | Tensor:
    """p or keep_ratio, whichever is given; ValueError for what the kernels do not handle."""
    if scores.dtype != torch.float32 or scores.ndim != 2 or not scores.is_contiguous():
        raise ValueError(
            f"scores is {scores.dtype} of shape {tuple(scores.shape)}, strides {scores.stride()}: wanted contiguous "
            "float32, (batch, blocks)"
        )
    batch = scores.shape[0]
    if batch == 0:
        raise ValueError("scores of no requests: wanted a batch of at least 1")
    check_bounds(token_bounds, batch, scores.device)
    if prompt_lengths.shape != (batch,) or prompt_lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"prompt_lengths is {prompt_lengths.dtype} of shape {tuple(prompt_lengths.shape)}: wanted int32 or int64, "
            f"({batch},)"
        )
    if prompt_lengths.device != scores.device or not prompt_lengths.is_contiguous():
        raise ValueError(f"prompt_lengths on {prompt_lengths.device}: wanted contiguous on {scores.device}")
    if block_size < 1 or last_n < 0 or sink_tokens < 0:
        raise ValueError(
            f"block_size {block_size}, last_n {last_n}, sink_tokens {sink_tokens}: wanted at least 1, 0 and 0"
        )
    fraction = p if keep_ratio is None else keep_ratio
    if fraction is None or (p is not None and keep_ratio is not None):
        raise ValueError(f"p {p}, keep_ratio {keep_ratio}: wanted one of them and the other None")
    if isinstance(fraction, Tensor):
        if fraction.shape != (batch,) or fraction.dtype != torch.float64 or fraction.device != scores.device:
            raise ValueError(
                f"p or keep_ratio is {fraction.dtype} of shape {tuple(fraction.shape)} on {fraction.device}: wanted "
                f"float64, ({batch},) on {scores.device}"
            )
        return fraction.contiguous()
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"p {p}, keep_ratio {keep_ratio}: wanted a fraction in (0, 1]")
    return fraction
