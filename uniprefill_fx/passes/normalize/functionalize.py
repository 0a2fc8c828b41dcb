"""Make in-place operations that nobody else sees into ordinary ones.

`mlp += attn` writes into a value of all tokens what may be computed on kept ones; as long as only its result is read
afterwards, `mlp + attn` is the same. Before::

    out = operator.iadd(mlp, attn)
    scores.masked_fill_(hidden, -inf)           # and `scores` is read below

After::

    out = operator.add(mlp, attn)
    scores_1 = scores.masked_fill(hidden, -inf)      # and `scores_1` is
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from uniprefill_fx.passes.dataflow import aliases
from uniprefill_fx.passes.node_utils import meta, shape

PLAIN = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
METHODS = {"masked_fill_": "masked_fill", "add_": "add", "sub_": "sub", "mul_": "mul", "div_": "div"}


def functionalize(gm: fx.GraphModule) -> int:
    """Replace in-place arithmetic whose target has no other name, in place; returns how many."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    replaced = 0
    for node in gm.graph.nodes:
        methods = node.op == "call_method" and node.target in METHODS
        if not (methods or (node.op == "call_function" and node.target in PLAIN)) or not _keeps_type(node):
            continue
        later = _read_later(node, order)
        if later is None:
            continue
        for user in later:
            user.replace_input_with(node.args[0], node)
        node.target = METHODS[node.target] if methods else PLAIN[node.target]
        replaced += 1
    if replaced:
        gm.recompile()
    return replaced


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
    """Who reads the target after the write; None if it has another name that is read then, or was there before.

    Other names are views, and the results of earlier writes that stay in place.
    """
    target = node.args[0]
    if not isinstance(target, fx.Node):
        return None
    later: list[fx.Node] = []
    for alias in aliases(target, without=node):
        readers = [user for user in alias.users if user is not node and order[user] > order[node]]
        if alias.op in ("placeholder", "get_attr") or (readers and alias is not target):
            return None
        later += readers
    return later
