"""Make augmented assignments that nobody else sees into ordinary operations.

`mlp += attn` writes into a value of all tokens what may be computed on kept ones; as long as only its result is read
afterwards, `mlp + attn` is the same. Before::

    out = operator.iadd(mlp, attn)

After::

    out = operator.add(mlp, attn)
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from uniprefill_fx.passes.values import aliases, meta, shape

PLAIN = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


def remove_augmented_assignments(gm: fx.GraphModule) -> int:
    """Replace in-place arithmetic whose target is not read again, in place; returns how many."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    replaced = 0
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target not in PLAIN or not _alone(node, order):
            continue
        target, other = node.args
        # The in-place operation keeps the target's dtype and shape; the plain one must not promote or broadcast it.
        same = isinstance(other, int | float) or (
            isinstance(other, fx.Node)
            and isinstance(meta(other), torch.Tensor)
            and meta(other).dtype == meta(target).dtype
            and len(shape(other) or ()) <= len(shape(target) or ())
        )
        if same and meta(target).is_floating_point():
            node.target = PLAIN[node.target]
            replaced += 1
    if replaced:
        gm.recompile()
    return replaced


def _alone(node: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether nothing but the result is read after the write: not the target, not what shares its storage."""
    target = node.args[0]
    if not isinstance(target, fx.Node) or not isinstance(meta(target), torch.Tensor) or target.op == "placeholder":
        return False
    for alias in aliases(target, through_writes=False):
        if alias.op == "placeholder" or any(user is not node and order[user] > order[node] for user in alias.users):
            return False
    return True
