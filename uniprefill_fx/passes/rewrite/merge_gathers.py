"""Gather a value once for all layers that read it, so that the layers between drops become equal graphs.

Each layer of a model makes its own view of the rotary tables, so each gathers them anew, and from the whole prompt
through every drop before it. Before, between the second drop and the third, and between the third and the fourth::

    cos_2 = compact(compact(cos.unsqueeze(1), kept_1, 2), kept_2, 2)
    cos_3 = compact(compact(compact(cos.unsqueeze(1), kept_1, 2), kept_2, 2), kept_3, 2)

After, with cos_1 = compact(cos.unsqueeze(1), kept_1, 2) in the layers before::

    cos_2 = compact(cos_1, kept_2, 2)
    cos_3 = compact(cos_2, kept_3, 2)
"""

from __future__ import annotations

from typing import Any

from torch import fx

from uniprefill_fx.passes.dataflow import aliases, written_nodes
from uniprefill_fx.passes.node_utils import name_of

MERGED = frozenset(("unsqueeze", "compact"))


def merge_gathers(gm: fx.GraphModule) -> int:
    """Replace gathers, and the views they are of, by earlier ones of the same; returns how many. Nothing that is
    written to is touched."""
    graph = gm.graph
    written = {alias for node in graph.nodes for w in written_nodes(node) for alias in aliases(w)}
    first: dict[Any, fx.Node] = {}
    merged = 0
    for node in list(graph.nodes):
        if name_of(node) not in MERGED or node in written:
            continue
        earlier = first.setdefault((node.op, node.target, node.args, tuple(sorted(node.kwargs.items()))), node)
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            graph.erase_node(node)
            merged += 1
    if merged:
        graph.lint()
        gm.recompile()
    return merged
