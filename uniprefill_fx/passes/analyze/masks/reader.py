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

from uniprefill_fx.errors import Category, refuse
from uniprefill_fx.passes.analyze.masks.numbers import (
    as_number,
    cases,
    choose,
    compared,
    constant,
    scalar,
    truth,
    visible,
)
from uniprefill_fx.passes.dataflow import aliases, written_nodes
from uniprefill_fx.passes.node_utils import expression, index_of, is_op, meta, name_of, shape
from uniprefill_fx.passes.normalize.causal_buffers import MARK
from uniprefill_fx.torch_internals import floor_div

AXES = sympy.symbols("axis0:8", integer=True)
BATCH, HEAD, QUERY, KEY = AXES[:4]  # those of a mask

COMPARE = {"lt": sympy.Lt, "le": sympy.Le, "gt": sympy.Gt, "ge": sympy.Ge, "eq": sympy.Eq, "ne": sympy.Ne}
ARITHMETIC = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": floor_div}
ARITHMETIC |= {"truediv": operator.truediv, "div": operator.truediv, "rsub": lambda left, right: right - left}
FILLED = {"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1}
LOGIC = {"and_": sympy.And, "logical_and": sympy.And, "or_": sympy.Or, "logical_or": sympy.Or}
CASTS = frozenset("to bool long int float half bfloat16 double type_as contiguous clone detach".split())


class MaskReader:
    """Evaluates nodes to sympy expressions of their own axes."""

    def __init__(self) -> None:
        self.memo: dict[fx.Node, Any] = {}
        self.data: dict[str, fx.Node] = {}
        self.causal_buffers: set[fx.Node] = set()
        self.reading: list[fx.Node] = []

    def read(self, value: Any, ndim: int) -> Any:
        """The expression of an operand, aligned (as broadcasting aligns) to a result of `ndim` axes."""
        if not isinstance(value, fx.Node):
            return constant(value) if isinstance(value, int | float) else sympy.sympify(value)
        fake = meta(value)
        if not isinstance(fake, torch.Tensor):
            return expression(fake) if isinstance(fake, torch.SymInt | int) else sympy.Symbol(value.name)
        shift = ndim - fake.ndim
        found = self.node(value)
        return found.xreplace({AXES[i]: AXES[i + shift] for i in range(fake.ndim)}) if shift else found

    def visible(self, mask: fx.Node) -> tuple[Any, Any]:
        """What a mask lets a query see, and what it adds to the logits there: 0, or a bias.

        Raises:
            RefusalError: what it adds differs from case to case.
        """
        seen = self.read(mask, 4)
        if meta(mask).dtype == torch.bool:
            return truth(seen), sympy.Integer(0)
        condition, added = visible(seen)
        if added is None:
            raise refuse(
                Category.MASK,
                f"an additive mask with values of its own for tokens it shows: `{name_of(mask)}`",
                "such a layer stays dense",
            )
        return condition, added

    def node(self, node: fx.Node) -> Any:
        """The expression of a node, opaque where something else writes to it in place."""
        if node in self.memo:
            return self.memo[node]
        self.reading.append(node)
        writers = self.writers(node)
        found = self._evaluate(node) if writers <= set(self.reading) else None
        self.reading.pop()
        ndim = meta(node).ndim
        if found is None or ndim > len(AXES):
            self.data[node.name] = node
            found = sympy.Function(node.name)(*AXES[:ndim])
        # Along an axis of size 1 the index is 0, which is also what broadcasting needs.
        found = found.xreplace(
            {AXES[d]: sympy.Integer(0) for d, s in enumerate(meta(node).shape) if expression(s) == 1}
        )
        if not writers:
            self.memo[node] = found
        return found

    def writers(self, node: fx.Node) -> set[fx.Node]:
        """The nodes that write to a node in place."""
        return {user for alias in aliases(node) for user in alias.users if alias in written_nodes(user)}

    def _evaluate(self, node: fx.Node) -> Any:
        name, args, ndim = name_of(node).strip("_"), node.args, meta(node).ndim
        if name == "arange" and not {"step"} & node.kwargs.keys() and len(args) in (1, 2):
            return AXES[0] + (self.read(args[0], 0) if len(args) == 2 else 0)
        if node.op == "placeholder":
            return self._triangle(node)
        if is_op(node, "known_mask"):
            return self.read(args[0], ndim)
        if name in FILLED:
            return self._number(FILLED[name], node)
        if name in ("full", "new_full", "full_like", "tensor", "scalar_tensor"):
            return self._number(scalar(node), node)
        if name == "and":
            name = "and_"
        if name == "or":
            name = "or_"
        if name in COMPARE or name in ARITHMETIC or name in LOGIC:
            left, right = (self.read(a, ndim) for a in args[:2])
            if name in LOGIC:
                return LOGIC[name](truth(left), truth(right))
            if name in COMPARE:
                return compared(COMPARE[name], left, right)
            left, right = as_number(left), as_number(right)
            if node.kwargs or (name == "floordiv" and (left.has(sympy.Piecewise) or right.has(sympy.Piecewise))):
                return None
            return ARITHMETIC[name](left, right)
        if name in ("not", "invert", "logical_not", "bitwise_not") and meta(node).dtype == torch.bool:
            return sympy.Not(truth(self.read(args[0], ndim)))
        if name in ("neg", "abs") and isinstance(args[0], fx.Node):
            inner = as_number(self.node(args[0]))
            return -inner if name == "neg" else sympy.Abs(inner)
        if name in CASTS and isinstance(args[0], fx.Node) and meta(args[0]).ndim == ndim:
            inner = self.node(args[0])
            if meta(node).dtype == torch.bool:
                return truth(inner)
            cut = meta(args[0]).is_floating_point() and not meta(node).is_floating_point()
            return None if cut and not all(x.is_integer for x, _ in cases(as_number(inner))) else inner
        if name in ("tril", "triu") and isinstance(args[0], fx.Node):
            row, column = AXES[ndim - 2], AXES[ndim - 1] - _diagonal(node)
            inside = sympy.Le(column, row) if name == "tril" else sympy.Ge(column, row)
            outside = sympy.false if meta(node).dtype == torch.bool else sympy.Integer(0)
            return choose(inside, self.node(args[0]), outside)
        if name in ("where", "masked_fill") and len(args) == 3:
            condition, then, other = args if name == "where" else (args[1], args[2], args[0])
            values = self._operand(then, node), self._operand(other, node)
            return None if None in values else choose(truth(self.read(condition, ndim)), *values)
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
        if name == "pad" and isinstance(args[0], fx.Node) and len(args) == 4:
            filled = self._number(0 if args[3] is None else args[3], node)
            return filled if args[2] == "constant" and self.node(args[0]) == filled else None  # more of the same number
        if isinstance(args[0] if args else None, fx.Node):
            return self._view(node, name)
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

    def _operand(self, value: Any, node: fx.Node) -> Any:
        """An operand of a node, whose dtype and axes are those of the node."""
        return self.read(value, meta(node).ndim) if isinstance(value, fx.Node) else self._number(value, node)

    def _number(self, value: Any, node: fx.Node) -> Any:
        """A constant in the dtype of a node; None if it is not one."""
        if not isinstance(value, bool | int | float) or value != value:
            return None
        if meta(node).dtype == torch.bool:
            return constant(bool(value))
        return constant(value)

    def _triangle(self, node: fx.Node) -> Any:
        triangle = node.meta.get(MARK)
        if triangle is None:
            return None
        self.causal_buffers.add(node)
        row, column = AXES[meta(node).ndim - 2], AXES[meta(node).ndim - 1]
        inside = sympy.Le(column, row)
        if triangle.window is not None:
            inside = sympy.And(inside, sympy.Gt(column, row - triangle.window))
        return choose(inside, *(self._number(v, node) for v in (triangle.below, triangle.above)))

    def _view(self, node: fx.Node, name: str) -> Any:
        """The same elements under axes in another order, or with axes of one element more or fewer."""
        source: Any = node.args[0]
        before, after, dims = shape(source), shape(node), [d for d in node.args[1:] if isinstance(d, int)]
        if before is None or after is None:
            return None
        if name in ("view", "reshape", "squeeze", "flatten", "unflatten"):
            wide = [[d for d, size in enumerate(sizes) if size != 1] for sizes in (before, after)]
            if [before[d] for d in wide[0]] != [after[d] for d in wide[1]]:
                return None
            moved = dict(zip(*wide, strict=True))
        else:
            order = list(range(len(before)))
            if name in ("transpose", "swapaxes") or name == "t" or (name == "getattr" and node.args[1] in ("T", "mT")):
                first, second = dims if len(dims) == 2 else (-2, -1)
                order[first], order[second] = order[second], order[first]
            elif name == "permute":
                order = [int(d) for d in (dims or node.args[1])]  # type: ignore[union-attr, arg-type]
            else:
                return None
            moved = {d % len(order): axis for axis, d in enumerate(order)}
        return self.node(source).xreplace({AXES[d]: AXES[to] for d, to in moved.items()})

    def _spread(self, source: Any, dim: int, ndim: int) -> Any:
        moved = {AXES[i]: AXES[i + 1] for i in range(dim, ndim - 1)}
        return self.node(source).xreplace(moved)

    def _getitem(self, node: fx.Node) -> Any:
        source, index = node.args[0], index_of(node)
        if not isinstance(source, fx.Node) or not isinstance(meta(source), torch.Tensor):
            return None
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
                moved[AXES[axis]] = AXES[out] + (expression(item.start) if item.start is not None else 0)
                axis, out = axis + 1, out + 1
            else:
                return None
        for rest in range(axis, meta(source).ndim):
            moved[AXES[rest]] = AXES[out]
            out += 1
        return self.node(source).xreplace(moved)


def _is_start(start: Any) -> bool:
    """Where a slice begins, counted from the front."""
    if isinstance(start, fx.Node) and isinstance(meta(start), torch.SymInt | int):
        return bool(expression(start).is_nonnegative)
    return start is None or (isinstance(start, int) and start >= 0)


def _dimension(dim: Any, ndim: int) -> int:
    return int(dim) % ndim


def _diagonal(node: fx.Node) -> int:
    diagonal = node.kwargs.get("diagonal", node.args[1] if len(node.args) > 1 else 0)
    if not isinstance(diagonal, int):
        raise refuse(Category.MASK, f"a triangle that starts at {diagonal}", "such a layer stays dense")
    return diagonal
