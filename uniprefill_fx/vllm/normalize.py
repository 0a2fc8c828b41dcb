"""Bring a graph of vLLM into the form that the analysis reads: one symbol of the token count, no writes across layers.

Before::

    out = torch.empty(size);  out_1 = out.view(-1, 4, 32)      # attention writes a view of a buffer
    _C.fused_add_rms_norm(x, residual, w, eps)                 # the stream is one tensor, written by every layer

After::

    out_1 = torch.empty((tokens, 4, 32))
    residual_1 = x + residual
    x_1 = torch.empty_like(residual_1);  _C.rms_norm(x_1, residual_1, w, eps)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from uniprefill_fx.errors import Category, refuse
from uniprefill_fx.passes.cleanup import clean
from uniprefill_fx.passes.dataflow import aliases
from uniprefill_fx.passes.node_utils import expression, meta, name_of
from uniprefill_fx.passes.schemas import overloads
from uniprefill_fx.vllm.attention import ATTENTION, operator_name
from uniprefill_fx.vllm.fused_rope import name_fused_rope


def one_token_count(inputs: Sequence[Any]) -> None:
    """Make every size that vLLM marks as dynamic one symbol: all of them are the number of tokens of a step.

    vLLM's compiled models take token ids or embeddings and positions, whose token axis it marks; Dynamo gives each
    input a symbol of its own. Weights have fixed sizes.

    Raises:
        RefusalError: they were traced with different numbers.
    """
    sizes: list[Any] = [i for i in inputs if isinstance(i, torch.SymInt)]
    sizes += [s for i in inputs if isinstance(i, torch.Tensor) for s in i.shape if isinstance(s, torch.SymInt)]
    symbols = {expression(size): size for size in sizes if not expression(size).is_Integer}
    first, *others = symbols.values() or [None]
    for other in others:
        assert isinstance(first, torch.SymInt)
        if not bool(first == other):  # from here on the trace knows them to be equal
            raise refuse(Category.TOKEN_AXIS, f"inputs of {first} and {other} tokens in one step", "stays dense")


def normalize(gm: fx.GraphModule) -> None:
    """Do what is shown above, in place. What has another form is left: the analysis refuses it where it matters."""
    for node in list(gm.graph.nodes):
        name = operator_name(node)
        if name == ATTENTION:
            _write_into_own_buffer(gm.graph, node)
        elif name == "_C::fused_add_rms_norm":
            _split_norm(gm.graph, node)
    name_fused_rope(gm.graph)
    clean(gm)


def _write_into_own_buffer(graph: fx.Graph, node: fx.Node) -> None:
    view: Any = node.args[3]
    base = view.args[0] if name_of(view) in ("view", "reshape") and view.args else None
    if not isinstance(base, fx.Node) or name_of(base) != "empty" or list(base.users) != [view]:
        return
    value = meta(view)
    counts = {expression(n): n for n in graph.find_nodes(op="placeholder") if isinstance(meta(n), torch.SymInt)}
    sizes = [int(s) if expression(s).is_Integer else counts.get(expression(s)) for s in value.shape]
    if None in sizes:
        return
    with graph.inserting_before(view):
        new = graph.call_function(torch.empty, (tuple(sizes),), {"dtype": value.dtype, "device": value.device})
    new.meta = dict(view.meta)
    view.replace_all_uses_with(new)
    graph.erase_node(view)
    graph.erase_node(base)


def _split_norm(graph: fx.Graph, node: fx.Node) -> None:
    x, residual, *rest = node.args
    order = {n: i for i, n in enumerate(graph.nodes)}
    assert isinstance(x, fx.Node) and isinstance(residual, fx.Node)
    for written in (x, residual):
        others = [a for a in aliases(written, without=node) if a is not written]
        if any(order[user] > order[node] for alias in others for user in alias.users):
            return  # read under another name
    with graph.inserting_before(node):
        total = graph.call_function(operator.add, (x, residual))
        total.meta = dict(residual.meta)
        normed = graph.call_function(torch.empty_like, (total,))
        normed.meta = dict(x.meta)
        rms_norm = getattr(torch.ops, overloads(node)[0].namespace).rms_norm.default
        graph.call_function(rms_norm, (normed, total, *rest)).meta = dict(node.meta)
    for old, new in ((x, normed), (residual, total)):
        for user in list(old.users):
            if order.get(user, -1) > order[node]:
                user.replace_input_with(old, new)
    graph.erase_node(node)
