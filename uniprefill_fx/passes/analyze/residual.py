"""Find the residual stream: what a dropped token is frozen to, and where the kept rows are scattered back."""

from __future__ import annotations

from typing import Any

import sympy
from torch import fx

from uniprefill_fx.errors import Category, refuse
from uniprefill_fx.passes.analyze.rowwise_ops import AXES, ELEMENTS, POINTWISE, known_name
from uniprefill_fx.passes.attention_node import AttentionNode
from uniprefill_fx.passes.dataflow import Ancestry
from uniprefill_fx.passes.node_utils import name_of, shape, token_dims

ADDS = frozenset({"add", "iadd", "add_"})
SCALES = ADDS | {"mul", "multiply"}
PRODUCTS_ADDED = frozenset({"addcmul", "addcmul_", "addcdiv", "addcdiv_"})  # x + a * b, x + a / b
WEIGHTED = frozenset({"lerp", "lerp_"})  # (1 - w) * x + w * y
# What a norm is made of: a sum behind these alone is the stream itself. No product with a matrix is among them.
NORMS = frozenset(
    "layer_norm rms_norm normalize norm linalg_vector_norm vector_norm mean sum var std dropout expand expand_as size "
    "dim numel getitem".split()
) | (POINTWISE | ELEMENTS | AXES)


def residual_adds(graph: fx.Graph, tokens: sympy.Symbol, ancestry: Ancestry) -> list[tuple[fx.Node, fx.Node]]:
    """[(sum, residual)] in graph order: sums `x + f(x)` of two equal shapes with a token axis, and their x.

    One operand being computed from the other is what tells a residual connection from other sums (rotary, gates,
    experts): no shape or name does. Either may be scaled by a number first.
    """
    found = []
    for node in graph.nodes:
        left, right = (_unscaled(a, tokens) for a in _summands(node, tokens))
        if left is None or right is None or left is right:
            continue
        if shape(left) is None or shape(left) != shape(right) or not token_dims(node, tokens):
            continue
        if ancestry.depends(right, left):
            found.append((node, left))
        elif ancestry.depends(left, right):
            found.append((node, right))
    return found


def _summands(node: fx.Node, tokens: sympy.Symbol) -> tuple[Any, Any]:
    """The two operands of a sum, or of what computes one; (None, None) where it is none."""
    name, args = name_of(node), node.args
    if name in ADDS and len(args) > 1:
        return args[0], args[1]
    if len(args) < 3:
        return None, None
    streams = [isinstance(a, fx.Node) and bool(token_dims(a, tokens)) for a in args[:3]]
    if name in WEIGHTED and streams == [True, True, False]:  # a weight of each token's own would be a gate
        return args[0], args[1]
    if name in PRODUCTS_ADDED and streams == [True, True, False]:
        return args[0], args[1]
    if name in ("addcmul", "addcmul_") and streams == [True, False, True]:
        return args[0], args[2]
    return None, None


def _unscaled(value: Any, tokens: sympy.Symbol) -> fx.Node | None:
    """An operand before casts, and before scales and shifts that are the same for every token.

    MiniMax: `alpha * x + beta * f(x)`, with numbers; Zaya: `(x + bias) * scale`, with a vector over channels.
    """
    while isinstance(value, fx.Node):
        name, args = name_of(value), value.args
        if name in SCALES and len(args) == 2:
            streams = [a for a in args if isinstance(a, fx.Node) and token_dims(a, tokens)]
            if len(streams) == 1 and shape(streams[0]) == shape(value):
                value = streams[0]
                continue
        if name in ("to", "float", "type_as", "dropout", "contiguous") and args:
            value = args[0]
            continue
        return value
    return None


def is_of_norm(node: fx.Node) -> bool:
    """Whether a node may be part of a norm, a cast or a change of shape: it reads no matrix of weights."""
    return node.op not in ("call_function", "call_method") or known_name(node) in NORMS


def entering(
    attention: AttentionNode, adds: list[tuple[fx.Node, fx.Node]], ancestry: Ancestry, shown: bool = True
) -> fx.Node:
    """The residual stream that enters the layer of `attention` (paper: H^(b,0)).

    The first sum that takes in the attention's output has a residual which is not computed from that output itself,
    and is an ancestor of the attention's queries. Where that is itself the sum of an earlier layer, or the embedding,
    it is the stream; where a norm lies between (post-norm models), the stream is the sum before the norm.

    Args:
        shown: whether a caller sees dropped rows; where nobody does, what they are frozen to need not be proven.

    Raises:
        RefusalError: there is no such sum, or what lies between it and the one before is more than a norm.
    """
    for node, residual in adds:
        if not ancestry.depends(node, attention.node):
            continue
        if not ancestry.depends(residual, attention.node) and ancestry.depends(attention.q, residual):
            earlier = [n for n, _ in adds if ancestry.depends(residual, n)]
            same = [n for n in earlier if shape(n) == shape(residual)]
            if not same:
                return residual
            if not shown:
                return same[-1]
            steps = [n for n in ancestry.order if ancestry.depends(residual, n) and ancestry.depends(n, same[-1])]
            if unknown := next((n for n in steps if n is not same[-1] and not is_of_norm(n)), None):
                raise refuse(
                    Category.RESIDUAL,
                    f"`{name_of(unknown)}` takes part in what the stream becomes before it enters the layer, "
                    "and that is no sum `x + f(x)`",
                    "dropped tokens would be frozen to an older state, so this layer stays dense",
                    attention.layer,
                )
            return same[-1]
        break
    raise refuse(
        Category.RESIDUAL,
        "no sum of the attention output with the stream that entered the layer",
        "dropped tokens would have no state to be frozen to, so this layer stays dense",
        attention.layer,
    )


def leaving(attention: AttentionNode, adds: list[tuple[fx.Node, fx.Node]], ancestry: Ancestry) -> fx.Node:
    """The last value of the residual stream, behind the last layer and before the final norm."""
    later = [node for node, _ in adds if ancestry.depends(node, attention.node)]
    if not later:
        raise refuse(
            Category.RESIDUAL, "no residual stream behind the attention", "this layer stays dense", attention.layer
        )
    return later[-1]
