"""Make in-place operations that nobody else sees into ordinary ones.

`mlp += attn` writes into a value of all tokens what may be computed on kept ones; as long as only its result is read
afterwards, `mlp + attn` is the same. Before::

    out = operator.iadd(mlp, attn)
    scores.masked_fill_(hidden, -inf)           # and `scores` is read below
    buffer[:] = o_proj(attn)                    # and `buffer` is

After::

    out = operator.add(mlp, attn)
    scores_1 = scores.masked_fill(hidden, -inf)      # and `scores_1` is
    buffer_1 = o_proj(attn).clone()                  # and `buffer_1` is
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from uniprefill_fx.passes.dataflow import aliases
from uniprefill_fx.passes.node_utils import expression, meta, shape

PLAIN: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    **{"masked_fill_": "masked_fill", "add_": "add", "sub_": "sub", "mul_": "mul", "div_": "div"},  # methods
}


def functionalize(gm: fx.GraphModule) -> int:
    """Replace in-place operations whose target has no other name, in place; returns how many."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    replaced = 0
    for node in list(gm.graph.nodes):
        fills = _fills(node)
        later = _read_later(node, order) if fills or _is_plain(node) else None
        if later is None:
            continue
        if fills:
            result = _copy_instead(gm.graph, node, order)
        else:
            result, node.target = node, PLAIN[node.target]
        for user in later:
            user.replace_input_with(node.args[0], result)
        if fills:
            gm.graph.erase_node(node)
        replaced += 1
    if replaced:
        gm.recompile()
    return replaced


def _is_plain(node: fx.Node) -> bool:
    """Whether there is a plain operation that gives what a node writes."""
    return node.op in ("call_function", "call_method") and node.target in PLAIN and _keeps_type(node)


def _fills(node: fx.Node) -> bool:
    """Whether a node stores a tensor into the whole of another one of its shape and type: `target[:] = value`."""
    if node.op != "call_function" or node.target is not operator.setitem:
        return False
    into, index, source = node.args
    if not (isinstance(into, fx.Node) and isinstance(source, fx.Node)):
        return False
    target, value = meta(into), meta(source)
    if not (isinstance(target, torch.Tensor) and isinstance(value, torch.Tensor) and target.is_contiguous()):
        return False
    parts = index if isinstance(index, tuple) else (index,)
    if parts and parts[-1] is Ellipsis:
        parts = parts[:-1]
    same = shape(into) == shape(source) and (target.dtype, target.device) == (value.dtype, value.device)
    return same and len(parts) <= target.ndim and all(map(_is_whole, parts, target.shape))


def _is_whole(part: Any, size: Any) -> bool:
    """Whether an index of one dimension takes all of it."""
    if not isinstance(part, slice) or part.start not in (None, 0) or part.step not in (None, 1):
        return False
    stop = meta(part.stop) if isinstance(part.stop, fx.Node) else part.stop
    return stop is None or (isinstance(stop, int | torch.SymInt) and expression(stop) == expression(size))


def _copy_instead(graph: fx.Graph, node: fx.Node, order: dict[fx.Node, int]) -> fx.Node:
    """A copy of what fills a tensor, before the node that does: it, or the tensor, may be written once more."""
    target, _, value = node.args
    assert isinstance(target, fx.Node)
    with graph.inserting_before(node):
        copy = graph.call_method("clone", (value,), {"memory_format": torch.contiguous_format})
    copy.meta, order[copy] = dict(target.meta), order[node]
    return copy


def _keeps_type(node: fx.Node) -> bool:
    """Whether the plain operation gives the target's dtype and shape, as the in-place one does."""
    target = meta(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    if not isinstance(target, torch.Tensor):
        return False
    if node.target == "masked_fill_":
        mask = node.args[1] if len(node.args) == 3 else None
        return isinstance(mask, fx.Node) and len(shape(mask) or ()) <= target.ndim
    if len(node.args) != 2 or node.kwargs or not target.is_floating_point():
        return False
    other = meta(node.args[1]) if isinstance(node.args[1], fx.Node) else node.args[1]
    same = isinstance(other, torch.Tensor) and other.dtype == target.dtype and other.ndim <= target.ndim
    return same or isinstance(other, int | float)


def _read_later(node: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node] | None:
    """Who reads the target after the write; None if it had another name before, by which it is read then.

    Other names are views, and the results of earlier writes that stay in place. A name made after the write is made by
    one of those who read the target.
    """
    target = node.args[0]
    if not isinstance(target, fx.Node):
        return None
    for alias in aliases(target, without=node):
        earlier = alias is not target and order[alias] < order[node]
        if alias.op in ("placeholder", "get_attr") or (earlier and any(order[n] > order[node] for n in alias.users)):
            return None
    return [user for user in target.users if order[user] > order[node]]
