"""What else computes the attention of `position_attention`: each maker gives a function without arguments, or None."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from uniprefill_fx.kernels.position_attention.kernel import position_attention
from uniprefill_fx.ops.attention import attention_reference
from uniprefill_fx.specs import AttentionSpec

Run = Callable[[], Tensor]
FLEX_BLOCK = 128
MASK_ROWS = 8192  # more make an explicit mask of all heads too large


def visible_range(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """For each query the keys [low, high) that it sees, (batch, queries): these are one range, as positions ascend."""
    keys, queries, position = given["k"].shape[2], given["q"].shape[2], given["k_positions"]
    if position is None:
        position = torch.arange(keys, device=given["k"].device)[None]
    a = position[:, keys - queries :].contiguous()
    oldest = torch.zeros_like(a)
    if given["spec"].window is not None:
        oldest = torch.maximum(oldest, a - given["spec"].window + 1)
    if given["spec"].chunk is not None:
        oldest = torch.maximum(oldest, a // given["spec"].chunk * given["spec"].chunk)
    low, high = torch.searchsorted(position, oldest), torch.searchsorted(position, a, right=True)
    if given["token_bounds"] is not None:
        low = torch.maximum(low, given["token_bounds"][:, :1])
    return low, torch.maximum(low, high)


def present(given: dict[str, Any]) -> Run:
    """The op's plain torch body: SDPA, where there is a mask by 256 query rows and after a wait; request by request."""
    token_bounds = None if given["token_bounds"] is None else given["token_bounds"].cpu()
    return lambda: attention_reference(**(given | {"token_bounds": token_bounds}))


def by_request(given: dict[str, Any]) -> Run | None:
    """The kernel, one launch for each request of a batch."""
    if given["token_bounds"] is None:
        return None
    parts = []
    for r, (start, end) in enumerate(given["token_bounds"].tolist()):
        own = {name: given[name][r : r + 1, :, start:end] for name in "qkv"} | {"token_bounds": None}
        positions = None if given["k_positions"] is None else given["k_positions"][r : r + 1, start:end].contiguous()
        parts.append((r, slice(start, end), given | own | {"q_positions": positions, "k_positions": positions}))

    def run() -> Tensor:
        out = given["q"].new_zeros(given["q"].shape)
        for r, rows, part in parts:
            out[r, :, rows] = position_attention(**part)[0]
        return out

    return run


def explicit_mask(given: dict[str, Any]) -> Run | None:
    """SDPA with the whole mask; keys and values repeated, which the kernels that take a mask need."""
    queries, keys = given["q"].shape[2], given["k"].shape[2]
    if queries * keys > MASK_ROWS**2 or given["spec"].sinks is not None or given["token_bounds"] is not None:
        return None
    low, high = visible_range(given)
    row = torch.arange(keys, device=low.device)
    mask = (row >= low[0, :, None]) & (row < high[0, :, None])
    groups = given["q"].shape[1] // given["k"].shape[1]

    def run() -> Tensor:
        k, v = (given[name].repeat_interleave(groups, 1) for name in "kv")
        return F.scaled_dot_product_attention(given["q"], k, v, attn_mask=mask, scale=given["spec"].scale)

    return run


def varlen(given: dict[str, Any]) -> Run | None:
    """torch's flash attention of one request; its window counts rows, so it is no rival where positions have holes."""
    windowed = given["spec"].window is not None
    spec: AttentionSpec = given["spec"]
    if (windowed and given["k_positions"] is not None) or any(
        term is not None for term in (spec.chunk, spec.sinks, given["token_bounds"])
    ):
        return None
    keys, queries = given["k"].shape[2], given["q"].shape[2]
    q_cu, k_cu = (torch.tensor([0, n], dtype=torch.int32, device=given["k"].device) for n in (queries, keys))
    q, k, v = (given[name][0].transpose(0, 1) for name in "qkv")
    options: dict[str, Any] = {"window_size": (given["spec"].window - 1, 0) if windowed else (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    return lambda: varlen_attn(q, k, v, q_cu, k_cu, queries, keys, **options).transpose(0, 1)[None]


def block_mask(given: dict[str, Any]) -> BlockMask:
    """By position, without a mask of queries x keys: ranges of blocks from the ranges of keys."""
    low, high = (side[0] for side in visible_range(given))
    queries, keys = given["q"].shape[2], given["k"].shape[2]
    q_blocks, k_blocks = -(-queries // FLEX_BLOCK), -(-keys // FLEX_BLOCK)
    row = torch.arange(q_blocks * FLEX_BLOCK, device=low.device).clamp(max=queries - 1).view(q_blocks, -1)
    some = low[row].amin(1) // FLEX_BLOCK, (high[row].amax(1) + FLEX_BLOCK - 1) // FLEX_BLOCK
    every = (low[row].amax(1) + FLEX_BLOCK - 1) // FLEX_BLOCK, high[row].amin(1) // FLEX_BLOCK
    block = torch.arange(k_blocks, device=low.device)
    touched = (block >= some[0][:, None]) & (block < some[1][:, None])
    full = (block >= every[0][:, None]) & (block < every[1][:, None])
    chosen = []
    for which in (touched & ~full, full):
        chosen.append(which.sum(1, dtype=torch.int32)[None, None])
        chosen.append((~which).to(torch.int8).sort(stable=True, dim=1).indices.int()[None, None])
    low32, high32 = low.int(), high.int()

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j >= low32[i]) & (j < high32[i])

    return BlockMask.from_kv_blocks(
        *chosen, BLOCK_SIZE=FLEX_BLOCK, mask_mod=sees, seq_lengths=(queries, keys), compute_q_blocks=False
    )


def flex(given: dict[str, Any]) -> Run | None:
    """FlexAttention of one request, compiled; the block mask is made before, once."""
    if given["token_bounds"] is not None:
        return None
    torch._dynamo.reset()  # each mask is a compilation, and after eight of them Dynamo would run it eagerly
    mask, compiled, sinks = block_mask(given), torch.compile(flex_attention, dynamic=False), given["spec"].sinks
    options = {"block_mask": mask, "scale": given["spec"].scale, "enable_gqa": True}
    if sinks is None:
        return lambda: compiled(given["q"], given["k"], given["v"], **options)

    def run() -> Tensor:
        out, lse = compiled(given["q"], given["k"], given["v"], return_lse=True, **options)
        return out * torch.sigmoid(lse - sinks.float()[:, None])[..., None].to(out.dtype)

    return run


RIVALS: dict[str, Callable[[dict[str, Any]], Run | None]] = {
    "present": present,
    "by_request": by_request,
    "flex": flex,
    "explicit_mask": explicit_mask,
    "varlen": varlen,
}
