"""Small questions about FX nodes that every pass asks: sizes as sympy, token axes, ancestors, module paths."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import sympy
import torch
from torch import fx

import uniprefill_fx.ops  # noqa: F401  `is_op` asks for its operators
from uniprefill_fx.torch_internals import size_expression


def meta(node: fx.Node) -> Any:
    """The fake value Dynamo recorded for a node (tensor, SymInt, number, tuple or None)."""
    return node.meta.get("example_value", node.meta.get("val"))


def expression(size: Any) -> sympy.Expr:
    """A size (int, SymInt, or node of one) as a sympy expression, with the equalities that tracing proved applied."""
    if isinstance(size, fx.Node):
        size = meta(size)
    if isinstance(size, torch.SymInt):
        return size_expression(size)
    return sympy.Integer(int(size))


def shape(node: fx.Node) -> tuple[sympy.Expr, ...] | None:
    """The symbolic shape of a tensor node; None for anything else."""
    value = meta(node)
    return tuple(expression(s) for s in value.shape) if isinstance(value, torch.Tensor) else None


def dimension_of(size: sympy.Expr, nodes: Iterable[fx.Node]) -> tuple[fx.Node, int] | None:
    """The first of some tensors that has a dimension of this size, and that dimension."""
    return next(((node, d) for node in nodes for d, own in enumerate(shape(node) or ()) if own == size), None)


def token_dims(node: fx.Node, tokens: sympy.Symbol) -> tuple[int, ...]:
    """The dimensions of a tensor node whose size depends on the number of tokens."""
    return tuple(d for d, size in enumerate(shape(node) or ()) if tokens in size.free_symbols)


def arguments(node: fx.Node) -> Iterator[Any]:
    """Every leaf of a node's args and kwargs."""
    yield from leaves_of(node.args)
    yield from leaves_of(node.kwargs)


def leaves_of(value: Any) -> Iterator[Any]:
    """Everything in nested sequences, dicts and slices."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from leaves_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves_of(item)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def name_of(node: fx.Node) -> str:
    """`torch.add`, `operator.add` and `Tensor.add` all as "add"; "" for placeholders and outputs."""
    if node.op == "call_method":
        return str(node.target)
    if node.op == "call_function":
        return getattr(node.target, "__name__", str(node.target)).split(".")[0]
    return ""


def module_path(node: fx.Node) -> str:
    """The innermost module that a node was traced in, as "model.layers.3.self_attn"; "" if Dynamo recorded none."""
    stack = node.meta.get("nn_module_stack") or {}
    return _path(list(stack.values())[-1]) if stack else ""


def _path(entry: Any) -> str:
    """The path of one entry of a stack of modules."""
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", str(entry[0]))
    return ".".join(part for part in path.split(".") if part not in ("L", "self", "_modules", ""))


def decoder_layer(node: fx.Node) -> int | None:
    """The decoder layer a node belongs to: the first number in the path of the modules around it; None without one.

    The outermost numbered module counts: a block that several layers share (Zamba's) is known by the path of the first.
    """
    for entry in (node.meta.get("nn_module_stack") or {}).values():
        numbers = [int(part) for part in _path(entry).split(".") if part.isdigit()]
        if numbers:
            return numbers[0]
    return None


def index_of(node: fx.Node) -> tuple[Any, ...]:
    """The index of a `getitem`, or the second argument of `narrow`, as a tuple."""
    index = node.args[1]
    return index if isinstance(index, tuple) else (index,)


def peel(node: fx.Node, names: Iterable[str]) -> fx.Node:
    """Follow first arguments back while the node is one of the named operations."""
    names = frozenset(names)
    while name_of(node) in names and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def is_op(node: fx.Node, name: str) -> bool:
    """Whether a node calls `uniprefill::name`."""
    packet = getattr(torch.ops.uniprefill, name)
    return node.op == "call_function" and node.target in (packet, packet.default)


def counts_blocks(node: fx.Node) -> bool:
    """Whether a node is what block-sparse attention says of its blocks."""
    return "uniprefill_layer" in node.meta and node.args[1:] == (1,)


def is_selected(node: fx.Node) -> bool:
    """Whether a node is one of the two results of a `select`."""
    return any(is_op(parent, "select") for parent in node.all_input_nodes)


def selects_by(node: fx.Node) -> bool:
    """Whether a node is the scores that a `select` chooses by."""
    return any(is_op(user, "select") and user.args[0] is node for user in node.users)


def copy_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph module with a copy of the graph (its nodes in the same order) over the same parameters."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    new = fx.GraphModule(gm, graph)
    new.meta = dict(gm.meta)
    return new


def autocast(graph: fx.Graph, values: Iterable[fx.Node], device: torch.device) -> list[fx.Node]:
    """Operands as autocast hands them to attention, where it is on while tracing: it does not know our ops."""
    if not torch.is_autocast_enabled(device.type):
        return list(values)
    dtype = torch.get_autocast_dtype(device.type)
    return [graph.call_method("to", (value, dtype)) for value in values]
