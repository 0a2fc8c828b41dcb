"""Evaluate the nodes of an attention mask to sympy expressions of the axes of their results.

`AXES[0]` is the first axis. What is not understood becomes an opaque function of the axes, named after its node, so
that two reads of the same data are the same expression.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv

from uniprefill_fx.errors import Category, refuse
from uniprefill_fx.passes.values import expression, meta, name_of, peel

AXES = sympy.symbols("axis0:8", integer=True)

COMPARE = {"lt": sympy.Lt, "le": sympy.Le, "gt": sympy.Gt, "ge": sympy.Ge, "eq": sympy.Eq, "ne": sympy.Ne}
ARITHMETIC = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": FloorDiv}
LOGIC = {"and_": sympy.And, "logical_and": sympy.And, "or_": sympy.Or, "logical_or": sympy.Or}
CASTS = frozenset("to bool long int contiguous clone detach".split())


class MaskReader:
    """Evaluates nodes to sympy expressions of their own axes."""

    def __init__(self) -> None:
        self.memo: dict[fx.Node, Any] = {}
        self.data: dict[str, fx.Node] = {}

    def read(self, value: Any, ndim: int) -> Any:
        """The expression of an operand, aligned (as broadcasting aligns) to a result of `ndim` axes."""
        if not isinstance(value, fx.Node):
            return sympy.sympify(value)
        fake = meta(value)
        if not isinstance(fake, torch.Tensor):
            return expression(fake) if isinstance(fake, torch.SymInt | int) else sympy.Symbol(value.name)
        shift = ndim - fake.ndim
        found = self.node(value)
        return found.xreplace({AXES[i]: AXES[i + shift] for i in range(fake.ndim)}) if shift else found

    def visible(self, mask: fx.Node) -> Any:
        """What a mask lets a query see: true of a boolean one, 0 (and not a very low number) of an additive one."""
        if meta(mask).dtype == torch.bool:
            return _truth(self.read(mask, 4))
        source = peel(mask, ("to", "expand", "contiguous", "float", "type_as"))
        name, args = name_of(source), source.args
        shift = 4 - meta(source).ndim
        if name == "where" and _is_zero(args[1]) and _is_low(args[2]) and isinstance(args[0], fx.Node):
            return _truth(self.read(args[0], 4))
        if name == "where" and _is_low(args[1]) and _is_zero(args[2]) and isinstance(args[0], fx.Node):
            return sympy.Not(_truth(self.read(args[0], 4)))
        if name == "masked_fill" and _is_low(args[2]) and self.read(args[0], 4) == 0 and isinstance(args[1], fx.Node):
            return sympy.Not(_truth(self.read(args[1], 4)))
        if name == "triu" and isinstance(args[0], fx.Node) and _is_filled_low(args[0]):
            row, column = AXES[meta(source).ndim - 2 + shift], AXES[meta(source).ndim - 1 + shift]
            return sympy.Lt(column, row + _diagonal(source))
        raise refuse(
            Category.MASK,
            f"an additive mask that is neither 0 nor very low: `{name or source.name}`",
            "such a layer stays dense",
        )

    def node(self, node: fx.Node) -> Any:
        if node not in self.memo:
            found = self._evaluate(node)
            ndim = meta(node).ndim
            if found is None or ndim > len(AXES):
                self.data[node.name] = node
                found = sympy.Function(node.name)(*AXES[:ndim])
            # Along an axis of size 1 the index is 0, which is also what broadcasting needs.
            ones = {AXES[d]: sympy.Integer(0) for d, s in enumerate(meta(node).shape) if expression(s) == 1}
            self.memo[node] = found.xreplace(ones)
        return self.memo[node]

    def _evaluate(self, node: fx.Node) -> Any:
        name, args, ndim = name_of(node).strip("_"), node.args, meta(node).ndim
        if name == "arange" and not {"step"} & node.kwargs.keys() and len(args) in (1, 2):
            return AXES[0] + (self.read(args[0], 0) if len(args) == 2 else 0)
        if name in ("zeros", "new_zeros", "zeros_like"):
            return sympy.Integer(0)
        if name in ("ones", "new_ones", "ones_like"):
            return sympy.true if meta(node).dtype == torch.bool else sympy.Integer(1)
        if name == "and":
            name = "and_"
        if name == "or":
            name = "or_"
        if name in COMPARE or name in ARITHMETIC or name in LOGIC:
            left, right = (self.read(a, ndim) for a in args[:2])
            if name in LOGIC:
                return LOGIC[name](_truth(left), _truth(right))
            if left in (sympy.true, sympy.false) or right in (sympy.true, sympy.false):
                return None
            return (COMPARE.get(name) or ARITHMETIC[name])(left, right)
        if name in ("not", "invert", "logical_not", "bitwise_not") and meta(node).dtype == torch.bool:
            return sympy.Not(_truth(self.read(args[0], ndim)))
        if name in CASTS and isinstance(args[0], fx.Node) and meta(args[0]).ndim == ndim:
            inner = self.node(args[0])
            return _truth(inner) if meta(node).dtype == torch.bool and name not in ("contiguous", "clone") else inner
        if name in ("tril", "triu") and isinstance(args[0], fx.Node) and self.node(args[0]) in (1, sympy.true):
            row, column = AXES[ndim - 2], AXES[ndim - 1] - _diagonal(node)
            return sympy.Le(column, row) if name == "tril" else sympy.Ge(column, row)
        if name in ("expand", "expand_as"):
            return self.read(args[0], ndim)
        if name == "unsqueeze":
            return self._spread(args[0], _dimension(args[1], ndim), ndim)
        if name == "getitem":
            return self._getitem(node)
        if name == "diff":
            return self._diff(node)
        if name == "cumsum" and isinstance(args[0], fx.Node) and self.node(args[0]) in (0, sympy.false):
            return sympy.Integer(0)
        return None

    def _diff(self, node: fx.Node) -> Any:
        """Each element minus the one before it, where what is prepended continues the expression at index -1."""
        source, before = node.args[0], node.kwargs.get("prepend")
        plain = len(node.args) == 1 and node.kwargs.keys() == {"prepend", "dim"}
        if not (plain and isinstance(source, fx.Node) and isinstance(before, fx.Node)):
            return None
        axis, found = AXES[_dimension(node.kwargs["dim"], meta(source).ndim)], self.node(source)
        earlier = found.xreplace({axis: axis - 1})
        if expression(meta(before).shape[AXES.index(axis)]) != 1 or self.node(before) != earlier.xreplace({axis: 0}):
            return None
        return sympy.expand(found - earlier)

    def _spread(self, source: Any, dim: int, ndim: int) -> Any:
        moved = {AXES[i]: AXES[i + 1] for i in range(dim, ndim - 1)}
        return self.node(source).xreplace(moved)

    def _getitem(self, node: fx.Node) -> Any:
        source, index = node.args[0], node.args[1]
        if not isinstance(source, fx.Node) or not isinstance(meta(source), torch.Tensor):
            return None
        index = index if isinstance(index, tuple) else (index,)
        tensors = [i for i in index if isinstance(i, fx.Node) and isinstance(meta(i), torch.Tensor)]
        if tensors:
            if len(tensors) != len(index) or len(index) != meta(source).ndim:
                return None
            # x[i, j] with index tensors that broadcast together: the source read at those indices.
            at = [self.read(i, meta(node).ndim) for i in tensors]
            return self.node(source).xreplace(dict(zip(AXES, at, strict=False)))
        moved, out, axis = {}, 0, 0
        if Ellipsis in index:
            return None
        for item in index:
            if item is None:
                out += 1
            elif isinstance(item, slice) and item.step is None and _is_start(item.start):
                moved[AXES[axis]] = AXES[out] + (item.start or 0)
                axis, out = axis + 1, out + 1
            else:
                return None
        for rest in range(axis, meta(source).ndim):
            moved[AXES[rest]] = AXES[out]
            out += 1
        return self.node(source).xreplace(moved)


def _is_start(start: Any) -> bool:
    """Where a slice begins, counted from the front."""
    return start is None or (isinstance(start, int) and start >= 0)


def _dimension(dim: Any, ndim: int) -> int:
    return int(dim) % ndim


def _truth(value: Any) -> Any:
    """An expression as a condition: data and numbers are true where they are not 0."""
    boolean = isinstance(value, sympy.logic.boolalg.Boolean) and not isinstance(value, sympy.Symbol)
    return value if boolean else sympy.Ne(value, 0)


def _diagonal(node: fx.Node) -> int:
    diagonal = node.kwargs.get("diagonal", node.args[1] if len(node.args) > 1 else 0)
    if not isinstance(diagonal, int):
        raise refuse(Category.MASK, f"a triangle that starts at {diagonal}", "such a layer stays dense")
    return diagonal


def _scalar(value: Any) -> float | None:
    """A number, or a 0-d tensor made from one."""
    if isinstance(value, fx.Node) and name_of(value) in ("tensor", "full", "scalar_tensor"):
        value = value.args[-1] if name_of(value) == "full" else value.args[0]
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _is_zero(value: Any) -> bool:
    return _scalar(value) == 0.0


def _is_low(value: Any) -> bool:
    """Minus infinity, or so low that its exponential is 0."""
    number = _scalar(value)
    return number is not None and number <= -1e4


def _is_filled_low(node: fx.Node) -> bool:
    fill = node.args[1] if name_of(node) in ("full", "full_like", "new_full") and len(node.args) > 1 else None
    return _is_low(node.kwargs.get("fill_value", fill))
