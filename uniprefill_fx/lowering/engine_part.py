"""One run of operators as a program for torch-tensorrt: exported with its weights, built again when those change."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.multiprocessing.reductions import StorageWeakRef

from uniprefill_fx.lowering.pieces import LazyPiece, Variant, dynamic_sizes
from uniprefill_fx.lowering.tensorrt import TensorRT
from uniprefill_fx.passes.node_utils import copy_module, expression, meta
from uniprefill_fx.passes.operator_internals import version_of
from uniprefill_fx.torch_internals import is_static_input

log = logging.getLogger(__name__)


class EnginePart(LazyPiece):
    """Operators in a row, as one program for torch-tensorrt. Weights are part of it, and are looked at in each call."""

    def __init__(self, gm: fx.GraphModule, tensorrt: TensorRT, name: str, batch: Collection[sympy.Expr]) -> None:
        super().__init__(gm, name)
        self.tensorrt = tensorrt
        self.beyond = False  # whether it was called with sizes outside of the bounds
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
            if not self.beyond:
                self.beyond = True
                log.warning(
                    "%s: %s rows lie outside of min_tokens=%d to max_tokens=%d of inner_options: runs without TensorRT",
                    *(self.name, sizes, tokens.lowest, tokens.highest),
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

        # Engines of weights that have changed are of no use, and hold memory.
        self.variants = [v for v in self.variants if not (isinstance(v.holds, _Fits) and v.holds.weights.gone())]
        fits = _Fits(self.free, values, bounds, examples, weights)
        return Variant(lambda *now: run(*(now[i] for i in self.free)), lambda now: [], fits)

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
    """Whether arguments hold the very weights that a program was made with, unchanged since then.

    Writes that autograd does not count (through `.data`, or into tensors made in inference mode) are not noticed.
    """

    def __init__(self, weights: dict[int, Tensor]) -> None:
        # Not held: the program shares their memory, and a weight that is gone elsewhere will not be asked for again.
        self.held = [(i, weakref.ref(w), _State(w)) for i, w in weights.items()]

    def __call__(self, args: Sequence[Any]) -> bool:
        return all(ref() is args[i] and state.is_of(args[i]) for i, ref, state in self.held)

    def gone(self) -> bool:
        """Whether no arguments can hold them again."""
        now = ((ref(), state) for _, ref, state in self.held)
        return any(weight is None or not state.is_of(weight) for weight, state in now)


class _State:
    """Which memory a tensor has (`weight.data = other` gives it another one), and how often it was written to."""

    def __init__(self, tensor: Tensor) -> None:
        # The memory may be freed meanwhile, and still no other takes its place in a comparison.
        self.memory = StorageWeakRef(tensor.untyped_storage())
        self.version = _version(tensor)

    def is_of(self, tensor: Tensor) -> bool:
        return self.memory == StorageWeakRef(tensor.untyped_storage()) and self.version == _version(tensor)


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
