"""Private APIs of PyTorch that compiling a piece relies on: `torch_internals` for the compiler's side.

One function each, with what it relies on; `tests/test_compiler_internals.py` calls each on the torch at hand.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.source import LocalSource
from torch._dynamo.utils import preserve_rng_state
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Mode = FakeTensorMode
KEPT_META = ("nn_module_stack", "stack_trace", "tensor_dict")  # of a node, what AOTAutograd and the logs read

# Backends


def backend_of(name: str) -> Callable[..., Any] | None:
    """A registered backend; None without one of that name. Relies on `lookup_backend` and what it raises."""
    try:
        found: Callable[..., Any] = torch._dynamo.lookup_backend(name)
    except torch._dynamo.exc.InvalidBackend:
        return None
    return found


def add_backend(name: str, module: str) -> None:
    """Register a backend, the function of that name in a module, where torch looked for entry points too early to find
    it. Relies on `register_backend`, which refuses a name twice."""
    if name not in torch.compiler.list_backends():
        torch._dynamo.register_backend(getattr(importlib.import_module(module), name), name=name)


@contextlib.contextmanager
def compiling(mode: FakeTensorMode) -> Iterator[None]:
    """The context in which Dynamo calls a backend, for fakes of `mode`. Relies on `TracingContext`."""
    with preserve_rng_state(), tracing(TracingContext(mode)):
        yield


def one_compilation() -> AbstractContextManager[Any]:
    """Held while something compiles: compilations share settings of the process. Relies on Dynamo's own lock, which a
    thread that holds it may take again."""
    return compile_lock


# Inputs of a graph


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor holds others that the compiler takes it apart into (a quantised weight)."""
    return is_traceable_wrapper_subclass(tensor)


def fixed_input(mode: FakeTensorMode, tensor: Tensor, index: int) -> Tensor:
    """A fake of an input whose sizes are numbers. Relies on `from_tensor`."""
    return mode.from_tensor(_plain(tensor), static_shapes=True, source=LocalSource(f"arg{index}"))


def dynamic_input(mode: FakeTensorMode, tensor: Tensor, index: int, dynamic: Sequence[int]) -> Tensor:
    """A fake of an input with a new symbol for each of the dimensions `dynamic`; sizes 0 and 1 stay numbers, which is
    what `ShapeEnv` asks for. Strides that do not follow from the sizes, and an offset, get symbols too.

    Relies on `StatelessSymbolicContext` and `DimDynamic`.
    """
    kinds = [
        DimDynamic.DYNAMIC if d in dynamic and size not in (0, 1) else DimDynamic.STATIC
        for d, size in enumerate(tensor.shape)
    ]
    context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(_plain(tensor), source=LocalSource(f"arg{index}"), symbolic_context=context)


def dynamic_size(mode: FakeTensorMode, size: int, index: int) -> Any:
    """A symbol for an input that is an integer; 0 and 1 stay numbers."""
    shape_env, source = mode.shape_env, LocalSource(f"arg{index}")
    assert shape_env is not None
    if size in (0, 1):
        return size
    symbol = shape_env.create_symbol(size, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    return shape_env.create_symintnode(symbol, hint=size, source=source)


def _plain(tensor: Tensor) -> Tensor:
    if not tensor.requires_grad:
        return tensor
    with torch.inference_mode(False):  # which no wrapper of another tensor can be detached in
        return tensor.detach()


# Marks that Dynamo leaves


def mark_as_dynamo(gm: fx.GraphModule) -> None:
    """Give a graph module the marks by which AOTAutograd takes it for Dynamo's and looks for static inputs.

    Relies on `dynamo_compile_id` in its meta, `_param_name_to_source`, and a `_dynamo_source` on each placeholder; the
    sources are arg0, arg1, ... in every process, because the key of AOTAutograd's cache holds them.
    """
    gm.meta.setdefault("dynamo_compile_id", None)
    gm._param_name_to_source = {}  # type: ignore[assignment]
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        node._dynamo_source = LocalSource(f"arg{i}")


def mode_of(values: Sequence[Any]) -> FakeTensorMode | None:
    """The fake mode of some fakes; None where none is."""
    return detect_fake_mode(list(values))


# Sizes and guards


def size_in(mode: FakeTensorMode, expression: sympy.Expr) -> Any:
    """A size of `mode` as an expression of its symbols. Relies on `create_symintnode` without a hint."""
    assert mode.shape_env is not None
    return int(expression) if expression.is_Integer else mode.shape_env.create_symintnode(expression, hint=None)


def without_guards(mode: FakeTensorMode) -> AbstractContextManager[Any]:
    """What is asked about sizes inside leaves no guard."""
    assert mode.shape_env is not None
    return mode.shape_env.suppress_guards()


def shape_guards(mode: FakeTensorMode, fakes: Sequence[Any]) -> tuple[Callable[[Sequence[Any]], bool], str]:
    """The test that inputs have sizes, strides and offsets such as `mode` has learned of, and its text.

    Args:
        fakes: by input, what stands for it in `mode`; None for an input that is not looked at.

    Relies on the pair `produce_guards_expression` and `evaluate_guards_expression`, which torch's caches use; the
    latter evaluates text or, as here, compiled code.
    """
    shape_env = mode.shape_env
    assert shape_env is not None
    watched: list[Any] = list(fakes)
    known = set().union(*map(_symbols, fakes))
    about = [g for g in shape_env.guards if shape_env.simplify(g.expr).free_symbols <= known]
    text = shape_env.produce_guards_expression(watched, guards=about, ignore_static=False) or "True"
    code: Any = compile(text, "<guards>", "eval")  # once, and not at each call
    return lambda inputs: bool(shape_env.evaluate_guards_expression(code, inputs)), text


def _symbols(fake: Any) -> set[Any]:
    parts = [*fake.shape, *fake.stride(), fake.storage_offset()] if isinstance(fake, Tensor) else [fake]
    return set().union(*(p.node.expr.free_symbols for p in parts if isinstance(p, torch.SymInt)))
