"""Which operations may run on some of a prompt's tokens without changing what they mean for those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy
import torch
from torch import fx

from uniprefill_fx.errors import Category, refuse
from uniprefill_fx.ops.mixer import bind
from uniprefill_fx.passes.node_utils import arguments, expression, is_op, meta, name_of, shape, token_dims

# Operations whose integer arguments are sizes or bounds of a token axis, so that a length may be replaced by the
# kept length. Anywhere else a length is a value, and replacing it would change what the model computes.
SIZED = frozenset(
    "view reshape expand repeat repeat_interleave new_zeros new_ones new_empty new_full zeros ones empty full arange "
    "split split_with_sizes narrow getitem unflatten resize_ setitem mixer".split()
)
# Operations that mix neighbouring tokens when they run along the token axis. Causal convolutions and mixers do too:
# they are meant to see the kept rows as neighbours.
ALONG = frozenset(
    "cumsum cumprod logcumsumexp cummax cummin roll flip diff softmax log_softmax sum mean prod amax amin max min "
    "argmax argmin norm std var any all logsumexp median".split()
)
PRODUCTS = frozenset("matmul bmm mm".split())
AFTER = {"roll": 2, "norm": 2, "diff": 2}  # the place of the dimension among an operation's arguments, if it is not 1


def check_rows(node: fx.Node, found: Mapping[fx.Node, int], tokens: sympy.Symbol, count: sympy.Expr) -> None:
    """Check that a node computes each token's row from that token alone, or mixes them as a mixer is meant to.

    Args:
        found: nonzero for inputs that will hold fewer rows.
        tokens: the symbol that tells axes of tokens from others. count: the number of tokens, an expression of it.

    Raises:
        RefusalError: with fewer rows it would compute something else.
    """
    name = name_of(node)
    if len(token_dims(node, tokens)) > 1:
        raise refuse(
            Category.TOKEN_OP,
            f"`{name}` relates tokens to tokens, shape {tuple(meta(node).shape)}",
            "only recognised attention may; register it as a mixer, or drop tokens behind it",
        )
    if is_op(node, "mixer"):
        _check_unpacked(node)
    if name in PRODUCTS and _sums_over(node, count):
        raise refuse(
            Category.TOKEN_OP,
            f"`{name}` sums over the token axis",
            "with tokens dropped it would compute something else; register it as a mixer if it is meant to",
        )
    base = node.args[0] if node.args else None
    buffer = isinstance(base, fx.Node) and isinstance(meta(base), torch.Tensor) and not token_dims(base, tokens)
    looked_up = any(isinstance(meta(n), torch.Tensor) for n in node.all_input_nodes if n is not base)  # table[ids]
    if name in ("getitem", "narrow") and token_dims(node, tokens) and buffer and not looked_up:
        raise refuse(
            Category.TOKEN_OP,
            f"the first rows of `{base}`, one for each token of the prompt, are taken",
            "the kept tokens are not the first ones",
        )
    for argument in arguments(node):
        if isinstance(argument, fx.Node) and isinstance(meta(argument), torch.SymInt | int | torch.SymFloat):
            value = meta(argument)
            if isinstance(value, torch.SymInt) and tokens in expression(value).free_symbols and name not in SIZED:
                raise refuse(
                    Category.TOKEN_OP,
                    f"`{name}` computes with the prompt length as a number",
                    "on fewer rows the length would mean something else",
                )
    if name in ALONG and node.args and isinstance(node.args[0], fx.Node) and found[node.args[0]]:
        source = node.args[0]
        fake = meta(source)
        if not isinstance(fake, torch.Tensor):
            return
        along = {d % fake.ndim for d in _dimensions(node, fake.ndim)}
        if any(d in along for d in token_dims(source, tokens) if expression(fake.shape[d]) == count):
            raise refuse(
                Category.TOKEN_OP,
                f"`{name}` runs along the token axis",
                "with tokens dropped it would compute something else; register it as a mixer if it is meant to",
            )


def _sums_over(product: fx.Node, count: sympy.Expr) -> bool:
    """Whether a product of matrices sums over the tokens, as linear attention that is not causal does."""
    left = shape(product.args[0]) if isinstance(product.args[0], fx.Node) else None
    return bool(left) and left[-1] == count  # type: ignore[index]


def _check_unpacked(mixer: fx.Node) -> None:
    """Refuse a mixer that is told where requests lie in the stream: behind a drop they lie elsewhere."""
    for argument, value in bind(*mixer.args).items():  # type: ignore[arg-type]
        if argument.startswith("cu_seq") and isinstance(value, fx.Node):
            raise refuse(
                Category.TOKEN_OP,
                f"a mixer over packed requests, `{argument}` of {mixer.args[0]}",
                "such a call stays dense; run prompts one by one",
            )


def _dimensions(node: fx.Node, ndim: int) -> Sequence[int]:
    """The dimensions that an operation of `ALONG` runs along; all of them where none is given."""
    given = [node.kwargs[name] for name in ("dim", "dims", "axis") if name in node.kwargs]
    given = given or list(node.args[AFTER.get(name_of(node), 1) :])
    if given and given[0] is None:
        return range(ndim)
    numbers = [n for item in given for n in (item if isinstance(item, tuple | list) else (item,))]
    return [n for n in numbers if isinstance(n, int) and not isinstance(n, bool)] if given else range(ndim)
