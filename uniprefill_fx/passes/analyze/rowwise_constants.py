"""Numbers written into a graph that decide how many rows a probe needs: a shift by 30 shows on more than 30 rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import fx

from uniprefill_fx.passes.analyze.rowwise_kinds import Axes
from uniprefill_fx.passes.analyze.rowwise_ops import argument, known_name
from uniprefill_fx.passes.node_utils import expression, index_of, leaves_of, meta

CUTS = {"chunk": (2, 0), "split": (2, 0), "narrow": (1, None), "select": (1, None)}  # the place of their dimension
CONVOLUTION = ("conv1d", "conv2d", "conv_depthwise")


def reach(node: fx.Node, axes: Axes) -> int:
    """How many rows apart one operation can bring together what lies on an axis of tokens, at most.

    That is the largest number in its slices, padding and sizes along such an axis. Numbers along a path add up.
    """
    name, source = known_name(node), argument(node, 0, "input", "self")
    dims = axes.dims(meta(source)) if isinstance(source, fx.Node) else ()
    own = max((_fixed_part(v, d, axes) for v in leaves_of(meta(node)) for d in axes.dims(v)), default=0)
    if name == "arange":
        return max(own, _largest([*node.args, *node.kwargs.values()]))
    if name in ("getitem", "setitem") and dims:
        return max(own, _largest(index_along(node, dims)))
    if name == "pad" and dims:
        return max(own, _largest(_padding_along(argument(node, 1, "pad"), meta(source).ndim, dims)))
    if name in CUTS and dims:
        return max(own, _largest([*node.args[1:], *node.kwargs.values()]))
    if name in CONVOLUTION:
        return max(own, _extent(node))
    return own


def index_along(node: fx.Node, dims: Iterable[int]) -> list[Any]:
    """The items of an index that lie on these dimensions of what is indexed; all of them where it holds tensors."""
    index = [i for i in index_of(node) if i is not None]
    if any(isinstance(i, fx.Node) and isinstance(meta(i), torch.Tensor) for i in index):
        return index
    if Ellipsis in [i for i in index if not isinstance(i, fx.Node)]:
        at = next(i for i, item in enumerate(index) if item is Ellipsis)
        index[at : at + 1] = [slice(None)] * (meta(node.args[0]).ndim - len(index) + 1)  # type: ignore[arg-type]
    return [index[d] for d in dims if d < len(index)]


def _padding_along(padding: Any, ndim: int, dims: Iterable[int]) -> list[Any]:
    """F.pad takes two numbers for each dimension, those of the last one first."""
    if not isinstance(padding, tuple | list):
        return [padding]
    return [p for d in dims for p in padding[2 * (ndim - 1 - d) : 2 * (ndim - d)]]


def _extent(node: fx.Node) -> int:
    """The rows under a kernel, and those it is moved by."""
    weight = argument(node, 1, "weight")
    longest = max((int(expression(s)) for s in meta(weight).shape[2:]), default=1)
    stride, padding, dilation = (
        _largest([argument(node, place, key)]) for place, key in ((3, "stride"), (4, "padding"), (5, "dilation"))
    )
    if known_name(node) == "conv_depthwise":  # its arguments lie elsewhere
        stride = padding = dilation = max(1, _largest([*node.args[2:], *node.kwargs.values()]))
    return max(1, dilation) * (longest - 1) + padding + max(1, stride)


def _fixed_part(value: torch.Tensor, dim: int, axes: Axes) -> int:
    """64 of tokens + 64; every number in a size that is neither a multiple of the tokens nor a sum with one."""
    fixed, rest = sympy.expand(axes.sizes(value)[dim]).as_independent(axes.tokens, as_Add=True)
    multiple = not sympy.cancel(rest / axes.tokens).has(axes.tokens)
    return _number(fixed) if multiple else max(_number(fixed), _number(rest))


def _largest(values: Iterable[Any]) -> int:
    """The largest whole number among arguments, and in the sizes they are computed from."""
    found = 0
    for value in leaves_of(list(values)):
        number = meta(value) if isinstance(value, fx.Node) else value
        if isinstance(number, torch.SymInt | int) and not isinstance(number, bool):
            found = max(found, _number(expression(number)))
    return found


def _number(size: sympy.Expr) -> int:
    return max((abs(int(n)) for n in size.atoms(sympy.Integer)), default=0)
