"""Replace attention that is understood by `uniprefill.attention`, in graphs that drop nothing.

Decode steps and later chunks read cache layers that may be compact; the op attends to the rows that they hold, by
their original indices. Dense prefill gains that no mask is formed. Before::

    keys = uniprefill.logical_view(stored_k, slots, seen, expected)    # (B, kv_heads, seen, D)
    attn = scaled_dot_product_attention(q, repeat(keys), repeat(values), attn_mask=mask)

After::

    attn = uniprefill.attention(q, stored_k, stored_v, arange(seen - queries, seen), slots, ...)

Where keys are computed from what is stored (`passes.expansion`), that is done to the stored rows.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from uniprefill_fx.passes.analyze.attention_nodes import Site, Stored
from uniprefill_fx.passes.node_utils import autocast, expression, is_op, meta
from uniprefill_fx.passes.rewrite.alibi import alibi_bias
from uniprefill_fx.passes.rewrite.drop_tokens import clean
from uniprefill_fx.timing import timed

ops = torch.ops.uniprefill


@timed("lower attention")
def lower_attention(gm: fx.GraphModule, sites: Sequence[Site]) -> int:
    """Replace every site that can be, in place; returns how many. Node meta stays as the model's own op had it."""
    replaced = 0
    first: dict[fx.Node, Site] = {}  # by cache layer: who wrote it
    for site in sites:
        if site.stored:
            first.setdefault(site.stored.slots, site)
    for site in sites:
        if site.mask is None or (site.stored and not _last_tokens(site)) or not (site.stored or site.fresh):
            continue
        if site.mask.triangles:
            continue  # only a look at the values, at each call, could say that the mask is what it was
        with gm.graph.inserting_before(site.node):
            shares = site.stored is not None and first[site.stored.slots] is not site
            new = _attention(gm.graph, site, shares)
        new.meta = dict(site.node.meta)
        site.node.replace_all_uses_with(new)
        replaced += 1
    if not replaced:
        return 0
    for node in list(gm.graph.nodes):
        if is_op(node, "bind_slots"):
            node.replace_all_uses_with(node.args[0])
    clean(gm)
    return replaced


def _last_tokens(site: Site) -> bool:
    """Whether the queries are the last of the tokens seen, which is what their mask's offset must say."""
    assert site.mask is not None and site.stored is not None
    seen, queries = expression(site.stored.seen), expression(meta(site.q).shape[2])
    return bool(site.mask.offset - (seen - queries) == 0)


def _attention(graph: fx.Graph, site: Site, shares: bool) -> fx.Node:
    assert site.mask is not None
    key_mask = site.mask.key_mask
    if key_mask is not None and meta(key_mask).dtype != torch.bool:
        key_mask = graph.call_method("bool", (key_mask,))
    k: Any = site.k
    v: Any = site.v
    q_slots = k_slots = None
    bias: Any = site.bias
    if site.mask.alibi is not None:
        tokens = site.stored.seen if site.stored else graph.call_function(torch.ops.aten.sym_size.int, (site.q, 2))
        bias = alibi_bias(graph, *site.mask.alibi, tokens, meta(site.q).device)
    if site.stored is not None:
        stored = site.stored
        if shares and stored.departed is not None:
            key_mask = _still_there(graph, stored.departed, site.layer, key_mask)
        k, v = _on_rows(graph, stored, (k, v))
        batch, one = expression(meta(site.q).shape[0]), expression(meta(site.q).shape[2]) == 1
        if not (
            batch == 1 and one and site.mask.full and key_mask is None and bias is None
        ):  # one query sees all that is stored: no slots needed
            k_slots = stored.slots
            queries = 1 if one else graph.call_function(torch.ops.aten.sym_size.int, (site.q, 2))
            if isinstance(stored.seen, int) and isinstance(queries, int):
                first: Any = stored.seen - queries
            else:
                first = graph.call_function(operator.sub, (stored.seen, queries))
            device = meta(site.q).device
            q_slots = graph.call_function(torch.arange, (first, stored.seen), {"device": device})
            q_slots = graph.call_method("unsqueeze", (q_slots, 0))
    q, k, v = autocast(graph, (site.q, k, v), meta(site.q).device)
    return graph.call_function(
        ops.attention.default,
        (
            q,
            k,
            v,
            q_slots,
            k_slots,
            None,
            key_mask,
            site.scale,
            site.mask.window,
            site.mask.chunk,
            site.softcap,
            site.sinks,
            bias,
            site.mask.segments,
            site.mask.chunk_start,
        ),
    )


def _still_there(graph: fx.Graph, departed: fx.Node, layer: int, key_mask: Any) -> fx.Node:
    """(batch, seen) bool: of the tokens in an earlier layer's cache, those that enter this layer too."""
    there = graph.call_function(operator.ge, (departed, layer))
    if key_mask is None:
        return there
    seen = graph.call_function(torch.ops.aten.sym_size.int, (departed, 1))
    columns = graph.call_function(torch.arange, (seen,), {"device": meta(departed).device})
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
