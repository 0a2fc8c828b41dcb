"""Have the sums of row-parallel layers read from the collective that makes them.

Such layers sum in place. Before::

    part = linear(x, w)                                    # (1, N, hidden), this rank's part of a sum
    sum = _c10d_functional.all_reduce(part, "sum", "0")
    part.copy_(_c10d_functional.wait_tensor(sum))          # and `part` is read below

After::

    sum = _c10d_functional.wait_tensor(_c10d_functional.all_reduce(part, "sum", "0"))   # and `sum` is
"""

from __future__ import annotations

from torch import fx

from uniprefill_fx.passes.dataflow import aliases
from uniprefill_fx.passes.distributed import collective_name
from uniprefill_fx.passes.node_utils import meta, shape


def plain_collectives(gm: fx.GraphModule) -> int:
    """Remove the copies, in place; returns how many. Where the target has another name too, the copy stays."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    replaced = sum([_read_sum(node, order) for node in list(gm.graph.nodes)])
    if replaced:
        gm.recompile()
    return replaced


def _read_sum(copy: fx.Node, order: dict[fx.Node, int]) -> bool:
    if copy.op != "call_method" or copy.target != "copy_" or len(copy.args) != 2 or copy.kwargs:
        return False
    target, source = copy.args
    if not isinstance(target, fx.Node) or not isinstance(source, fx.Node):
        return False
    same = shape(target) == shape(source) and meta(target).dtype == meta(source).dtype
    if collective_name(source) != "wait_tensor" or list(source.users) != [copy] or not same:
        return False
    for alias in aliases(target, without=copy):
        read = any(order[user] > order[copy] for user in alias.users)
        if alias.op == "placeholder" or (read and alias is not target and order[alias] < order[copy]):
            return False
    for user in list(target.users):
        if order[user] > order[copy]:
            user.replace_input_with(target, source)
    copy.replace_all_uses_with(source)
    copy.graph.erase_node(copy)
    return True
