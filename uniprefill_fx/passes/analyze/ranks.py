"""Find what a graph exchanges with other ranks, and prove that they may drop tokens together (tensor parallelism).

Every rank runs the same graph on the same prompt, with its own part of the weights. Ranks that keep the same tokens
compute what one rank would, as long as nothing is exchanged but sums and gathered channels, whose rows are those of the
tokens on every rank. They do keep the same tokens: block scores are summed over the ranks before the selection
(UniPrefill, arXiv 2605.06221, Eq. 15), and the sum is the same number on each.

What a value is to the ranks is followed through the graph, from inputs on::

    x                                          same
    w  = DTensor.to_local(weight)              own: this rank's rows of the weight
    q  = linear(x, w).view(...)                own, of w: this rank's heads
    y  = all_reduce(linear(attn, w_o), "sum")  same

Scores of the same queries on every rank add up to a multiple of themselves, which selects alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from uniprefill_fx.errors import Category, refuse
from uniprefill_fx.passes.analyze.rowwise_ops import argument, is_inactive, is_random, known_name
from uniprefill_fx.passes.attention_node import AttentionNode
from uniprefill_fx.passes.distributed import (
    collective_name,
    conversion,
    group_of_mesh,
    is_dtensor,
    is_whole,
    split_dim,
)
from uniprefill_fx.passes.node_utils import meta, name_of

LEAVE = "such a call stays dense on every rank; load the model without tp_plan to have tokens dropped"
EXPERTS = 3  # dimensions of a weight that holds one matrix an expert


@dataclass(frozen=True)
class Ranks:
    """Ranks that run a graph together.

    Attributes:
        group: the name of their process group.
        own: values that differ from rank to rank, each with the weights that make it so; all others are the same.
    """

    group: str
    own: dict[fx.Node, frozenset[fx.Node]]


def find_ranks(graph: fx.Graph) -> Ranks | None:
    """The ranks that share a graph, whose collectives are written plainly; None where nothing is shared.

    Raises:
        RefusalError: it is not proven that every rank's rows are those of the same tokens.
    """
    groups: dict[str, fx.Node] = {}
    own: dict[fx.Node, frozenset[fx.Node]] = {}
    whole = False  # whether a weight says how it is split
    for node in graph.nodes:
        if is_dtensor(meta(node)):
            if not _is_weight(node):
                what = "a weight that is not split evenly over one group" if node.op == "placeholder" else "computed"
                raise refuse(
                    Category.RANKS, f"a DTensor, `{node.name}` ({what}): nothing says what its rows are", LEAVE
                )
            groups.setdefault(group_of_mesh(meta(node)) or "", node)
            whole = True
        elif conversion(node) == "to_local":
            weight = node.args[0]
            assert isinstance(weight, fx.Node)
            if not is_whole(meta(weight)):
                own[node] = frozenset({weight})
        elif collective_name(node):
            group = _group(node)
            if group is not None:
                groups.setdefault(group, node)
        elif any(n in own for n in node.all_input_nodes) and node.op != "output":
            own[node] = frozenset().union(*(own.get(n, frozenset()) for n in node.all_input_nodes))
        elif _draws(node):
            own[node] = frozenset({node})
    if not groups:
        return None
    if len(groups) > 1:
        raise refuse(Category.RANKS, f"the model is split over several groups of ranks: {', '.join(groups)}", LEAVE)
    if not whole:
        node = next(iter(groups.values()))
        raise refuse(
            Category.RANKS,
            f"the collective `{name_of(node)}` among weights of which nothing says how they are split over ranks",
            LEAVE,
        )
    return Ranks(next(iter(groups)), own)


def _draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers, which each rank does for itself."""
    name = known_name(node)
    if name == "dropout":
        return not is_inactive(node)
    if name == "scaled_dot_product_attention":
        return argument(node, 4, "dropout_p") not in (None, 0, 0.0)
    return is_random(node)


def _group(node: fx.Node) -> str | None:
    """The group of a collective that keeps rows where they are; None of one that only waits.

    Raises:
        RefusalError: it could move rows, or do something else.
    """
    name = collective_name(node)
    if name == "wait_tensor":
        return None
    if name == "all_reduce" and node.args[1:2] == ("sum",) and isinstance(node.args[2], str):
        return node.args[2]
    if name == "all_gather_into_tensor" and isinstance(node.args[2], str) and isinstance(meta(node).shape[0], int):
        return node.args[2]  # neither tokens nor prompts, whose number is a symbol, are in the axis that grows
    how = f" ({node.args[1]})" if len(node.args) > 1 and isinstance(node.args[1], str) else ""
    raise refuse(
        Category.RANKS,
        f"the collective `{name}`{how}: ranks exchange more than sums and gathered channels",
        "sequence parallelism, or a layer of your own? " + LEAVE,
    )


def _is_weight(node: fx.Node) -> bool:
    """Whether a DTensor is a weight that every rank holds all of, or as much of as the others, of a single group.

    Raises:
        RefusalError: it is split by experts.
    """
    value = meta(node)
    if node.op != "placeholder" or group_of_mesh(value) is None:
        return False
    if any(conversion(user) != "to_local" for user in node.users):
        return False
    dim = split_dim(value)
    if dim == 0 and value.ndim == EXPERTS:
        raise refuse(
            Category.RANKS,
            f"experts that are split over ranks, `{node.name}` of shape {tuple(value.shape)}",
            "expert parallelism: each rank's graph holds other numbers. " + LEAVE,
        )
    return dim is not None or is_whole(value)


def check_heads(ranks: Ranks, attention: AttentionNode) -> None:
    """Check that the scores of all ranks add up to those of all heads, or to a multiple of them.

    Raises:
        RefusalError: some queries are neither this rank's own, of a column-parallel weight, nor the same on all ranks.
    """
    for weight in ranks.own.get(attention.q, ()):
        parts = [use for user in weight.users for use in user.users] if is_dtensor(meta(weight)) else []
        if not parts or split_dim(meta(weight)) != 0 or not all(_makes_channels(part, ranks) for part in parts):
            raise refuse(
                Category.RANKS,
                f"queries that depend on this rank's part of `{weight.name}`, which is no column-parallel weight",
                "nothing says that each head is scored on one rank. " + LEAVE,
                attention.layer,
            )


def _makes_channels(node: fx.Node, ranks: Ranks) -> bool:
    """Whether this rank's rows of a weight, or of its bias, make this rank's channels of what is the same on all."""
    return name_of(node) == "linear" and bool(node.args) and node.args[0] not in ranks.own


def check_same(ranks: Ranks, nodes: Iterable[fx.Node], layer: int | None) -> None:
    """Check that some values of the residual stream are the same on all ranks.

    Raises:
        RefusalError: one is not.
    """
    for node in nodes:
        if node in ranks.own:
            raise refuse(
                Category.RANKS,
                f"a residual stream that differs from rank to rank, `{node.name}`",
                "a sum over ranks is missing. " + LEAVE,
                layer,
            )
