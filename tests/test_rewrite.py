"""The passes that execute decisions: lower attention, split, extract. `drop_tokens` has `test_shapes.py`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import operation
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from traced import assert_same_values, calls, trace

import uniprefill_fx.frontends
from uniprefill_fx.errors import Category, RefusalError
from uniprefill_fx.passes.analyze.attention_nodes import find_attention_nodes
from uniprefill_fx.passes.cleanup import clean
from uniprefill_fx.passes.node_utils import copy_module, meta
from uniprefill_fx.passes.rewrite.extract import extract
from uniprefill_fx.passes.rewrite.lower_attention import lower_attention
from uniprefill_fx.passes.rewrite.split import Piece, split_at_selections

ops = torch.ops.uniprefill
uniprefill_fx.frontends.install()


@pytest.fixture
def rows() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(1, 2, 40, 8)


# -- lower attention --------------------------------------------------------------------------------------------------


def windowed(x: Tensor) -> Tensor:
    place = torch.arange(x.shape[2])
    mask = (place <= place[:, None]) & (place > place[:, None] - 9)
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask) * 2


def test_attention_that_is_understood_needs_no_mask(rows: Tensor) -> None:
    gm, given = trace(windowed, rows)
    before = copy_module(gm)
    assert lower_attention(gm, find_attention_nodes(gm.graph)) == 1
    assert [name for name in calls(gm) if name not in ("size", "sym_size")] == ["attention", "mul"]
    (node,) = [n for n in gm.graph.nodes if n.target is ops.attention.default]
    names = [argument.name for argument in ops.attention.default._schema.arguments]
    assert dict(zip(names, node.args, strict=True))["window"] == 9
    assert_same_values(before, gm, given)


def bidirectional(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def test_attention_that_is_not_stays(rows: Tensor) -> None:
    gm, _ = trace(bidirectional, rows)
    before, (attention,) = calls(gm), find_attention_nodes(gm.graph)
    assert attention.refusal is not None and attention.refusal.category is Category.NON_CAUSAL
    assert lower_attention(gm, [attention]) == 0 and calls(gm) == before


# -- split ------------------------------------------------------------------------------------------------------------


def selecting(autocast: bool = False) -> fx.GraphModule:
    """x -> y = 2 x; score and select on y; z = compact(y) + 1."""
    graph = fx.Graph()
    x, bounds = graph.placeholder("x"), graph.placeholder("bounds")
    if autocast:
        graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", torch.bfloat16, True, None))
    y = graph.call_method("mul", (x, 2.0))
    scores = graph.call_function(ops.score.default, (y, y, None, bounds, None, None, None, None, 4, 8, torch.float32))
    chosen = graph.call_function(ops.select.default, (scores, bounds, bounds, 8, 4, 4, 0.5, None))
    kept = graph.call_function(operator.getitem, (chosen, 0))
    kept_bounds = graph.call_function(operator.getitem, (chosen, 1))
    z = graph.call_method("add", (graph.call_function(ops.compact.default, (y, kept, 2)), 1.0))
    graph.output((z, kept_bounds))
    return fx.GraphModule({}, graph)


def test_the_pieces_compute_what_the_graph_does(rows: Tensor) -> None:
    gm, bounds = selecting(), torch.tensor([[0, 40]])
    pieces = split_at_selections(gm)
    assert [piece.selection for piece in pieces] == [False, True, False]
    assert [[operation(n) for n in p.gm.graph.nodes if n.op.startswith("call")] for p in pieces] == [
        ["mul"],
        ["score", "select", "getitem", "getitem"],
        ["compact", "add"],
    ]
    got = run(dict(zip(gm.graph.find_nodes(op="placeholder"), (rows, bounds), strict=True)), pieces, gm)
    torch.testing.assert_close(got, gm(rows, bounds), rtol=0, atol=0)


def run(values: dict[fx.Node, Any], pieces: Sequence[Piece], gm: fx.GraphModule) -> Any:
    """What a graph returns whose pieces run one after the other; values: of its inputs."""
    for piece in pieces:
        values.update(zip(piece.outputs, piece.gm(*(values[n] for n in piece.inputs)), strict=True))
    return fx.node.map_arg(gm.graph.output_node().args[0], values.__getitem__)


def test_a_graph_without_a_selection_is_one_piece(rows: Tensor) -> None:
    gm, given = trace(bidirectional, rows)
    (piece,) = split_at_selections(gm)
    assert not piece.selection
    taken = dict(zip([n for n in gm.graph.nodes if n.op == "placeholder"], given, strict=True))
    torch.testing.assert_close(piece.gm(*(taken[n] for n in piece.inputs))[-1], gm(*given)[0])


def reshaping() -> fx.GraphModule:
    """x -> sizes of x and its halves; y = sigmoid(x), which is cut out; what comes behind reads all of them."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    sizes = graph.call_method("size", (x,))
    halves = graph.call_method("split", (x, 4), {"dim": 3})
    y = graph.call_function(torch.sigmoid, (x,))
    flat = graph.call_method("view", (y, -1))
    first, heads = (graph.call_function(operator.getitem, of) for of in ((halves, 0), (sizes, 1)))
    graph.output((graph.call_method("view", (flat, sizes)), first, heads, sizes))
    return fx.GraphModule({}, graph)


def cut_at_sigmoid(gm: fx.GraphModule, rows: Tensor) -> list[Piece]:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = [DimDynamic.STATIC, DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC]
    context: Any = StatelessSymbolicContext(sizes)
    FakeTensorProp(gm, mode).propagate(mode.from_tensor(rows, symbolic_context=context))
    pieces = split_at_selections(gm, lambda node: node.target is torch.sigmoid)
    assert len(pieces) == 3
    return pieces


def test_pieces_hand_over_tensors_and_numbers(rows: Tensor) -> None:
    gm = reshaping()
    before = gm(rows)
    pieces = cut_at_sigmoid(gm, rows)
    given = [meta(node) for piece in pieces for node in piece.inputs]
    assert {type(value) for value in given} == {FakeTensor, torch.SymInt}
    (x,) = gm.graph.find_nodes(op="placeholder")
    got = run({x: rows}, pieces, gm)
    assert got[2:] == before[2:] == (2, (1, 2, 40, 8))
    torch.testing.assert_close(got[:2], before[:2], rtol=0, atol=0)


def taking_twice(read: Any) -> fx.GraphModule:
    """x -> deviations and means of its rows, of which both pieces around a cut read."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    both = graph.call_function(torch.ops.aten.std_mean.dim, (x, [3]), {"keepdim": True})
    a = graph.call_function(operator.getitem, (both, 0))
    y = graph.call_function(torch.sigmoid, (x,))
    b = read(graph, both)
    graph.output((graph.call_function(operator.add, (y, a)), graph.call_function(operator.mul, (y, b))))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("index", [0, -2, 1])
def test_an_element_is_handed_over_once(rows: Tensor, index: int) -> None:
    """Else two inputs of a piece would be one tensor, which compilers refuse where it is written."""
    gm = taking_twice(lambda graph, both: graph.call_function(operator.getitem, (both, index)))
    before = gm(rows)
    pieces = cut_at_sigmoid(gm, rows)
    assert len(pieces[-1].inputs) == (3 if index == 1 else 2)
    (x,) = gm.graph.find_nodes(op="placeholder")
    torch.testing.assert_close(run({x: rows}, pieces, gm), before, rtol=0, atol=0)


def test_a_method_of_a_tuple_from_before_a_cut_is_refused(rows: Tensor) -> None:
    gm = taking_twice(lambda graph, both: graph.call_method("__len__", (both,)))
    with pytest.raises(RefusalError, match="__len__ of a tuple that is made before a drop"):
        cut_at_sigmoid(gm, rows)


def test_a_selection_inside_an_autocast_region_is_refused() -> None:
    with pytest.raises(RefusalError, match="autocast region"):
        split_at_selections(selecting(autocast=True))


# -- extract ----------------------------------------------------------------------------------------------------------


def counted(x: Tensor) -> tuple[Tensor, Tensor]:
    place = torch.zeros(x.shape[2], dtype=torch.int64)
    place += torch.arange(x.shape[2])
    return x.exp().sum(), place.cumsum(0)


def test_a_value_is_cut_out_with_the_writes_into_it(rows: Tensor) -> None:
    gm, given = trace(counted, rows)
    wanted = [n for n in gm.graph.nodes if operation(n) == "cumsum"]
    cut = extract(gm, wanted)
    assert "exp" not in calls(cut) and any(name in calls(cut) for name in ("iadd", "add_"))
    assert len(list(cut.graph.find_nodes(op="placeholder"))) == len(list(gm.graph.find_nodes(op="placeholder")))
    torch.testing.assert_close(cut(*given)[0], gm(*given)[1])
    assert extract(gm, [])(*given) == ()


# -- clean ------------------------------------------------------------------------------------------------------------


def test_what_nobody_reads_goes_and_what_writes_stays(rows: Tensor) -> None:
    def wasteful(x: Tensor) -> Tensor:
        x.exp()
        y = torch.zeros_like(x)
        y.copy_(x)
        y[:, :, :3] = 1.0
        return y

    gm, given = trace(wasteful, rows)
    before = copy_module(gm)
    clean(gm)
    assert "exp" not in calls(gm) and {"copy_", "setitem"} <= set(calls(gm))
    assert_same_values(before, gm, given)
