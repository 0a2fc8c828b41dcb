"""Data flow of a graph: what depends on what, what is written, and which nodes share storage."""

from __future__ import annotations

import torch
from torch import fx

from uniprefill_fx.passes.node_utils import meta
from uniprefill_fx.passes.schemas import effects


class Ancestry:
    """Data-flow reachability of a graph, as one bit set a node."""

    def __init__(self, graph: fx.Graph) -> None:
        """In-place writes count as flow from the writer to later readers of what it wrote to."""
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self._bits: dict[fx.Node, int] = {}
        for node, i in self.order.items():
            bits = 1 << i
            for parent in node.all_input_nodes:
                bits |= self._bits[parent]
            self._bits[node] = bits
            for written in written_nodes(node):
                for alias in aliases(written):
                    if self.order[alias] <= i:
                        self._bits[alias] |= bits

    def depends(self, node: fx.Node, on: fx.Node) -> bool:
        """Whether `node` is computed from `on` (a node depends on itself)."""
        return bool(self._bits[node] >> self.order[on] & 1)


def written_nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes whose storage this node writes, by the schema of its operator; all it reads where nothing tells."""
    return effects(node).writes


def aliases(node: fx.Node, without: fx.Node | None = None) -> list[fx.Node]:
    """Nodes that may share storage with `node`: views of it, what it is a view of, and results of writes to it.

    without: a node that is left out, with all that is reached through it alone.
    """
    found: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        current = pending.pop()
        if current in found or current is without:
            continue
        found[current] = None
        pending.extend(effects(current).shares)
        pending.extend(user for user in current.users if current in effects(user).shares)
    return [n for n in found if isinstance(meta(n), torch.Tensor | tuple | list) or n is node]
