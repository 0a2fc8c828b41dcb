"""What prompts cost and would have cost dense, by counting: FLOPs of one prefill and bytes of its cache.

Counted are products of matrices (linear layers, experts, the head) at two operations a multiply-add, and attention at
2 · (dim of keys + dim of values) for each query, head and key that it sees. Norms, activations, rotary and scans are
not counted, and scoring is (last_n queries over the rows that enter a drop layer), which is the dropped run's alone.
The paper (arXiv 2605.06221, Eq. 9) counts the same way by layer: what falls away grows with the dropped rows in linear
layers, and with the pairs of rows in attention. Of block-sparse attention the computed part of the blocks counts, and
not how they are chosen. In a batch, products and caches have the rows of its padding as well: all prompts are as long
as the one that keeps most. Attention is counted without.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor, fx

from uniprefill_fx.config import PrefillConfig
from uniprefill_fx.passes.analyze.plan import Plan
from uniprefill_fx.passes.node_utils import decoder_layer, is_op, meta, name_of, shape
from uniprefill_fx.runtime.last_call import LastCall

PRODUCTS = ("linear", "matmul", "bmm", "mm", "addmm", "baddbmm")


@dataclass(frozen=True)
class Savings:
    """Counts of one call. `flops` and `dense_flops` are by decoder layer, and -1 stands for what is outside of them.

    Attributes:
        kv_bytes, dense_kv_bytes: keys and values that the cache holds after the prefill; without a cache, that the
            attention layers read.
        uncounted: names of products whose rows do not follow from the number of tokens.
    """

    flops: dict[int, float]
    dense_flops: dict[int, float]
    kv_bytes: int
    dense_kv_bytes: int
    uncounted: tuple[str, ...] = ()

    @property
    def flops_saved(self) -> float:
        """Share of the dense FLOPs that fell away."""
        dense = sum(self.dense_flops.values())
        return 1.0 - sum(self.flops.values()) / dense if dense else 0.0

    @property
    def kv_saved(self) -> float:
        """Share of the dense cache that fell away."""
        return 1.0 - self.kv_bytes / self.dense_kv_bytes if self.dense_kv_bytes else 0.0


@dataclass(frozen=True)
class Cost:
    """FLOPs of one part of a decoder layer (-1: of no layer), by what it grows with.

    Attributes:
        level: how many drops lie before it. each: FLOPs a row. fixed: FLOPs whatever the rows.
        pair: FLOPs a (query, key) pair that the mask lets through. window, chunk: of that mask. full: full attention.
        scoring: FLOPs a pair of a last query and a row, of the dropped run alone.
    """

    layer: int
    level: int
    each: float = 0.0
    fixed: float = 0.0
    pair: float = 0.0
    window: int | None = None
    chunk: int | None = None
    full: bool = False
    scoring: float = 0.0


@dataclass(frozen=True)
class Stored:
    """A layer of the cache: the drop level of its rows, bytes a row, and the most rows it holds (None: all)."""

    level: int
    each: int
    most: int | None


def costs(
    gm: fx.GraphModule, plan: Plan, drops: Sequence[int | None], prompts: int
) -> tuple[list[Cost], list[Stored], list[str]]:
    """What a prefill is made of, and names of products whose rows do not follow from the number of tokens.

    gm: the graph as Dynamo traced it. drops: layers at which this call dropped.
    """
    assert plan.tokens is not None
    found: list[Cost] = []
    uncounted: list[str] = []
    # By name: the graph is a copy of the one that was planned.
    interior = {node.name for attention in plan.attention_nodes for node in attention.interior}
    levels = {node.name: level for node, level in plan.level.items()} if drops else {}
    for node in gm.graph.nodes:
        counted = None if node.name in interior else _product(node, plan.tokens, {plan.batch: sympy.Integer(prompts)})
        if counted is None:
            continue
        each, fixed = counted
        if each is None:
            uncounted.append(node.name)
            continue
        layer = decoder_layer(node)
        found.append(Cost(-1 if layer is None else layer, levels.get(node.name, 0), each, fixed))
    level = 0
    for attention in plan.attention_nodes:
        layer = -1 if attention.layer is None else attention.layer
        heads, spec = attention.num_heads, attention.spec
        if spec is not None:
            pair = 2.0 * heads * (attention.head_dim + attention.v_dim)
            chunk = spec.chunk if spec.window is None else None
            found.append(Cost(layer, level, 0.0, 0.0, pair, spec.window, chunk, attention.full))
        if attention.layer in drops:
            found.append(Cost(layer, level, scoring=2.0 * heads * attention.head_dim))
            level = drops.index(attention.layer) + 1
    stores = _stores(gm.graph) or [
        (attention.k.name, _row_bytes(attention.k, attention.v), None)
        for attention in plan.attention_nodes
        if attention.spec
    ]
    return found, [Stored(levels.get(name, 0), each, most) for name, each, most in stores], uncounted


def estimate(gm: fx.GraphModule, plan: Plan, config: PrefillConfig, call: LastCall) -> Savings | None:
    """Count one call of the graph as Dynamo traced it; None when the call does not know its tokens."""
    if call.columns is None or plan.tokens is None or not plan.attention_nodes:
        return None
    total, prompts = call.columns, len(call.token_bounds)
    drops = [drop.attention.layer for drop in plan.drops] if call.kept_indices else []
    rows = [total, *(max(b - a for a, b in itertools.pairwise(call.cu_seqlens[layer])) for layer in drops)]
    alive = [[torch.arange(past - first) for first, past in call.token_bounds]]
    for layer in drops:
        kept, bounds = call.kept_indices[layer].cpu(), itertools.pairwise(call.cu_seqlens[layer])
        alive.append([kept[a:b] - first for (a, b), (first, _) in zip(bounds, call.token_bounds, strict=True)])
    last_n = call.changed.get("last_n", config.last_n)
    found, stores, uncounted = costs(gm, plan, drops, prompts)
    flops: dict[int, float] = {}
    dense: dict[int, float] = {}
    for cost in found:
        at, own = cost.layer, alive[cost.level]
        share = call.density.get(at, 1.0) if cost.full else 1.0
        dense[at] = dense.get(at, 0.0) + cost.each * total + cost.fixed + cost.pair * _pairs(cost, alive[0])
        flops[at] = (
            flops.get(at, 0.0) + cost.each * rows[cost.level] + cost.fixed + share * cost.pair * _pairs(cost, own)
        )
        flops[at] += cost.scoring * sum(min(last_n, len(one)) * len(one) for one in own)
    kv = sum(prompts * store.each * _capped(rows[store.level], store.most) for store in stores)
    dense_kv = sum(prompts * store.each * _capped(total, store.most) for store in stores)
    return Savings(flops, dense, kv, dense_kv, tuple(uncounted))


def _product(
    node: fx.Node, tokens: sympy.Symbol, known: dict[sympy.Expr, sympy.Expr]
) -> tuple[float | None, float] | None:
    """(FLOPs for each token, FLOPs whatever the tokens) of a matrix product; (None, 0) if its rows are not understood;
    None for any other node. known: sizes of this call."""
    name = name_of(node)
    if name not in PRODUCTS and "grouped_mm" not in name:
        return None
    out, tensors = shape(node), [arg for arg in node.all_input_nodes if isinstance(meta(arg), torch.Tensor)]
    left = tensors[1] if name in ("addmm", "baddbmm") and len(tensors) > 2 else tensors[0] if tensors else None
    inner = shape(left) if left is not None else None
    if out is None or inner is None:
        return None, 0.0
    count = sympy.sympify(2 * sympy.prod(out) * inner[-1]).xreplace(known)
    if not count.free_symbols & {tokens}:
        return (0.0, float(count)) if count.is_number else (None, 0.0)
    each = sympy.cancel(count / tokens)
    return (float(each), 0.0) if each.is_number else (None, 0.0)


def _pairs(cost: Cost, positions: Sequence[Tensor]) -> int:
    """(query, key) pairs that the mask of an attention op lets through; positions of each prompt, ascending."""
    return sum(_pairs_of(cost, own) for own in positions) if cost.pair else 0


def _pairs_of(cost: Cost, positions: Tensor) -> int:
    first = torch.zeros_like(positions)  # the first position that a query sees
    if cost.window is not None:
        first = (positions - cost.window + 1).clamp(min=0)
    elif cost.chunk is not None:
        first = positions // cost.chunk * cost.chunk
    seen = torch.arange(1, len(positions) + 1) - torch.searchsorted(positions, first)
    return int(seen.sum())


def _stores(graph: fx.Graph) -> list[tuple[str, int, int | None]]:
    """Of each cache layer that the graph fills: a node of it, the bytes of a row, and the most rows that it keeps of a
    prompt (sliding layers; None: all)."""
    found = []
    for node in (n for n in graph.nodes if is_op(n, "bind_positions")):
        _, keys, values = node.args
        lasts = [size[1] for user in node.users if name_of(user) == "getitem" and (size := shape(user)) is not None]
        found.append((node.name, _row_bytes(keys, values), next((int(n) for n in lasts if n.is_number), None)))
    return found


def _row_bytes(*tensors: fx.Node) -> int:
    return sum(int(t.shape[1]) * int(t.shape[3]) * int(t.dtype.itemsize) for t in map(meta, tensors))


def _capped(rows: int, most: int | None) -> int:
    return rows if most is None else min(rows, most)
