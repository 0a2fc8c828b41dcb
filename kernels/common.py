"""What the kernels share: where a request lies in a padded batch, and checks that need no look at device memory."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def bounds_of(token_bounds, request):
    """The first column of a request, and the number of its tokens."""
    start = tl.load(token_bounds + 2 * request)
    return start, tl.load(token_bounds + 2 * request + 1) - start


@triton.jit
def tanh(x):
    # exp overflows to infinity for large x, which gives 1 as it should
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)  # 2 log2(e)


def check_device(device: torch.device) -> None:
    """Raise ValueError unless the kernels can run on `device`."""
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError(f"tensors on {device}: wanted a CUDA device, or TRITON_INTERPRET=1 before triton is imported")


def check_bounds(token_bounds: Tensor, batch: int, device: torch.device) -> None:
    """Raise ValueError unless `token_bounds` is what the kernels assume, and the kernels can run on `device`."""
    check_device(device)
    if token_bounds.dtype != torch.int32 or token_bounds.shape != (batch, 2):
        raise ValueError(
            f"token_bounds is {token_bounds.dtype} of shape {tuple(token_bounds.shape)}: wanted int32, ({batch}, 2)"
        )
    if token_bounds.device != device or not token_bounds.is_contiguous():
        raise ValueError(f"token_bounds lies on {token_bounds.device}: wanted a contiguous tensor on {device}")


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors' own."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may use."""
    if device.type != "cuda":
        return 1 << 18
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]
