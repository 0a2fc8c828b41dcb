"""What the wrappers of the kernels refuse, with what came and what was wanted. The kernels themselves check nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from uniprefill_fx.kernels.common import check_device, shared_memory
from uniprefill_fx.kernels.tiles import Tiles, attention_tiles, fit_attention, fit_scores, score_tiles
from uniprefill_fx.specs import MAX_HEAD_DIM, AttentionSpec

MIN_BLOCK, MAX_BLOCK = 16, 128


def has_tiles(q: Tensor, block_size: int, fp8: bool) -> bool:
    """Whether a block of keys fits in a tile of `block_scores`; float32 ones are multiplied in three parts."""
    return score_tiles(q.shape[-1], q.element_size(), fp8, block_size, shared_memory(q.device)) is not None


def check_scores(
    q: Tensor,
    k: Tensor,
    scale: float,
    last_n: int,
    block_size: int,
    softcap: float | None,
    dtype: str,
    sinks: Tensor | None,
) -> None:
    """Raise ValueError for what `block_scores` does not handle; `token_bounds` apart."""
    if (
        not q.ndim == k.ndim == 4
        or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:])
        or k.shape[1] == 0
        or q.shape[1] % k.shape[1]
    ):
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}: wanted (batch, heads, columns, head_dim) and (batch, kv_heads, "
            "columns, head_dim), heads a multiple of kv_heads"
        )
    if not 1 <= q.shape[3] <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim {q.shape[3]}: wanted 1 to {MAX_HEAD_DIM}")
    if q.dtype != k.dtype or q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"q is {q.dtype}, k is {k.dtype}: wanted both float32, float16 or bfloat16")
    if q.device != k.device:
        raise ValueError(f"q lies on {q.device}, k on {k.device}: wanted one device")
    if q.stride(3) != 1 or k.stride(3) != 1:
        raise ValueError(f"strides of q {q.stride()}, of k {k.stride()}: wanted 1 in the last dimension")
    if not MIN_BLOCK <= block_size <= MAX_BLOCK:
        raise ValueError(f"block_size {block_size}: wanted {MIN_BLOCK} to {MAX_BLOCK}")
    if last_n < 1:
        raise ValueError(f"last_n {last_n}: wanted at least 1")
    if not 0.0 < scale < math.inf or (softcap is not None and not 0.0 < softcap < math.inf):
        raise ValueError(f"scale {scale}, softcap {softcap}: wanted positive finite numbers")
    if sinks is not None and (sinks.numel() != q.shape[1] or sinks.device != q.device):
        raise ValueError(f"sinks of shape {tuple(sinks.shape)} on {sinks.device}: wanted {q.shape[1]} on {q.device}")
    if dtype not in ("input", "fp8"):
        raise ValueError(f"dtype {dtype!r}: wanted 'input' or 'fp8'")


def tiles_for_scores(q: Tensor, dtype: str, block_size: int, tiles: Tiles | None = None) -> Tiles:
    """The tiles of a `block_scores` call, those that were asked for if any; ValueError if they do not compile."""
    limit, shape = shared_memory(q.device), (q.shape[-1], q.element_size(), dtype == "fp8", block_size)
    chosen = tiles or score_tiles(*shape, limit)
    if chosen is None or not fit_scores(chosen, *shape, limit):
        raise ValueError(
            f"{q.dtype}, head_dim {shape[0]}, block_size {block_size}, {tiles or 'any tiles'}: too much for {limit} "
            "bytes of shared memory and the registers of a program; wanted a smaller block_size or smaller tiles"
        )
    return chosen


def tiles_for_attention(q: Tensor, v: Tensor, spec: AttentionSpec, groups: int, tiles: Tiles | None = None) -> Tiles:
    """The tiles of a `position_attention` call, those that were asked for if any; ValueError if they do not compile.

    groups: heads that read the same keys.
    """
    limit, shape = shared_memory(q.device), (q.shape[3], v.shape[3], q.element_size())
    shared = 1 if spec.bias is not None else groups  # heads with a bias of their own do not share a tile
    chosen = tiles or attention_tiles(*shape, q.shape[2], shared, spec.window, limit)
    if chosen is None or not fit_attention(chosen, *shape, limit):
        raise ValueError(
            f"{q.dtype}, head_dim {shape[0]}, v_dim {shape[1]}, {tiles or 'any tiles'}: too much for {limit} bytes of "
            "shared memory and the registers of a program; wanted narrower heads or smaller tiles"
        )
    if shared % chosen.heads:
        raise ValueError(f"{chosen.heads} heads in a tile, groups of {groups}: wanted a divisor; 1 with a bias")
    return chosen


def check_operands(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Raise ValueError for operands that no attention kernel handles; their shapes in words, for further messages."""
    check_device(q.device)
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if (
        not q.ndim == k.ndim == v.ndim == 4
        or not q.shape[0] == k.shape[0] == v.shape[0]
        or q.shape[3] != k.shape[3]
        or k.shape[1:3] != v.shape[1:3]
        or k.shape[1] == 0
        or q.shape[1] % k.shape[1]
    ):
        raise ValueError(
            f"{shapes}: wanted (batch, heads, queries, head_dim), (batch, kv_heads, keys, head_dim) and (batch, "
            "kv_heads, keys, v_dim), heads a multiple of kv_heads"
        )
    if not (1 <= q.shape[3] <= MAX_HEAD_DIM and 1 <= v.shape[3] <= MAX_HEAD_DIM):
        raise ValueError(f"{shapes}: wanted head_dim and v_dim of 1 to {MAX_HEAD_DIM}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}: wanted all float32, float16 or bfloat16")
    if not 1 == q.stride(3) == k.stride(3) == v.stride(3):
        raise ValueError(f"strides of q {q.stride()}, k {k.stride()}, v {v.stride()}: wanted 1 in the last dimension")
    return shapes


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    token_bounds: Tensor | None,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    spec: AttentionSpec,
) -> None:
    """Raise ValueError for what `position_attention` does not handle; values on the device are not looked at."""
    shapes = check_operands(q, k, v)
    if token_bounds is not None and (token_bounds.shape != (q.shape[0], 2) or q.shape[2] != k.shape[2]):
        raise ValueError(
            f"{shapes} with token_bounds {tuple(token_bounds.shape)}: wanted as many queries as keys, and token_bounds "
            f"({q.shape[0]}, 2)"
        )
    by_position = q_positions is not None and k_positions is not None
    if not by_position and q.shape[2] > k.shape[2]:
        raise ValueError(f"{shapes} without positions: wanted no more queries than keys")
    for name, positions, rows in (("q_positions", q_positions, q.shape[2]), ("k_positions", k_positions, k.shape[2])):
        shapes_of_positions = ((1, rows), (q.shape[0], rows))
        if (
            by_position
            and positions is not None
            and (positions.shape not in shapes_of_positions or positions.dtype != torch.int64)
        ):
            raise ValueError(
                f"{name} is {positions.dtype} of shape {tuple(positions.shape)}: wanted int64, "
                f"(1 or {q.shape[0]}, {rows})"
            )
    scale, softcap, window, chunk = spec.scale, spec.softcap, spec.window, spec.chunk
    if not 0.0 < scale < math.inf or (softcap is not None and not 0.0 < softcap < math.inf):
        raise ValueError(f"scale {scale}, softcap {softcap}: wanted positive finite numbers")
    if (window is not None and window < 1) or (chunk is not None and chunk < 1):
        raise ValueError(f"window {window}, chunk {chunk}: wanted at least 1")
