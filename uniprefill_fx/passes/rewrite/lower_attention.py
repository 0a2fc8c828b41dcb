"""Replace attention that is understood by `uniprefill.attention`, in graphs that drop nothing.

Decode steps and later chunks read cache layers that may be compact; the op attends to the rows that they hold, by
their original indices. Dense prefill gains that no mask is formed. Before::

    keys = uniprefill.logical_view(stored_k, positions, seen, expected)    # (B, kv_heads, seen, D)
    attn = scaled_dot_product_attention(q, repeat(keys), repeat(values), attn_mask=mask)

After::

    attn = uniprefill.attention(q, stored_k, stored_v, arange(seen - queries, seen), positions, ...)

Where keys are computed from what is stored (`passes.expansion`), that is done to the stored rows.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from uniprefill_fx.passes.attention_node import AttentionNode, CachedKeys
from uniprefill_fx.passes.cleanup import clean
from uniprefill_fx.passes.node_utils import expression, is_op, meta
from uniprefill_fx.passes.rewrite.alibi import alibi_bias
from uniprefill_fx.passes.rewrite.attention_op import attention_op, attention_operands


def lower_attention(gm: fx.GraphModule, attention_nodes: Sequence[AttentionNode], with_buffers: bool = False) -> int:
    """Replace every attention that can be, in place; returns how many. Node meta stays as the model's own op had it.

    `with_buffers`: also where masks are buffers, whose values the caller looks at in each call.
    """
    first: dict[fx.Node, AttentionNode] = {}  # by cache layer: who wrote it
    for attention in attention_nodes:
        if attention.cached:
            first.setdefault(attention.cached.positions, attention)
    chosen = [attention for attention in attention_nodes if _can_be(attention, with_buffers)]
    for attention in chosen:
        with gm.graph.inserting_before(attention.node):
            shares = attention.cached is not None and first[attention.cached.positions] is not attention
            new = _attention(gm.graph, attention, shares)
        new.meta = dict(attention.node.meta)
        attention.node.replace_all_uses_with(new)
    if not chosen:
        return 0
    for node in list(gm.graph.nodes):
        if is_op(node, "bind_positions"):
            node.replace_all_uses_with(node.args[0])
    clean(gm)
    return len(chosen)


def _can_be(attention: AttentionNode, with_buffers: bool) -> bool:
    """Whether an attention is understood, over keys that are at hand, with nothing to look at in each call."""
    if attention.spec is None or (attention.causal_buffers and not with_buffers):
        return False  # only a look at the values of a buffer, at each call, could say that the mask is what it was
    if not attention.layout.canonical or attention.written_output is not None:
        return False  # a library's own op knows its layout and its cache
    return attention.is_prefill if attention.cached is None else _last_tokens(attention, attention.cached)


def _last_tokens(attention: AttentionNode, cached: CachedKeys) -> bool:
    """Whether the queries are the last of the tokens seen, which is what their mask's offset must say."""
    return bool(attention.offset - (expression(cached.seen) - attention.num_queries) == 0)


def _attention(graph: fx.Graph, attention: AttentionNode, shares: bool) -> fx.Node:
    spec, cached = attention.spec, attention.cached
    assert spec is not None
    key_mask, bias = spec.key_mask, spec.bias
    if key_mask is not None and meta(key_mask).dtype != torch.bool:
        key_mask = graph.call_method("bool", (key_mask,))
    k: Any = attention.k
    v: Any = attention.v
    q_positions = k_positions = None
    if attention.alibi is not None:
        size = torch.ops.aten.sym_size.int
        tokens = cached.seen if cached else graph.call_function(size, (attention.q, 2))
        bias = alibi_bias(graph, *attention.alibi, tokens, meta(attention.q).device)
    if cached is not None:
        if shares and cached.dropped_after is not None:
            key_mask = _still_there(graph, cached.dropped_after, attention.layer, key_mask)
        k, v = _on_rows(graph, cached, (k, v))
        one = attention.num_queries == 1
        # one query sees all that is stored: no positions needed
        if not (attention.batch == 1 and one and spec.full and key_mask is None and bias is None):
            k_positions = cached.positions
            q_positions = _positions_of_queries(graph, attention, cached)
    spec = replace(spec, key_mask=key_mask, bias=bias)
    operands = attention_operands(graph, attention, (attention.q, k, v))
    return attention_op(graph, attention, operands, (q_positions, k_positions, None), spec)


def _positions_of_queries(graph: fx.Graph, attention: AttentionNode, cached: CachedKeys) -> fx.Node:
    """(1, queries): the last of the tokens seen."""
    one = attention.num_queries == 1
    queries = 1 if one else graph.call_function(torch.ops.aten.sym_size.int, (attention.q, 2))
    if isinstance(cached.seen, int) and isinstance(queries, int):
        first: Any = cached.seen - queries
    else:
        first = graph.call_function(operator.sub, (cached.seen, queries))
    device = meta(attention.q).device
    positions = graph.call_function(torch.arange, (first, cached.seen), {"device": device})
    return graph.call_method("unsqueeze", (positions, 0))


def _still_there(graph: fx.Graph, dropped_after: fx.Node, layer: int, key_mask: Any) -> fx.Node:
    """(batch, seen) bool: of the tokens in an earlier layer's cache, those that enter this layer too."""
    there = graph.call_function(operator.ge, (dropped_after, layer))
    if key_mask is None:
        return there
    seen = graph.call_function(torch.ops.aten.sym_size.int, (dropped_after, 1))
    columns = graph.call_function(torch.arange, (seen,), {"device": meta(dropped_after).device})
    return graph.call_function(operator.and_, (there, graph.call_method("index_select", (key_mask, 1, columns))))


def _on_rows(graph: fx.Graph, cached: CachedKeys, ends: Sequence[fx.Node]) -> list[fx.Node]:
    """Keys and values of the rows that a cache layer holds: what computes them is changed in place."""
    rows: dict[fx.Node, Any] = {view: view.args[0] for view in cached.roots}
    region = cached.region
    if region:
        with graph.inserting_before(region[0]):
            count = graph.call_function(torch.ops.aten.sym_size.int, (rows[cached.roots[0]], 2))

        def changed(argument: fx.Node) -> Any:
            value = meta(argument)
            if isinstance(value, torch.SymInt) and expression(value) == expression(cached.seen):
                return count
            return rows.get(argument, argument)

        for node in region:
            node.args = fx.node.map_arg(node.args, changed)
            node.kwargs = fx.node.map_arg(node.kwargs, changed)
    return [rows.get(end, end) for end in ends]
