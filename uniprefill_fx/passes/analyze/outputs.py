"""What becomes of a graph's outputs when tokens are dropped, and what of the head_region behind the residual stream."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import sympy
import torch
from torch import fx

from uniprefill_fx.config import PrefillConfig
from uniprefill_fx.errors import Category, refuse
from uniprefill_fx.passes.analyze.latent_kv import latent_kv
from uniprefill_fx.passes.attention_node import AttentionNode
from uniprefill_fx.passes.dataflow import Ancestry
from uniprefill_fx.passes.node_utils import arguments, expression, index_of, is_op, meta, name_of, shape, token_dims
from uniprefill_fx.torch_internals import traced_size


class Exposure(StrEnum):
    """Which rows the outputs behind the residual stream show."""

    NONE = "last rows"
    ALL = "all rows"


def head_region_of(graph: fx.Graph, end: fx.Node, ancestry: Ancestry) -> frozenset[fx.Node]:
    """The nodes behind the last value of the residual stream: final norm, slice, head."""
    return frozenset(n for n in graph.nodes if n is not end and n.op != "output" and ancestry.depends(n, end))


def exposure_of(
    graph: fx.Graph, head_region: frozenset[fx.Node], end: fx.Node, tokens: sympy.Symbol, config: PrefillConfig
) -> Exposure:
    """Whether any output behind the end of the stream shows rows that may be dropped.

    Raises:
        RefusalError: an output reduces over all tokens (a loss), or all logits are asked for with
            `full_logits="dense"`.
    """
    row_dim: dict[fx.Node, int | None] = {end: token_dims(end, tokens)[0]}  # of nodes that show such rows
    picked: dict[fx.Node, fx.Node] = {}  # by node: what picked rows by an index that is data
    for node in graph.nodes:
        if node in head_region and not _last_rows(node, tokens, config.last_n):
            read = [n for n in node.all_input_nodes if n in row_dim]
            if read and _last_rows(node, tokens, sys.maxsize):
                raise refuse(
                    Category.OUTPUT,
                    f"more of the last rows are asked for than always stay (last_n={config.last_n})",
                    "raise last_n, or ask for fewer (logits_to_keep, or tokens that a draft adds to the prompt)",
                )
            if read:
                row_dim[node] = _row_dim(node, read[0], row_dim[read[0]], tokens)
                first = next((picked[n] for n in read if n in picked), node if _picks(node, read[0]) else None)
                if row_dim[node] is None and first is not None:
                    picked[node] = first
    shown = [n for n in arguments(graph.output_node()) if isinstance(n, fx.Node) and n in row_dim]
    for node in shown:
        if row_dim[node] is None and node in picked:
            raise refuse(
                Category.OUTPUT,
                f"an output of shape {_shape(node)} whose rows are picked by an index tensor "
                f"(`{name_of(picked[node])}`): which tokens they are is known at run time only",
                "ask for the last rows by a number (logits_to_keep=1); of a classifier that looks for the last token, "
                "set config.pad_token_id to None and run prompts one by one, without padding",
            )
        if row_dim[node] is None:
            raise refuse(
                Category.OUTPUT,
                f"an output of shape {_shape(node)} that is computed from all tokens (a loss, pooling?)",
                "it would be approximate: such a call stays dense; leave out labels to have tokens dropped",
            )
    if shown and config.full_logits == "dense":
        raise refuse(
            Category.FULL_LOGITS,
            "logits or hidden states of all positions are asked for, with full_logits='dense'",
            "pass logits_to_keep=1, or full_logits='frozen' to have dropped rows come from their frozen states",
        )
    return Exposure.ALL if shown else Exposure.NONE


def _picks(node: fx.Node, read: fx.Node) -> bool:
    """Whether a node looks up rows of a value by a tensor of numbers."""
    indices = [n for n in node.all_input_nodes if n is not read]
    integers = any(
        isinstance(meta(n), torch.Tensor) and not meta(n).is_floating_point() and meta(n).ndim for n in indices
    )
    return name_of(node) in ("getitem", "gather", "index_select", "take_along_dim") and integers


def _row_dim(node: fx.Node, read: fx.Node, dim: int | None, tokens: sympy.Symbol) -> int | None:
    """The dimension of `node` that still holds one row a token, for some of the tokens; None if there is none."""
    dims = token_dims(node, tokens)
    if dims:
        return dims[0] if len(dims) == 1 else None
    before, after = shape(read), shape(node)
    if dim is None or before is None or after is None or len(before) != len(after):
        return None
    if name_of(node) == "getitem":  # a slice of the rows, of a length that is a number
        return dim if all(isinstance(i, slice) for i in index_of(node)) else None
    return dim if before[dim] == after[dim] else None


def restored_outputs(
    graph: fx.Graph,
    attention_nodes: Sequence[AttentionNode],
    level: dict[fx.Node, int],
    head_region: frozenset[fx.Node],
    end: fx.Node,
    tokens: sympy.Symbol,
    config: PrefillConfig,
) -> frozenset[fx.Node]:
    """The outputs that are restored: kept rows over frozen states. All others leave the graph as they are.

    Raises:
        RefusalError: an output of kept rows, or the head_region, needs values that dropped tokens do not have.
    """
    written = {node for attention in attention_nodes for node in (attention.k, attention.v)}
    positioned = {
        arg for n in graph.nodes if is_op(n, "bind_positions") for arg in n.args[1:] if isinstance(arg, fx.Node)
    }
    for node in head_region:
        for read in node.all_input_nodes:
            if level[read] and read is not end and token_dims(read, tokens):
                raise refuse(Category.OUTPUT, f"the head reads `{read.name}`, a value inside the layers", "stays dense")
    _check_cache(graph, attention_nodes, level, tokens, config)
    restored = set()
    for node in (a for a in arguments(graph.output_node()) if isinstance(a, fx.Node)):
        if not level[node] or not token_dims(node, tokens) or _taken_from(node, positioned):
            continue  # what the cache layers hold stays compact
        if _taken_from(node, written):
            raise refuse(
                Category.CACHE,
                "keys and values go to a cache that cannot say which tokens it holds",
                "hand over an empty DynamicCache of transformers (not offloaded), or use_cache=False",
            )
        if shape(node) != shape(end):
            raise refuse(
                Category.OUTPUT,
                f"an output of shape {_shape(node)} indexed by token, neither the residual stream nor keys or values",
                "dropped tokens have no such value: do not ask for it (attentions, router logits, a quantised cache)",
            )
        restored.add(node)
    return frozenset(restored)


def _check_cache(
    graph: fx.Graph,
    attention_nodes: Sequence[AttentionNode],
    level: dict[fx.Node, int],
    tokens: sympy.Symbol,
    config: PrefillConfig,
) -> None:
    """Refuse compact caches that a decode step could not read: it computes keys from the rows of one layer.

    A later layer that reads those rows too attends to the tokens that entered it, which `dropped_after_layer` tell.
    """
    layers = [node for node in graph.nodes if is_op(node, "bind_positions")]
    noted = {node.args[0] for node in graph.nodes if is_op(node, "dropped_after_layer")}
    of_row = {row: layer for layer in layers for row in layer.args[1:3]}
    unread = {layer for layer in layers if level[layer]}
    for attention in attention_nodes if layers else ():
        if not level[attention.node]:
            continue
        roots = latent_kv((attention.k, attention.v), of_row.__contains__, tokens, tokens).roots
        read = {of_row[root] for root in roots}
        shared = any(level[layer] < level[attention.node] for layer in read)
        if len(read) != 1 or (shared and any(layer.args[0] not in noted for layer in read)):
            raise refuse(
                Category.CACHE,
                "keys of several cache layers, or of one that cannot say which tokens later layers dropped",
                "decode could not read them: pass no cache, DynamicCache(config=model.config), or use_cache=False",
                attention.layer,
            )
        own = not shared and set(roots) == {attention.k, attention.v}
        if config.window == "index" and not own and attention.spec is not None and not attention.full:
            raise refuse(
                Category.CACHE,
                "window='index' over keys that are computed from a cache, or shared",
                "use window='position'",
                attention.layer,
            )
        unread -= read
    if unread:
        raise refuse(Category.CACHE, "a cache layer that no attention reads", "such a call stays dense")


def _taken_from(node: fx.Node, rows: set[fx.Node]) -> bool:
    """Whether an output is one of the values in `rows`, some of their rows, or the positions that belong to them."""
    while node not in rows and not is_op(node, "bind_positions"):
        if name_of(node) not in ("getitem", "contiguous", "clone") or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]
    return True


def rows_shown(
    graph: fx.Graph, head_region: frozenset[fx.Node], tokens: sympy.Symbol, last_n: int
) -> tuple[int, fx.Node | None]:
    """How many of the last rows the head_region takes, at most `last_n`: so many must stay.

    A node is the input that holds the number, where it is no constant (`logits_to_keep`, after two values of it).
    """
    taken = [node for node in head_region if _last_rows(node, tokens, last_n)]
    at = {node: index_of(node)[token_dims(_source(node), tokens)[0]] for node in taken}
    starts = [i.start for i in at.values() if isinstance(i, slice) and isinstance(i.start, fx.Node)]
    fixed = [node for node in taken if not (isinstance(at[node], slice) and isinstance(at[node].start, fx.Node))]
    count = next((k for k in range(last_n + 1) if all(_last_rows(node, tokens, k) for node in fixed)), last_n)
    if not starts:
        return count, None
    inputs = [n for n in graph.nodes if n.op == "placeholder" and isinstance(meta(n), torch.SymInt)]
    same = [n for n in inputs if all(expression(n) == -expression(start) for start in starts)]
    return (count, same[0]) if same and not count else (last_n, None)


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _last_rows(node: fx.Node, tokens: sympy.Symbol, last_n: int) -> bool:
    """Whether a node takes only rows that always stay, x[:, -k:] or x[:, [-k]], k <= last_n, along the token axis."""
    if name_of(node) != "getitem" or not isinstance(node.args[0], fx.Node):
        return False
    dims = token_dims(node.args[0], tokens)
    index = index_of(node)
    if len(dims) != 1 or Ellipsis in index or None in index or len(index) <= dims[0]:
        return False
    taken = index[dims[0]]
    if isinstance(taken, list | tuple):
        return bool(taken) and all(isinstance(i, int) and -last_n <= i < 0 for i in taken)
    start = taken.start if isinstance(taken, slice) else taken
    if isinstance(start, fx.Node) and isinstance(meta(start), torch.SymInt) and isinstance(taken, slice):
        size = meta(start)
        # The graph is guarded to hold for such numbers only, and traced again for others.
        if not -last_n <= traced_size(size) < 0 or not (size < 0 and size >= -last_n):
            return False
    elif not isinstance(start, int) or not -last_n <= start < 0:
        return False
    return not isinstance(taken, slice) or (taken.stop is None and taken.step in (None, 1))


def _shape(node: fx.Node) -> tuple[Any, ...]:
    return tuple(getattr(meta(node), "shape", ()))
