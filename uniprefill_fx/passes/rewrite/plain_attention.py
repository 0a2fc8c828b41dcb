"""Write `uniprefill.attention` as PyTorch's own, where the two compute the same: compilers know that one.

Where no mask is needed, rows that ascend see each other in their order, whatever positions they have. Before::

    attn = uniprefill.attention(q, k, v, positions, positions, token_bounds, scale, ...)     # 4 heads, 2 KV heads

After::

    keys = k.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2)
    attn = scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scale)
    attn = attn.transpose(1, 2).contiguous().transpose(1, 2)                        # the layout that the op promises
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx

from uniprefill_fx.passes.cleanup import clean
from uniprefill_fx.passes.node_utils import dimension_of, is_op, shape
from uniprefill_fx.specs import AttentionSpec


@dataclass(frozen=True)
class Plain:
    """An attention that is PyTorch's where its requests have no padding.

    Attributes:
        node: the op. bounds: the placeholder that says which columns are no padding; None: there is none.
        rows: where the number of rows can be read: (placeholder, dimension).
    """

    node: fx.Node
    bounds: fx.Node | None
    rows: tuple[fx.Node, int] | None


def find_plain_attention(graph: fx.Graph) -> list[Plain]:
    """The attention of a graph that PyTorch's computes, of prompts without padding."""
    found = (_plain(graph, node) for node in graph.nodes if is_op(node, "attention"))
    return [plain for plain in found if plain is not None]


def is_whole(plain: Sequence[Plain]) -> Callable[[Sequence[Any]], bool]:
    """A test of the arguments of a graph: no padding lies in what these attend to."""
    if not plain:
        return lambda args: True
    placeholders = plain[0].node.graph.find_nodes(op="placeholder")
    read = {
        (placeholders.index(p.bounds), placeholders.index(p.rows[0]), p.rows[1])
        for p in plain
        if p.bounds is not None and p.rows is not None
    }

    def whole(args: Sequence[Any]) -> bool:
        return all(_covers(args[bounds], args[rows].shape[d]) for bounds, rows, d in read)

    return whole


def write_plainly(gm: fx.GraphModule) -> None:
    """Replace what `find_plain_attention` finds, in place. It holds where `is_whole` does."""
    found = find_plain_attention(gm.graph)
    for plain in found:
        node = plain.node
        q, k, v = node.args[:3]
        groups = _groups(node)
        graph = gm.graph
        with graph.inserting_before(node):
            if groups > 1:
                k, v = (_repeated(graph, x, groups) for x in (k, v))
            terms = {"is_causal": True, "scale": node.args[6]}
            new = graph.call_function(F.scaled_dot_product_attention, (q, k, v), terms)
            for method in ("transpose", "contiguous", "transpose"):
                new = graph.call_method(method, (new,) if method == "contiguous" else (new, 1, 2))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
    if found:
        clean(gm)


def _plain(graph: fx.Graph, node: fx.Node) -> Plain | None:
    terms: tuple[Any, ...] = node.args
    q, k, v, _, k_positions, bounds = terms[:6]
    spec = AttentionSpec(*terms[6:])
    shapes = [shape(x) if isinstance(x, fx.Node) else None for x in (q, k, v)]
    if not spec.plain or spec.masked or isinstance(spec.scale, fx.Node) or None in shapes:
        return None
    q_shape, k_shape, v_shape = shapes
    if q_shape[2] != k_shape[2] or not q_shape[3] == k_shape[3] == v_shape[3]:  # type: ignore[index]
        return None  # a compiler's attention wants three operands of one shape
    if bounds is None:
        return Plain(node, None, None) if k_positions is None else None  # positions may hold padding
    rows = dimension_of(k_shape[2], graph.find_nodes(op="placeholder"))  # type: ignore[index]
    if rows is None or not isinstance(bounds, fx.Node) or bounds.op != "placeholder":
        return None
    return Plain(node, bounds, rows)


def _groups(node: fx.Node) -> int:
    q, k = (shape(x) for x in node.args[:2])  # type: ignore[arg-type]
    assert q is not None and k is not None
    return int(q[1] / k[1])


def _repeated(graph: fx.Graph, x: Any, groups: int) -> fx.Node:
    """(batch, kv_heads, rows, dim) -> (batch, kv_heads × groups, rows, dim), each head `groups` times in a row."""
    x = graph.call_method("unsqueeze", (x, 2))
    x = graph.call_method("expand", (x, -1, -1, groups, -1, -1))
    return graph.call_method("flatten", (x, 1, 2))


def _covers(bounds: Tensor, rows: int) -> bool:
    """Whether the (batch, 2) bounds of every request hold all rows; they lie on the CPU."""
    return bool((bounds[:, 0] == 0).all()) and bool((bounds[:, 1] == rows).all())
