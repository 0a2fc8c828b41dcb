"""Read attention that a model spells out: matmul, scale, mask, softmax, matmul.

Backwards from the softmax, every step must be one that is known (so that nothing is lost when the whole is replaced by
one op), until the product of queries and keys; forwards, until the product with the values::

    w = softmax(cat([matmul(q, k.transpose(2, 3)) * scale + mask, sinks], -1), -1)[..., :-1]
    out = matmul(dropout(w), v)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from uniprefill_fx.errors import Category, refuse
from uniprefill_fx.passes.analyze.masks.numbers import is_low
from uniprefill_fx.passes.node_utils import expression, meta, name_of, peel

CASTS = frozenset("to float type_as contiguous clone".split())
RESHAPES = frozenset("view reshape squeeze unsqueeze".split())
PRODUCTS = frozenset("matmul bmm".split())


@dataclass
class ExplicitAttention:
    """The parts of one spelled-out attention, found while walking its nodes.

    Attributes:
        out: its result, (batch, heads, queries, v_dim). q, k, v: operands, (batch, heads, tokens, dim).
        scale: factor on q·k. masks: what is added or must be true, and (node, True) for masks of what is hidden.
        scaled_masks: whether the scale is applied to what a mask adds, too.
        softcap: logits become softcap * tanh(logits / softcap). sinks: one logit a head that takes part in the softmax.
        bias: added to the logits, of keys only. interior: every node that goes away with the replacement.
    """

    scale: float = 1.0
    softcap: float | None = None
    sinks: fx.Node | None = None
    bias: fx.Node | None = None
    masks: list[tuple[fx.Node, bool]] = field(default_factory=list)
    scaled_masks: bool = False
    interior: set[fx.Node] = field(default_factory=set)
    q: Any = None
    k: Any = None
    v: Any = None
    out: Any = None


def read_explicit_attention(softmax: fx.Node) -> ExplicitAttention | None:
    """The attention around a softmax; None when the softmax is no attention (a router's, say).

    Raises:
        RefusalError: it is attention, with a step that is not known.
    """
    fake = meta(softmax)
    if not isinstance(fake, torch.Tensor) or fake.ndim < 3 or not _leads_to_product(softmax):
        return None
    dim = softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else None)
    if dim not in (-1, fake.ndim - 1):
        return None
    found = ExplicitAttention()
    _backwards(softmax.args[0], found)
    _forwards(softmax, found)
    for node in found.interior - {found.out}:
        outside = [user for user in node.users if user not in found.interior]
        if outside:
            raise refuse(
                Category.ATTENTION,
                f"attention weights are read by `{name_of(outside[0]) or 'the output'}`",
                "do not ask for attentions: they do not exist for dropped tokens",
            )
    return found


def _leads_to_product(softmax: fx.Node) -> bool:
    """Whether the softmax's result is the left side of a matrix product: what tells attention from other softmaxes."""
    node = softmax
    for _ in range(8):
        for user in node.users:
            if name_of(user) in PRODUCTS and user.args[0] is node:
                return True
        follow = [u for u in node.users if name_of(u) in CASTS | RESHAPES | {"dropout", "getitem", "masked_fill"}]
        if not follow:
            return False
        node = follow[0]
    return False


def _backwards(node: Any, found: ExplicitAttention) -> None:
    """From the softmax's input to the product of queries and keys."""
    while True:
        if not isinstance(node, fx.Node):
            raise _unknown(node)
        name = name_of(node)
        args: Any = node.args
        found.interior.add(node)
        if name in PRODUCTS:
            found.q, found.k = _heads(args[0]), _heads(_untransposed(args[1]))
            return
        if name == "baddbmm":
            if node.kwargs.get("beta", 1) != 1 or found.softcap is not None or found.scale != 1.0:
                raise _unknown(node)
            alpha: Any = node.kwargs.get("alpha", 1)
            found.scale *= float(alpha)
            if expression(meta(args[0]).shape[-2]) == 1:
                found.bias = args[0]
            else:
                found.masks.append((args[0], False))
            batches = [
                node.kwargs.get(n, args[i] if len(args) > i else None) for i, n in ((1, "batch1"), (2, "batch2"))
            ]
            found.q, found.k = _heads(batches[0]), _heads(_untransposed(batches[1]))
            return
        if name in CASTS or name in RESHAPES or (name == "sub" and _is_maximum(args[1], args[0], found)):
            node = args[0]
        elif name == "cat" and len(args[0]) == 2 and found.sinks is None:
            node, sinks = args[0]
            found.interior.add(sinks)
            found.sinks = peel(sinks, ("expand",))
        elif name == "mul" and _number(args[1]) is not None and name_of(args[0]) == "tanh":
            inner = args[0].args[0]
            if name_of(inner) != "truediv" or inner.args[1] != args[1] or (found.masks and found.scale != 1.0):
                raise _unknown(node)
            found.softcap = float(args[1])
            found.interior |= {args[0], inner}
            node = inner.args[0]
        elif name in ("mul", "truediv", "div") and _number(args[1]) is not None:
            if found.softcap is None and found.scale != 1.0:
                raise _unknown(node)
            found.scale *= float(args[1]) if name == "mul" else 1.0 / float(args[1])
            node = args[0]
        elif name in ("max", "maximum") and len(args) == 2 and is_low(args[1]):
            node = args[0]  # a bound for hidden keys
        elif name in ("add", "iadd") and len(args) == 2 and found.softcap is None:
            found.scaled_masks |= found.scale != 1.0
            scores, other = args if _has_product(args[0]) else args[::-1]
            if not isinstance(other, fx.Node):
                raise _unknown(node)
            found.masks.append((other, False))
            node = scores
        elif name == "masked_fill" and is_low(args[2]) and found.scale == 1.0 and found.softcap is None:
            found.masks.append((args[1], True))
            node = args[0]
        elif name == "where" and is_low(args[2]) and found.scale == 1.0 and found.softcap is None:
            found.masks.append((args[0], False))
            node = args[1]
        else:
            raise _unknown(node)


def _forwards(softmax: fx.Node, found: ExplicitAttention) -> None:
    """From the softmax to the product with the values, and to a 4-D result."""
    node, sliced = softmax, False
    while True:
        found.interior.add(node)
        if len(node.users) != 1:
            raise refuse(Category.ATTENTION, "attention weights with several readers", "do not ask for attentions")
        (user,) = node.users
        name = name_of(user)
        if name in PRODUCTS and user.args[0] is node:
            found.v, node = _heads(user.args[1]), user
            break
        if name == "getitem" and user.args[1] == (Ellipsis, slice(None, -1, None)):
            sliced = True
        elif name == "dropout":
            active = user.kwargs.get("training", user.args[2] if len(user.args) > 2 else True)
            if active and (user.kwargs.get("p", user.args[1] if len(user.args) > 1 else 0.5)) != 0:
                raise refuse(Category.ATTENTION, "attention with dropout", "call model.eval()")
        elif name not in CASTS and name not in RESHAPES:
            raise _unknown(user)
        node = user
    if sliced != (found.sinks is not None):
        raise _unknown(softmax)
    if meta(node).ndim == 3 and len(node.users) == 1:  # bmm: batch and heads are one axis until the next view
        found.interior.add(node)
        (node,) = node.users
        if name_of(node) not in ("view", "reshape"):
            raise _unknown(node)
    found.interior.add(node)
    found.out = _scaled_by_sinks(node, softmax, found) if found.sinks is None else node
    found.interior.add(found.out)


def _scaled_by_sinks(product: fx.Node, softmax: fx.Node, found: ExplicitAttention) -> fx.Node:
    """The result times `sigmoid(logsumexp(logits, -1) - sinks)`, where that is done to it; or the product itself.

    exp(lse) / (exp(lse) + exp(sink)) is what one more logit in the softmax's denominator makes of the weights.
    """
    users = list(product.users)
    if len(users) != 1 or name_of(users[0]) != "mul" or len(users[0].args) != 2:
        return product
    factor = next((a for a in users[0].args if a is not product), None)
    path: list[fx.Node] = []
    for names in ("to", "unsqueeze", "to"), ("sigmoid",), ("to", "float"), ("sub",):
        for name in names:
            if isinstance(factor, fx.Node) and name_of(factor) == name:
                path.append(factor)
                factor = factor.args[0]
    if [name_of(n) for n in path if name_of(n) not in ("to", "float")] != ["unsqueeze", "sigmoid", "sub"]:
        return product
    spread, difference = next(n for n in path if name_of(n) == "unsqueeze"), path[-1]
    shape, sinks = meta(product).shape, difference.args[1]
    if not isinstance(factor, fx.Node) or name_of(factor) != "logsumexp" or factor.args[0] is not softmax.args[0]:
        return product
    dim = factor.kwargs.get("dim", factor.args[1] if len(factor.args) > 1 else None)
    keepdim = factor.kwargs.get("keepdim", factor.args[2] if len(factor.args) > 2 else False)
    sizes = [expression(s) for s in meta(sinks).shape] if isinstance(sinks, fx.Node) else []
    alone = all(len(n.users) == 1 for n in (*path, factor))
    by_head = sizes in ([1, expression(shape[1]), 1], [expression(shape[1]), 1])
    if dim not in (-1, 3) or keepdim or spread.args[1] not in (-1, 3) or not (alone and by_head and len(shape) == 4):
        return product
    found.interior |= {*path, factor}
    assert isinstance(sinks, fx.Node)
    found.sinks = peel(sinks, ("view", "reshape"))
    return users[0]


def _heads(node: Any) -> fx.Node:
    """An operand as (batch, heads, tokens, dim): before batch and heads were made one axis for `bmm`."""
    if isinstance(node, fx.Node) and meta(node).ndim == 3 and name_of(node) in ("view", "reshape"):
        node = node.args[0]
    if not isinstance(node, fx.Node) or meta(node).ndim != 4:
        raise _unknown(node)
    return node


def _untransposed(node: Any) -> Any:
    """k, given its transpose over the last two dimensions."""
    if isinstance(node, fx.Node) and name_of(node) in ("transpose", "swapaxes"):
        ndim, dims = meta(node).ndim, [d for d in node.args[1:3] if isinstance(d, int)]
        if sorted(d % ndim for d in dims) == [ndim - 2, ndim - 1]:
            return node.args[0]
    raise _unknown(node)


def _is_maximum(value: Any, of: Any, found: ExplicitAttention) -> bool:
    """Whether `value` is the row maximum of `of`: subtracting it does not change a softmax."""
    source = value.args[0] if isinstance(value, fx.Node) and name_of(value) == "getitem" else value
    if isinstance(source, fx.Node) and name_of(source) in ("max", "amax") and source.args[0] is of:
        found.interior |= {value, source}
        return True
    return False


def _has_product(node: Any) -> bool:
    """Whether the product of queries and keys lies behind an operand, through known steps."""
    steps = CASTS | RESHAPES | {"mul", "truediv", "div", "tanh", "add", "masked_fill"}
    while isinstance(node, fx.Node):
        if name_of(node) in PRODUCTS or name_of(node) == "baddbmm":
            return True
        if name_of(node) == "where" and len(node.args) == 3:
            node = node.args[1]
            continue
        if name_of(node) not in steps or not node.args:
            return False
        node = node.args[0]
    return False


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _unknown(node: Any) -> Exception:
    what = f"`{name_of(node)}`" if isinstance(node, fx.Node) else repr(node)
    return refuse(
        Category.ATTENTION,
        f"spelled-out attention with a step that is not known: {what}",
        "this layer stays dense; use attn_implementation='sdpa' where the model has it",
    )
