"""Whether the graph that Dynamo traces now is for this backend: what we teach Dynamo must be inert for all others."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.symbolic_convert import InstructionTranslator

OURS = "_uniprefill_backend"  # attribute that marks our backend callables


@torch._dynamo.assume_constant_result
def compiling_for_uniprefill() -> bool:
    """True while Dynamo traces for a backend callable of ours. Evaluated while tracing; a constant in the graph."""
    compiler = InstructionTranslator.current_tx().output.compiler_fn
    for _ in range(8):  # wrappers: torch.compile's own, functools.partial, Dynamo's backend contexts
        if getattr(compiler, OURS, False):
            return True
        inner = getattr(compiler, "compiler_fn", None) or getattr(compiler, "func", None)
        inner = inner or getattr(compiler, "_torchdynamo_orig_backend", None)
        if inner is None:
            return False
        compiler = inner
    return False


def resumed() -> bool:
    """Whether the frame that Dynamo compiles now continues one whose graph was broken. For backends to ask."""
    try:
        frame = InstructionTranslator.current_tx()
    except AttributeError:  # called by someone other than Dynamo: there is no frame
        return False
    return frame.f_code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX)


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
