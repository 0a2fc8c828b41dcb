"""Which rows each node computes: level 0 holds all tokens, level i the rows kept after the i-th drop.

A node is of the latest level among its inputs; the output of a drop layer's attention op is of the level that its drop
begins. Nodes that do not depend on a drop stay at level 0 and are gathered where they meet the kept rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import sympy
from torch import fx

from uniprefill_fx.errors import Category, refuse
from uniprefill_fx.passes.analyze.batch import request_dim
from uniprefill_fx.passes.analyze.rowwise import check_rows
from uniprefill_fx.passes.analyze.rowwise_kinds import Axes
from uniprefill_fx.passes.analyze.rowwise_ops import CREATIONS
from uniprefill_fx.passes.attention_node import AttentionNode, interiors
from uniprefill_fx.passes.dataflow import aliases, written_nodes
from uniprefill_fx.passes.node_utils import expression, meta, name_of, token_dims
from uniprefill_fx.passes.schemas import effects

INDEXING = frozenset("getitem index_select gather take_along_dim index_add_ index_copy_ scatter_ scatter_add_".split())
CARRY = frozenset(
    "to long int view reshape expand unsqueeze squeeze getitem repeat_interleave floordiv contiguous "
    "clone flatten".split()
)


class Move(StrEnum):
    """How a value of an earlier level is brought to the rows of a later one."""

    GATHER = "gather"
    REPEAT = "repeat"  # do the operation again with the sizes of the later level


@dataclass(frozen=True)
class GatherRule:
    """A move; for a gather, the token axis and that of the requests (None: there is one request)."""

    move: Move
    dim: int = 0
    batch_dim: int | None = None


def drop_levels(
    graph: fx.Graph,
    attention_nodes: Sequence[AttentionNode],
    drops: Sequence[AttentionNode],
    tokens: sympy.Symbol,
    head_region: frozenset[fx.Node],
) -> dict[fx.Node, int]:
    """The level of every node; nodes of `head_region` (behind the restored stream) are level 0.

    Raises:
        RefusalError: a node cannot run on fewer rows without changing what it means.
    """
    begins = {attention.output: i + 1 for i, attention in enumerate(drops)}
    attention_of = {attention.node: attention for attention in attention_nodes}
    late = _written_later(graph, tokens, drops, begins, head_region, attention_of)
    found: dict[fx.Node, int] = {}
    interior = interiors(attention_nodes)
    stores = {node for attention in attention_nodes for node in attention.cache_writes}
    for node in graph.nodes:
        inputs = [max(found[n], begins.get(n, 0)) for n in _read_by(node, attention_of) if n not in head_region]
        found[node] = 0 if node in head_region or node.op == "output" else max(inputs, default=0)
        found[node] = max(found[node], late.get(node, 0))
        if found[node] and node in attention_of and not attention_of[node].is_prefill:
            why = attention_of[node].refusal or "its keys are not those of its queries"
            raise refuse(
                Category.ATTENTION,
                f"attention behind a drop that is not understood: {why}",
                "drop tokens in later layers only, or in none",
                attention_of[node].layer,
            )
    _check_writes(graph, found, tokens, head_region, stores | interior)
    _check_outputs(attention_nodes, found)
    batch = next(a for a in attention_nodes if a.is_prefill).batch
    reads = {n for a in attention_nodes if a.spec and found[a.node] for n in (a.q, a.k, a.v)}
    given = {n for a in attention_nodes for n in (a.node, a.output)}
    skipped = (interior | set(late) | stores) - given
    check_rows(
        graph,
        found,
        Axes(tokens, tokens, batch),
        given,
        skipped,
        lambda n: row_numbers(n, found),
        head_region,
        reads,
    )
    return found


def _read_by(node: fx.Node, attention_of: Mapping[fx.Node, AttentionNode]) -> Collection[fx.Node]:
    """The nodes whose values a node reads: of attention its operands, and not the tensor that it writes."""
    attention = attention_of.get(node)
    if attention is None or attention.spec is None:
        return node.all_input_nodes
    return (attention.q, attention.k, attention.v)


def _written_later(
    graph: fx.Graph,
    tokens: sympy.Symbol,
    drops: Sequence[AttentionNode],
    begins: dict[fx.Node, int],
    head_region: frozenset[fx.Node],
    attention_of: Mapping[fx.Node, AttentionNode],
) -> dict[fx.Node, int]:
    """Buffers that are filled at level 0 and first written at a later one: they are of the level of that write.

    Only buffers that are made behind the drop: before it, nobody knows how many rows there will be.
    """
    drop_of = {attention.node: i + 1 for i, attention in enumerate(drops)}
    passed = 0  # drops
    made: dict[fx.Node, int] = {}  # how many drops lie before a node in the order of the graph
    rough: dict[fx.Node, int] = {}
    late: dict[fx.Node, int] = {}
    for node in graph.nodes:
        made[node] = passed = max(passed, drop_of.get(node, 0))
        inputs = [max(rough[n], begins.get(n, 0), late.get(n, 0)) for n in _read_by(node, attention_of)]
        rough[node] = 0 if node in head_region else max(inputs, default=0)
        for buffer in map(_storage_of, written_nodes(node)):
            early = rough[buffer] < rough[node] <= made[buffer]
            if name_of(buffer) in CREATIONS and early and token_dims(buffer, tokens):
                late.setdefault(buffer, rough[node])
    return late


def _storage_of(node: fx.Node) -> fx.Node:
    """The value that a view is of; any other value itself."""
    while len(shares := effects(node).shares) == 1:
        (node,) = shares
    return node


def _check_writes(
    graph: fx.Graph,
    found: dict[fx.Node, int],
    tokens: sympy.Symbol,
    head_region: frozenset[fx.Node],
    known: Collection[fx.Node],
) -> None:
    """Refuse a write that reaches, by aliasing, a value which another level reads through its own gathered copy."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        for target in written_nodes(node) if node not in known else ():
            copied: list[fx.Node] = []  # readers of gathered copies
            for alias in aliases(target):
                if found[node] and alias.op == "placeholder":
                    raise refuse(
                        Category.CACHE,
                        f"kept rows are written into `{alias.name}`, a buffer that comes from outside (StaticCache?)",
                        "pass transformers' DynamicCache, or none; such a call stays dense",
                    )
                if not token_dims(alias, tokens):
                    continue
                later = [user for user in alias.users if order[user] > order[node]]
                if node in head_region and alias not in head_region and all(user in head_region for user in later):
                    continue  # written behind the restored stream, and read there alone
                if found[alias] != found[node]:
                    raise refuse(
                        Category.MUTATION,
                        f"`{name_of(node)}` writes into a value of all tokens from the kept ones",
                        "the write would be lost in a gathered copy",
                    )
                copied += [user for user in alias.users if found[user] > found[alias]]
            if len({order[user] > order[node] for user in copied}) > 1:
                raise refuse(
                    Category.MUTATION,
                    f"`{name_of(node)}` writes into a value that is read behind a drop before and after it",
                    "the gathered copy would be that of before",
                )


def _check_outputs(attention_nodes: Sequence[AttentionNode], found: dict[fx.Node, int]) -> None:
    """Refuse attention that writes its result into a tensor which anybody sees under another name afterwards."""
    for attention in attention_nodes:
        if attention.written_output is None or attention.spec is None:
            continue
        behind = False
        for node in attention.node.graph.nodes:
            named = [n for n in node.all_input_nodes if n in aliases(attention.written_output)]
            if behind and any(n is not attention.written_output and found[n] != found[node] for n in named):
                raise refuse(
                    Category.MUTATION,
                    f"`{node.name}` reads a view of what the attention wrote, taken before the write",
                    "such a layer stays dense",
                    attention.layer,
                )
            behind |= node is attention.node


def gather_rules(
    graph: fx.Graph,
    attention_nodes: Sequence[AttentionNode],
    found: dict[fx.Node, int],
    tokens: sympy.Symbol,
    batch: sympy.Expr,
) -> dict[fx.Node, GatherRule]:
    """How each tensor that a later level reads gets there. `batch`: 1, or the symbol of the number of requests.

    Raises:
        RefusalError: it can be neither gathered nor made again.
    """
    understood = [attention for attention in attention_nodes if attention.spec is not None]
    outputs = {attention.output for attention in understood}
    interior = interiors(attention_nodes)
    reads: dict[fx.Node, set[fx.Node]] = {node: set() for node in interior}
    for attention in understood:
        reads[attention.node] = {attention.q, attention.k, attention.v}
        slopes = attention.alibi[0] if attention.alibi is not None else None
        terms = (attention.spec.bias, attention.spec.sinks, slopes) if attention.spec is not None else ()
        for operand in terms:  # read whole, by position, at every level
            if operand is not None and found[operand]:
                raise refuse(
                    Category.ATTENTION,
                    f"a bias of the attention logits that is computed from kept tokens: {operand.name}",
                    "such a layer stays dense",
                    attention.layer,
                )
    moves: dict[fx.Node, GatherRule] = {}
    for node in graph.nodes:
        for read in reads.get(node, node.all_input_nodes):
            dims = token_dims(read, tokens)
            if read in moves or not dims or found[read] >= found[node]:
                continue
            sizes = meta(read).shape
            name = name_of(read)
            if (name in CREATIONS and read not in outputs) or (name == "arange" and row_numbers(read, found)):
                moves[read] = GatherRule(Move.REPEAT)
            elif len(dims) == 1 and expression(sizes[dims[0]]) == tokens:
                moves[read] = GatherRule(Move.GATHER, dims[0], request_dim(read, dims[0], batch))
            else:
                raise refuse(
                    Category.TOKEN_AXIS,
                    f"`{read.name}` of shape {tuple(sizes)} meets the kept rows",
                    "it has no single axis of one row for each token",
                )
    return moves


def row_numbers(node: fx.Node, found: dict[fx.Node, int]) -> bool:
    """Whether an arange numbers rows (it only ever indexes values of a later level) rather than token positions.

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
