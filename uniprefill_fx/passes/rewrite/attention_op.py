"""Write one `uniprefill.attention` into a graph, for operands and a result of any layout.

Before, in a library whose rows hold all heads::

    out = empty(N, 4 * 16)
    library.attention(q, k, v, out)                              # (N, 4 * 16), (N, 2 * 16) twice; returns nothing

After::

    q_1 = q.unflatten(-1, (4, 16)).permute(1, 0, 2).unsqueeze(0)     # (1, 4, N, 16); k and v alike
    y = uniprefill.attention(q_1, k_1, v_1, ...)                     # (1, 4, N, 16)
    out = y.squeeze(0).permute(1, 0, 2).flatten(-2)                  # (N, 4 * 16)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from uniprefill_fx.passes.attention_node import AttentionNode, Layout
from uniprefill_fx.passes.node_utils import autocast, meta
from uniprefill_fx.specs import AttentionSpec


def attention_operands(graph: fx.Graph, attention: AttentionNode, values: Sequence[Any]) -> list[fx.Node]:
    """q, k and v, given as `attention.layout` says, as (batch, heads, tokens, dim)."""
    layout = attention.layout
    heads = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
    if not layout.canonical:
        values = [_to_canonical(graph, value, layout, count) for value, count in zip(values, heads, strict=True)]
    return autocast(graph, values, meta(attention.q).device)


def attention_op(
    graph: fx.Graph, attention: AttentionNode, operands: Sequence[Any], places: Sequence[Any], spec: AttentionSpec
) -> fx.Node:
    """The result of `attention` in its own layout.

    Args:
        operands: as `attention_operands` returns them. places: positions of queries and of keys, and token bounds.
        spec: the terms, as nodes of `graph`.
    """
    out = graph.call_function(torch.ops.uniprefill.attention.default, (*operands, *places, *spec.arguments()))
    known = attention.node.meta
    out.meta = {key: known[key] for key in ("nn_module_stack", "stack_trace") if key in known}
    return out if attention.of_output.canonical else _from_canonical(graph, out, attention.of_output)


def sparse_attention_op(
    graph: fx.Graph,
    attention: AttentionNode,
    operands: Sequence[Any],
    token_bounds: fx.Node,
    options: fx.Node,
    row: int,
    spec: AttentionSpec,
) -> fx.Node:
    """The result of `attention`, block-sparse, in its own layout; beside it a node that counts blocks."""
    terms = (token_bounds, options, row, spec.scale, spec.softcap, spec.sinks)
    both = graph.call_function(torch.ops.uniprefill.block_sparse_attention.default, (*operands, *terms))
    known = attention.node.meta
    both.meta = {key: known[key] for key in ("nn_module_stack", "stack_trace") if key in known}
    out = graph.call_function(operator.getitem, (both, 0))
    totals = graph.call_function(operator.getitem, (both, 1))
    totals.meta["uniprefill_layer"] = attention.layer
    return out if attention.of_output.canonical else _from_canonical(graph, out, attention.of_output)


def _order(layout: Layout) -> list[int]:
    """Where the axes of requests, heads and tokens lie, once heads have an axis of their own; head_dim is the last."""
    heads = layout.heads
    own = [] if layout.batch is None else [layout.batch]
    if heads is None:  # behind the last of the others
        return [*own, max([*own, layout.tokens]) + 1, layout.tokens]
    return [*own, heads, layout.tokens]


def _to_canonical(graph: fx.Graph, value: fx.Node, layout: Layout, heads: int) -> fx.Node:
    if layout.heads is None:
        value = graph.call_method("unflatten", (value, -1, (heads, -1)))
    order = _order(layout)
    value = graph.call_method("permute", (value, *order, len(order)))
    return graph.call_method("unsqueeze", (value, 0)) if layout.batch is None else value


def _from_canonical(graph: fx.Graph, value: fx.Node, layout: Layout) -> fx.Node:
    if layout.batch is None:
        value = graph.call_method("squeeze", (value, 0))
    order = _order(layout)
    back = [order.index(axis) for axis in range(len(order))]
    value = graph.call_method("permute", (value, *back, len(order)))
    return graph.call_method("flatten", (value, -2)) if layout.heads is None else value
