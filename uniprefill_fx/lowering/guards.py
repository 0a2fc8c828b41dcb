"""When a compilation may run on some inputs: the guards of its shape environment, and what those leave out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

log = logging.getLogger(__name__)
Test = Callable[[Sequence[Any]], bool]


def guards(
    shape_env: ShapeEnv, fakes: Sequence[Any], args: Sequence[Any], static: Sequence[bool], writes: bool
) -> Test:
    """Whether inputs are such as a finished compilation was made for.

    Args:
        fakes: what was compiled for `args`, one by one. static: inputs of which no more than the storage offset is
            looked at, because whoever calls guards the rest (parameters). writes: whether the graph writes to inputs:
            then which of them share storage counts too.
    """
    watched = [i for i, fixed in enumerate(static) if not fixed]
    tensors = [i for i in watched if isinstance(args[i], torch.Tensor)]
    kinds = [(i, type(args[i]), args[i].dtype, args[i].device, args[i].ndim) for i in tensors]
    sizes = [i for i in watched if isinstance(fakes[i], torch.SymInt)]
    constants = [(i, type(args[i]), args[i]) for i in watched if i not in tensors and i not in sizes]
    shapes = _shape_guards(shape_env, [f if i in tensors or i in sizes else None for i, f in enumerate(fakes)])
    # What is compiled takes parameters for aligned where they are, and those of other layers may be put in their place.
    offsets = [(i, args[i].storage_offset()) for i, fixed in enumerate(static) if fixed and _is_plain(args[i])]
    pattern = _sharing(args, tensors) if writes else None

    def test(now: Sequence[Any]) -> bool:
        for i, kind, dtype, device, ndim in kinds:
            t = now[i]
            if type(t) is not kind or t.dtype is not dtype or t.device != device or t.ndim != ndim:
                return False
        for i, offset in offsets:
            if now[i].storage_offset() != offset:
                return False
        for i, kind, value in constants:
            if type(now[i]) is not kind or now[i] != value:
                return False
        return shapes(now) and (pattern is None or _sharing(now, tensors) == pattern)

    return test


def _shape_guards(shape_env: ShapeEnv, fakes: Sequence[Any]) -> Test:
    """The sizes, strides and storage offsets of inputs; None stands for one that is not looked at."""
    # A quantised tensor that is no parameter: its sizes are numbers, and its class is all that can be told.
    watched: list[Any] = [f if _is_plain(f) or isinstance(f, torch.SymInt) else None for f in fakes]
    known = set().union(*(_symbols(f) for f in watched))
    about = [g for g in shape_env.guards if shape_env.simplify(g.expr).free_symbols <= known]
    if len(about) < len(shape_env.guards):
        log.debug("guards about no input: %s", [g.expr for g in shape_env.guards if g not in about])
    code = shape_env.produce_guards_expression(watched, guards=about, ignore_static=False) or "True"
    log.debug("guards: %s", code)
    compiled: Any = compile(code, "<guards>", "eval")  # once, and not at each call
    return lambda now: bool(shape_env.evaluate_guards_expression(compiled, now))


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value)


def _symbols(fake: Any) -> set[Any]:
    if isinstance(fake, torch.Tensor):
        parts: list[Any] = [*fake.shape, *fake.stride(), fake.storage_offset()]
    else:
        parts = [fake]
    return set().union(*(p.node.expr.free_symbols for p in parts if isinstance(p, torch.SymInt)))


def _sharing(args: Sequence[Any], tensors: Sequence[int]) -> tuple[int, ...]:
    """Which tensors share storage, numbered by first appearance."""
    seen: dict[int, int] = {}
    return tuple(seen.setdefault(args[i].untyped_storage()._cdata, len(seen)) for i in tensors)
