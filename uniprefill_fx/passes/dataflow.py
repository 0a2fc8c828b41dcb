"""Data flow of a graph: what depends on what, what is written, and which nodes share storage."""

from __future__ import annotations

import torch
from torch import fx

from uniprefill_fx.passes.node_utils import meta, name_of


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


VIEWS = frozenset(
    "view reshape transpose permute unsqueeze squeeze expand getitem chunk split narrow select t T unbind movedim "
    "swapaxes view_as flatten unflatten expand_as detach contiguous to".split()
)


def written_nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes whose storage this node writes: the first argument of an in-place operation, or `out=`."""
    name = name_of(node)
    if node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator":
        in_place = name in IN_PLACE_OPERATORS  # `operator.and_` ends so to differ from a keyword, and writes nothing
    else:
        in_place = name.endswith("_") and not name.endswith("__")
    written = [node.args[0]] if in_place and node.args else []
    written.append(node.kwargs.get("out"))
    return tuple(w for w in written if isinstance(w, fx.Node) and isinstance(meta(w), torch.Tensor))


IN_PLACE_OPERATORS = frozenset(
    "setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor imatmul".split(),
)


def aliases(node: fx.Node, through_writes: bool = True) -> list[fx.Node]:
    """Nodes that may share storage with `node`: views of it, what it is a view of, and results of writes to it.

    `through_writes=False` leaves out the results of in-place operations, which are the written tensor itself.
    """
    found: list[fx.Node] = []
    pending = [node]
    while pending:
        current = pending.pop()
        if current in found:
            continue
        found.append(current)
        if name_of(current) in VIEWS or (through_writes and written_nodes(current)):
            pending.extend(a for a in current.args[:1] if isinstance(a, fx.Node))
        for user in current.users:
            shares = name_of(user) in VIEWS or (through_writes and bool(written_nodes(user)))
            if shares and user.args and user.args[0] is current:
                pending.append(user)
    return [n for n in found if isinstance(meta(n), torch.Tensor | tuple | list) or n is node]
