"""Pieces of a prompt's graph as TensorRT engines.

A piece is cut around the operators of this package that are not made of torch's own, at which an engine would end in
any case, and the rest is exported part by part (`torch.export`), with weights as constants and token axes between
bounds. Attention that PyTorch's computes as well is written so first (`passes.rewrite.plain_attention`). It holds for
prompts without padding; a call with padding gets parts in which attention is the operator of this package.

What steps of decoding run is not built here: an engine holds a copy of its weights, and cannot write into a cache.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import Dim

from uniprefill_fx.lowering.pieces import LazyPiece, Variant, dynamic_sizes
from uniprefill_fx.lowering.tensorrt import TensorRT
from uniprefill_fx.ops import gather
from uniprefill_fx.passes.cleanup import clean
from uniprefill_fx.passes.node_utils import copy_module, expression, meta, shape
from uniprefill_fx.passes.operator_internals import version_of
from uniprefill_fx.passes.rewrite.plain_attention import find_plain_attention, is_whole, write_plainly
from uniprefill_fx.passes.rewrite.split import Piece, split_at_selections
from uniprefill_fx.runtime.warn_once import warn_once
from uniprefill_fx.torch_internals import is_static_input

log = logging.getLogger(__name__)
COMPOSITE = {f"uniprefill.{f.__name__}": f for f in (gather.compact, gather.restore, gather.clear_pads)}


class EnginePiece:
    """A graph of a prompt, run by engines and, between them, by the operators of this package.

    Args:
        gm: the graph; placeholders carry fakes in `meta`. tensorrt: what builds engines. name: for messages.
        batch: sizes that engines are built for one by one: of the batch.

    Raises:
        RefusalError: one of our operators lies in an autocast region, which no part could hold whole.
    """

    def __init__(self, gm: fx.GraphModule, tensorrt: TensorRT, name: str, batch: Collection[sympy.Expr] = ()) -> None:
        self.gm, self.name = gm, name
        plain = copy_module(gm)
        self.is_whole = is_whole(find_plain_attention(gm.graph))
        write_plainly(plain)
        self.whole, self.parts = _chain(plain, tensorrt, name, batch)
        self.padded, self.parts_with_padding = _chain(copy_module(gm), tensorrt, f"{name}, with padding", batch)

    def __call__(self, *args: Any) -> Any:
        return (self.whole if self.is_whole(args) else self.padded)(*args)


class EnginePart(LazyPiece):
    """Operators in a row, as one program for torch-tensorrt. Weights are part of it, and are looked at in each call."""

    def __init__(self, gm: fx.GraphModule, tensorrt: TensorRT, name: str, batch: Collection[sympy.Expr]) -> None:
        super().__init__(gm, name)
        self.tensorrt = tensorrt
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.static = [is_static_input(node) for node in placeholders]
        self.free = [i for i, n in enumerate(placeholders) if not self.static[i] and isinstance(meta(n), Tensor)]
        self.dynamic: dict[int, dict[int, Any]] = {}  # by input and dimension, expressions of token counts
        for i in self.free:
            self.dynamic[i] = {
                d: e for d, e in dynamic_sizes(placeholders[i]).items() if d is not None and e not in batch
            }

    def __call__(self, *args: Any) -> Any:
        tokens = self.tensorrt.tokens
        sizes = [args[i].shape[d] for i in self.free for d, size in self.dynamic[i].items() if size.is_Symbol]
        if sizes and not tokens.lowest <= min(sizes) <= max(sizes) <= tokens.highest:
            warn_once(
                "engine bounds",
                f"an axis of {min(sizes)} to {max(sizes)} rows lies outside of min_tokens={tokens.lowest} to "
                f"max_tokens={tokens.highest} of inner_options: it runs without TensorRT.",
            )
            return self.gm(*args)
        return super().__call__(*args)

    def _compile(self, args: Sequence[Any]) -> Variant:
        gm = copy_module(self.gm)
        weights = _as_constants(gm, args, self.static)
        with torch.inference_mode(False), torch.no_grad():
            examples = [self._example(i, args) for i in self.free]
            dims = tuple(self._ranges(i, x) for i, x in zip(self.free, examples, strict=True))
            exported = torch.export.export(gm, tuple(examples), dynamic_shapes=dims, strict=False)
        values = [n.meta["val"] for n in exported.graph.nodes if n.name in exported.graph_signature.user_inputs]
        bounds = {symbol: (int(r.lower), int(r.upper)) for symbol, r in exported.range_constraints.items()}
        shapes = [_shapes(value, example, bounds) for value, example in zip(values, examples, strict=True)]
        log.info("%s: exported for shapes %s", self.name, shapes)
        run = self.tensorrt.build(self.name, exported, shapes, examples)

        def called(*now: Any) -> Any:
            return run(*(now[i] for i in self.free))

        # Engines of weights that have changed are of no use, and hold memory.
        self.variants = [v for v in self.variants if not (isinstance(v.holds, _Fits) and v.holds.weights.gone())]
        return Variant(called, lambda now: [], _Fits(self.free, values, bounds, examples, weights))

    def _example(self, i: int, args: Sequence[Any]) -> Tensor:
        """An input of the sizes that engines are tuned for; only its kind and its sizes are looked at."""
        best = self.tensorrt.tokens.best
        sizes = list(args[i].shape)
        for d, size in self.dynamic[i].items():
            if best is not None and sizes[d] not in (0, 1):
                sizes[d] = _at(size, best)
        return torch.empty(sizes, dtype=args[i].dtype, device=args[i].device)

    def _ranges(self, i: int, example: Tensor) -> dict[int, Any]:
        """The bounds of the token axes of an input. An axis of one row stays one."""
        tokens, auto = self.tensorrt.tokens, Dim.AUTO
        return {
            d: auto(min=_at(size, tokens.lowest), max=_at(size, tokens.highest))
            for d, size in self.dynamic[i].items()
            if example.shape[d] not in (0, 1)
        }


class _Fits:
    """Whether arguments are such as a program was exported for: shapes, kinds, and the very weights."""

    def __init__(
        self,
        free: Sequence[int],
        values: Sequence[Tensor],
        bounds: Mapping[sympy.Symbol, tuple[int, int]],
        examples: Sequence[Tensor],
        weights: _Weights,
    ) -> None:
        self.kinds = [(i, x.dtype, x.device) for i, x in zip(free, examples, strict=True)]
        self.shapes = [tuple(expression(size) for size in value.shape) for value in values]
        self.bounds, self.weights = bounds, weights

    def __call__(self, args: Sequence[Any]) -> bool:
        found: dict[sympy.Symbol, int] = {}
        later: list[tuple[sympy.Expr, int]] = []
        for (i, dtype, device), sizes in zip(self.kinds, self.shapes, strict=True):
            x = args[i]
            if x.dtype is not dtype or x.device != device or x.ndim != len(sizes):
                return False
            for size, own in zip(sizes, x.shape, strict=True):
                if size.is_Symbol:
                    low, high = self.bounds.get(size, (own, own))
                    if found.setdefault(size, own) != own or not low <= own <= high:
                        return False
                else:
                    later.append((size, own))
        return all(size.xreplace(found) == own for size, own in later) and self.weights(args)


class _Weights:
    """Whether arguments hold the very weights that a program was made with, unchanged since then."""

    def __init__(self, weights: dict[int, Tensor]) -> None:
        # Not held: the program shares their memory, and a weight that is gone elsewhere will not be asked for again.
        self.held = [(i, weakref.ref(w), _version(w)) for i, w in weights.items()]

    def __call__(self, args: Sequence[Any]) -> bool:
        return all(ref() is args[i] and _version(args[i]) == version for i, ref, version in self.held)

    def gone(self) -> bool:
        """Whether no arguments can hold them again."""
        now = ((ref(), version) for _, ref, version in self.held)
        return any(weight is None or _version(weight) != version for weight, version in now)


def _chain(
    gm: fx.GraphModule, tensorrt: TensorRT, name: str, batch: Collection[sympy.Expr]
) -> tuple[fx.GraphModule, list[EnginePart]]:
    """A graph module that calls the parts of `gm` one after the other; and those that become engines."""
    parts: list[EnginePart] = []
    graph, modules = fx.Graph(), nn.Module()
    values: dict[fx.Node, Any] = {n: graph.node_copy(n) for n in gm.graph.find_nodes(op="placeholder")}
    for number, piece in enumerate(split_at_selections(gm, _is_outside)):
        # A size at an edge is read off a tensor there: engines take and return tensors.
        sizes = {n: where for n in piece.outputs if (where := _dimension(n, values)) is not None}
        returned = [n for n in piece.outputs if n not in sizes]
        own = _with_own_sizes(piece, returned)
        run: Any = own
        if not piece.selection and _is_program(own):
            run = EnginePart(own, tensorrt, f"{name}, part {number}", batch)
            parts.append(run)
        elif not piece.selection:
            log.info("%s, part %d: runs in PyTorch, as it takes or returns more than tensors", name, number)
        setattr(modules, f"part_{number}", _Calls(run))
        if returned:
            out = graph.call_module(f"part_{number}", tuple(values[n] for n in piece.inputs))
        for n, (tensor, d) in sizes.items():
            values[n] = graph.call_function(torch.ops.aten.sym_size.int, (values[tensor], d))
        for i, n in enumerate(returned):
            values[n] = graph.call_function(operator.getitem, (out, i))
    graph.output(fx.node.map_arg(gm.graph.output_node().args[0], values.__getitem__))
    return fx.GraphModule(modules, graph), parts


class _Calls(nn.Module):
    """What runs a part, as a module that a graph can call."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *args: Any) -> Any:
        return self.run(*args)


def _is_outside(node: fx.Node) -> bool:
    """Whether a node is an operator of this package that no compiler can look into, or one of several results of it."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return _is_outside(node.args[0])
    return str(node.target).startswith("uniprefill.") and _composite(node) is None


def _composite(node: fx.Node) -> Callable[..., Any] | None:
    """What an operator of this package is made of, as a function that an exporter traces into."""
    return COMPOSITE.get(str(node.target).removesuffix(".default"))  # "uniprefill.compact.default"


def _dimension(size: fx.Node, tensors: Iterable[fx.Node]) -> tuple[fx.Node, int] | None:
    """Where a size can be read off one of some tensors; None for a node that is no size, or if it cannot."""
    if not isinstance(meta(size), torch.SymInt):
        return None
    found = ((n, d) for n in tensors for d, own in enumerate(shape(n) or ()) if own == expression(size))
    return next(found, None)


def _with_own_sizes(piece: Piece, returned: Collection[fx.Node]) -> fx.GraphModule:
    """The graph of a piece that returns only some of its outputs, and reads sizes off its own inputs."""
    gm = piece.gm
    for node in gm.graph.nodes:
        node.target = _composite(node) or node.target
    outputs: Any = gm.graph.output_node().args[0]
    kept = tuple(own for own, n in zip(outputs, piece.outputs, strict=True) if n in returned)
    gm.graph.output_node().args = (kept,)
    placeholders = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_after(placeholders[-1] if placeholders else None):
        for size in placeholders:
            where = _dimension(size, placeholders)
            if where is not None:
                size.replace_all_uses_with(gm.graph.call_function(torch.ops.aten.sym_size.int, where))
    clean(gm)
    return gm


def _is_program(gm: fx.GraphModule) -> bool:
    """Whether a graph takes and returns tensors, some of which are no weights."""
    taken = [n for n in gm.graph.find_nodes(op="placeholder") if n.users]
    outputs: Any = gm.graph.output_node().args[0]
    free = any(not is_static_input(n) for n in taken)
    return free and bool(outputs) and all(isinstance(meta(n), Tensor) for n in [*taken, *outputs])


def _as_constants(gm: fx.GraphModule, args: Sequence[Any], static: Sequence[bool]) -> _Weights:
    """Make weights attributes of a module in place of inputs, and take away inputs that nobody reads."""
    weights: dict[int, Tensor] = {}
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if static[i]:
            weights[i] = args[i]
            with torch.inference_mode(False):
                value = args[i].detach()
            if isinstance(args[i], nn.Parameter):
                gm.register_parameter(f"weight_{i}", nn.Parameter(value, requires_grad=False))
            else:
                gm.register_buffer(f"weight_{i}", value)
            with gm.graph.inserting_before(node):
                node.replace_all_uses_with(gm.graph.get_attr(f"weight_{i}"))
        if static[i] or not isinstance(args[i], Tensor):
            gm.graph.erase_node(node)
    gm.recompile()
    return _Weights(weights)


def _shapes(
    value: Tensor, example: Tensor, bounds: Mapping[sympy.Symbol, tuple[int, int]]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The least, the best and the largest shape of an input."""
    sizes = [expression(size) for size in value.shape]
    ends = ({symbol: end[side] for symbol, end in bounds.items()} for side in (0, 1))
    least, largest = (tuple(int(size.xreplace(end)) for size in sizes) for end in ends)
    return least, tuple(example.shape), largest


def _at(size: sympy.Expr, tokens: int) -> int:
    """A size where every token axis has so many rows."""
    return int(size.xreplace({symbol: sympy.Integer(tokens) for symbol in size.free_symbols}))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)
