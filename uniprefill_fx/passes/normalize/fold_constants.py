"""Write numbers that tracing knows into the graph as numbers.

With `dynamic=True` Dynamo makes inputs of all Python numbers. Before::

    scale = l_self_..._scaling.item()      # a SymFloat, from a f64[] placeholder
    attn = scaled_dot_product_attention(q, k, v, scale=scale)

After::

    attn = scaled_dot_product_attention(q, k, v, scale=0.25)

Floats are the model's constants (scales, epsilons), so each is guarded to stay what it was; sizes are replaced only
where tracing has fixed them already.
"""

from __future__ import annotations

import torch
from torch import fx

from uniprefill_fx.passes.node_utils import expression, meta
from uniprefill_fx.torch_internals import traced_number


def fold_constants(gm: fx.GraphModule) -> int:
    """Replace every float and every fixed size by its value, in place; returns how many nodes were."""
    replaced = 0
    for node in list(gm.graph.nodes):
        value = meta(node)
        if isinstance(value, torch.SymFloat):
            constant: float | int = traced_number(value)
        elif isinstance(value, torch.SymInt) and expression(value).is_Integer:
            constant = int(expression(value))
        else:
            continue
        if node.users:
            _replace(node, constant)
            replaced += 1
        if node.op != "placeholder":
            gm.graph.erase_node(node)
    if replaced:
        gm.recompile()
    return replaced


def _replace(node: fx.Node, constant: float | int) -> None:
    for user in list(node.users):

        def written(argument: fx.Node) -> fx.Node | float | int:
            return constant if argument is node else argument

        user.args = fx.node.map_arg(user.args, written)
        user.kwargs = fx.node.map_arg(user.kwargs, written)
