"""Numbers in masks as sympy expressions that differ by case: 0 where a key is seen, `LOW` where it is hidden.

A condition counts as 1 or 0 where a model computes with it, `(1 - tril(ones)) * -1e9`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import sympy
from torch import fx

from uniprefill_fx.passes.node_utils import name_of

LOW = sympy.Symbol("LOW", negative=True)  # minus infinity
LOWEST_SEEN = -1e4  # the exponential of anything lower is 0


def constant(value: float) -> Any:
    """A number, or True or False, as sympy has it."""
    if isinstance(value, bool):
        return sympy.true if value else sympy.false
    if value == -math.inf:
        return LOW
    # sympy tells 0.0 from 0
    return sympy.Integer(int(value)) if math.isfinite(value) and value == int(value) else sympy.sympify(value)


def is_condition(value: Any) -> bool:
    """Whether an expression is true or false, and not a number."""
    return isinstance(value, sympy.logic.boolalg.Boolean) and not isinstance(value, sympy.Symbol)


def choose(condition: Any, then: Any, otherwise: Any) -> Any:
    """`then` where the condition holds, `otherwise` elsewhere: two conditions, or two numbers."""
    if is_condition(then) and is_condition(otherwise):
        return sympy.Or(sympy.And(condition, then), sympy.And(sympy.Not(condition), otherwise))
    return sympy.Piecewise((as_number(then), condition), (as_number(otherwise), True))


def as_number(value: Any) -> Any:
    """1 where a condition holds and 0 elsewhere; numbers as they are."""
    return sympy.Piecewise((1, value), (0, True)) if is_condition(value) else value


def cases(value: Any) -> list[tuple[Any, Any]]:
    """[(number, when)]: the values without cases that an expression takes, and the disjoint conditions for them."""
    if isinstance(value, sympy.Piecewise):
        found, before = [], sympy.true
        for branch, condition in value.args:
            found += [(x, sympy.And(before, condition, when)) for x, when in cases(branch)]
            before = sympy.And(before, sympy.Not(condition))
        return [(x, when) for x, when in found if when is not sympy.false]
    if not value.has(sympy.Piecewise):
        return [(value, sympy.true)]
    combined = []
    for parts in itertools.product(*(cases(arg) for arg in value.args)):
        when = sympy.And(*(condition for _, condition in parts))
        if when is not sympy.false:
            combined.append((value.func(*(x for x, _ in parts)), when))
    return combined


def compared(compare: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """A comparison of two expressions, case by case."""
    pairs = itertools.product(cases(as_number(left)), cases(as_number(right)))
    return sympy.Or(*(sympy.And(a, b, compare(x, y)) for (x, a), (y, b) in pairs))


def truth(value: Any) -> Any:
    """An expression as a condition: data and numbers are true where they are not 0."""
    return value if is_condition(value) else compared(sympy.Ne, value, sympy.Integer(0))


def visible(added: Any) -> tuple[Any, Any]:
    """What a number added to the logits lets through, and what it then adds; None when that differs by case."""
    found = cases(as_number(added))
    seen = [(x, when) for x, when in found if not _hides(x)]
    values = {x for x, _ in seen}
    return sympy.Or(*(when for _, when in seen)), values.pop() if len(values) == 1 else None


def _hides(value: Any) -> bool:
    return bool(value.has(LOW) or (value.is_number and value <= LOWEST_SEEN))


def is_low(value: Any) -> bool:
    """Whether an operand is a number that hides: minus infinity, or so low that its exponential is 0."""
    found = scalar(value)
    return found is not None and found <= LOWEST_SEEN


def scalar(value: Any) -> float | None:
    """A number, or a tensor of one number."""
    if isinstance(value, fx.Node) and name_of(value) in ("tensor", "full", "scalar_tensor"):
        given = value.args[1:2] if name_of(value) == "full" else value.args[:1]
        value = value.kwargs.get("fill_value", given[0] if given else None)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
