"""What block-sparse attention refuses, with what came and what was wanted. The kernels themselves check nothing."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from uniprefill_fx.kernels.block_sparse_attention.tiles import BLOCK_SIZES
from uniprefill_fx.kernels.checks import check_operands
from uniprefill_fx.specs import TILE_ROWS

FP8_CAPABILITY = (8, 9)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, token_bounds: Tensor | None) -> None:
    """Raise ValueError for tensors that are not taken; values on the device are not looked at."""
    shapes = check_operands(q, k, v)
    if q.shape[1] // k.shape[1] > TILE_ROWS:
        raise ValueError(f"got {q.shape[1]} heads on {k.shape[1]} kv_heads: wanted up to {TILE_ROWS} heads on each")
    if q.shape[2] > k.shape[2]:
        raise ValueError(f"got {shapes}: wanted no more queries than tokens")
    if not q.device == k.device == v.device:
        raise ValueError(f"got q on {q.device}, k on {k.device}, v on {v.device}: wanted one device")
    if sinks is not None and (sinks.numel() != q.shape[1] or sinks.device != q.device):
        raise ValueError(
            f"got sinks of shape {tuple(sinks.shape)} on {sinks.device}: wanted {q.shape[1]} elements on {q.device}"
        )
    if token_bounds is None:
        return
    if token_bounds.shape != (q.shape[0], 2) or token_bounds.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"got token_bounds {token_bounds.dtype} of shape {tuple(token_bounds.shape)}: wanted int32 or int64, "
            f"({q.shape[0]}, 2)"
        )
    if token_bounds.device.type == "cpu":
        for start, end in token_bounds.tolist():
            if not 0 <= start <= end <= k.shape[2]:
                raise ValueError(f"got token_bounds [{start}, {end}): wanted columns of [0, {k.shape[2]})")


def check_options(
    scale: float,
    softcap: float | None,
    alpha: float,
    block_size: int,
    sink_blocks: int,
    window_blocks: int,
    last_tokens: int,
    parts: int,
    dtype: str,
    device: torch.device,
) -> None:
    """Raise ValueError for options outside their ranges, and for eight bits on a card that cannot multiply them."""
    if not 0.0 < scale < math.inf or (softcap is not None and not 0.0 < softcap < math.inf):
        raise ValueError(f"got scale {scale}, softcap {softcap}: wanted positive finite numbers")
    if not 0.0 <= alpha < 1.0:
        raise ValueError(f"got alpha {alpha}: wanted [0, 1)")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"got block_size {block_size}: wanted one of {BLOCK_SIZES}")
    if sink_blocks < 0 or window_blocks < 1 or last_tokens < 0:
        raise ValueError(
            f"got sink_blocks {sink_blocks}, window_blocks {window_blocks}, last_tokens {last_tokens}: wanted at least "
            "0, 1 and 0"
        )
    if parts not in (1, 2):
        raise ValueError(f"got parts {parts}: wanted 1 or 2")
    if dtype not in ("input", "fp8"):
        raise ValueError(f"got dtype {dtype!r}: wanted 'input' or 'fp8'")
    if dtype == "fp8" and device.type == "cuda" and not triton.knobs.runtime.interpret:
        capability = torch.cuda.get_device_capability(device)
        if capability < FP8_CAPABILITY:
            raise ValueError(f"got dtype 'fp8' on compute capability {capability}: wanted {FP8_CAPABILITY} or later")
