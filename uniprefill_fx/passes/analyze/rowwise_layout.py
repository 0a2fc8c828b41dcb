"""What operators that move, cut and join axes make of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from uniprefill_fx.passes.analyze.rowwise_kinds import Axes, Kind, Kinds, Rows, Same, State, is_tensor
from uniprefill_fx.passes.analyze.rowwise_ops import argument, complete, first_of, is_empty, last_few
from uniprefill_fx.passes.node_utils import expression, index_of, meta
from uniprefill_fx.torch_internals import is_known_negative

KindOf = Callable[[Any], Any]  # from a node to its Kinds


class LayoutRules:
    """The rules of such operators, for one graph. Each takes a node, its name, and what its arguments are."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes

    def _rows(self, value: Any, dim: int, like: Rows) -> Rows | None:
        """`like` at another axis, where that is the one axis of tokens."""
        return Rows(dim, like.outer, like.inner) if self.axes.dims(value) == (dim,) else None

    def _apart(self, value: Any, dim: int, kind: Rows) -> bool:
        """Whether an axis tells tokens, or prompts, from one another."""
        return dim % value.ndim == kind.dim or self.axes.of_prompts(value, dim)

    def _elements(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        source = first_of(node)
        kind = kind_of(source)
        if any(isinstance(a, torch.dtype) for a in (*node.args, *node.kwargs.values())) or not isinstance(kind, Rows):
            return None
        return self.axes.reshaped(meta(source), meta(node), kind)

    def _moved(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        source = first_of(node)
        kind, ndim = kind_of(source), meta(source).ndim
        if not isinstance(kind, Rows) or any(isinstance(a, fx.Node) for a in node.args[1:]):
            return None
        marked = torch.empty(tuple(range(2, 2 + ndim)), device="meta")
        target: Any = node.target
        moved = getattr(marked, str(target)) if node.op == "call_method" else None
        moved = target(marked, *node.args[1:], **node.kwargs) if moved is None else moved(*node.args[1:], **node.kwargs)
        return self._rows(meta(node), tuple(moved.shape).index(2 + kind.dim), kind)

    def _expanded(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        source, value = first_of(node), meta(node)
        kind = kind_of(source)
        if not isinstance(kind, Rows):
            return None
        dim = value.ndim - meta(source).ndim + kind.dim
        same = self.axes.sizes(value)[dim] == self.axes.sizes(meta(source))[kind.dim]
        return self._rows(value, dim, kind) if same else None

    def _repeated(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        source, value = first_of(node), meta(node)
        kind = kind_of(source)
        if not isinstance(kind, Rows):
            return None
        dim = value.ndim - meta(source).ndim + kind.dim
        times = self.axes.sizes(value)[dim] / self.axes.sizes(meta(source))[kind.dim]
        if times.free_symbols & self.axes.count.free_symbols:
            return None
        return self._rows(value, dim, Rows(0, kind.outer if times == 1 else (times, *kind.outer), kind.inner))

    def _interleaved(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        source, value = first_of(node), meta(node)
        kind, dim = kind_of(source), argument(node, 2, "dim")
        times = argument(node, 1, "repeats")
        if not isinstance(kind, Rows) or not isinstance(dim, int) or not isinstance(times, int):
            return None
        inner = kind.inner if dim % value.ndim != kind.dim or times == 1 else (*kind.inner, expression(times))
        return self._rows(value, kind.dim, Rows(0, kind.outer, inner))

    def _pieces(self, node: fx.Node, name: str, kind_of: KindOf) -> Kinds | None:
        source = first_of(node)
        kind, dim = kind_of(source), argument(node, 2, "dim")
        dim = 0 if dim is None else dim
        if not isinstance(kind, Rows) or not isinstance(dim, int) or self._apart(meta(source), dim, kind):
            return None
        return complete(self._each(meta(node), lambda v: self._rows(v, kind.dim, kind)))  # type: ignore[arg-type,return-value]

    def _joined(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        parts: Any = first_of(node)
        dim, value = argument(node, 1, "dim", "axis"), meta(node)
        if not isinstance(parts, tuple | list) or not isinstance(0 if dim is None else dim, int):
            return None
        dim = (0 if dim is None else dim) % value.ndim
        full = [p for p in parts if is_tensor(p) and not is_empty(meta(p))]
        kinds = {kind_of(p) for p in full}
        if not kinds or any(not isinstance(k, Rows | Same) for k in kinds):
            return None
        found = [k for k in kinds if isinstance(k, Rows)]
        if len(found) != 1 or (Same() in kinds and any(not self.axes.dims(meta(p)) for p in full)):
            return None
        new = found[0].dim + (name == "stack" and dim <= found[0].dim)
        if new == dim and (name == "stack" or len(full) > 1):
            return None
        if name != "stack" and len(full) > 1 and self.axes.of_prompts(meta(full[0]), dim):
            return None
        return self._rows(value, new, found[0])

    def _every_token(self, node: fx.Node) -> bool:
        """Whether an index of slices and numbers takes every row of the token axis, x[..., :16] say."""
        source, index = first_of(node), index_of(node)
        if not is_tensor(source) or any(not isinstance(i, int | slice) and i is not Ellipsis for i in index):
            return False
        ndim, behind = meta(source).ndim, len(index)
        if Ellipsis in index:
            at = index.index(Ellipsis)
            index = (*index[:at], *[slice(None)] * (ndim - behind + 1), *index[at + 1 :])
        return all(d >= len(index) or index[d] == slice(None) for d in self.axes.dims(meta(source)))

    def _indexed(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        source, index, value = first_of(node), index_of(node), meta(node)
        if not is_tensor(source) or not isinstance(value, torch.Tensor):
            return None
        ndim, kind = meta(source).ndim, kind_of(source)
        taken = sum(i is not None and i is not Ellipsis for i in index)
        if Ellipsis in [i for i in index if not isinstance(i, fx.Node)]:
            at = next(i for i, item in enumerate(index) if item is Ellipsis)
            index = (*index[:at], *[slice(None)] * (ndim - taken), *index[at + 1 :])
        index = (*index, *[slice(None)] * (ndim - sum(i is not None for i in index)))
        looked_up = [i for i in index if is_tensor(i)]
        index = tuple(-1 if last_few(i) else i for i in index)  # x[:, [-1]]
        if any(not isinstance(i, int | slice | None) and not is_tensor(i) for i in index) or len(looked_up) > 1:
            return None
        old = new = 0
        found: Kind | None = None
        for item in index:
            if item is None:
                new += 1
                continue
            if isinstance(kind, Rows) and self.axes.of_prompts(meta(source), old) and item != slice(None):
                return None
            if is_tensor(item):
                its = kind_of(item)
                if meta(item).dtype == torch.bool or (isinstance(its, Rows) and isinstance(kind, Rows)):
                    return None
                if isinstance(its, Rows) and isinstance(kind, Same) and not self.axes.dims(meta(source)):
                    found = self._rows(value, new + its.dim, its)
                new += meta(item).ndim
                if isinstance(kind, Rows) and old == kind.dim:
                    return None
            elif isinstance(item, slice):
                if isinstance(kind, Rows) and old == kind.dim:
                    if self._all_of(item, self.axes.sizes(meta(source))[old]):
                        found = self._rows(value, new, kind)
                    elif not self._last(item):
                        return None
                    else:
                        # a window at least as long as the prompt holds all its rows
                        size, whole = self.axes.sizes(meta(source))[old], self.axes.sizes(value)[new]
                        all_of_it = isinstance(item.start, int) and size == whole
                        found = self._rows(value, new, kind) if all_of_it else State()
                new += 1
            elif isinstance(kind, Rows) and old == kind.dim:
                found = State() if isinstance(item, int) and item < 0 else None
            old += 1
        return None if isinstance(found, State) and self.axes.dims(value) else found

    def _all_of(self, item: slice, size: Any) -> bool:
        start, stop = item.start, item.stop
        begins = start in (None, 0) or (isinstance(start, fx.Node) and expression(start) == -size)
        ends = stop is None or (isinstance(stop, fx.Node) and expression(stop) == size)
        return begins and ends and item.step in (None, 1)

    def _last(self, item: slice) -> bool:
        """x[-4:], as the state of a convolution is taken."""
        start = meta(item.start) if isinstance(item.start, fx.Node) else item.start
        negative = is_known_negative(start) if isinstance(start, torch.SymInt) else isinstance(start, int) and start < 0
        return negative and item.stop is None and item.step in (None, 1)

    def _selected(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        source, dim = argument(node, 0, "input", "self"), argument(node, 1, "dim")
        kind = kind_of(source)
        if not isinstance(kind, Rows) or not isinstance(dim, int) or self._apart(meta(source), dim, kind):
            return None
        gone = name == "select" and dim % meta(source).ndim < kind.dim
        return self._rows(meta(node), kind.dim - gone, kind)

    def _left(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        (source,) = (n for n in node.all_input_nodes if is_tensor(n))
        kind = kind_of(source)
        if not isinstance(kind, Rows) or (name == "one_hot" and not argument(node, 1, "num_classes")):
            return None
        at_end = name == "view_as_complex" and kind.dim == meta(source).ndim - 1
        return None if at_end else self._rows(meta(node), kind.dim, kind)

    def _each(self, value: Any, make: Callable[[Any], Kind]) -> Kinds:
        return tuple(make(v) for v in value) if isinstance(value, tuple | list) else make(value)
