"""When a compilation may run on some inputs: the guards of its shape environment, and what those leave out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from uniprefill_fx.lowering.compiler_internals import Mode, is_wrapper, shape_guards

log = logging.getLogger(__name__)
Test = Callable[[Sequence[Any]], bool]


def guards(mode: Mode, fakes: Sequence[Any], args: Sequence[Any], static: Sequence[bool], writes: bool) -> Test:
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
    # Of a quantised tensor that is no parameter all sizes are numbers, and its class is what can be told.
    shown = [f if i in sizes or (i in tensors and _is_plain(f)) else None for i, f in enumerate(fakes)]
    shapes, text = shape_guards(mode, shown)
    log.debug("guards: %s", text)
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


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not is_wrapper(value)


def _sharing(args: Sequence[Any], tensors: Sequence[int]) -> tuple[int, ...]:
    """Which tensors share storage, numbered by first appearance."""
    seen: dict[int, int] = {}
    return tuple(seen.setdefault(args[i].untyped_storage().data_ptr(), len(seen)) for i in tensors)
