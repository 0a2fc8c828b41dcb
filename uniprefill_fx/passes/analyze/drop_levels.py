"""Which rows each node computes: stage 0 holds all tokens, stage i the rows kept after the i-th drop.

A node is of the latest stage among its inputs; the output of a drop layer's attention op is of the stage that its drop
begins. Nodes that do not depend on a drop stay at stage 0 and are gathered where they meet the kept rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import sympy
from torch import fx

from uniprefill_fx.errors import Category, refuse
from uniprefill_fx.passes.analyze.attention_nodes import Site, interiors
from uniprefill_fx.passes.analyze.batch import request_dim
from uniprefill_fx.passes.analyze.rowwise import check_rows
from uniprefill_fx.passes.dataflow import aliases, written_nodes
from uniprefill_fx.passes.node_utils import expression, meta, name_of, token_dims
from uniprefill_fx.timing import timed

FILLS = frozenset(
    "zeros ones empty full new_zeros new_ones new_empty new_full zeros_like ones_like empty_like full_like".split()
)
INDEXING = frozenset("getitem index_select gather take_along_dim index_add_ index_copy_ scatter_ scatter_add_".split())
CARRY = frozenset(
    "to long int view reshape expand unsqueeze squeeze getitem repeat_interleave floordiv contiguous "
    "clone flatten".split()
)


class Move(StrEnum):
    """How a value of an earlier stage is brought to the rows of a later one."""

    GATHER = "gather"
    REPEAT = "repeat"  # do the operation again with the sizes of the later stage


@dataclass(frozen=True)
class Crossing:
    """A move; for a gather, the token axis and that of the requests (None: there is one request)."""

    move: Move
    dim: int = 0
    batch_dim: int | None = None


@timed("stages")
def stages(
    graph: fx.Graph, sites: Sequence[Site], drops: Sequence[Site], tokens: sympy.Symbol, tail: frozenset[fx.Node]
) -> dict[fx.Node, int]:
    """The stage of every node; nodes of `tail` (behind the restored stream) are stage 0.

    Raises:
        RefusalError: a node cannot run on fewer rows without changing what it means.
    """
    begins = {site.node: i + 1 for i, site in enumerate(drops)}
    late = _written_later(graph, tokens, begins, tail)
    found: dict[fx.Node, int] = {}
    site_of = {site.node: site for site in sites}
    interior = interiors(sites)
    for node in graph.nodes:
        inputs = [max(found[n], begins.get(n, 0)) for n in node.all_input_nodes if n not in tail]
        found[node] = 0 if node in tail or node.op == "output" else max(inputs, default=0)
        found[node] = max(found[node], late.get(node, 0))
        if found[node] and node not in site_of and node not in late and node not in interior:
            check_rows(node, found, tokens, tokens)
        if found[node] and node in site_of and not site_of[node].fresh:
            why = site_of[node].refusal or "its keys are not those of its queries"
            raise refuse(
                Category.ATTENTION,
                f"attention behind a drop that is not understood: {why}",
                "drop tokens in later layers only, or in none",
                site_of[node].layer,
            )
    _check_writes(graph, found, tokens)
    return found


def _written_later(
    graph: fx.Graph, tokens: sympy.Symbol, begins: dict[fx.Node, int], tail: frozenset[fx.Node]
) -> dict[fx.Node, int]:
    """Buffers that are filled at stage 0 and first written at a later one: they are made where they are written."""
    rough: dict[fx.Node, int] = {}
    late: dict[fx.Node, int] = {}
    for node in graph.nodes:
        inputs = [max(rough[n], begins.get(n, 0), late.get(n, 0)) for n in node.all_input_nodes]
        rough[node] = 0 if node in tail else max(inputs, default=0)
        for buffer in written_nodes(node):
            if name_of(buffer) in FILLS and rough[buffer] < rough[node] and token_dims(buffer, tokens):
                late.setdefault(buffer, rough[node])
    return late


def _check_writes(graph: fx.Graph, found: dict[fx.Node, int], tokens: sympy.Symbol) -> None:
    """Refuse a write that reaches, by aliasing, a value which another stage reads through its own gathered copy."""
    for node in graph.nodes:
        for target in written_nodes(node):
            for alias in aliases(target):
                if found[node] and alias.op == "placeholder":
                    raise refuse(
                        Category.CACHE,
                        f"kept rows are written into `{alias.name}`, a buffer that comes from outside (StaticCache?)",
                        "pass transformers' DynamicCache, or none; such a call stays dense",
                    )
                if token_dims(alias, tokens) and found[alias] != found[node]:
                    raise refuse(
                        Category.MUTATION,
                        f"`{name_of(node)}` writes into a value of all tokens from the kept ones",
                        "the write would be lost in a gathered copy",
                    )


@timed("crossings")
def crossings(
    graph: fx.Graph, sites: Sequence[Site], found: dict[fx.Node, int], tokens: sympy.Symbol, batch: sympy.Expr
) -> dict[fx.Node, Crossing]:
    """How each tensor that a later stage reads gets there. `batch`: 1, or the symbol of the number of requests.

    Raises:
        RefusalError: it can be neither gathered nor made again.
    """
    understood = [site for site in sites if site.mask is not None]
    interior = interiors(sites)
    reads: dict[fx.Node, set[fx.Node]] = {node: set() for node in interior}
    for site in understood:
        reads[site.node] = {site.q, site.k, site.v}
        slopes = site.mask.alibi[0] if site.mask is not None and site.mask.alibi is not None else None
        for operand in (site.bias, site.sinks, slopes):  # read whole, by slot, at every stage
            if operand is not None and found[operand]:
                raise refuse(
                    Category.ATTENTION,
                    f"a bias of the attention logits that is computed from kept tokens: {operand.name}",
                    "such a layer stays dense",
                    site.layer,
                )
    moves: dict[fx.Node, Crossing] = {}
    for node in graph.nodes:
        for read in reads.get(node, node.all_input_nodes):
            dims = token_dims(read, tokens)
            if read in moves or not dims or found[read] >= found[node]:
                continue
            sizes = meta(read).shape
            name = name_of(read)
            if name in FILLS or (name == "arange" and row_numbers(read, found)):
                moves[read] = Crossing(Move.REPEAT)
            elif len(dims) == 1 and expression(sizes[dims[0]]) == tokens:
                moves[read] = Crossing(Move.GATHER, dims[0], request_dim(read, dims[0], batch))
            else:
                raise refuse(
                    Category.TOKEN_AXIS,
                    f"`{read.name}` of shape {tuple(sizes)} meets the kept rows",
                    "it has no single axis of one row for each token",
                )
    return moves


def row_numbers(node: fx.Node, found: dict[fx.Node, int]) -> bool:
    """Whether an arange numbers rows (it only ever indexes values of a later stage) rather than token positions.

    MoE code numbers its rows to undo a sort; positions feed rotary tables, embeddings and masks. The first must count
    the kept rows anew, the second must keep the original numbers.

    Raises:
        RefusalError: it is used as both.
    """
    indexes = elsewhere = False
    seen: set[fx.Node] = set()
    pending = [node]
    while pending:
        carrier = pending.pop()
        if carrier in seen:
            continue
        seen.add(carrier)
        for user in carrier.users:
            name, base = name_of(user), user.args[0] if user.args else None
            if name == "setitem" and isinstance(base, fx.Node):
                if user.args[2] is carrier:
                    pending.append(base)  # stored values: whoever reads the buffer reads them
                elif base is not carrier:
                    indexes |= found[base] > 0
            elif name in INDEXING and base is not carrier and isinstance(base, fx.Node):
                indexes |= found[base] > 0
                elsewhere |= found[base] == 0
            elif name in CARRY:
                pending.append(user)
            else:
                elsewhere |= found[user] > 0
    if indexes and elsewhere:
        raise refuse(Category.TOKEN_OP, "one arange is both positions and row numbers", "no cut can serve both")
    return indexes
