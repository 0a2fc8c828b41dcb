"""What the kernels on packed streams share: whose item an index is, and checks that need no look at device memory.

A stream packs its requests one after another; `cu_seqlens` (requests + 1,) int32 holds where each begins. Items of
SIZE tokens (blocks, or tiles of blocks) never span two requests: those of request r are numbered from
`cu_seqlens[r] // SIZE + r`. Their count, `total // SIZE + requests`, is an upper bound known without reading
`cu_seqlens`; at most one number a request is left over.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def find_request(cu_seqlens, requests, item, SIZE: tl.constexpr):
    """The request whose range of numbers holds `item`; empty requests own one (unused) number too."""
    low = 0
    high = requests
    while low + 1 < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) // SIZE + middle <= item:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def tanh(x):
    # exp overflows to infinity for large x, which gives 1 as it should
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)  # 2 log2(e)


def check_device(device: torch.device) -> None:
    """Raise ValueError unless the kernels can run on `device`."""
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError(f"tensors on {device}: wanted a CUDA device, or TRITON_INTERPRET=1 before triton is imported")


def check_stream(cu_seqlens: Tensor, device: torch.device) -> None:
    """Raise ValueError unless `cu_seqlens` is what the kernels assume, and the kernels can run on `device`."""
    check_device(device)
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}: wanted int32, (requests + 1,)"
        )
    if cu_seqlens.device != device or not cu_seqlens.is_contiguous():
        raise ValueError(f"cu_seqlens lies on {cu_seqlens.device}: wanted a contiguous tensor on {device}")


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors' own."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may use."""
    if device.type != "cuda":
        return 1 << 18
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]
