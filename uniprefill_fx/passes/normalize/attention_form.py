"""Write the products of attention as matmuls over (batch, heads, tokens, dim), whatever their layout was.

Attention over 3-D operands (heads, tokens, dim), `bmm`, and `einsum` become one form, which `attention_nodes` and
`spelled` read.
Before::

    scores = einsum("bihd,bjhd->bhij", q, k)
    out = bmm(softmax(scores_2, -1), v_2)                       # (heads, N, N), (heads, N, D)
    out_2 = scaled_dot_product_attention(q_3, k_3, v_3)         # (heads, N, D) each

After::

    scores = matmul(q.permute(0, 2, 1, 3), k.permute(0, 2, 1, 3).transpose(-2, -1))
    out = matmul(softmax(scores_2, -1)[None], v_2[None]).squeeze(0)
    out_2 = scaled_dot_product_attention(q_3[None], k_3[None], v_3[None]).squeeze(0)

The values are the same; a new first axis stands for one batch whose rows are all heads (`plan` checks that they are).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from uniprefill_fx.passes.cleanup import clean
from uniprefill_fx.passes.node_utils import meta, name_of, peel
from uniprefill_fx.torch_internals import dispatch_in_python

BETWEEN = frozenset("to float type_as contiguous clone dropout view reshape squeeze unsqueeze".split())
LOGITS = BETWEEN | frozenset("mul truediv div add iadd sub masked_fill masked_fill_ where tanh".split())


def unify_attention_form(gm: fx.GraphModule) -> int:
    """Rewrite the products around attention in place; returns how many."""
    written = 0
    with dispatch_in_python():
        for node in list(gm.graph.nodes):
            if node.target is F.scaled_dot_product_attention and _ndim(node.args[:1]) == 3:
                written += _fused(node)
            elif name_of(node) == "softmax":
                for product, scores in _products(node):
                    written += _einsum(product, scores) if name_of(product) == "einsum" else _matmul(product, scores)
    if written:
        clean(gm)
    return written


def _ndim(values: Any) -> int | None:
    value = meta(values[0]) if values and isinstance(values[0], fx.Node) else None
    return value.ndim if isinstance(value, torch.Tensor) else None


def _products(softmax: fx.Node) -> Iterator[tuple[fx.Node, bool]]:
    """The product that a softmax weighs, flagged, and the one that reads its weights; neither for other softmaxes."""
    weighed, operand = None, softmax
    for _ in range(8):
        readers = [u for u in operand.users if name_of(u) in ("matmul", "bmm", "einsum")]
        if readers:
            weighed = readers[0]
            break
        onward = [u for u in operand.users if name_of(u) in BETWEEN]
        if not onward:
            return
        operand = onward[0]
    logits: Any = softmax.args[0]
    for _ in range(12):
        if name_of(logits) in ("matmul", "bmm", "einsum"):
            if weighed is not None:
                yield logits, True
                yield weighed, False
            return
        if name_of(logits) not in LOGITS:
            return
        nodes = [a for a in logits.args if isinstance(a, fx.Node) and _ndim([a]) == _ndim([logits])]
        if not nodes:
            return
        logits = next((a for a in nodes if name_of(a) in LOGITS | {"matmul", "bmm", "einsum"}), nodes[0])


class _Writer:
    """Inserts calls before a node, with the meta that they have."""

    def __init__(self, before: fx.Node) -> None:
        self.before, self.graph = before, before.graph

    def __call__(self, value: fx.Node, method: str, *args: Any) -> fx.Node:
        with self.graph.inserting_before(self.before):
            new = self.graph.call_method(method, (value, *args))
        operands = [meta(a) if isinstance(a, fx.Node) else a for a in args]
        return self._described(new, getattr(meta(value), method)(*operands))

    def matmul(self, left: fx.Node, right: fx.Node) -> fx.Node:
        with self.graph.inserting_before(self.before):
            new = self.graph.call_function(torch.matmul, (left, right))
        return self._described(new, torch.matmul(meta(left), meta(right)))

    def permuted(self, value: fx.Node, order: list[int]) -> fx.Node:
        return value if order == sorted(order) else self(value, "permute", *order)

    def _described(self, new: fx.Node, value: Any) -> fx.Node:
        new.meta = {key: self.before.meta[key] for key in ("nn_module_stack", "stack_trace") if key in self.before.meta}
        new.meta["example_value"] = value
        return new


def _fused(node: fx.Node) -> int:
    writer = _Writer(node)
    operands = tuple(writer(operand, "unsqueeze", 0) for operand in node.args[:3] if isinstance(operand, fx.Node))
    if len(operands) != 3:
        return 0
    old = meta(node)
    node.args = (*operands, *node.args[3:])
    node.meta["example_value"] = old.unsqueeze(0)
    following = _Writer(node.next)
    back = following(node, "squeeze", 0)
    node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
    return 1


def _matmul(product: fx.Node, scores: bool) -> int:
    """Operands with a batch axis, and keys that are transposed right before their product."""
    left, right = product.args[:2]
    if not (isinstance(left, fx.Node) and isinstance(right, fx.Node)) or _ndim([left]) != _ndim([right]):
        return 0
    ndim = _ndim([left])
    writer = _Writer(product)
    if ndim == 3 and not any(_ndim(peel(n, ("transpose",)).args[:1]) == 4 for n in (left, right)):
        if scores:
            keys = writer(_untransposed(right, writer), "unsqueeze", 0)
            new = writer.matmul(writer(left, "unsqueeze", 0), writer(keys, "transpose", -2, -1))
        else:
            new = writer.matmul(writer(left, "unsqueeze", 0), writer(right, "unsqueeze", 0))
        new = writer(new, "squeeze", 0)
    elif ndim == 4 and scores and name_of(right) not in ("transpose", "swapaxes"):
        new = writer.matmul(left, writer(_untransposed(right, writer), "transpose", -2, -1))
    else:
        return 0
    product.replace_all_uses_with(new)
    return 1


def _untransposed(value: fx.Node, writer: _Writer) -> fx.Node:
    """The keys whose transpose `value` is: what was transposed, or else its transpose."""
    ndim, name = meta(value).ndim, name_of(value)
    swapped = [*range(ndim - 2), ndim - 1, ndim - 2]
    dims: Any = value.args[1:]
    dims = list(dims[0]) if len(dims) == 1 and isinstance(dims[0], tuple | list) else list(dims)
    source = value.args[0] if value.args else None
    if isinstance(source, fx.Node):
        if name == "getattr" and value.args[1] == "mT":
            return source
        numbers = [d % ndim for d in dims if isinstance(d, int)]
        if (name == "permute" and numbers == swapped) or (
            name in ("transpose", "swapaxes") and sorted(numbers) == [ndim - 2, ndim - 1]
        ):
            return source
    return writer(value, "transpose", -2, -1)


def _einsum(product: fx.Node, scores: bool) -> int:
    """A product of two operands with one summed and one free index each, as a matmul between permutations."""
    equation: Any = product.args[0]
    operands: Any = product.args[1:]
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or equation.count("->") != 1 or "." in equation or len(operands) != 2:
        return 0
    inputs, out = equation.replace(" ", "").split("->")
    names, nodes = inputs.split(","), list(operands)
    if not scores and not _from_softmax(nodes[0]):  # weights come first
        names, nodes = names[::-1], nodes[::-1]
    if scores and out and out[-1] not in names[1]:  # keys come second
        names, nodes = names[::-1], nodes[::-1]
    left, right = names
    if any(len(set(term)) != len(term) for term in (left, right, out)):
        return 0
    batch = [c for c in out if c in left and c in right]
    summed = [c for c in left if c in right and c not in out]
    rows, columns = ([c for c in out if c in a and c not in b] for a, b in ((left, right), (right, left)))
    complete = set(left) | set(right) == {*batch, *summed, *rows, *columns}
    if not (len(summed) == len(rows) == len(columns) == 1 and 1 <= len(batch) <= 2 and complete):
        return 0
    writer = _Writer(product)
    first = writer.permuted(nodes[0], [left.index(c) for c in (*batch, *rows, *summed)])
    order = (*batch, *columns, *summed) if scores else (*batch, *summed, *columns)
    second = writer.permuted(nodes[1], [right.index(c) for c in order])
    if len(batch) == 1:
        first, second = writer(first, "unsqueeze", 0), writer(second, "unsqueeze", 0)
    if scores:
        second = writer(second, "transpose", -2, -1)
    new = writer.matmul(first, second)
    if len(batch) == 1:
        new = writer(new, "squeeze", 0)
    made = [*batch, *rows, *columns]
    product.replace_all_uses_with(writer.permuted(new, [made.index(c) for c in out]))
    return 1


def _from_softmax(node: Any) -> bool:
    return isinstance(node, fx.Node) and name_of(peel(node, BETWEEN)) == "softmax"
