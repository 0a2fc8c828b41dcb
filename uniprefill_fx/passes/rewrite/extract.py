"""Cut values out of a graph that are looked at before a call: whether a prompt drops may depend on them.

Before::

    ids = diff(position_ids, prepend=...).ne(1).cumsum(-1)     # (1, N), read by a mask among the rest of the network

After, a graph of its own that takes all inputs::

    return (diff(position_ids, prepend=...).ne(1).cumsum(-1),)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from uniprefill_fx.passes.dataflow import Ancestry


def extract(gm: fx.GraphModule, wanted: Sequence[fx.Node]) -> fx.GraphModule:
    """The nodes that `wanted` are computed from, in-place writes among them, as a module that returns those values."""
    ancestry = Ancestry(gm.graph)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder" or any(ancestry.depends(w, node) for w in wanted):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[w] for w in wanted))
    return fx.GraphModule(gm, graph)
