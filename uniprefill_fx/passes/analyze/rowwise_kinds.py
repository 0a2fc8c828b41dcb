"""What the rows of a value are to the tokens: the words in which `rowwise` speaks of the values of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from uniprefill_fx.passes.node_utils import expression


@dataclass(frozen=True)
class Rows:
    """One axis holds a row for each token, computed from that token alone (or from its neighbours, as a mixer does).

    Attributes:
        dim: that axis, of size outer · tokens · inner. outer, inner: factors of its size before and behind the tokens,
            in order: (batch,) outside for tokens of several prompts in one axis, (k,) inside for k rows a token.
    """

    dim: int
    outer: tuple[sympy.Expr, ...] = ()
    inner: tuple[sympy.Expr, ...] = ()


@dataclass(frozen=True)
class Same:
    """Nothing in it depends on which tokens are there, except its size along an axis of tokens."""


@dataclass(frozen=True)
class State:
    """No axis of tokens, and computed from them as it should be: the state of a mixer, or the last rows."""


@dataclass(frozen=True)
class Mixed:
    """Rows of several tokens are in it, or it is not known what is.

    Attributes:
        what: the sentence that a refusal says. groups: made by operations that sort rows, look them up and count them:
            a later value may have a row for each token again. convolves: made of padding, slices and convolutions.
            counted: it holds numbers of tokens, or sums over them.
    """

    what: str
    groups: bool = False
    convolves: bool = False
    convolution: bool = False
    counted: bool = False


Kind = Rows | Same | State | Mixed
Kinds = Any  # a Kind, or a tuple of Kinds for a value that is a tuple


class Axes:
    """Which axes of a graph's values are axes of tokens."""

    def __init__(self, tokens: sympy.Symbol, count: sympy.Expr, batch: sympy.Expr = sympy.S.One) -> None:
        """tokens: the symbol that tells them from others. count: the number of tokens, an expression of it.

        batch: 1, or the symbol of the number of prompts, whose rows lie side by side and are no better mixed.
        """
        self.tokens, self.count, self.batch = tokens, count, batch

    def sizes(self, value: Any) -> tuple[sympy.Expr, ...]:
        return tuple(expression(s) for s in value.shape)

    def dims(self, value: Any) -> tuple[int, ...]:
        """The axes of a tensor whose size depends on the number of tokens."""
        if not isinstance(value, torch.Tensor):
            return ()
        return tuple(d for d, size in enumerate(self.sizes(value)) if self.tokens in size.free_symbols)

    def of_prompts(self, value: Any, dim: int) -> bool:
        """Whether an axis of a tensor holds the prompts of a batch."""
        return self.batch != 1 and bool(self.sizes(value)[dim] == self.batch)

    def plain(self, value: Any) -> Rows | None:
        """A tensor with one axis of tokens, one row each; None if it isn't one."""
        dims = self.dims(value)
        if len(dims) == 1 and self.sizes(value)[dims[0]] == self.count:
            return Rows(dims[0])
        return None

    def rows_a_token(self, value: Any, dim: int) -> sympy.Expr | None:
        """How many rows a token has along an axis; None if that is no number of its own."""
        ratio = sympy.cancel(self.sizes(value)[dim] / self.count)
        return None if ratio.free_symbols & self.count.free_symbols or ratio.is_integer is False else ratio

    def reshaped(self, before: Any, after: Any, rows: Rows) -> Rows | None:
        """`rows` of `before` in `after`, which has the same elements in the same order."""
        dims = self.dims(after)
        if len(dims) != 1:
            return None
        old, new, dim = self.sizes(before), self.sizes(after), dims[0]
        outer = _behind([*old[: rows.dim], *rows.outer], new[:dim])
        inner = _behind([*old[rows.dim + 1 :][::-1], *rows.inner[::-1]], new[dim + 1 :][::-1])
        if outer is None or inner is None:
            return None
        return Rows(dim, outer, inner[::-1])


def _behind(factors: list[sympy.Expr], taken: tuple[sympy.Expr, ...]) -> tuple[sympy.Expr, ...] | None:
    """The factors that are left when those in front make up the product of `taken`."""
    wanted, made = sympy.prod(taken), sympy.S.One
    left = [f for f in factors if f != 1]
    while made != wanted and left:
        made = made * left.pop(0)
        if made != wanted and (wanted / made).is_integer is False:
            more = sympy.cancel(made / wanted)  # one factor is taken in part: (12,) as (3, 4)
            return (more, *left) if more.is_integer else None
    return tuple(left) if sympy.expand(made - wanted) == 0 else None


def is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(
        value.meta.get("example_value", value.meta.get("val")), torch.Tensor
    )
