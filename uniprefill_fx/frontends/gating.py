"""Whether the graph that Dynamo traces now is for this backend: what we teach Dynamo must be inert for all others."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from uniprefill_fx.torch_internals import compiling_backends

OURS = "_uniprefill_backend"  # attribute that marks our backend callables


@torch.compiler.assume_constant_result
def compiling_for_uniprefill() -> bool:
    """True while Dynamo traces for a backend callable of ours. Evaluated while tracing; a constant in the graph."""
    return any(getattr(compiler, OURS, False) for compiler in compiling_backends())


def copy_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A second function object with the same code: what a substitution calls, as Dynamo replaces the first one."""
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__module__ = function.__module__
    copy.__dict__.update(function.__dict__)  # among them the mark of functions that are disabled for the compiler
    return copy
