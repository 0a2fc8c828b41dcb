"""Follow keys and values back to the cache rows that they are computed from.

Models with latent attention store a compressed row for each token, and expand it to the keys and values of all heads::

    latent, rotary = logical_view(...), logical_view(...)          # (1, 1, seen, 32), (1, 1, seen, 8)
    k_nope, v = linear(latent, w).view(1, seen, 4, 32).transpose(1, 2).split(16, -1)
    k = new_empty(1, 4, seen, 24); k[..., :16].copy_(k_nope); k[..., 16:].copy_(rotary.expand(1, 4, seen, 8))
    attn = scaled_dot_product_attention(q, k, v, attn_mask=mask)

Each token's keys come from that token's row alone, so the same operations may run on the rows that a compact layer
holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from uniprefill_fx.errors import Category, RefusalError, refuse
from uniprefill_fx.passes.analyze.row_kinds import Axes
from uniprefill_fx.passes.analyze.rowwise import check_rows
from uniprefill_fx.passes.dataflow import aliases, written_nodes
from uniprefill_fx.passes.node_utils import arguments, expression, meta, shape, token_dims


@dataclass(frozen=True)
class LatentKV:
    """How keys and values are made from the rows of one cache layer.

    Attributes:
        roots: the nodes of those rows, in graph order; keys and values themselves where nothing is done to them.
        region: the nodes that compute keys and values from them, in graph order.
    """

    roots: tuple[fx.Node, ...]
    region: tuple[fx.Node, ...]


def latent_kv(
    ends: Sequence[fx.Node], is_root: Callable[[fx.Node], bool], tokens: sympy.Symbol, count: sympy.Expr
) -> LatentKV:
    """The expansion of cache rows to `ends`, the keys and values of one attention.

    Args:
        is_root: whether a node holds rows of a cache layer.
        tokens: the symbol that tells axes of tokens from others. count: the number of tokens, an expression of it.

    Raises:
        RefusalError: something on the way relates tokens to one another, or cannot run on fewer rows.
    """
    visited = _behind(ends, is_root)
    reached = _reached_from([node for node in visited if is_root(node)], visited)
    ordered = [node for node in ends[0].graph.nodes if node in reached]
    found = {node: int(node in reached) for node in visited}
    if any(end not in reached for end in ends if reached):
        raise _refused("keys from a cache beside values that are not")
    first = next((i for i, node in enumerate(ordered) if not is_root(node)), len(ordered))
    if any(is_root(node) for node in ordered[first:]):
        raise _refused(f"`{ordered[first].name}` is made before the rows that it is to hold")
    check_rows(ends[0].graph, found, Axes(tokens, count), given=ordered[:first], ends=ends if ordered else ())
    for node in ordered[first:]:
        _check(node, found, tokens, count)
    return LatentKV(tuple(ordered[:first]), tuple(ordered[first:]))


def _check(node: fx.Node, found: dict[fx.Node, int], tokens: sympy.Symbol, count: sympy.Expr) -> None:
    if isinstance(meta(node), torch.Tensor):
        sizes = [size for size in shape(node) or () if tokens in size.free_symbols]
        if sizes != [count]:
            raise _refused(f"`{node.name}` has no row for each token")
    for argument in arguments(node):
        value = meta(argument) if isinstance(argument, fx.Node) else None
        if isinstance(value, torch.SymInt) and tokens in expression(value).free_symbols and expression(value) != count:
            raise _refused(f"`{node.name}` computes with the number of tokens")
        if isinstance(value, torch.Tensor) and not found[argument] and token_dims(argument, tokens):
            raise _refused(f"`{node.name}` reads `{argument.name}`, which has a row for each token too")


def _refused(what: str) -> RefusalError:
    return refuse(Category.CACHE, f"keys computed from a cache: {what}", "such a layer stays dense")


def _behind(ends: Sequence[fx.Node], is_root: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Everything that `ends` are computed from, in-place writes included, back to the roots."""
    visited: set[fx.Node] = set()
    pending = list(ends)
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        if not is_root(node):
            pending.extend(node.all_input_nodes)
            pending.extend(_writers(node))
    return visited


def _writers(node: fx.Node) -> Iterator[fx.Node]:
    """The in-place operations that write into a node's storage."""
    if isinstance(meta(node), torch.Tensor) and node.op != "placeholder":
        for alias in aliases(node):
            yield from (user for user in alias.users if alias in written_nodes(user))


def _reached_from(roots: Sequence[fx.Node], visited: set[fx.Node]) -> set[fx.Node]:
    """The visited nodes that hold something computed from the roots, and the roots."""
    reached: set[fx.Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node in reached or node not in visited:
            continue
        reached.add(node)
        pending.extend(node.users)
        for written in written_nodes(node):
            pending.extend(aliases(written))
    return reached
