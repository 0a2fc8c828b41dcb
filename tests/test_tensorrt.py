"""torch-tensorrt as the inner backend, by a stand-in of its name that runs the programs which it is given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import TWO_LAYERS, needle_ids
from eager_reference import DropSpec
from exactness import SHARP, Case, Compiled, assert_near, assert_same_rows
from split_models import FIRST
from tiny import tiny_llama, token_ids
from torch import Tensor, fx, nn

import uniprefill_fx
from uniprefill_fx.config import OptionError, PrefillConfig
from uniprefill_fx.lowering.engines import EnginePiece
from uniprefill_fx.lowering.inner import checked_inner_backend, tensorrt_of
from uniprefill_fx.lowering.tensorrt import NAMES, EngineError, tensorrt
from uniprefill_fx.passes.node_utils import expression
from uniprefill_fx.specs import AttentionSpec
from uniprefill_fx.torch_internals import is_static_input
from uniprefill_fx.vllm.options import engine_args

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
pytestmark = pytest.mark.usefixtures("fresh_dynamo")
LIBRARY = '''
"""What torch-tensorrt is called by. Its converters take attention over equal shapes only, as the library's do."""
import types
import torch

given, failure = [], []

class Input:
    def __init__(self, *, dtype, shape=None, min_shape=None, opt_shape=None, max_shape=None):
        self.dtype, self.shapes = dtype, (min_shape or shape, opt_shape or shape, max_shape or shape)

def compile(exported_program, inputs=None, *, arg_inputs=None, device=None, min_block_size=5, workspace_size=0,
            torch_executed_ops=None, pass_through_build_failures=False, **kwargs):
    if failure:
        raise failure[0]
    given.append((exported_program, arg_inputs, {"min_block_size": min_block_size, "workspace_size": workspace_size}))
    return exported_program.module()

dynamo = types.SimpleNamespace(compile=compile)
'''


@dataclass
class StandIn:
    module: Any

    @property
    def given(self) -> list[tuple[torch.export.ExportedProgram, list[Any], dict[str, Any]]]:
        return self.module.given

    def names(self) -> list[str]:
        """The names of all operators of all programs."""
        graphs = [exported.graph for exported, _, _ in self.given]
        return [str(n.target) for graph in graphs for n in graph.nodes if n.op == "call_function"]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A library of that name, and what it was given."""
    (tmp_path / "torch_tensorrt.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_tensorrt", raising=False)
    import torch_tensorrt

    yield StandIn(torch_tensorrt)
    sys.modules.pop("torch_tensorrt", None)


def taken(program: torch.export.ExportedProgram) -> list[Any]:
    """The values that a program takes at each call."""
    names = program.graph_signature.user_inputs
    return [node.meta["val"] for node in program.graph.nodes if node.name in names]


class Layer(nn.Module):
    """Attention over rows that may be padding, as this package's operator, between two products; then kept rows."""

    def __init__(self, **terms: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.out = nn.Linear(32, 64, bias=False), nn.Linear(32, 32, bias=False)
        self.spec = AttentionSpec(**terms)

    def operands(self, x: Tensor) -> list[Tensor]:
        q, k, v = self.project(x).split([32, 16, 16], -1)
        return [y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in (q, k, v)]

    def forward(self, x: Tensor, bounds: Tensor, kept: Tensor) -> Tensor:
        y = torch.ops.uniprefill.attention(*self.operands(x), None, None, bounds, *self.spec.arguments())
        y = x + self.out(y.transpose(1, 2).reshape(*x.shape))
        return torch.ops.uniprefill.compact(y, kept, 1).relu()

    def expected(self, x: Tensor, bounds: Tensor, kept: Tensor) -> Tensor:
        """The same in float64, with a mask."""
        q, k, v = (y.double() for y in self.operands(x))
        at = torch.arange(x.shape[1])
        far = at[:, None] - at
        seen = (far >= 0) & (far < (self.spec.window or 1 << 30))
        real = torch.stack([(at >= first) & (at < last) for first, last in bounds.tolist()])
        scores = (q @ k.repeat_interleave(2, 1).mT * 8**-0.5).masked_fill(~(seen & real[:, None, None]), -1e30)
        y = (scores.softmax(-1) @ v.repeat_interleave(2, 1) * real[:, None, :, None]).transpose(1, 2)
        y = x + y.reshape(*x.shape) @ self.out.weight.T.double()
        return y[:, kept[0]].relu().float()


class Subject:
    """A `Layer` as Dynamo traces it for any length, run by engines."""

    def __init__(self, batch: int = 1, options: dict[str, Any] | None = None, **terms: Any) -> None:
        self.layer, self.batch = Layer(**terms).requires_grad_(False), batch
        found: list[fx.GraphModule] = []

        def keep(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            found.append(gm)
            return gm.forward

        x, bounds, kept = self.inputs(40)
        for tensor, d in ((x, 1), (kept, 1), *(((x, 0), (bounds, 0)) if batch > 1 else ())):
            torch._dynamo.mark_dynamic(tensor, d)
        torch.compile(self.layer, backend=keep)(x, bounds, kept)
        self.gm = found[0]
        self.placeholders = self.gm.graph.find_nodes(op="placeholder")
        batches = {expression(size) for size in self._sizes() if size.node.hint == batch}
        self.piece = EnginePiece(self.gm, tensorrt("tensorrt", options), "layer", batches)

    def _sizes(self) -> list[torch.SymInt]:
        values = [node.meta["example_value"] for node in self.placeholders]
        return [value for value in values if isinstance(value, torch.SymInt)]

    def inputs(self, rows: int, padding: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn(self.batch, rows, 32, generator=torch.Generator().manual_seed(rows))
        bounds = torch.tensor([[0, rows]] * self.batch)
        bounds[-1, 0] = padding
        return x, bounds, torch.arange(padding, rows, 3)[None]

    def check(self, rows: int, padding: int = 0) -> None:
        x, bounds, kept = self.inputs(rows, padding)
        now = {40: rows, 14: kept.shape[1], self.batch: self.batch}
        args = [
            now[node.meta["example_value"].node.hint]
            if isinstance(node.meta["example_value"], torch.SymInt)
            else self._tensor(node, x, bounds, kept)
            for node in self.placeholders
        ]
        with torch.inference_mode():
            (out,) = self.piece(*args)
        assert_near(out, self.layer.expected(x, bounds, kept), 1e-5)

    def _tensor(self, node: fx.Node, x: Tensor, bounds: Tensor, kept: Tensor) -> Tensor:
        if is_static_input(node):
            (weight,) = (p for name, p in self.layer.named_parameters() if name.split(".")[0] in node.name.split("_"))
            return weight
        return {3: x, 2: bounds if node.meta["example_value"].shape[1] == 2 else kept}[node.meta["example_value"].ndim]


def test_a_program_has_weights_attention_and_bounds(stand_in: StandIn) -> None:
    subject = Subject(options={"max_tokens": 512, "workspace_size": 1 << 20})
    for rows in (40, 61):  # the second length by the engines of the first
        subject.check(rows)
    ((exported, inputs, settings),) = stand_in.given
    assert settings == {"min_block_size": 5, "workspace_size": 1 << 20}
    assert sorted(p.shape for p in exported.parameters()) == [(32, 32), (64, 32)]
    shapes = [given.shapes for given in inputs]
    assert sorted(shapes) == [((1, 2), (1, 14), (1, 512)), ((1, 2, 32), (1, 40, 32), (1, 512, 32))]
    assert [value.dtype for value in taken(exported)] == [given.dtype for given in inputs]
    assert not any(name.startswith("uniprefill") for name in stand_in.names())
    (node,) = exported.graph.find_nodes(op="call_function", target=ATTENTION)
    assert node.args[5] is True and "enable_gqa" not in node.kwargs  # causal, with the heads of groups written out
    assert len({str(x.meta["val"].shape) for x in node.args[:3]}) == 1  # a converter asks for this


def test_the_size_that_engines_are_tuned_for(stand_in: StandIn) -> None:
    Subject(options={"opt_tokens": 128}).check(40)
    ((_, inputs, _),) = stand_in.given
    assert sorted(given.shapes[1] for given in inputs) == [(1, 128), (1, 128, 32)]


def test_windows_run_between_programs(stand_in: StandIn) -> None:
    Subject(window=8).check(40)
    assert len(stand_in.given) == 2 and str(ATTENTION) not in stand_in.names()
    assert not any(name.startswith("uniprefill") for name in stand_in.names())


def test_padding_has_attention_run_between_programs(stand_in: StandIn) -> None:
    subject = Subject(batch=2)
    subject.check(40)
    assert len(stand_in.given) == 1
    subject.check(40, padding=9)
    assert len(stand_in.given) == 3 and stand_in.names().count(str(ATTENTION)) == 1


def test_weights_that_change_make_a_new_program(stand_in: StandIn) -> None:
    subject = Subject()
    subject.check(40)
    with torch.no_grad():
        subject.layer.out.weight.mul_(-2)
    subject.check(40)
    assert len(stand_in.given) == 2 and len(subject.piece.parts[0].variants) == 1


def test_weights_that_get_other_memory_make_a_new_program(stand_in: StandIn) -> None:
    """`weight.data = other` leaves the parameter and its count of writes as they were."""
    subject = Subject()
    for count in (1, 2, 3):
        subject.check(40)
        assert len(stand_in.given) == count and len(subject.piece.parts[0].variants) == 1
        subject.layer.out.weight.data = subject.layer.out.weight.data * -2


def test_rows_beyond_the_bounds_run_without_engines(stand_in: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    subject = Subject(options={"max_tokens": 64})
    subject.check(65)
    subject.check(66)
    (message,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "[65, 22] rows lie outside of min_tokens=2 to max_tokens=64" in message
    assert not stand_in.given
    subject.check(64)
    assert len(stand_in.given) == 1


class Sort(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sort().values


def test_a_sort_says_its_dimension(stand_in: StandIn) -> None:
    x = torch.randn(3, 5)
    run = tensorrt("tensorrt", None).build("part", torch.export.export(Sort(), (x,)), [((3, 5),) * 3], [x])
    ((exported, _, _),) = stand_in.given
    (node,) = exported.graph.find_nodes(op="call_function", target=torch.ops.aten.sort.default)
    assert node.args[1] == 1 and torch.equal(run(x), x.sort().values)


def test_a_build_that_fails_raises(stand_in: StandIn) -> None:
    stand_in.module.failure.append(RuntimeError("no kernel found"))
    with pytest.raises(EngineError, match="layer, part 0: torch-tensorrt could not build its engines: no kernel"):
        Subject().check(40)


def test_a_model(stand_in: StandIn) -> None:
    """Dropped and dense, by programs that hold each weight once."""
    extra = {"inner_backend": "tensorrt", "inner_options": {"max_tokens": 512}}
    compiled = Compiled(Case("tiny", FIRST, extra), tiny_llama(2), tiny_llama(2))
    for length in (300, 212):
        ids = token_ids(length)
        want = compiled.expected(ids)
        out, call = compiled.prefill(ids, logits_to_keep=1)
        assert_same_rows(call, want, length)
        assert_near(out.logits, want.last_logits)
    assert len(stand_in.given) == 2 and stand_in.names().count(str(ATTENTION)) == 2
    assert not any(name.startswith("uniprefill") for name in stand_in.names())
    weights = [sum(p.numel() for p in exported.parameters()) for exported, _, _ in stand_in.given]
    assert all(weights) and sum(weights) == sum(p.numel() for p in compiled.model.parameters())
    with uniprefill_fx.disabled():
        out, call = compiled.prefill(ids, logits_to_keep=1)
    assert not call.dropped and len(stand_in.given) == 3
    assert_near(out.logits, compiled.dense(ids, logits_to_keep=1).logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["needle-llama", "needle-gemma3", "needle-qwen3-next"])
def test_checkpoints_generate(stand_in: StandIn, name: str) -> None:
    """Steps run by Inductor, on the caches that programs have filled."""
    spec = DropSpec(TWO_LAYERS[name], p=(0.9, 0.8), **SHARP)
    compiled = Compiled(Case(name, spec, {"inner_backend": "torch_tensorrt"}))
    ids = needle_ids(1111)
    tokens, logits = compiled.reference.generate(ids, 4)
    got = compiled.generate(ids, 4)
    assert torch.equal(got.sequences[:, 1111:], tokens)
    for ours, theirs in zip(got.logits, logits, strict=True):
        assert_near(ours, theirs)
    assert stand_in.given and not any(n.startswith("uniprefill") for n in stand_in.names())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"workspace": 1}, r"inner_options\['workspace'\]\": got 1; .*Did you mean 'workspace_size'"),
        ({"arg_inputs": []}, "The pieces of the graph say it"),
        ({"pass_through_build_failures": False}, "always raises"),
        ({"min_tokens": 1}, "min_tokens.*got 1; allowed: an integer of at least 2"),
        ({"max_tokens": 64, "min_tokens": 128}, "max_tokens.*got 64; allowed: an integer of at least 128"),
        ({"max_tokens": 64, "opt_tokens": 65}, "opt_tokens.*got 65; allowed: at most max_tokens, 64"),
        ({"opt_tokens": 2.5}, "opt_tokens.*got 2.5"),
    ],
)
def test_options_are_checked(stand_in: StandIn, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        uniprefill_fx.compile(nn.Linear(1, 1), inner_backend="torch_tensorrt", inner_options=options)
    assert tensorrt_of(PrefillConfig(inner_backend="torch_tensorrt")) is not None


@pytest.mark.parametrize("name", NAMES)
def test_vllm_has_no_engines(name: str) -> None:
    with pytest.raises(OptionError, match="in vLLM, any but torch-tensorrt"):
        engine_args(inner_backend=name)


def test_a_library_that_is_not_there_is_named_with_the_version_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)  # importing it raises ImportError
    minor = ".".join(torch.__version__.split(".")[:2])
    for ask in (
        lambda: checked_inner_backend("tensorrt"),
        lambda: tensorrt_of(PrefillConfig(inner_backend="tensorrt")),
    ):
        with pytest.raises(OptionError, match=rf"torch-tensorrt=={minor}\.\*"):
            ask()
