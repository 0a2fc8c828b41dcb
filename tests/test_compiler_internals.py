"""Each private API of PyTorch that compiling a piece relies on, on the torch at hand."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from test_torch_internals import PACKAGE, traced
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext

from uniprefill_fx.lowering import compiler_internals as internals
from uniprefill_fx.torch_internals import fake_mode, is_fake

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_add_backend() -> None:
    """Once, and a name that torch knows keeps what it stands for."""
    for _ in range(2):
        internals.add_backend("a_backend", f"{__name__}")
    assert internals.backend_of("a_backend") is a_backend
    internals.add_backend("inductor", f"{__name__}")
    assert internals.backend_of("inductor") is not inductor


def a_backend(gm: torch.fx.GraphModule, inputs: object) -> object:
    return gm


inductor = a_backend


def test_backend_of() -> None:
    assert callable(internals.backend_of("inductor")) and internals.backend_of("no such backend") is None


def test_compiling() -> None:
    mode = fake_mode()
    before = torch.get_rng_state()
    with internals.compiling(mode):
        context = TracingContext.get()
        assert context.fake_mode is mode
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), before)


def test_one_compilation() -> None:
    """One thread at a time, which may enter again; Dynamo takes the same lock."""
    free: list[bool] = []

    def other() -> None:
        lock: Any = internals.one_compilation()
        free.append(lock.acquire(blocking=False))
        if free[-1]:
            lock.release()

    def ask(_: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return lambda *args: (args[0] + 1,)

    with internals.one_compilation(), internals.one_compilation():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    torch.compile(lambda x: x + 1, backend=ask)(torch.ones(2))
    other()
    assert free == [False, False, True]


def test_is_wrapper() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    assert internals.is_wrapper(TwoTensor(torch.ones(2), torch.ones(2))) and not internals.is_wrapper(torch.ones(2))


def test_fixed_and_dynamic_input() -> None:
    mode = fake_mode()
    real = nn.Parameter(torch.ones(5, 1, 7).transpose(0, 2))
    fixed, dynamic = internals.fixed_input(mode, real, 0), internals.dynamic_input(mode, real, 1, [0, 1])
    assert is_fake(fixed) and is_fake(dynamic) and not dynamic.requires_grad
    assert [type(s) for s in fixed.shape] == [int] * 3 and fixed.stride() == (1, 7, 7)
    assert [type(s) for s in dynamic.shape] == [torch.SymInt, int, int]
    assert dynamic.stride()[2] == dynamic.shape[0]


def test_dynamic_size() -> None:
    mode = fake_mode()
    assert [type(internals.dynamic_size(mode, n, n)) for n in (0, 1, 2, 300)] == [int, int, torch.SymInt, torch.SymInt]


def test_mark_as_dynamo() -> None:
    """AOTAutograd finds the parameter of a graph that was copied, and only with the marks."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.w

    static: list[list[int]] = []

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        metadata = TracingContext.get().fw_metadata
        assert metadata is not None
        static.append(metadata.static_input_indices)
        return gm.forward

    gm = traced(Layer(), torch.ones(3), dynamic=False)
    (parameter,) = (i for i, n in enumerate(gm.graph.find_nodes(op="placeholder")) if "parameters" in n.name)
    for marked in (False, True):
        graph = fx.Graph()
        graph.output(graph.graph_copy(gm.graph, {}))
        copy, mode = fx.GraphModule(gm, graph), fake_mode()
        if marked:
            internals.mark_as_dynamo(copy)
        with internals.compiling(mode):
            inputs = [internals.fixed_input(mode, torch.ones(3), i) for i in range(2)]
            aot_autograd(fw_compiler=compiler)(copy, inputs)
    assert static == [[], [parameter]]
    assert set(internals.KEPT_META) > {"tensor_dict"}


def test_mode_of() -> None:
    mode = fake_mode()
    assert internals.mode_of([internals.fixed_input(mode, torch.ones(2), 0)]) is mode
    assert internals.mode_of([torch.ones(2)]) is None


def test_size_in() -> None:
    mode = fake_mode()
    size = internals.dynamic_size(mode, 300, 0)
    double = internals.size_in(mode, 2 * size.node.expr)
    assert isinstance(double, torch.SymInt) and bool(double == 2 * size) and int(double) == 600
    assert internals.size_in(mode, sympy.Integer(7)) == 7


def test_without_guards() -> None:
    mode = fake_mode()
    size = internals.dynamic_size(mode, 300, 0)
    with internals.without_guards(mode):
        assert bool(size > 200)
    assert internals.shape_guards(mode, [size])[0]([10])
    assert bool(size > 200)
    assert not internals.shape_guards(mode, [size])[0]([10])


def test_shape_guards() -> None:
    """Sizes, strides, offsets, equalities and what was asked; inputs of None are not looked at."""
    mode = fake_mode()
    x, y = torch.ones(8, 6), torch.ones(8, 3)
    fakes = [internals.dynamic_input(mode, t, i, [0]) for i, t in enumerate((x, y))]
    assert bool(fakes[0].shape[0] == fakes[1].shape[0]) and bool(fakes[0].shape[0] % 4 == 0)
    test, text = internals.shape_guards(mode, [*fakes, None])
    assert "size()" in text and "stride()" in text and "storage_offset()" in text
    assert test([x, y, None]) and test([torch.ones(12, 6), torch.ones(12, 3), "anything"])
    wrong = [
        (torch.ones(12, 6), torch.ones(8, 3)),
        (torch.ones(10, 6), torch.ones(10, 3)),
        (torch.ones(8, 5), y),
        (torch.ones(6, 8).T, y),
        (torch.ones(49)[1:].view(8, 6), y),
    ]
    assert not any(test([*pair, None]) for pair in wrong)


def test_every_function_is_used_and_tested() -> None:
    names = {
        name
        for name, item in vars(internals).items()
        if isinstance(item, types.FunctionType) and item.__module__ == internals.__name__ and not name.startswith("_")
    }
    assert len(names) >= 12
    here, package = Path(__file__).read_text(), "\n".join(p.read_text() for p in PACKAGE.rglob("*.py"))
    assert {name for name in names if f"internals.{name}" not in here} == set()
    assert {name for name in names if package.count(f"{name}(") < 2} == set()
    assert all(getattr(internals, name).__doc__ for name in names)
