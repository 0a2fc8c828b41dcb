"""Batches of prompts: which axis holds the requests, and what must not run over the padding between them.

Requests keep different numbers of rows, so behind a drop a batch is left-padded. That is harmless to whatever computes
row by row, and attention skips padding. What runs along the token axis gets zeros there: convolutions then see what
they see before the first token, and linear recurrences keep their zero state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy
from torch import fx

from uniprefill_fx.errors import Category, refuse
from uniprefill_fx.passes.attention_node import AttentionNode, interiors
from uniprefill_fx.passes.node_utils import index_of, is_op, meta, name_of, shape, token_dims


def request_dim(node: fx.Node, token_dim: int, batch: sympy.Expr) -> int | None:
    """The axis of the requests in a value with a token axis; None when there is one request.

    Its size is the batch, or 1 for values that all requests share (positions, rotary tables).

    Raises:
        RefusalError: there is no such axis.
    """
    if batch == 1:
        return None
    sizes = shape(node) or ()
    found = [d for d, size in enumerate(sizes) if size == batch]
    beside = 1 if token_dim == 0 else 0  # (N, B, d), or (B, ..., N, d)
    if not found and len(sizes) > 1 and sizes[beside] == 1:
        found = [beside]
    if len(found) != 1:
        raise refuse(
            Category.BATCH,
            f"`{node.name}` of shape {tuple(meta(node).shape)} has no axis of one row for each of {batch} prompts",
            "run such a model's prompts one by one",
        )
    return found[0]


def mixed_along(
    graph: fx.Graph,
    attention_nodes: Sequence[AttentionNode],
    level: Mapping[fx.Node, int],
    tokens: sympy.Symbol,
    batch: sympy.Expr,
) -> frozenset[fx.Node]:
    """The values of kept rows that some operation, other than attention, reads across rows: their padding is cleared.

    Raises:
        RefusalError: the rows of such a value cannot be told by request.
    """
    if batch == 1:
        return frozenset()
    found = set()
    attention = interiors(attention_nodes)
    for node in graph.nodes:
        for read in node.all_input_nodes if level[node] and node not in attention else ():
            dims = token_dims(read, tokens) if level[read] else ()
            # Rows beyond the tokens (a convolution's padding) are cut off again, by a slice that keeps rows in place.
            if len(dims) == 1 and (shape(read) or ())[dims[0]] == tokens and _reads_across(node, read, tokens):
                request_dim(read, dims[0], batch)
                found.add(read)
    return frozenset(found)


def _reads_across(node: fx.Node, read: fx.Node, tokens: sympy.Symbol) -> bool:
    name = name_of(node)
    if is_op(node, "mixer") or name.startswith("conv") or name == "pad":
        return True
    if name not in ("getitem", "narrow") or not token_dims(node, tokens):
        return False
    if any(isinstance(item, fx.Node) for item in index_of(node)):
        return False  # rows looked up by index
    before, after = ({(shape(n) or ())[d] for d in token_dims(n, tokens)} for n in (read, node))
    return before != after  # x[:, :-1], for a shift by one token
