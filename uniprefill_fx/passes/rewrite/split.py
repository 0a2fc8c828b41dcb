"""Cut a rewritten graph at its selections: pieces to compile, with score and select between them outside.

What a piece hands to a later one is a tensor or a number. Before, with the cut between the two lines::

    sizes = x.size()                                     # (tokens, 64)
    z = y.view(sizes)

After::

    sizes = x.size();  tokens = sizes[0]
    z = y.view((tokens, 64))
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from uniprefill_fx.errors import Category, refuse
from uniprefill_fx.passes.distributed import collective_name
from uniprefill_fx.passes.node_utils import counts_blocks, is_op, is_selected, meta, name_of, selects_by

HANDED_OVER = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, tuple, list)


@dataclass(frozen=True)
class Piece:
    """A run of nodes, in program order, as a graph module of its own.

    Attributes:
        gm: takes `inputs`, returns the tuple of `outputs`; placeholders have the meta of the nodes they stand for.
        inputs, outputs: nodes of the whole graph. Outputs are what later pieces, or the graph's output, read, and what
            is selected.
        selection: whether the piece scores and selects (and is not to be compiled).
    """

    gm: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    selection: bool


def split_at_selections(gm: fx.GraphModule, outside: Callable[[fx.Node], bool] | None = None) -> list[Piece]:
    """The pieces of a graph, to be run one after the other. Program order is kept, so in-place writes stay in place.

    Args:
        outside: which nodes are not compiled; None: selections.

    Raises:
        RefusalError: a selection lies inside an autocast region, which no piece could hold whole.
    """
    outside = outside or _selects
    runs: list[list[fx.Node]] = [[]]
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if outside(node) != (len(runs) % 2 == 0):
            runs.append([])
        runs[-1].append(node)
    for nodes in runs:
        if _balance(nodes) != 0:
            raise refuse(Category.TOKEN_OP, "a drop inside an autocast region of the model", "the prompt stays dense")
    _hand_over_elements(gm.graph, runs)
    return [_piece(gm, nodes, selection=i % 2 == 1) for i, nodes in enumerate(runs)]


def _hand_over_elements(graph: fx.Graph, runs: list[list[fx.Node]]) -> None:
    """Replace what several runs share and is a tuple by its elements, taken where it is made: see above."""
    run_of = {id(node): run for run in runs for node in run}
    for node in [node for run in runs for node in run]:
        run = run_of[id(node)]
        later = [user for user in node.users if run_of.get(id(user)) is not run]
        if not later or not isinstance(meta(node), tuple | list):
            continue
        elements = _elements(graph, node, run)
        run_of |= {id(own): run for own in run}
        for user in later:
            index: Any = user.args[1] if user.target is operator.getitem else None
            element = elements[index] if isinstance(index, int) else None
            if isinstance(element, fx.Node):
                user.replace_all_uses_with(element)
                run_of[id(user)].remove(user)
                graph.erase_node(user)
            else:
                _replace_argument(user, node, elements)


def _elements(graph: fx.Graph, node: fx.Node, run: list[fx.Node]) -> Sequence[Any]:
    """The elements of a tuple or list: nodes for tensors and symbols, which its run gets, and others as they are."""
    values: Sequence[Any] = meta(node)
    taken = {
        user.args[1] % len(values): user
        for user in node.users
        if user in run and user.target is operator.getitem and isinstance(user.args[1], int)
    }
    found: list[Any] = []
    for i, value in enumerate(values):
        element: Any = value
        if isinstance(value, HANDED_OVER):
            # One that is there already is the same tensor: a piece that got both would write into one of two names.
            element = taken.get(i)
            if element is None:
                with graph.inserting_after(node):
                    element = graph.call_function(operator.getitem, (node, i))
                element.meta = {"val": value, "example_value": value}
                run.insert(run.index(node) + 1, element)
            if isinstance(value, tuple | list):
                element = _elements(graph, element, run)
        found.append(element)
    return found if isinstance(values, list) else tuple(found)


def _replace_argument(user: fx.Node, old: fx.Node, new: Sequence[Any]) -> None:
    if user.target in (getattr, operator.setitem) or (user.op == "call_method" and user.args[0] is old):
        what = f"{name_of(user)} of a {type(meta(old)).__name__} that is made before a drop"
        raise refuse(Category.TOKEN_OP, what, "the prompt stays dense")
    user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda node: new if node is old else node)


def _balance(nodes: list[fx.Node]) -> int:
    """Autocast regions that the nodes enter and do not leave."""
    names = [name_of(node) for node in nodes]
    return names.count("_enter_autocast") - names.count("_exit_autocast")


def _selects(node: fx.Node) -> bool:
    if collective_name(node):  # a sum of scores over ranks
        return _selects(node.all_input_nodes[0])
    return is_op(node, "score") or is_op(node, "select") or is_selected(node)


def _is_reported(node: fx.Node) -> bool:
    """What the record of a call is made from, whoever else reads it."""
    return is_selected(node) or selects_by(node) or counts_blocks(node)


def _piece(gm: fx.GraphModule, nodes: list[fx.Node], selection: bool) -> Piece:
    inside = set(nodes)
    inputs = tuple(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
    outputs = tuple(node for node in nodes if _is_reported(node) or any(user not in inside for user in node.users))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[n] for n in outputs))
    return Piece(fx.GraphModule(gm, graph), inputs, outputs, selection)
