"""Calling one operation of a probe, and comparing what it gave."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from uniprefill_fx.passes.analyze.rowwise_ops import FILLS, GROUPED, PRODUCTS, known_name

SUMMED = 16  # the elements that a product of a probe sums over
LARGE = 1 << 18  # elements of a weight that is made of a small buffer


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether two results differ by no more than rounding."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if not (got.is_floating_point() or got.is_complex()):
        return torch.equal(got, want)
    epsilon = torch.finfo(got.dtype).eps
    scale = float(want.abs().nan_to_num(0, 0, 0).max()) if want.numel() else 0.0
    slack = epsilon * (4 if epsilon > 1e-4 else 256)
    wide = torch.complex128 if got.is_complex() else torch.float64
    return bool(torch.isclose(got.to(wide), want.to(wide), rtol=0, atol=slack * scale, equal_nan=True).all())


def call(node: fx.Node, args: Any, kwargs: Any) -> Any:
    name = known_name(node)
    if node.op == "call_method" and "empty" in name:
        return torch.zeros_like(getattr(args[0], str(node.target))(*args[1:], **kwargs))
    if name in GROUPED or name in PRODUCTS or name == "linear":
        args = _shortened(name, args)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = node.target
    if target in (operator.setitem,):
        target(*args)
        return None
    out = target(*args, **kwargs)
    return torch.zeros_like(out) if name in FILLS and "empty" in name else out


def _shortened(name: str, args: Any) -> Any:
    """The operands of a product, so that it sums over few elements where one of them is large."""
    if len(args) < 2 or not all(isinstance(a, torch.Tensor) for a in args[:2]) or args[1].numel() <= LARGE:
        return args
    left, right = args[:2]
    if name == "linear":
        return (left[..., :SUMMED], right[..., :SUMMED], *args[2:])
    if right.ndim < 2 or right.shape[-2] != left.shape[-1]:
        return args
    return (left[..., :SUMMED].contiguous(), right[..., :SUMMED, :].contiguous(), *args[2:])


def cards(args: Any) -> list[int]:
    """The CUDA devices of the arguments, whose random numbers are to be left as they are."""
    return sorted({a.device.index or 0 for a in args if isinstance(a, torch.Tensor) and a.device.type == "cuda"})


def any_tensor(value: Any) -> bool:
    """Whether a value is or holds a tensor."""
    if isinstance(value, tuple | list):
        return any(any_tensor(v) for v in value)
    return isinstance(value, torch.Tensor)
