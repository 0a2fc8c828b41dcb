"""Causal masks that a model keeps as a buffer and slices by length: `self.triangle[:, :, :n, :n]`.

What a buffer holds is no part of the graph, so its values are looked at, once when the graph is compiled and again
whenever the buffer has changed; while they are not those of a triangle, the prompt runs dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from uniprefill_fx.passes.operator_internals import version_of
from uniprefill_fx.torch_internals import is_fake

MARK = "uniprefill_causal_buffer"  # key in the meta of a placeholder
LARGEST = 1 << 14  # rows: larger ones are not looked at, each check reads them whole


@dataclass(frozen=True)
class CausalBuffer:
    """A matrix of one number on and below the diagonal, `below`, and another one over it, `above`.

    With a `window`, only that many elements of a row are `below`, those up to the diagonal.
    """

    below: float
    above: float
    window: int | None = None

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor (1, ..., rows, rows) holds this."""
        matrix = tensor.reshape(tensor.shape[-2:])
        lower = torch.ones(matrix.shape, dtype=torch.bool, device=matrix.device).tril_()
        if self.window is not None:
            lower &= ~lower.tril(-self.window)
        return bool(torch.where(lower, matrix == self.below, matrix == self.above).all())


def mark_causal_buffers(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Note in the meta of every placeholder whether it is a buffer that holds a triangle."""
    placeholders = (n for n in gm.graph.nodes if n.op == "placeholder")
    for node, example in zip(placeholders, example_inputs, strict=True):
        if not isinstance(example, Tensor) or isinstance(example, torch.nn.Parameter) or is_fake(example):
            continue
        rows = example.shape[-1] if example.ndim >= 2 else 0
        # Changes of a tensor that was made in inference mode cannot be noticed.
        if not 2 <= rows <= LARGEST or example.numel() != rows * rows or example.is_inference():
            continue
        if example.shape[-2] != rows or example.is_complex():
            continue
        below, above = example.flatten()[:2].tolist()
        window = int((example.reshape(rows, rows)[:, 0] == below).sum())  # whose first column they reach
        found = CausalBuffer(float(below), float(above), window if window < rows else None)
        if found.below != found.above and found.fits(example):
            node.meta[MARK] = found


class Unchanged:
    """Whether a buffer still holds its triangle; reads it again only after it was replaced or written to.

    The memory that was read is held, so that no other buffer can come to lie at its address, and its count of writes is
    shared with the buffer. (Writes through `.data` count for nobody: autograd does not see them either.)
    """

    def __init__(self, triangle: CausalBuffer) -> None:
        self.triangle = triangle
        self.read: Tensor | None = None
        self.version = -1
        self.fits = False

    def __call__(self, tensor: Tensor) -> bool:
        if tensor.is_inference():
            return self.triangle.fits(tensor)
        if self.read is None or _place(self.read) != _place(tensor) or self.version != version_of(tensor):
            self.read, self.version = tensor.detach(), version_of(tensor)
            self.fits = self.triangle.fits(tensor)
        return self.fits


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()
