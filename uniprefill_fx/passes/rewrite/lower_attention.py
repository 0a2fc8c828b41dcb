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
from typing import Any

import torch
from torch import fx

from uniprefill_fx.passes.analyze.attention_nodes import AttentionNode, Stored
from uniprefill_fx.passes.node_utils import autocast, expression, is_op, meta
from uniprefill_fx.passes.rewrite.alibi import alibi_bias
from uniprefill_fx.passes.rewrite.drop_tokens import clean
from uniprefill_fx.timing import timed

ops = torch.ops.uniprefill


@timed("lower attention")
def lower_attention(gm: fx.GraphModule, attention_nodes: Sequence[AttentionNode]) -> int:
    """Replace every attention that can be, in place; returns how many. Node meta stays as the model's own op had it."""
    replaced = 0
    first: dict[fx.Node, AttentionNode] = {}  # by cache layer: who wrote it
    for attention in attention_nodes:
        if attention.stored:
            first.setdefault(attention.stored.positions, attention)
    for attention in attention_nodes:
        if (
            attention.mask is None
            or (attention.stored and not _last_tokens(attention))
            or not (attention.stored or attention.is_prefill)
        ):
            continue
        if attention.mask.causal_buffers:
            continue  # only a look at the values, at each call, could say that the mask is what it was
        with gm.graph.inserting_before(attention.node):
            shares = attention.stored is not None and first[attention.stored.positions] is not attention
            new = _attention(gm.graph, attention, shares)
        new.meta = dict(attention.node.meta)
        attention.node.replace_all_uses_with(new)
        replaced += 1
    if not replaced:
        return 0
    for node in list(gm.graph.nodes):
        if is_op(node, "bind_positions"):
            node.replace_all_uses_with(node.args[0])
    clean(gm)
    return replaced


def _last_tokens(attention: AttentionNode) -> bool:
    """Whether the queries are the last of the tokens seen, which is what their mask's offset must say."""
    assert attention.mask is not None and attention.stored is not None
    seen, queries = expression(attention.stored.seen), expression(meta(attention.q).shape[2])
    return bool(attention.mask.offset - (seen - queries) == 0)


def _attention(graph: fx.Graph, attention: AttentionNode, shares: bool) -> fx.Node:
    assert attention.mask is not None
    key_mask = attention.mask.key_mask
    if key_mask is not None and meta(key_mask).dtype != torch.bool:
        key_mask = graph.call_method("bool", (key_mask,))
    k: Any = attention.k
    v: Any = attention.v
    q_positions = k_positions = None
    bias: Any = attention.bias
    if attention.mask.alibi is not None:
        tokens = (
            attention.stored.seen
            if attention.stored
            else graph.call_function(torch.ops.aten.sym_size.int, (attention.q, 2))
        )
        bias = alibi_bias(graph, *attention.mask.alibi, tokens, meta(attention.q).device)
    if attention.stored is not None:
        stored = attention.stored
        if shares and stored.dropped_after is not None:
            key_mask = _still_there(graph, stored.dropped_after, attention.layer, key_mask)
        k, v = _on_rows(graph, stored, (k, v))
        batch, one = expression(meta(attention.q).shape[0]), expression(meta(attention.q).shape[2]) == 1
        if not (
            batch == 1 and one and attention.mask.full and key_mask is None and bias is None
        ):  # one query sees all that is stored: no positions needed
            k_positions = stored.positions
            queries = 1 if one else graph.call_function(torch.ops.aten.sym_size.int, (attention.q, 2))
            if isinstance(stored.seen, int) and isinstance(queries, int):
                first: Any = stored.seen - queries
            else:
                first = graph.call_function(operator.sub, (stored.seen, queries))
            device = meta(attention.q).device
            q_positions = graph.call_function(torch.arange, (first, stored.seen), {"device": device})
            q_positions = graph.call_method("unsqueeze", (q_positions, 0))
    q, k, v = autocast(graph, (attention.q, k, v), meta(attention.q).device)
    return graph.call_function(
        ops.attention.default,
        (
            q,
            k,
            v,
            q_positions,
            k_positions,
            None,
            key_mask,
            attention.scale,
            attention.mask.window,
            attention.mask.chunk,
            attention.softcap,
            attention.sinks,
            bias,
            attention.mask.sequence_ids,
            attention.mask.chunk_start,
        ),
    )


def _still_there(graph: fx.Graph, dropped_after: fx.Node, layer: int, key_mask: Any) -> fx.Node:
    """(batch, seen) bool: of the tokens in an earlier layer's cache, those that enter this layer too."""
    there = graph.call_function(operator.ge, (dropped_after, layer))
    if key_mask is None:
        return there
    seen = graph.call_function(torch.ops.aten.sym_size.int, (dropped_after, 1))
    columns = graph.call_function(torch.arange, (seen,), {"device": meta(dropped_after).device})
    return graph.call_function(operator.and_, (there, graph.call_method("index_select", (key_mask, 1, columns))))


def _on_rows(graph: fx.Graph, stored: Stored, ends: Sequence[fx.Node]) -> list[fx.Node]:
    """Keys and values of the rows that a cache layer holds: what computes them is changed in place."""
    rows: dict[fx.Node, Any] = {view: view.args[0] for view in stored.expansion.roots}
    region = stored.expansion.region
    if region:
        with graph.inserting_before(region[0]):
            count = graph.call_function(torch.ops.aten.sym_size.int, (rows[stored.expansion.roots[0]], 2))

        def changed(argument: fx.Node) -> Any:
            value = meta(argument)
            if isinstance(value, torch.SymInt) and expression(value) == expression(stored.seen):
                return count
            return rows.get(argument, argument)

        for node in region:
            node.args = fx.node.map_arg(node.args, changed)
            node.kwargs = fx.node.map_arg(node.kwargs, changed)
    return [rows.get(end, end) for end in ends]
