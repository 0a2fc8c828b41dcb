"""Pieces of a graph: what they are compiled for, how often, and by whom."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from eager_reference import DropSpec, EagerReference
from exactness import assert_dropped, assert_near, assert_same_rows, options_of
from tiny import LLAMA, tiny_llama, token_ids
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext

import uniprefill_fx
from uniprefill_fx.lowering.pieces import MAX_VARIANTS, CompiledPiece
from uniprefill_fx.lowering.structure import structure
from uniprefill_fx.torch_internals import is_static_input

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Inner:
    """An inner backend that counts, and remembers what it compiled for. Its graphs refuse every other input."""

    def __init__(self, prepare: Callable[[Sequence[Any]], Any] = lambda inputs: None) -> None:
        self.prepare = prepare
        self.graphs: list[fx.GraphModule] = []
        self.inputs: list[Sequence[Any]] = []

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(gm)
        self.inputs.append(inputs)
        self.prepare(inputs)

        def run(*args: Any) -> Any:
            for arg, fake in zip(args, inputs, strict=True):
                if isinstance(arg, Tensor):
                    assert (arg.dtype, arg.ndim) == (fake.dtype, fake.ndim)
                    pairs = zip((*arg.shape, *arg.stride()), (*fake.shape, *fake.stride()), strict=True)
                    assert all(a == b for a, b in pairs if isinstance(b, int))
            return gm(*args)

        return run


def piece(function: Callable[..., Any], *args: Any, inner: Any) -> CompiledPiece:
    """A function as Dynamo traces it for any length, as a piece."""
    found: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(gm)
        return gm.forward

    torch.compile(function, backend=keep, dynamic=True)(*args)
    (gm,) = found
    return CompiledPiece(gm, inner, "piece")


def call(run: CompiledPiece, *tensors: Tensor) -> Tensor:
    """Call a piece whose inputs are sizes of its one tensor, and that tensor."""
    values = iter(tensors)
    sizes = iter(tensors[0].shape)
    names = run.gm.graph.find_nodes(op="placeholder")
    (out,) = run(*(next(sizes) if isinstance(n.meta["example_value"], torch.SymInt) else next(values) for n in names))
    return out


def double(x: Tensor) -> Tensor:
    return x * 2


def test_one_compilation_for_all_sizes() -> None:
    inner = Inner()
    run = piece(double, torch.randn(5, 6), inner=inner)
    for size in ((5, 6), (7, 9), (300, 2)):
        x = torch.randn(size)
        assert torch.equal(call(run, x), x * 2)
    assert len(inner.graphs) == 1


@pytest.mark.parametrize(
    "other",
    [
        torch.randn(9, 7).T,
        torch.randn(7, 18)[:, ::2],
        torch.randn(64)[1:].view(7, 9),
        torch.randn(7, 9).bfloat16(),
        torch.randint(9, (7, 9)),
        torch.randn(1, 9),
    ],
    ids=["transposed", "strided", "offset", "bfloat16", "int64", "one row"],
)
def test_strides_and_dtypes_are_guarded(other: Tensor) -> None:
    """An intermediate that is laid out otherwise does not reach what was compiled for another: `Inner` asserts it."""
    inner = Inner()
    run = piece(double, torch.randn(5, 6), inner=inner)
    plain = torch.randn(7, 9)
    for _ in range(2):
        assert torch.equal(call(run, plain), plain * 2)
        assert torch.equal(call(run, other), other * 2)
    assert len(inner.graphs) == 2
    found = run._variant(run_args(run, other))
    assert found is run.variants[1] and not run.variants[0].holds(run_args(run, other))


def run_args(run: CompiledPiece, x: Tensor) -> list[Any]:
    names, sizes = run.gm.graph.find_nodes(op="placeholder"), iter(x.shape)
    return [next(sizes) if isinstance(n.meta["example_value"], torch.SymInt) else x for n in names]


def test_guards_of_the_inner_backend_hold() -> None:
    """What a backend learns about a size while it compiles decides which calls reach that compilation."""

    def prepare(inputs: Sequence[Any]) -> None:
        (tensor,) = (x for x in inputs if isinstance(x, Tensor))
        seen.append(bool(tensor.shape[0] % 8 == 0))

    seen: list[bool] = []
    inner = Inner(prepare)
    run = piece(double, torch.randn(5, 6), inner=inner)
    for length in (16, 24, 17, 31, 800):
        x = torch.randn(length, 6)
        assert torch.equal(call(run, x), x * 2)
    assert seen == [True, False]


def specialise(inputs: Sequence[Any]) -> None:
    time.sleep(0.02)
    for size in inputs:
        if isinstance(size, torch.SymInt):
            int(size)


def test_the_bound_on_variants_holds_in_threads() -> None:
    """A backend that compiles anew for each size: what comes too late runs without it, and is right."""
    inner = Inner(specialise)
    run = piece(double, torch.randn(5, 6), inner=inner)
    inputs = [torch.randn(length, 6) for length in range(10, 10 + 2 * MAX_VARIANTS)] * 2
    with ThreadPoolExecutor(8) as pool:
        for x, out in zip(inputs, pool.map(lambda x: call(run, x), inputs), strict=True):
            assert torch.equal(out, x * 2)
    assert len(inner.graphs) == len(run.variants) == MAX_VARIANTS


def test_two_threads_compile_once() -> None:
    inner = Inner(lambda inputs: time.sleep(0.2))
    run = piece(double, torch.randn(5, 6), inner=inner)
    start = threading.Barrier(4)

    def cold(x: Tensor) -> Tensor:
        start.wait()
        return call(run, x)

    inputs = [torch.randn(length, 6) for length in range(10, 14)]
    with ThreadPoolExecutor(4) as pool:
        for x, out in zip(inputs, pool.map(cold, inputs), strict=True):
            assert torch.equal(out, x * 2)
    assert len(inner.graphs) == 1


def test_alignment_of_weights_is_guarded() -> None:
    """Inductor loads an aligned parameter as such and never looks again: another weight in its place may not be."""
    inner = Inner()
    run = graph_of_weight(inner)
    x, aligned, shifted = torch.randn(7, 6), torch.randn(6, 6), torch.randn(37)[1:].view(6, 6)
    for w in (aligned, shifted, aligned):
        names = run.gm.graph.find_nodes(op="placeholder")
        values = [
            7 if isinstance(n.meta["example_value"], torch.SymInt) else w if is_static_input(n) else x for n in names
        ]
        assert torch.equal(run(*values)[0], x @ w)
    assert len(inner.graphs) == 2


def test_shared_storage_is_guarded_where_a_piece_writes() -> None:
    def write(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x + y

    inner = Inner()
    run = piece(write, torch.randn(6), torch.randn(6), inner=inner)
    for shared in (False, True, False, True):
        x = torch.randn(8)
        y = x.clone() if not shared else x
        want = (x + 1) + (x + 1 if shared else y)
        names = run.gm.graph.find_nodes(op="placeholder")
        values = iter((x, y))
        args = [8 if isinstance(n.meta["example_value"], torch.SymInt) else next(values) for n in names]
        assert torch.equal(run(*args)[0], want)
    assert len(inner.graphs) == 2


@pytest.mark.parametrize(
    ("layers", "drops", "found"),
    [(7, (1, 3, 5), [2, 2, 1]), pytest.param(16, (3, 6, 9, 12), [4, 3, 3], marks=pytest.mark.slow)],
)
def test_layers_between_drops_compile_once(layers: int, drops: tuple[int, ...], found: list[int]) -> None:
    """Four drops in 16 layers are five pieces; the three between drops are one graph with other weights."""
    spec = DropSpec(drops, p=0.9, block_size=16, last_n=16, sink_tokens=16)
    inner = Inner()
    model = tiny_llama(layers)
    uniprefill_fx.compile(model, **options_of(spec, inner_backend=inner))
    for length in (300, 333):
        want = EagerReference(tiny_llama(layers), spec).prefill(token_ids(length))
        with torch.inference_mode():
            out = model(token_ids(length), logits_to_keep=1).logits
        done = uniprefill_fx.last_call()
        assert done is not None
        assert_dropped(done)
        assert_same_rows(done, want, length)
        assert_near(out, want.last_logits)
    ops = [[n.target for n in gm.graph.nodes].count(torch.ops.uniprefill.attention.default) for gm in inner.graphs]
    assert ops == found


def test_different_layers_are_not_shared() -> None:
    """Three drops in four layers are four pieces; the two between drops differ by the epsilon of one norm."""
    spec = replace(LLAMA, drop_layers=(0, 1, 2))
    inner = Inner()
    model = tiny_llama(4)
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 0.25
    with torch.inference_mode():
        want = EagerReference(model, spec).prefill(token_ids(300))
        uniprefill_fx.compile(model, **options_of(spec, inner_backend=inner))
        out = model(token_ids(300), logits_to_keep=1).logits
    assert_near(out, want.last_logits)
    assert len(inner.graphs) == 4


def graph_of_weight(inner: Any) -> CompiledPiece:
    return CompiledPiece(graph(lambda x, w: x @ w, torch.randn(6, 6)), inner, "piece")


def graph(function: Callable[[Tensor, Tensor], Any], weight: Tensor, x: Tensor | None = None) -> fx.GraphModule:
    """A function of an activation and a parameter, traced for any length."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(weight, requires_grad=False)

        def forward(self, x: Tensor) -> Any:
            return function(x, self.w)

    torch._dynamo.reset()
    return piece(Layer(), torch.randn(5, 6) if x is None else x, inner=None).gm


def test_structure() -> None:
    """What makes two graphs the same, and what does not."""

    def base(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w) * 2

    def renamed(activation: Tensor, w: Tensor) -> Tensor:
        between = activation @ w
        return between * 2

    others: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "float for int": lambda x, w: (x @ w) * 2.0,
        "number": lambda x, w: (x @ w) * 3,
        "order": lambda x, w: (w @ x.T).T * 2,
        "operation": lambda x, w: (x @ w) + 2,
        "outputs": lambda x, w: ((x @ w) * 2, x @ w),
    }
    w = torch.randn(6, 6)
    keys = {"base": structure(graph(base, w))}
    assert structure(graph(renamed, torch.randn(6, 6))) == keys["base"]
    for name, function in others.items():
        keys[name] = structure(graph(function, w))
    keys["layout of the weight"] = structure(graph(base, w.T))
    keys["dtype"] = structure(graph(base, w.double(), torch.randn(5, 6).double()))
    keys["width"] = structure(graph(base, torch.randn(6, 7)))
    assert len(set(keys.values())) == len(keys)


def test_weights_are_static_inputs() -> None:
    """AOTAutograd knows each parameter and buffer of each piece from what Dynamo said of it."""
    counts: list[tuple[int, int]] = []

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        context = TracingContext.get()
        assert context.fw_metadata is not None
        static = context.fw_metadata.static_input_indices
        floats = [i for i in static if inputs[i].is_floating_point() and inputs[i].shape[0] != 300]
        counts.append((len(static), len(floats)))
        return gm.forward

    captured = Inner()
    backend = aot_autograd(fw_compiler=compiler, inference_compiler=compiler)

    def inner(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        captured(gm, inputs)
        return backend(gm, inputs)

    model = tiny_llama(3)
    uniprefill_fx.compile(model, **options_of(LLAMA, inner_backend=inner))
    with torch.inference_mode():
        model(token_ids(300), logits_to_keep=1)
    weights = len(list(model.parameters())) + len(list(model.buffers()))
    assert sum(n for n, _ in counts) == sum(m for _, m in counts)
    # every weight is in one of the two pieces; a rotary buffer that the model does not read is in none
    assert weights - 1 <= sum(n for n, _ in counts) <= weights
    marked = [sum(is_static_input(n) for n in gm.graph.find_nodes(op="placeholder")) for gm in captured.graphs]
    assert marked == [n for n, _ in counts]


def test_nothing_of_a_compilation_stays_alive() -> None:
    """After a reset and the end of the model: no weight, no graph, no piece."""
    graphs: list[fx.GraphModule] = []

    def inner(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    model = tiny_llama(3)
    uniprefill_fx.compile(model, **options_of(LLAMA, inner_backend=inner))
    with torch.inference_mode():
        model.generate(token_ids(300), max_new_tokens=3, do_sample=False)
    done = uniprefill_fx.last_call()
    assert done is not None and done.dropped
    alive: list[weakref.ref[Any]] = [weakref.ref(model), *map(weakref.ref, model.parameters())]
    alive += map(weakref.ref, graphs)
    alive += [weakref.ref(o) for o in gc.get_objects() if type(o) is CompiledPiece]
    assert len(graphs) >= 3 and sum(isinstance(r(), CompiledPiece) for r in alive) >= 3
    del model, done
    graphs.clear()
    torch._dynamo.reset()
    gc.collect()
    assert not [type(r()) for r in alive if r() is not None]
