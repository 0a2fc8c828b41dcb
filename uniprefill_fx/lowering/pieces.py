"""Compile a piece of a graph with the inner backend when it first runs, for any length of its token axes.

Each compilation has a shape environment of its own, in which every size that the passes know to be symbolic is one
symbol with the size at hand as its hint. The guards that the inner backend adds are checked at each call; a call that
fails them compiles once more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.source import LocalSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._sympy.printers import PythonPrinter

from uniprefill_fx.lowering.inner import InnerBackend
from uniprefill_fx.passes.node_utils import copy_module, meta

log = logging.getLogger(__name__)
MAX_VARIANTS = 8


@dataclass(frozen=True)
class Variant:
    """One compilation: the callable, and the test that its guards hold for the sizes of some inputs."""

    run: Callable[..., Any]
    holds: Callable[[Sequence[int]], bool]


class CompiledPiece:
    """A graph module that compiles itself when called; all token-axis lengths share a compilation.

    Placeholders carry fakes in `meta`; a size that is symbolic there is dynamic, every other one is fixed.
    """

    def __init__(self, gm: fx.GraphModule, inner: InnerBackend, name: str) -> None:
        self.gm, self.inner, self.name = gm, inner, name
        self.variants: list[Variant] = []
        self.seconds = 0.0
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        # (input, dimension) of every dynamic size; dimension None for an input that is a size itself
        self.dynamic: list[tuple[int, int | None]] = []
        for i, node in enumerate(placeholders):
            value = meta(node)
            if isinstance(value, torch.SymInt):
                self.dynamic.append((i, None))
            elif isinstance(value, torch.Tensor):
                self.dynamic += [(i, d) for d, s in enumerate(value.shape) if isinstance(s, torch.SymInt)]

    def __call__(self, *args: Any) -> Any:
        sizes = [args[i] if d is None else args[i].shape[d] for i, d in self.dynamic]
        for variant in self.variants:
            if variant.holds(sizes):
                return variant.run(*args)
        if len(self.variants) == MAX_VARIANTS:
            log.warning("%s: compiled %d times, runs without the inner backend from now on", self.name, MAX_VARIANTS)
            self.variants.append(Variant(self.gm, lambda _: True))
        else:
            self.variants.append(self._compile(args, sizes))
        return self.variants[-1].run(*args)

    def _compile(self, args: Sequence[Any], sizes: Sequence[int]) -> Variant:
        began = time.perf_counter()
        shape_env = ShapeEnv()
        mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
        symbols: list[Any] = []
        fakes = [self._fake(i, arg, mode, shape_env, symbols) for i, arg in enumerate(args)]
        gm = copy_module(self.gm)
        for node in gm.graph.nodes:  # the inner backend fills in its own meta, in its own shape environment
            node.meta = {k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")}
        with torch._dynamo.utils.preserve_rng_state(), tracing(TracingContext(mode)):
            run = self.inner(gm, fakes)
        self.seconds += time.perf_counter() - began
        log.info("%s: compiled for sizes %s in %.1f s", self.name, list(sizes), time.perf_counter() - began)
        return Variant(run, _guards(shape_env, symbols, self.name))

    def _fake(self, i: int, arg: Any, mode: FakeTensorMode, shape_env: ShapeEnv, symbols: list[Any]) -> Any:
        source = LocalSource(f"arg{i}")
        if isinstance(arg, torch.Tensor):
            dims = [d for j, d in self.dynamic if j == i and d is not None]
            if is_traceable_wrapper_subclass(arg):  # a quantised weight: every size is fixed
                symbols += [arg.shape[d] for d in dims]
                return mode.from_tensor(arg, static_shapes=True, source=source)
            # Sizes 0 and 1 are always specialised (broadcasting depends on them); such a call has its own variant.
            kinds = [
                DimDynamic.DYNAMIC if d in dims and s not in (0, 1) else DimDynamic.STATIC
                for d, s in enumerate(arg.shape)
            ]
            fake = mode.from_tensor(
                arg.detach() if arg.requires_grad else arg,
                source=source,
                symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds),
            )
            symbols += [fake.shape[d] for d in dims]
            return fake
        if (i, None) in self.dynamic and arg not in (0, 1):
            symbol = shape_env.create_symbol(arg, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
            symbols.append(shape_env.create_symintnode(symbol, hint=arg, source=source))
            return symbols[-1]
        if (i, None) in self.dynamic:
            symbols.append(arg)
        return arg


def _guards(shape_env: ShapeEnv, symbols: Sequence[Any], name: str) -> Callable[[Sequence[int]], bool]:
    """Whether sizes, in the order of `symbols`, satisfy every guard of a finished compilation."""
    original: list[sympy.Symbol | int] = [s if isinstance(s, int) else _symbol(s) for s in symbols]
    names = {s: f"n{i}" for i, s in enumerate(original) if not isinstance(s, int)}
    tests = [f"n{i} == {s}" if isinstance(s, int) else f"n{i} > 1" for i, s in enumerate(original)]
    for guard in shape_env.guards:
        if not guard.expr.free_symbols <= names.keys():
            log.debug("%s: guard %s is about no input", name, guard.expr)
            continue
        renamed = guard.expr.xreplace({s: sympy.Symbol(n, integer=True, positive=True) for s, n in names.items()})
        tests.append(PythonPrinter().doprint(renamed))
    code = f"lambda {', '.join(f'n{i}' for i in range(len(original)))}: {' and '.join(tests) or 'True'}"
    log.debug("%s: guards %s", name, code)
    test = eval(code, {"math": __import__("math"), "torch": torch})
    return lambda sizes: bool(test(*sizes))


def _symbol(size: torch.SymInt) -> sympy.Symbol:
    """The symbol a size was created as, whatever the compilation learned about it since."""
    found = size.node._expr
    assert isinstance(found, sympy.Symbol)
    return found
