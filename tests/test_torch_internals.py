"""Each private API of PyTorch that the package uses, on the torch at hand; and that no other module uses one."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import logging
import re
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import torch.distributed as dist
from checkpoints import ROOT
from torch import Tensor, fx, nn

from uniprefill_fx import torch_internals as internals
from uniprefill_fx.passes import operator_internals

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def traced(
    function: Callable[..., Any], *args: Any, dynamic: bool | None = True, fullgraph: bool = True
) -> fx.GraphModule:
    """The first graph that Dynamo makes of a function."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(gm)
        return gm.forward

    torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=fullgraph)(*args)
    return graphs[0]


def inputs_of(gm: fx.GraphModule) -> list[fx.Node]:
    """The placeholders that hold tensors."""
    return [n for n in gm.graph.nodes if n.op == "placeholder" and isinstance(n.meta["example_value"], Tensor)]


# The compilation that is under way


@pytest.mark.parametrize("wrap", [lambda b: b, lambda b: functools.partial(b, extra=1)], ids=["plain", "partial"])
def test_compiling_backends(wrap: Callable[[Backend], Backend]) -> None:
    def backend(gm: fx.GraphModule, inputs: Sequence[Any], **extra: Any) -> Any:
        return gm.forward

    other = "eager"
    found: list[bool] = []

    @torch.compiler.assume_constant_result
    def ours() -> bool:
        found.append(any(b is backend for b in internals.compiling_backends()))
        return found[-1]

    def function(x: Tensor) -> Tensor:
        return x + 1 if ours() else x + 2

    compiled = torch.compile(function, backend=wrap(backend), fullgraph=True)
    assert compiled(torch.zeros(1)).item() == 1 and found[-1]
    torch._dynamo.reset()
    assert torch.compile(function, backend=other, fullgraph=True)(torch.zeros(1)).item() == 2 and not found[-1]


def test_a_broken_graph_and_the_frame_behind_it() -> None:
    resumed, breaks = [], []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        resumed.append(internals.frame_is_resumed())
        breaks.append(internals.graph_break(gm))
        return gm.forward

    @torch.compile(backend=backend)
    def function(x: Tensor) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    function(torch.ones(2))
    assert resumed == [False, True]
    assert breaks[1] is None and breaks[0] is not None
    reason, frames = breaks[0]
    assert "graph_break" in reason and f"{Path(__file__).name}:" in frames[-1] and "in function" in frames[-1]


def test_graphs_of_the_code_that_is_traced() -> None:
    codes: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        codes.append(internals.traced_code())
        return gm.forward

    def inner(x: Tensor) -> Tensor:
        return x + 1

    def function(x: Tensor) -> Tensor:
        return inner(x) * 2

    assert internals.graphs_of(function.__code__) == 0
    compiled = torch.compile(function, backend=backend, dynamic=False)
    for count in (2, 3):
        compiled(torch.ones(count))
    assert codes == [function.__code__] * 2
    assert internals.graphs_of(function.__code__) == 2 and internals.graphs_of(inner.__code__) == 0
    with torch._dynamo.config.patch(recompile_limit=3):
        assert internals.recompile_limit() == 3


def test_calls_with_a_limit_of_their_own() -> None:
    """Graphs are counted by the fullest limit; before torch 2.13 there is one for all."""

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    module, isolated = Module(), "isolate_recompiles" in inspect.signature(torch.compile).parameters
    first, second = (internals.compile_call(module, backend="eager", dynamic=False) for _ in range(2))
    for call, counts in ((first, (2, 3)), (second, (4,))):
        for count in counts:
            assert call(torch.ones(count)).tolist() == [2.0] * count
    assert internals.graphs_of(Module.forward.__code__) == (2 if isolated else 3)
    internals.set_compiled_call(module, lambda x: x - 1)
    assert module(torch.ones(2)).tolist() == [0.0, 0.0] and internals.is_compiled_in_place(module)


def test_hooks_of_a_module_and_of_all() -> None:
    module = torch.nn.Linear(2, 2)
    shared = torch.nn.modules.module
    for register in (
        module.register_forward_hook,
        module.register_forward_pre_hook,
        shared.register_module_forward_hook,
        shared.register_module_forward_pre_hook,
    ):
        assert not internals.has_hooks(module)
        handle = register(lambda *args: None)
        assert internals.has_hooks(module)
        handle.remove()
    assert not internals.has_hooks(module)


def test_subclasses_that_are_taken_for_plain_tensors() -> None:
    class Refusing(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError

    with operator_internals.as_plain_tensors():
        assert bool((torch.ones(2).as_subclass(Refusing) + 1 == 2).all())


def test_nothing_is_traced_out_here() -> None:
    assert internals.traced_code() is None
    assert not internals.frame_is_resumed()
    assert internals.graph_break(fx.symbolic_trace(nn.Linear(2, 2))) is None


def test_restart_with_marked_sizes() -> None:
    """Traced as a number, marked, traced again as a symbol: in one call, and with one result."""
    sizes: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        tensor = next(i for i in inputs if isinstance(i, Tensor))
        sizes.append(inputs_of(gm)[-1].meta["example_value"].shape[1])
        if internals.mark_maybe_dynamic(tensor, [1]):
            raise internals.RestartTrace("once more")
        return gm.forward

    assert bool((torch.compile(lambda x: x * 2, backend=backend)(torch.ones(2, 5)) == 2).all())
    assert sizes[0] == 5 and isinstance(sizes[0], int)
    assert len(sizes) == 2 and isinstance(sizes[1], torch.SymInt)


def _mark_what_is_traced(context: Any) -> None:
    local, inputs = context.get_local("doubled").as_fake(), internals.traced_inputs()
    assert [node.op for node, _ in inputs].count("placeholder") == len(inputs)
    (given,) = (example for _, example in inputs if isinstance(example, Tensor))
    assert local.shape == given.shape
    if internals.mark_maybe_dynamic(given, [1]):
        raise internals.RestartTrace("before the rest is traced")


def test_restart_comptime() -> None:
    """The same from within the function that is traced: what follows the call is traced once."""

    def function(x: Tensor) -> Tensor:
        doubled = x * 2
        internals.comptime(_mark_what_is_traced)
        return doubled.tanh()

    torch._dynamo.utils.counters.clear()
    graph = traced(function, torch.ones(2, 5), dynamic=None)
    assert isinstance(inputs_of(graph)[-1].meta["example_value"].shape[1], torch.SymInt)
    assert torch._dynamo.utils.counters["stats"]["calls_captured"] == 2  # of the trace that came to its end


def test_what_a_backend_raised() -> None:
    class OwnError(ValueError):
        pass

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        raise OwnError("no")

    with pytest.raises(Exception) as raised:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert not isinstance(raised.value, OwnError)
    assert isinstance(internals.backend_error(raised.value), OwnError)
    assert internals.backend_error(OwnError()) is None


# Inputs and marks


def test_marks() -> None:
    tensor = torch.ones(2, 3)
    assert internals.mark_maybe_dynamic(tensor, [0, 1])
    assert not internals.mark_maybe_dynamic(tensor, [1]) and not internals.mark_maybe_dynamic(tensor, [])
    marked = torch.ones(2, 3)
    torch._dynamo.mark_dynamic(marked, 1)
    internals.mark_maybe_dynamic(marked, [1])
    assert not internals.mark_maybe_dynamic(marked, [1])  # or a backend would ask for a new trace for ever
    gm = traced(lambda x: x * 2, tensor, dynamic=None)
    (placeholder,) = inputs_of(gm)
    assert all(isinstance(size, torch.SymInt) for size in placeholder.meta["example_value"].shape)


def test_static_inputs() -> None:
    module = nn.BatchNorm1d(3).eval()
    with torch.no_grad():
        gm = traced(lambda x: module(x), torch.ones(4, 3), dynamic=False)
    static = {n.name: internals.is_static_input(n) for n in inputs_of(gm)}
    assert sum(static.values()) == 4 and len(static) == 5, static  # weight, bias, mean, variance; x
    assert not static["l_x_"]


# What torch.compile wraps


def test_wrappers() -> None:
    module = nn.Linear(2, 2)
    assert internals.compiled_module(torch.compile(module)) is module
    assert internals.compiled_module(module) is None and internals.compiled_module(len) is None
    assert not internals.is_compiled_in_place(module)
    module.compile(backend="eager")
    assert internals.is_compiled_in_place(module)


def test_uncompiled() -> None:
    def function(x: Tensor) -> Tensor:
        return x

    assert internals.uncompiled(torch.compile(function, backend="eager")) is function
    assert internals.uncompiled(torch.compiler.disable(function)) is function
    assert internals.uncompiled(function) is function


def test_model_being_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """From inside the look-up of a backend, where the package's own is loaded."""
    found: list[Any] = []
    lookup = torch._dynamo.eval_frame.get_compiler_fn if hasattr(torch._dynamo.eval_frame, "get_compiler_fn") else None
    assert lookup is not None

    def watched(compiler_fn: Any) -> Any:
        found.append(internals.model_being_wrapped())
        return lookup(compiler_fn)

    monkeypatch.setattr(torch._dynamo.eval_frame, "get_compiler_fn", watched)
    module = nn.Linear(2, 2)
    torch.compile(module, backend="eager")
    assert found and all(model is module for model in found)
    assert internals.model_being_wrapped() is None


# Fakes and sizes


def test_fakes() -> None:
    mode = internals.fake_mode()
    with mode:
        fake = torch.empty(3) + torch.ones(3)
    assert internals.is_fake(fake) and not internals.is_fake(torch.empty(3))
    assert mode.shape_env is not internals.fake_mode().shape_env
    assert internals.is_fake(mode.from_tensor(torch.ones(2))) and internals.is_fake(torch.ones(2) + fake[:2])


@pytest.mark.parametrize("hint, any_integer", [(7, False), (1, True), (0, True)])
def test_sizes(hint: int, any_integer: bool) -> None:
    mode = internals.fake_mode()
    size = internals.new_size(mode, "n", hint, any_integer)
    symbol = internals.size_expression(size)
    assert isinstance(symbol, sympy.Symbol) and internals.hint_of(size, symbol) == hint
    more = size * 2 + 1
    assert internals.size_expression(more) == 2 * symbol + 1 and internals.hint_of(more, symbol) == hint
    if any_integer:
        assert isinstance(internals.size_expression(size), sympy.Symbol)  # neither 0 nor 1 was put in its place
    else:
        with mode:
            assert internals.size_expression(torch.empty(size, 2).shape[0]) == symbol
        assert bool(size == hint) and internals.size_expression(size) == hint  # an equality that was proved


def test_what_tracing_proved_is_applied() -> None:
    mode = internals.fake_mode()
    a, b = internals.new_size(mode, "a", 9), internals.new_size(mode, "b", 9)
    with mode:
        torch.empty(a) + torch.empty(b)
    assert internals.size_expression(a) == internals.size_expression(b)


def test_what_is_known_of_a_size() -> None:
    size = internals.new_size(internals.fake_mode(), "k", 5, any_integer=True)
    assert internals.traced_size(-size) == -5 and internals.traced_size(size * 2 - 3) == 7
    assert not internals.is_known_negative(-size)
    assert bool(size >= 1)  # a guard
    assert internals.is_known_negative(-size) and not internals.is_known_negative(size)


def test_traced_number() -> None:
    gm = traced(lambda x, scale: x * scale, torch.ones(2), 0.37)
    values = [n.meta.get("example_value") for n in gm.graph.nodes]
    (number,) = (v for v in values if isinstance(v, torch.SymFloat))
    assert internals.traced_number(number) == 0.37


def test_floor_division() -> None:
    n = sympy.Symbol("n", integer=True)
    half = internals.floor_div(n, sympy.Integer(2))
    assert internals.is_floor_div(half) and half.args == (n, 2) and half.subs(n, 7) == 3
    assert internals.floor_div(sympy.Integer(7), sympy.Integer(2)) == 3
    assert not internals.is_floor_div(n / 2) and not internals.is_floor_div(7)
    size = internals.new_size(internals.fake_mode(), "n", 11)
    assert internals.is_floor_div(internals.size_expression(size // 2))


# Dispatch, operators, logs

FUSED = [
    ("_transformer_encoder_layer_fwd", operator_internals.fused_layer, 20),
    ("_native_multi_head_attention", operator_internals.fused_attention, 13),
]


def test_dispatch_in_python() -> None:
    """Padding is taken apart in C++ otherwise, and asks for the number of rows there."""
    for context, symbolic in ((contextlib.nullcontext, False), (internals.dispatch_in_python, True)):
        mode = internals.fake_mode()
        with torch.no_grad(), mode, context():
            size = internals.new_size(mode, "n", 12)
            torch.nn.functional.pad(torch.empty(size, 3), (1, 1))
        assert isinstance(internals.size_expression(size), sympy.Symbol) == symbolic


def test_versions() -> None:
    tensor = torch.zeros(4)
    before = operator_internals.version_of(tensor)
    assert operator_internals.version_of(tensor) == before
    tensor[1:].add_(1)
    assert operator_internals.version_of(tensor) > before


def test_schemas() -> None:
    schema = operator_internals.schema_of(torch.ops.aten.add_.Tensor)
    assert schema.name == "aten::add_" and [a.name for a in schema.arguments] == ["self", "other", "alpha"]
    assert [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments] == [True, False, False]
    assert operator_internals.schema_of(torch.add) is None


@pytest.mark.parametrize("name, op, count", FUSED, ids=["layer", "attention"])
def test_fused_ops_take_what_the_passes_read_by_its_place(name: str, op: Callable[[], Any], count: int) -> None:
    assert op() is getattr(torch, name)
    arguments = operator_internals.schema_of(getattr(torch.ops.aten, name).default).arguments
    assert len(arguments) == count and arguments[-1].name == "mask_type"


def test_fused_layer_is_what_a_layer_is_traced_as() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.inference_mode():
        gm = traced(lambda x: layer(x), torch.ones(1, 5, 8), dynamic=False)
    assert [len(n.args) for n in gm.graph.nodes if n.target is operator_internals.fused_layer()] == [20]


def test_vmap_levels() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    gm = traced(torch.vmap(double), torch.ones(3, 2))
    moves = [n for n in gm.graph.nodes if operator_internals.moves_between_vmap_levels(n)]
    assert len(moves) >= 3, gm.graph  # opens a level, closes it, and takes x in
    torch._dynamo.reset()
    plain = traced(double, torch.ones(3, 2))
    assert not any(operator_internals.moves_between_vmap_levels(n) for n in plain.graph.nodes)


def test_groups_are_found_by_name() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        assert dist.group.WORLD is not None
        assert internals.group_named(dist.group.WORLD.group_name) is dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_artifacts_are_made_for_a_reader(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def payload() -> str:
        made.append("text")
        return made[-1]

    with caplog.at_level(logging.DEBUG, "torch.__trace"):
        internals.log_artifact("uniprefill_test", "string", payload)
    (record,) = (r for r in caplog.records if "uniprefill_test" in str(getattr(r, "metadata", None)))
    assert made == ["text"] and record.payload == "text"  # type: ignore[attr-defined]
    assert record.metadata["artifact"] == {"name": "uniprefill_test", "encoding": "string"}  # type: ignore[attr-defined]
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [])  # nobody reads it
    internals.log_artifact("uniprefill_test", "string", payload)
    assert made == ["text"]


# Nobody else

PACKAGE = ROOT / "uniprefill_fx"
INTERNALS = ("torch_internals.py", "lowering/compiler_internals.py", "passes/operator_internals.py")
PRIVATE_MODULE = re.compile(r"^(torch|transformers)(\.\w+)*\._\w+|^torch\.fx\.experimental\.symbolic_shapes")
PRIVATE_TEXT = re.compile(
    r"^_(dynamo|torchdynamo|orig_mod|compiled_call|tensor_dict|schema)\w*$|^torch\._\w+|^compile_subgraph_reason$"
)


def own_names(trees: Sequence[ast.AST]) -> set[str]:
    """Names with a leading underscore that the package itself defines: methods, functions, attributes, fields."""
    names: set[str] = set()
    for node in (n for tree in trees for n in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if name.startswith("_")}


def private_uses(tree: ast.AST, own: set[str]) -> Iterator[tuple[int, str]]:
    """Line and text of each import of a private module of torch, each attribute whose name begins with one underscore
    and is none of the package's own, and each text that is the name of such an attribute."""
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            if node.attr.startswith("_") and not node.attr.startswith("__") and node.attr not in own:
                yield node.lineno, ast.unparse(node)
            found = [ast.unparse(node)] if ast.unparse(node).startswith("torch.fx.experimental") else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PRIVATE_TEXT.match(node.value):
            yield node.lineno, repr(node.value)
        yield from ((node.lineno, name) for name in found if PRIVATE_MODULE.match(name))  # type: ignore[attr-defined]


def test_no_other_module_of_the_package_uses_private_apis() -> None:
    trees = {p.relative_to(PACKAGE).as_posix(): ast.parse(p.read_text()) for p in PACKAGE.rglob("*.py")}
    trees |= {
        f"kernels/{p.relative_to(ROOT / 'kernels').as_posix()}": ast.parse(p.read_text())
        for p in (ROOT / "kernels").rglob("*.py")
    }
    assert len(trees) > 60
    own = own_names(list(trees.values())) | {"_attn_implementation"}  # of a config of transformers
    uses = {name: sorted(private_uses(tree, own)) for name, tree in trees.items() if name not in INTERNALS}
    assert {name: found for name, found in uses.items() if found} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch._guards import tracing",
        "from torch import _guards",
        "from torch.fx.experimental.symbolic_shapes import ShapeEnv",
        "from torch.utils._sympy.functions import FloorDiv",
        "torch._dynamo.reset()",
        "x._version",
        "getattr(model, '_orig_mod', model)",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv()",
    ],
)
def test_private_uses_are_found(code: str) -> None:
    assert list(private_uses(ast.parse(code), {"_mine"}))


@pytest.mark.parametrize("code", ["self._mine", "torch.compile(x.__name__)", "from __future__ import annotations"])
def test_what_is_no_private_use(code: str) -> None:
    assert not list(private_uses(ast.parse(code), {"_mine"}))


def test_every_function_is_used_and_tested() -> None:
    names = {
        name
        for name, item in vars(internals).items()
        if isinstance(item, types.FunctionType | type) and item.__module__ == internals.__name__
    }
    assert len(names) > 20
    here = Path(__file__).read_text()
    package = "\n".join(p.read_text() for p in PACKAGE.rglob("*.py") if p.name != "torch_internals.py")
    assert {name for name in names if f"internals.{name}" not in here} == set()
    assert {name for name in names if not re.search(rf"\b{name}\b", package)} == set()
    assert all(getattr(internals, name).__doc__ for name in names)
