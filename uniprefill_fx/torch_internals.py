"""Private APIs of PyTorch that the package relies on, one function each; nothing else in the package uses any.

`tests/test_torch_internals.py` calls each on the torch at hand and fails on private uses elsewhere. What each looks
like in the oldest and newest torch, and what changes next, is written in `docs/torch-versions.md`.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import eval_frame
from torch._dynamo.comptime import comptime as comptime  # in traced code, comptime(f) calls f(context) at once
from torch._dynamo.exc import BackendCompilerFailed, TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.source import ConstantSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._logging import trace_structured
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, guard_scalar, statically_known_true
from torch.nn.modules import module as nn_module
from torch.utils._sympy.functions import FloorDiv

# Dynamo: the frame and the backend of the compilation that is under way


def compiling_backends() -> Iterator[Any]:
    """The backend that the frame being traced is traced for, then what it wraps; to be called while Dynamo traces.

    Relies on `InstructionTranslator.current_tx().output.compiler_fn`, and on what wrappers call the backend inside:
    `compiler_fn` (torch.compile's), `func` (functools.partial), `_torchdynamo_orig_backend` (Dynamo's contexts).
    """
    compiler = InstructionTranslator.current_tx().output.compiler_fn
    for _ in range(8):
        yield compiler
        inner = getattr(compiler, "compiler_fn", None) or getattr(compiler, "func", None)
        compiler = inner or getattr(compiler, "_torchdynamo_orig_backend", None)
        if compiler is None:
            return


def frame_is_resumed() -> bool:
    """Whether the frame that Dynamo compiles now continues one whose graph was broken; False outside of Dynamo.

    Relies on `current_tx()` where nothing is traced (it raises AttributeError, or in torch 2.11 gives None once
    something was), and on the names of resumed functions.
    """
    try:
        frame = InstructionTranslator.current_tx()
    except AttributeError:
        return False
    return frame is not None and frame.f_code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX)


def graph_break(gm: fx.GraphModule) -> tuple[str, list[str]] | None:
    """Why Dynamo ended this graph early, and the user's frames there, outermost first; None if it did not.

    Relies on `compile_subgraph_reason` (`graph_break`, `reason`, `user_stack`), which Dynamo sets on the module.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    frames = getattr(reason, "user_stack", None) or ()
    return str(reason.reason), [f"{frame.filename}:{frame.lineno}, in {frame.name}" for frame in frames]


class RestartTrace(UnspecializeRestartAnalysis, TensorifyScalarRestartAnalysis):
    """Raised by a backend to have Dynamo trace the frame once more.

    Relies on two kinds of `RestartAnalysis`: the first base makes Dynamo forget the trace, the second one passes
    through the code that calls backends (`OutputGraph.call_user_compiler`), where others end as a failed backend.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(restart_reason=reason)


def backend_error(error: BaseException) -> BaseException | None:
    """What a backend raised, of the exception that torch.compile made of it; None for any other exception.

    Relies on `BackendCompilerFailed.inner_exception`.
    """
    return error.inner_exception if isinstance(error, BackendCompilerFailed) else None


# Dynamo: inputs of a graph, and marks on tensors


def mark_maybe_dynamic(tensor: torch.Tensor, dims: Sequence[int]) -> bool:
    """Ask for symbolic sizes where Dynamo next traces this tensor; whether that is news: a mark was added.

    Relies on `torch._dynamo.maybe_mark_dynamic` (a wish: what must be a number becomes one), which keeps the marks
    in the tensor's attribute `_dynamo_weak_dynamic_indices`. Since torch 2.15 it leaves out what `mark_dynamic` marked.
    """
    marks = [set(getattr(tensor, "_dynamo_weak_dynamic_indices", ()))]
    torch._dynamo.maybe_mark_dynamic(tensor, list(dims))
    marks.append(set(getattr(tensor, "_dynamo_weak_dynamic_indices", ())))
    return marks[0] != marks[1]


def traced_inputs() -> list[tuple[fx.Node, Any]]:
    """(placeholder, the tensor or number that was given) of the frame being traced, so far; called while Dynamo traces.

    Relies on `current_tx().output.placeholders` and on the `grapharg` in their `meta`, whose `example` is the input.
    """
    output = InstructionTranslator.current_tx().output
    return [(n, n.meta["grapharg"].example) for n in output.placeholders if "grapharg" in n.meta]


def is_static_input(placeholder: fx.Node) -> bool:
    """Whether Dynamo takes an input for part of the model: a parameter or a buffer, whose address stays.

    Relies on `meta["tensor_dict"]` of placeholders, where Dynamo copies the attribute `_dynamo_static_input_type`.
    """
    return placeholder.meta.get("tensor_dict", {}).get("_dynamo_static_input_type") is not None


def recompile_limit() -> int:
    """How many graphs Dynamo makes of one function before it runs eagerly. Relies on `config.recompile_limit`."""
    return int(torch._dynamo.config.recompile_limit)


def traced_code() -> Any:
    """The code object of the frame that Dynamo compiles now; None outside of Dynamo.

    Relies on `current_tx()` as `frame_is_resumed` does, and on `output.root_tx`, which others are inlined in.
    """
    try:
        frame = InstructionTranslator.current_tx()
    except AttributeError:
        return None
    return None if frame is None else frame.output.root_tx.f_code


def graphs_of(code: Any) -> int:
    """How many graphs Dynamo holds of a code object, by the limit that is fullest: see `compile_call`.

    Relies on `_debug_get_cache_entry_list`, and on `isolate_recompiles_id` of its entries (since torch 2.13).
    """
    entries = eval_frame._debug_get_cache_entry_list(code)
    return max(Counter(getattr(entry, "isolate_recompiles_id", -1) for entry in entries).values(), default=0)


# torch.compile: what it wraps


def compiled_module(model: Any) -> Any:
    """The module in the wrapper of `torch.compile(module)`; None without one. Relies on `OptimizedModule._orig_mod`."""
    return model._orig_mod if isinstance(model, eval_frame.OptimizedModule) else None


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether `module.compile()` was called. Relies on `Module._compiled_call_impl`."""
    return module._compiled_call_impl is not None


def compile_call(module: torch.nn.Module, **options: Any) -> Callable[..., Any]:
    """What `module.compile(**options)` makes, with a limit of graphs of its own where torch has that (since 2.13).

    Relies on `Module._call_impl`, and on the argument `isolate_recompiles` of `torch.compile`.
    """
    known = inspect.signature(torch.compile).parameters
    own: dict[str, Any] = {name: True for name in ("isolate_recompiles",) if name in known}
    return torch.compile(module._call_impl, **own, **options)


def set_compiled_call(module: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Have calls of a module go to `call`, as `compile()` does. Relies on `Module._compiled_call_impl`."""
    module._compiled_call_impl = call


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a hook looks at calls of a module. Relies on where `torch.nn` keeps those of modules, and global ones."""
    shared = (nn_module._global_forward_pre_hooks, nn_module._global_forward_hooks)
    return any((module._forward_pre_hooks, module._forward_hooks, *shared))


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside those that torch.compile and torch.compiler.disable return; a plain one is itself.

    Relies on `torch._dynamo.eval_frame.innermost_fn`.
    """
    inner: Callable[..., Any] = eval_frame.innermost_fn(function)
    return inner


def model_being_wrapped() -> Any:
    """The `model` of the `torch.compile(model)` call that is under way further up this stack; None without one.

    Relies on the first parameter of `torch.compile` being called "model", and on backends being looked up inside it.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code is not torch.compile.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals.get("model")


# Fake tensors and symbolic sizes


def fake_mode() -> FakeTensorMode:
    """A mode that makes fake tensors, with a shape environment of its own (`mode.shape_env`). Real tensors may enter.

    Relies on `FakeTensorMode(shape_env=..., allow_non_fake_inputs=...)` and `ShapeEnv()`.
    """
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values. Relies on the class `FakeTensor`."""
    return isinstance(tensor, FakeTensor)


def new_size(mode: FakeTensorMode, name: str, hint: int, any_integer: bool = False) -> torch.SymInt:
    """A new backed SymInt that is traced with the number `hint`: a size of at least 2, or any integer.

    Relies on `ShapeEnv.create_symbol`, `create_unspecified_symbol` (which specialises neither 0 nor 1) and
    `create_symintnode`, and on `ConstantSource` as a source that nothing guards.
    """
    env, source = mode.shape_env, ConstantSource(name)
    assert env is not None
    create = env.create_unspecified_symbol if any_integer else env.create_symbol
    symbol = create(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    size = env.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(size, torch.SymInt)
    return size


def size_expression(size: Any) -> sympy.Expr:
    """A SymInt as a sympy expression, with the equalities that its trace has proved applied.

    Relies on `SymInt.node`, its `expr` and `shape_env`, and on `ShapeEnv.simplify`.
    """
    found: sympy.Expr = size.node.shape_env.simplify(size.node.expr)
    return found


def hint_of(size: torch.SymInt, symbol: sympy.Symbol) -> int:
    """The number that a symbol of `size` was traced with. Relies on `ShapeEnv.backed_var_to_val`."""
    return int(size.node.shape_env.backed_var_to_val[symbol])


def traced_size(size: torch.SymInt) -> int:
    """The integer that a SymInt was traced with; nothing is guarded. Relies on `ShapeEnv.backed_var_to_val`."""
    expr = size_expression(size)
    return int(expr.xreplace({s: sympy.Integer(hint_of(size, s)) for s in expr.free_symbols}))


def is_known_negative(size: torch.SymInt) -> bool:
    """Whether guards already say that a SymInt is below 0; none is added. Relies on `statically_known_true`."""
    return bool(statically_known_true(size < 0))


def traced_number(number: torch.SymFloat) -> float:
    """The number that a SymFloat was traced with; the graph then holds for it alone. Relies on `guard_scalar`."""
    return float(guard_scalar(number))


def floor_div(a: Any, b: Any) -> sympy.Expr:
    """a // b as sizes spell it. Relies on `torch.utils._sympy.functions.FloorDiv`."""
    return FloorDiv(a, b)


def is_floor_div(expression: Any) -> bool:
    """Whether an expression is one that `floor_div` makes, so that its `args` are dividend and divisor."""
    return isinstance(expression, FloorDiv)


# Dispatch, operators, logs


def dispatch_in_python() -> AbstractContextManager[Any]:
    """Inside, composite ops on symbolic sizes are taken apart in Python: in C++ some read sizes as numbers.

    Relies on `torch._dispatch.python.enable_python_dispatcher`.
    """
    context: AbstractContextManager[Any] = enable_python_dispatcher()
    return context


def log_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Write an artifact to torch's structured log, if somebody reads it (`tlparse`): `payload` is called only then.
    Relies on `torch._logging.trace_structured("artifact", ...)` with the keys "name" and "encoding"."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload)


def group_named(name: str) -> Any:
    """The process group of a name, as collectives in graphs give it. Relies on `_resolve_process_group`."""
    resolve: Any = torch.distributed.distributed_c10d._resolve_process_group
    return resolve(name)
