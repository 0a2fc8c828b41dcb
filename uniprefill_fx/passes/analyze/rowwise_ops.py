"""The operators whose rows are known: from the kinds of their arguments to the kind of what they return.

Each rule says for PyTorch's own operators when a token's row of the result comes from that token's rows alone. A rule
answers None where it cannot say; `rowwise_probe` then runs the operation.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from uniprefill_fx.passes.analyze.row_kinds import Axes, Kind, Kinds, Rows, Same, State, is_tensor
from uniprefill_fx.passes.node_utils import expression, index_of, meta
from uniprefill_fx.passes.schemas import overloads

POINTWISE = frozenset(
    "add sub mul div true_divide floor_divide floordiv truediv multiply subtract divide mod remainder fmod pow rsub "
    "neg negative pos abs absolute exp exp2 expm1 log log2 log1p log10 sqrt rsqrt square reciprocal sin cos tan tanh "
    "sinh cosh asin acos atan atan2 arctan arctan2 sigmoid silu gelu relu relu6 leaky_relu elu selu celu mish softplus "
    "hardtanh hardswish hardsigmoid logsigmoid erf erfc erfinv clamp clamp_min clamp_max clip maximum minimum where "
    "masked_fill eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_xor "
    "bitwise_not and_ or_ xor invert isnan isinf isfinite nan_to_num floor ceil round trunc frac sign sgn lerp addcmul "
    "addcdiv to float half bfloat16 double long int bool type type_as clone contiguous detach positive copy xlogy "
    "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor".split()
)
FILLS = frozenset(
    "zeros ones empty full new_zeros new_ones new_empty new_full zeros_like ones_like empty_like full_like "
    "zero fill".split()
)
# name -> the place of the dimensions among its arguments, and those it takes where none are given (None: all)
ALONG: dict[str, tuple[int, int | None]] = {
    **{n: (1, None) for n in "sum mean prod amax amin max min argmax argmin all any std var logsumexp median".split()},
    **{n: (1, None) for n in "nansum nanmean count_nonzero softmax log_softmax cumsum cumprod cummax cummin".split()},
    **{n: (1, -1) for n in "sort argsort glu".split()},
    **{n: (2, -1) for n in "topk kthvalue".split()},
    **{n: (2, None) for n in "norm linalg_vector_norm vector_norm".split()},
    **{"normalize": (2, 1), "logcumsumexp": (1, None), "softmin": (1, None), "flip": (1, None), "unbind": (1, 0)},
}
ELEMENTS = frozenset("view reshape flatten unflatten unsqueeze squeeze view_as reshape_as ravel".split())
AXES = frozenset("transpose permute t swapaxes swapdims movedim moveaxis".split())
PIECES = frozenset("chunk split split_with_sizes tensor_split".split())
PRODUCTS = frozenset("matmul bmm mm imatmul".split())
GROUPED = frozenset("_grouped_mm grouped_mm grouped_mm_fallback".split())
LOOKUPS = frozenset(
    "getitem index_select gather take_along_dim embedding scatter scatter_add index_add index_copy index_put setitem "
    "scatter_reduce".split()
)
COUNTS = frozenset("histc bincount one_hot arange repeat_interleave searchsorted bucketize sum any all".split())
# What takes part in sending tokens to experts and back: only a chain of these may be run as a whole.
GROUPS = frozenset(
    "sort argsort topk expand expand_as repeat cat stack chunk split linear softmax cumsum unbind".split()
) | (POINTWISE | FILLS | ELEMENTS | AXES | PRODUCTS | GROUPED | LOOKUPS | COUNTS)
# What a causal convolution is made of.
CONVOLVES = (
    POINTWISE | ELEMENTS | AXES | frozenset("pad cat getitem narrow chunk split conv1d conv2d conv_depthwise".split())
)


def known_name(node: fx.Node) -> str:
    """The name of an operator of PyTorch's own, without the underscore of an in-place form; "" for any other."""
    target: Any = node.target
    if node.op == "call_method":
        name = str(target)
    elif isinstance(target, OpOverload | OpOverloadPacket):
        of_torch = isinstance(target, OpOverload) and target.namespace == "aten"
        of_torch |= isinstance(target, OpOverloadPacket) and target._qualified_op_name.startswith("aten::")
        if "transformers::grouped_mm_fallback" in str(getattr(target, "_qualified_op_name", target)):
            return "grouped_mm_fallback"
        if not of_torch:
            return "grouped_mm_fallback" if str(target).startswith("transformers.grouped_mm_fallback") else ""
        name = str(target).split(".")[1]
    elif node.op == "call_function":
        module = (getattr(target, "__module__", None) or "").split(".")[0]
        if module not in ("torch", "_operator", "builtins") and not isinstance(target, types.MethodDescriptorType):
            return ""
        name = getattr(target, "__name__", "")
        if module == "_operator":
            return name
    else:
        return ""
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


KindOf = Callable[[Any], Kind]


class Rules:
    """The rules, for one graph."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes

    def result(self, node: fx.Node, kind_of: KindOf) -> Kinds | None:
        """The kind of what a node returns, whose arguments are all understood; None where no rule can say."""
        name = known_name(node)
        operands = [n for n in node.all_input_nodes if is_tensor(n) or isinstance(meta(n), tuple | list)]
        kinds = [kind_of(n) for n in operands]
        value = meta(node)
        if name == "getitem" and operands and isinstance(meta(operands[0]), tuple | list):
            found = kind_of(operands[0])
            return found[node.args[1]] if isinstance(found, tuple) and isinstance(node.args[1], int) else found
        if not _holds_tensor(value) and not (name == "setitem"):
            return Same() if name in ("size", "dim", "numel", "getitem", "sym_size") or not operands else None
        if name in FILLS and not any(self._counts(v) for v in _fill_values(node, name)):
            return Same()
        if all(isinstance(k, Same) for k in kinds):
            # One number repeated for each token stays that only where tokens are not counted or added up.
            plain = not any(self._has_rows(meta(n)) for n in operands) and not self._has_rows(value)
            plain |= bool(operands) and name in POINTWISE | ELEMENTS | AXES | {"expand", "expand_as", "T", "mT"}
            return self._each(value, lambda v: Same()) if name and plain and not is_random(node) else None
        if all(isinstance(k, Same | State) for k in kinds):
            return self._each(value, lambda v: State()) if name and not self._has_rows(value) else None
        if any(not isinstance(k, Same | Rows) for k in kinds):
            return None
        if name in POINTWISE or (name in ("max", "min") and len(operands) == 2) or name == "dropout":
            return None if name == "dropout" and not _inactive(node) else self._pointwise(node, operands, kind_of)
        for names, rule in self._table():
            if name in names:
                return rule(node, name, kind_of)
        return None

    def _table(self) -> Sequence[tuple[Any, Callable[[fx.Node, str, KindOf], Kinds | None]]]:
        return (
            (ALONG, self._along),
            (ELEMENTS, self._elements),
            (AXES, self._moved),
            (("T", "mT"), self._moved),
            (("expand", "expand_as"), self._expanded),
            (("repeat",), self._repeated),
            (("repeat_interleave",), self._interleaved),
            (PIECES, self._pieces),
            (("cat", "concat", "stack"), self._joined),
            (PRODUCTS, self._product),
            (("linear",), self._linear),
            (("layer_norm", "rms_norm"), self._norm),
            (("getitem",), self._indexed),
            (("select", "narrow"), self._selected),
            (("embedding",), self._embedded),
            (("gather", "scatter"), self._gathered),
            (("one_hot",), self._left),
            (("view_as_real", "view_as_complex", "real", "imag", "conj"), self._left),
        )

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _counts(self, value: Any) -> bool:
        return (
            isinstance(value, fx.Node)
            and isinstance(meta(value), torch.SymInt)
            and self.axes.tokens in expression(meta(value)).free_symbols
        )

    def _has_rows(self, value: Any) -> bool:
        if isinstance(value, tuple | list):
            return any(self._has_rows(v) for v in value)
        return bool(self.axes.dims(value))

    def _each(self, value: Any, make: Callable[[Any], Kind]) -> Kinds:
        return tuple(make(v) for v in value) if isinstance(value, tuple | list) else make(value)

    def _apart(self, value: Any, dim: int, kind: Rows) -> bool:
        """Whether an axis tells tokens, or prompts, from one another."""
        return dim % value.ndim == kind.dim or self.axes.of_prompts(value, dim)

    def _rows(self, value: Any, dim: int, like: Rows) -> Rows | None:
        """`like` at another axis, where that is the one axis of tokens."""
        return Rows(dim, like.outer, like.inner) if self.axes.dims(value) == (dim,) else None

    # -- rules --------------------------------------------------------------------------------------------------------

    def _pointwise(self, node: fx.Node, operands: list[fx.Node], kind_of: KindOf) -> Kind | None:
        value, found = meta(node), set()
        if not isinstance(value, torch.Tensor):
            return None
        for operand in operands:
            kind = kind_of(operand)
            if isinstance(kind, Rows):
                found.add((meta(operand).ndim - kind.dim, kind.outer, kind.inner))
        if len(found) != 1:
            return None
        ((right, outer, inner),) = found
        return self._rows(value, value.ndim - right, Rows(0, outer, inner))

    def _along(self, node: fx.Node, name: str, kind_of: KindOf) -> Kinds | None:
        source = _argument(node, 0, "input", "self", "x")
        kind = kind_of(source) if is_tensor(source) else None
        if not isinstance(kind, Rows) or len([n for n in node.all_input_nodes if is_tensor(n)]) != 1:
            return None
        before = meta(source)
        along = {d % before.ndim for d in dimensions(node, name, before.ndim)}
        if kind.dim in along or any(self.axes.of_prompts(before, d) for d in along):
            return None
        gone = sum(d < kind.dim for d in along)

        def after(value: Any) -> Kind | None:
            return self._rows(value, kind.dim if value.ndim == before.ndim else kind.dim - gone, kind)

        return _all(self._each(meta(node), after))  # type: ignore[arg-type]

    def _elements(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        source = node.args[0]
        kind = kind_of(source)
        if any(isinstance(a, torch.dtype) for a in (*node.args, *node.kwargs.values())) or not isinstance(kind, Rows):
            return None
        return self.axes.reshaped(meta(source), meta(node), kind)

    def _moved(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        source = node.args[0]
        kind, ndim = kind_of(source), meta(source).ndim
        if not isinstance(kind, Rows) or any(isinstance(a, fx.Node) for a in node.args[1:]):
            return None
        marked = torch.empty(tuple(range(2, 2 + ndim)), device="meta")
        target: Any = node.target
        moved = getattr(marked, str(target)) if node.op == "call_method" else None
        moved = target(marked, *node.args[1:], **node.kwargs) if moved is None else moved(*node.args[1:], **node.kwargs)
        return self._rows(meta(node), tuple(moved.shape).index(2 + kind.dim), kind)

    def _expanded(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        source, value = node.args[0], meta(node)
        kind = kind_of(source)
        if not isinstance(kind, Rows):
            return None
        dim = value.ndim - meta(source).ndim + kind.dim
        same = self.axes.sizes(value)[dim] == self.axes.sizes(meta(source))[kind.dim]
        return self._rows(value, dim, kind) if same else None

    def _repeated(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        source, value = node.args[0], meta(node)
        kind = kind_of(source)
        if not isinstance(kind, Rows):
            return None
        dim = value.ndim - meta(source).ndim + kind.dim
        times = self.axes.sizes(value)[dim] / self.axes.sizes(meta(source))[kind.dim]
        if times.free_symbols & self.axes.count.free_symbols:
            return None
        return self._rows(value, dim, Rows(0, kind.outer if times == 1 else (times, *kind.outer), kind.inner))

    def _interleaved(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        source, value = node.args[0], meta(node)
        kind, dim = kind_of(source), _argument(node, 2, "dim")
        times = _argument(node, 1, "repeats")
        if not isinstance(kind, Rows) or not isinstance(dim, int) or not isinstance(times, int):
            return None
        inner = kind.inner if dim % value.ndim != kind.dim or times == 1 else (*kind.inner, expression(times))
        return self._rows(value, kind.dim, Rows(0, kind.outer, inner))

    def _pieces(self, node: fx.Node, name: str, kind_of: KindOf) -> Kinds | None:
        source = node.args[0]
        kind, dim = kind_of(source), _argument(node, 2, "dim")
        dim = 0 if dim is None else dim
        if not isinstance(kind, Rows) or not isinstance(dim, int) or self._apart(meta(source), dim, kind):
            return None
        return _all(self._each(meta(node), lambda v: self._rows(v, kind.dim, kind)))  # type: ignore[arg-type,return-value]

    def _joined(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        parts, dim, value = node.args[0], _argument(node, 1, "dim", "axis"), meta(node)
        if not isinstance(parts, tuple | list) or not isinstance(0 if dim is None else dim, int):
            return None
        dim = (0 if dim is None else dim) % value.ndim
        full = [p for p in parts if is_tensor(p) and not _empty(meta(p))]
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

    def _product(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        left, right = (_argument(node, i, *keys) for i, keys in enumerate((("input", "self"), ("other", "mat2"))))
        if not is_tensor(left) or not is_tensor(right) or min(meta(left).ndim, meta(right).ndim) < 2:
            return None
        value, kinds = meta(node), (kind_of(left), kind_of(right))
        places = [meta(n).ndim - k.dim for n, k in zip((left, right), kinds, strict=True) if isinstance(k, Rows)]
        rows = [k for k in kinds if isinstance(k, Rows)]
        if any((r.outer, r.inner) != (rows[0].outer, rows[0].inner) for r in rows) or len(set(places)) != 1:
            return None
        summed = (isinstance(kinds[0], Rows) and places[0] == 1) or (isinstance(kinds[1], Rows) and places[0] == 2)
        constant = [n for n, k in zip((left, right), kinds, strict=True) if isinstance(k, Same)]
        summed |= self.axes.of_prompts(meta(left), -1)
        if summed or (len(rows) == 2 and places[0] < 3) or any(self.axes.dims(meta(n)) for n in constant):
            return None
        return self._rows(value, value.ndim - places[0], rows[0])

    def _linear(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        source, *weights = (n for n in node.all_input_nodes if is_tensor(n))
        kind = kind_of(source)
        given = node.args[0] if node.args else node.kwargs.get("input")
        if source is not given or not isinstance(kind, Rows) or any(not isinstance(kind_of(w), Same) for w in weights):
            return None
        return self._rows(meta(node), kind.dim, kind) if not self._apart(meta(source), -1, kind) else None

    def _norm(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        source, shape = _argument(node, 0, "input"), _argument(node, 1, "normalized_shape")
        others = [n for n in node.all_input_nodes if is_tensor(n) and n is not source]
        kind = kind_of(source)
        if not isinstance(kind, Rows) or not isinstance(shape, tuple | list):
            return None
        if any(not isinstance(kind_of(n), Same) or self.axes.dims(meta(n)) for n in others):
            return None
        over = range(meta(source).ndim - len(shape), meta(source).ndim)
        if any(self._apart(meta(source), d, kind) for d in over):
            return None
        return self._rows(meta(node), kind.dim, kind)

    def _indexed(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        source, index, value = node.args[0], index_of(node), meta(node)
        if not is_tensor(source) or not isinstance(value, torch.Tensor):
            return None
        ndim, kind = meta(source).ndim, kind_of(source)
        taken = sum(i is not None and i is not Ellipsis for i in index)
        if Ellipsis in [i for i in index if not isinstance(i, fx.Node)]:
            at = next(i for i, item in enumerate(index) if item is Ellipsis)
            index = (*index[:at], *[slice(None)] * (ndim - taken), *index[at + 1 :])
        index = (*index, *[slice(None)] * (ndim - sum(i is not None for i in index)))
        looked_up = [i for i in index if is_tensor(i)]
        index = tuple(-1 if _last_few(i) else i for i in index)  # x[:, [-1]]
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
                        found = State()
                new += 1
            elif isinstance(kind, Rows) and old == kind.dim:
                found = State() if isinstance(item, int) and item < 0 else None
            old += 1
        return State() if isinstance(found, State) and not self.axes.dims(value) else found

    def _all_of(self, item: slice, size: Any) -> bool:
        start, stop = item.start, item.stop
        begins = start in (None, 0) or (isinstance(start, fx.Node) and expression(start) == -size)
        ends = stop is None or (isinstance(stop, fx.Node) and expression(stop) == size)
        return begins and ends and item.step in (None, 1)

    def _last(self, item: slice) -> bool:
        """x[-4:], as the state of a convolution is taken."""
        return isinstance(item.start, int) and item.start < 0 and item.stop is None and item.step in (None, 1)

    def _selected(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        source, dim = _argument(node, 0, "input", "self"), _argument(node, 1, "dim")
        kind = kind_of(source)
        if not isinstance(kind, Rows) or not isinstance(dim, int) or self._apart(meta(source), dim, kind):
            return None
        gone = name == "select" and dim % meta(source).ndim < kind.dim
        return self._rows(meta(node), kind.dim - gone, kind)

    def _embedded(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        operands = [n for n in node.all_input_nodes if is_tensor(n)]
        kinds = [kind_of(n) for n in operands]
        rows = [k for k in kinds if isinstance(k, Rows)]
        index = next(n for n in operands if isinstance(kind_of(n), Rows))
        floating = meta(index).is_floating_point()
        if (
            len(operands) != 2
            or len(rows) != 1
            or floating
            or any(self.axes.dims(meta(n)) for n in operands if n is not index)
        ):
            return None
        return self._rows(meta(node), rows[0].dim, rows[0])

    def _gathered(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        source, dim = _argument(node, 0, "input", "self"), _argument(node, 1, "dim")
        operands = [n for n in node.all_input_nodes if is_tensor(n)]
        kinds = {kind_of(n) for n in operands}
        # Rows beside one another, and an index into another axis; a buffer that is the same for all tokens fits them.
        rows = [k for k in kinds if isinstance(k, Rows)]
        if (
            len(rows) != 1
            or not isinstance(dim, int)
            or any(self.axes.dims(meta(n)) != (rows[0].dim,) for n in operands)
        ):
            return None
        if self._apart(meta(source), dim, rows[0]):
            return None
        return self._rows(meta(node), rows[0].dim, rows[0])

    def _left(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        (source,) = (n for n in node.all_input_nodes if is_tensor(n))
        kind = kind_of(source)
        if not isinstance(kind, Rows) or (name == "one_hot" and not _argument(node, 1, "num_classes")):
            return None
        at_end = name == "view_as_complex" and kind.dim == meta(source).ndim - 1
        return None if at_end else self._rows(meta(node), kind.dim, kind)


def dimensions(node: fx.Node, name: str, ndim: int) -> Sequence[int]:
    """The dimensions that an operation of `ALONG` runs along; all of them where none is given, or no number."""
    place, default = ALONG[name]
    given = [node.kwargs[key] for key in ("dim", "dims", "axis") if key in node.kwargs] or list(node.args[place:])
    if not given:
        return range(ndim) if default is None else [default]
    if isinstance(given[0], bool) or given[0] is None:
        return range(ndim)
    items = given if name == "flip" else given[:1]
    numbers = [n for item in items for n in (item if isinstance(item, tuple | list) else (item,))]
    return numbers if all(isinstance(n, int) for n in numbers) and numbers else range(ndim)


def _argument(node: fx.Node, place: int, *names: str) -> Any:
    if len(node.args) > place:
        return node.args[place]
    return next((node.kwargs[name] for name in names if name in node.kwargs), None)


def _all(kinds: Any) -> Any:
    """The kinds, if there is one of each."""
    return None if kinds is None or (isinstance(kinds, tuple) and None in kinds) else kinds


def _fill_values(node: fx.Node, name: str) -> list[Any]:
    places = {"full": 1, "new_full": 2, "full_like": 1, "fill": 1}
    return [_argument(node, places[name], "fill_value", "value")] if name in places else []


def _last_few(item: Any) -> bool:
    return isinstance(item, list | tuple) and bool(item) and all(isinstance(i, int) and i < 0 for i in item)


def _inactive(node: fx.Node) -> bool:
    """Whether a dropout does nothing."""
    return _argument(node, 2, "training", "train") is False or _argument(node, 1, "p") in (0, 0.0)


def _empty(value: Any) -> bool:
    return any(isinstance(s, int) and s == 0 for s in value.shape)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(_holds_tensor(v) for v in value)
    return isinstance(value, torch.Tensor)


def is_random(node: fx.Node) -> bool:
    """Whether an operator draws random numbers."""
    return any(torch.Tag.nondeterministic_seeded in o.tags for o in overloads(node))
