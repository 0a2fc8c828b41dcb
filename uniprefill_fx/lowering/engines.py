"""Pieces of a prompt's graph as TensorRT engines.

A piece is cut around the operators of this package that are not made of torch's own, at which an engine would end in
any case, and the rest is exported part by part (`torch.export`), with weights as constants and token axes between
bounds. Attention that PyTorch's computes as well is written so first (`passes.rewrite.plain_attention`), for prompts
without padding; a call with padding gets parts in which attention is the operator of this package.

Steps of decoding have no engines: those hold a copy of their weights, and cannot write into a cache.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from uniprefill_fx.errors import Category, refuse
from uniprefill_fx.lowering.engine_part import EnginePart
from uniprefill_fx.lowering.tensorrt import TensorRT
from uniprefill_fx.ops import gather
from uniprefill_fx.passes.cleanup import clean
from uniprefill_fx.passes.dataflow import aliases, written_nodes
from uniprefill_fx.passes.node_utils import arguments, copy_module, dimension_of, expression, meta
from uniprefill_fx.passes.rewrite.plain_attention import find_plain_attention, is_whole, write_plainly
from uniprefill_fx.passes.rewrite.split import Piece, split_at_selections
from uniprefill_fx.torch_internals import is_static_input

log = logging.getLogger(__name__)
COMPOSITE = {f"uniprefill.{f.__name__}": f for f in (gather.compact, gather.restore, gather.clear_pads)}


class EnginePiece:
    """A graph of a prompt, run by engines and, between them, by the operators of this package.

    Args:
        gm: the graph; placeholders carry fakes in `meta`. tensorrt: what builds engines. name: for messages.
        batch: sizes that engines are built for one by one: of the batch.

    Raises:
        RefusalError: a part writes into what it is given, or an autocast region lies around one of our operators.
    """

    def __init__(self, gm: fx.GraphModule, tensorrt: TensorRT, name: str, batch: Collection[sympy.Expr] = ()) -> None:
        self.gm, self.name = gm, name
        plain = copy_module(gm)
        self.is_whole = is_whole(find_plain_attention(gm.graph))
        write_plainly(plain)
        self.whole, self.parts = _chain(plain, tensorrt, name, batch)
        self.padded, _ = _chain(copy_module(gm), tensorrt, f"{name}, with padding", batch)

    def __call__(self, *args: Any) -> Any:
        return (self.whole if self.is_whole(args) else self.padded)(*args)


def _chain(
    gm: fx.GraphModule, tensorrt: TensorRT, name: str, batch: Collection[sympy.Expr]
) -> tuple[fx.GraphModule, list[EnginePart]]:
    """A graph module that calls the parts of `gm` one after the other; and those that become engines."""
    parts: list[EnginePart] = []
    graph, modules = fx.Graph(), nn.Module()
    values: dict[fx.Node, Any] = {n: graph.node_copy(n) for n in gm.graph.find_nodes(op="placeholder")}
    late = _made_for_the_caller(gm.graph)
    for node in late:
        gm.graph.output_node().prepend(node)  # where they cut nothing
    for number, piece in enumerate(split_at_selections(gm, lambda node: node in late or _is_outside(node))):
        own = _with_own_sizes(piece)
        # A size at an edge is read off a tensor there: engines take and return tensors.
        sizes = {
            n: known
            for n in piece.outputs
            if isinstance(meta(n), torch.SymInt) and (known := _size(graph, expression(n), values)) is not None
        }
        returned = [n for n in piece.outputs if n not in sizes]
        results: Any = own.graph.output_node().args[0]
        own.graph.output_node().args = (tuple(r for r, n in zip(results, piece.outputs, strict=True) if n in returned),)
        clean(own)
        if not piece.selection:
            _check_writes(own)
        run: Any = own
        hindrance = "" if piece.selection else _hindrance(own)
        if hindrance:
            log.info("%s, part %d: runs in PyTorch: %s", name, number, hindrance)
        elif not piece.selection:
            run = EnginePart(own, tensorrt, f"{name}, part {number}", batch)
            parts.append(run)
        setattr(modules, f"part_{number}", _Calls(run))
        if returned:
            out = graph.call_module(f"part_{number}", tuple(values[n] for n in piece.inputs))
        values |= sizes
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


def _size(graph: fx.Graph, size: sympy.Expr, tensors: Mapping[fx.Node, fx.Node]) -> Any:
    """A size, read off tensors of a graph and multiplied and added up; None if it cannot be.

    tensors: nodes with known shapes, each with what stands for it in `graph`.
    """
    if size.is_Integer:
        return int(size)
    if (found := dimension_of(size, tensors)) is not None:
        node, d = found
        return graph.call_function(torch.ops.aten.sym_size.int, (tensors[node], d))
    if not isinstance(size, sympy.Add | sympy.Mul):
        return None
    combine = operator.add if isinstance(size, sympy.Add) else operator.mul
    parts = [_size(graph, part, tensors) for part in size.args]
    return None if None in parts else functools.reduce(lambda a, b: graph.call_function(combine, (a, b)), parts)


def _with_own_sizes(piece: Piece) -> fx.GraphModule:
    """The graph of a piece, which reads sizes off its own inputs where it can."""
    gm = piece.gm
    for node in gm.graph.nodes:
        node.target = _composite(node) or node.target
    placeholders = gm.graph.find_nodes(op="placeholder")
    tensors = {n: n for n in placeholders}
    with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.op != "placeholder")):
        for node in placeholders:
            known = _size(gm.graph, expression(node), tensors) if isinstance(meta(node), torch.SymInt) else None
            if known is not None:
                node.replace_all_uses_with(known)
    return gm


def _hindrance(gm: fx.GraphModule) -> str:
    """Why a graph is no program for the library; "" where it takes tensors that are no weights, and returns tensors."""
    taken = [n for n in gm.graph.find_nodes(op="placeholder") if n.users]
    outputs: Any = gm.graph.output_node().args[0]
    others = [n.name for n in (*taken, *outputs) if not isinstance(meta(n), Tensor)]
    if others:
        return f"takes or returns what is no tensor: {', '.join(others)}"
    if not outputs or all(is_static_input(n) for n in taken):
        return "returns nothing, or reads weights alone"
    return ""


def _made_for_the_caller(graph: fx.Graph) -> set[fx.Node]:
    """Tensors that are made of sizes alone and only returned: what a cache layer notes of the tokens that it saw."""
    return {
        node
        for node in graph.nodes
        if node.op == "call_function"
        and isinstance(meta(node), Tensor)
        and not any(isinstance(a, fx.Node) and isinstance(meta(a), Tensor) for a in arguments(node))
        and all(user.op == "output" for user in node.users)
    }


def _check_writes(gm: fx.GraphModule) -> None:
    """Check that a part writes only into tensors that it makes.

    Raises:
        RefusalError: it writes into one that it is given. Behind an engine that one is a copy, and others read another.
    """
    for node in gm.graph.nodes:
        for written in written_nodes(node):
            if any(alias.op == "placeholder" for alias in aliases(written)):
                seen = f"`{node.name}` writes into a tensor that others see (a static cache, say)"
                raise refuse(Category.MUTATION, seen, "engines return copies")
