"""What operations write, read off their schemas: in-place and `out=` forms, and operators that return nothing."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eager_reference import DropSpec
from exactness import assert_differs, assert_near, options_of
from expecttest import assert_expected_inline
from graphs import operation
from mixing_decoders import build
from mixing_ops import Op, channels_last, fused_add_norm, mean_into, scale, scale_into
from plain_decoders import VOCABULARY
from plain_reference import reference
from torch import Tensor, fx

import uniprefill_fx
from uniprefill_fx import LastCall
from uniprefill_fx.passes import operator_internals as internals
from uniprefill_fx.passes.cleanup import clean
from uniprefill_fx.passes.dataflow import Ancestry, aliases, written_nodes
from uniprefill_fx.passes.schemas import effects

SPEC = DropSpec((0,), p=0.7, block_size=16, last_n=16, sink_tokens=16)

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:uniprefill. outputs of all positions"),
]


@torch.library.custom_op("writes_test::unified_attention_with_output", mutates_args=("output",))
def unified_attention_with_output(q: Tensor, k: Tensor, v: Tensor, output: Tensor, layer_name: str) -> None:
    """As vLLM's: attention over (tokens, heads, dim) that writes its fourth argument and returns nothing."""
    scores = torch.einsum("nhd,mhd->hnm", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    output.copy_(torch.einsum("hnm,mhd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))


@torch.library.custom_op("writes_test::gate_with_output", mutates_args=("output",))
def gate_with_output(q: Tensor, k: Tensor, v: Tensor, output: Tensor, layer_name: str) -> None:
    """The same signature, row by row."""
    output.copy_(q.sigmoid() * k + v)


@torch.library.custom_op("writes_test::lists", mutates_args=("outs", "scratch"))
def lists(x: Tensor, outs: list[Tensor], scratch: Tensor | None = None) -> None:
    for out in outs:
        out.copy_(x)


@torch.library.custom_op("writes_test::count", mutates_args=("calls",))
def count(x: Tensor, calls: Tensor) -> None:
    calls.add_(1)


SEEN: list[tuple[int, ...]] = []
library = torch.library.Library("writes_test", "FRAGMENT")
library.define("announce(Tensor x) -> ()")
library.define("stamp(Tensor x) -> Tensor")
library.impl("announce", lambda x: SEEN.append(tuple(x.shape)), "CompositeExplicitAutograd")
library.impl("stamp", lambda x: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("writes_test::announce", lambda x: None, lib=library)
torch.library.register_fake("writes_test::stamp", torch.empty_like, lib=library)
announce, stamp = torch.ops.writes_test.announce, torch.ops.writes_test.stamp
torch.fx.node.has_side_effect(stamp.default)


# -- schemas ---------------------------------------------------------------------------------------------------------


def graph_of(**values: Any) -> tuple[fx.Graph, dict[str, fx.Node]]:
    graph = fx.Graph()
    nodes = {}
    for name, value in values.items():
        nodes[name] = graph.placeholder(name)
        nodes[name].meta["example_value"] = value
    return graph, nodes


OPS = torch.ops.writes_test
FORMS: dict[str, tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = {
    # name: method or function, what is called, arguments by the name of an input, keyword arguments
    "function": ("f", torch.add, ("x", "y"), {}),
    "out=": ("f", torch.add, ("x", "y"), {"out": "z"}),
    "in-place method": ("m", "add_", ("x", "y"), {}),
    "in-place function": ("f", torch.relu_, ("x",), {}),
    "iadd": ("f", operator.iadd, ("x", "y"), {}),
    "and_ of a keyword": ("f", operator.and_, ("i", "i"), {}),
    "overload": ("f", torch.ops.aten.mul_.Tensor, ("x", "y"), {}),
    "overload out": ("f", torch.ops.aten.mul.out, ("x", "y"), {"out": "z"}),
    "setitem": ("f", operator.setitem, ("x", 0, "y"), {}),
    "view": ("m", "view", ("x", 40), {}),
    "reshape": ("m", "reshape", ("x", 8, 5), {}),
    "slice": ("f", operator.getitem, ("x", slice(1, 3)), {}),
    "look-up": ("f", operator.getitem, ("x", "i"), {}),
    "sort": ("m", "sort", ("x",), {"dim": 1}),
    "type_as": ("m", "type_as", ("x", "y"), {}),
    "float": ("m", "float", ("x",), {}),
    "einsum that moves axes": ("f", torch.einsum, ("ab->ba", "x"), {}),
    "einsum": ("f", torch.einsum, ("ab,ab->a", "x", "y"), {}),
    "dropout that does nothing": ("f", F.dropout, ("x", 0.1, False, False), {}),
    "dropout in place": ("f", F.dropout, ("x", 0.1, True, True), {}),
    "silu": ("f", F.silu, ("x",), {}),
    "silu in place": ("f", F.silu, ("x",), {"inplace": True}),
    "normalize": ("f", F.normalize, ("x",), {"dim": 0}),
    "batch_norm": ("f", F.batch_norm, ("x", "w", "w"), {}),
    "batch_norm that trains": ("f", F.batch_norm, ("x", "w", "w"), {"training": True}),
    "copy_": ("m", "copy_", ("x", "y"), {}),
    "index_copy_": ("m", "index_copy_", ("x", 0, "i", "y"), {}),
    "foreach": ("f", torch._foreach_add_, (("x", "z"), ("y", "y")), {}),
    "vLLM's attention": ("f", OPS.unified_attention_with_output.default, ("x", "x", "y", "z", "layer"), {}),
    "a packet, by keyword": ("f", OPS.unified_attention_with_output, ("x", "x", "y"), {"output": "z"}),
    "two by mutation": ("f", fused_add_norm._opoverload, ("x", "z", "w"), {}),
    "a list, and None": ("f", OPS.lists.default, ("x", ("y", "z"), None), {}),
    "a list, and another": ("f", OPS.lists.default, ("x", ("y",), "z"), {}),
    "linear": ("f", F.linear, ("x", "y"), {}),
    "size": ("m", "size", ("x",), {}),
}


def test_what_each_form_writes_and_shares() -> None:
    sizes = {name: torch.empty(5, 8, device="meta") for name in "xyz"}
    graph, inputs = graph_of(**sizes, w=torch.empty(8, device="meta"), i=torch.zeros(5, dtype=torch.int64))

    def node(value: Any) -> Any:
        return inputs.get(value, value) if isinstance(value, str) else value

    lines = []
    for name, (kind, target, args, kwargs) in FORMS.items():
        call = graph.call_method if kind == "m" else graph.call_function
        made = call(
            target,
            fx.node.map_aggregate(args, node),
            {key: node(value) for key, value in kwargs.items()},
        )
        found = effects(made)
        written, shared = (",".join(map(str, nodes)) or "-" for nodes in (found.writes, found.shares))
        lines.append(f"{name}: writes {written}, shares {shared}" + ("" if found.known else ", unknown"))
    assert_expected_inline(
        "\n".join(lines),
        """\
function: writes -, shares -
out=: writes z, shares z
in-place method: writes x, shares x
in-place function: writes x, shares x
iadd: writes x, shares x
and_ of a keyword: writes -, shares -
overload: writes x, shares x
overload out: writes z, shares z
setitem: writes x, shares x
view: writes -, shares x
reshape: writes -, shares x
slice: writes -, shares x
look-up: writes -, shares -
sort: writes -, shares -
type_as: writes -, shares x
float: writes -, shares x
einsum that moves axes: writes -, shares x
einsum: writes -, shares -
dropout that does nothing: writes -, shares x
dropout in place: writes x, shares x
silu: writes -, shares -
silu in place: writes x, shares x
normalize: writes -, shares -
batch_norm: writes -, shares -
batch_norm that trains: writes w, shares -
copy_: writes x, shares x
index_copy_: writes x, shares x
foreach: writes x,z, shares -
vLLM's attention: writes z, shares -
a packet, by keyword: writes z, shares -
two by mutation: writes x,z, shares -
a list, and None: writes y,z, shares -
a list, and another: writes y,z, shares -
linear: writes -, shares -
size: writes -, shares -""",
    )


def test_private_apis_of_the_dispatcher() -> None:
    aten = torch.ops.aten
    assert isinstance(aten.add.Tensor, internals.OpOverload) and isinstance(aten.add, internals.OpOverloadPacket)
    assert internals.has_kernel(aten.sort.default) and not internals.has_kernel(aten.sort.int)
    assert internals.has_registered_effect(stamp.default) and not internals.has_registered_effect(aten.mm.default)
    assert internals.is_composite(aten.matmul.default) and not internals.is_composite(aten.mm.default)
    x = torch.empty(4, device="meta")
    assert internals.storage_of(x) == internals.storage_of(x[1:]) != internals.storage_of(torch.empty_like(x))
    seen: list[Any] = []
    with internals.watching(lambda overload, args, kwargs: seen.append((overload, len(args), kwargs))):
        torch.add(x, x, alpha=2)
        with internals.without_modes():
            torch.mul(x, x)
    assert seen == [(aten.add.Tensor, 2, {"alpha": 2})]


def test_what_is_called_for_its_effect_stays() -> None:
    graph, inputs = graph_of(x=torch.empty(3, device="meta"))
    for target in (announce, announce.default, stamp, stamp.default, torch.ops.aten.abs, torch.abs):
        graph.call_function(target, (inputs["x"],)).meta["example_value"] = torch.empty(3, device="meta")
    graph.output(inputs["x"])
    gm = fx.GraphModule({}, graph)
    clean(gm)
    assert [operation(n) for n in gm.graph.nodes][1:-1] == ["announce", "announce", "stamp", "stamp"]


def test_an_effect_on_kept_rows_is_refused() -> None:
    """Nothing says what the operator does with its rows, so nothing says that kept ones will do."""

    def rows(y: Tensor) -> Tensor:
        announce(y)
        return y * 0.1

    def summary(y: Tensor) -> Tensor:
        announce(y.norm())
        return y * 0.1

    assert_dense(channels_last(rows), "announce")
    assert_dense(channels_last(summary), "announce")


def test_what_nothing_is_known_of_may_write_all_that_it_reads() -> None:
    def opaque(x: Tensor, y: Tensor) -> Tensor:
        return x * float(y.sum())  # cannot be run without data

    graph, inputs = graph_of(x=torch.empty(3, device="meta"), y=torch.empty(3, device="meta"), n=3)
    node = graph.call_function(opaque, (inputs["x"], inputs["y"], inputs["n"]))
    found = effects(node)
    assert not found.known and found.writes == found.shares == (inputs["x"], inputs["y"])


def test_effects_follow_a_node_that_is_changed() -> None:
    graph, inputs = graph_of(x=torch.empty(3, device="meta"), y=torch.empty(3, device="meta"))
    node = graph.call_method("add_", (inputs["x"], 1))
    assert written_nodes(node) == (inputs["x"],)
    node.target = "add"
    assert written_nodes(node) == ()
    node.target, node.args = "mul_", (inputs["y"], 1)
    assert written_nodes(node) == (inputs["y"],)


def test_data_flows_through_an_operator_that_returns_nothing() -> None:
    x = torch.empty(5, 4, 8, device="meta")
    graph, inputs = graph_of(q=x, k=x, v=x)
    output = graph.call_function(torch.empty_like, (inputs["q"],))
    row = graph.call_function(operator.getitem, (output, 0))
    output.meta["example_value"], row.meta["example_value"] = x, x[0]
    call = graph.call_function(OPS.unified_attention_with_output.default, (*inputs.values(), output, "layer"))
    after = graph.call_function(torch.relu, (output,))
    after.meta["example_value"] = x
    ancestry = Ancestry(graph)
    assert ancestry.depends(after, call) and ancestry.depends(after, inputs["v"]) and ancestry.depends(row, call)
    assert set(aliases(row)) == {row, output} and call not in aliases(output)


# -- behind a drop ---------------------------------------------------------------------------------------------------


def prompt() -> Tensor:
    return torch.randint(0, VOCABULARY, (1, 197), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def run(op: Op, observer: list[fx.GraphModule] | None = None) -> tuple[Any, Tensor, LastCall, Tensor]:
    """A two-layer decoder with x + op(x) in its first, compiled: model, output, record, and its ids."""
    model, ids = (
        build("bnd", [[op], []]),
        torch.randint(0, VOCABULARY, (1, 197), generator=torch.Generator().manual_seed(1)),
    )
    got = torch.compile(model, backend="uniprefill", dynamic=True, options=options_of(SPEC))(ids)
    call = uniprefill_fx.last_call()
    assert call is not None
    return model, got, call, ids


def assert_drops_right(op: Op) -> None:
    model, got, call, ids = run(op)
    want = reference(model, ids, SPEC)
    assert call.dropped and torch.equal(call.kept_indices[0], want.kept[0]), str(call)
    assert_near(got, want.logits)
    with torch.inference_mode():
        assert_differs(got, model(ids))


def assert_dense(op: Op, *words: str) -> None:
    model, got, call, ids = run(op)
    assert not call.dropped and call.reason is not None and all(w in call.reason.seen for w in words), str(call)
    with torch.inference_mode():
        assert_near(got, model(ids))


def heads(call: Callable[..., None]) -> Op:
    """(1, tokens, channels) through an operator over (tokens, heads, dim) that writes its output argument."""

    def op(y: Tensor) -> Tensor:
        q, k, v = (t.view(-1, 4, y.shape[-1] // 4) for t in (y, y * 0.5, y.tanh()))
        output = torch.empty_like(q)
        call(q, k, v, output, "layers.0.attn")
        return output.view(y.shape)

    return channels_last(op)


def test_attention_that_writes_its_output_argument_is_not_taken_for_row_wise() -> None:
    assert_dense(heads(unified_attention_with_output), "unified_attention_with_output")


def test_an_operator_of_the_same_form_that_works_row_by_row_drops() -> None:
    assert_drops_right(heads(gate_with_output))


def test_two_outputs_by_mutation_drop() -> None:
    def op(y: Tensor) -> Tensor:
        x, residual = y.tanh(), y * 0.5
        fused_add_norm(x, residual, torch.ones(y.shape[-1]))
        return x * 0.1 + residual

    assert_drops_right(channels_last(op))


def test_optional_arguments_and_several_writes_into_one_buffer_drop() -> None:
    def op(x: Tensor, t: int) -> Tensor:
        out = torch.zeros_like(x)
        scale_into(x, out, [0.5])
        half = out.clone()
        scale_into(x, out, [0.25, 2.0], other=half)
        return out.mul_(0.5) + scale(half, 0.1)

    assert_drops_right(op)


def test_a_mean_that_is_written_is_refused_where_it_is_read() -> None:
    def op(x: Tensor, t: int) -> Tensor:
        out = torch.empty_like(x)
        view = out[..., 1:]
        mean_into(x[..., 1:], view, t)
        out[..., 0] = 0
        return out * 0.1

    assert_dense(op, "mean_into")


def test_a_mean_that_nobody_reads_does_not_matter() -> None:
    def op(x: Tensor, t: int) -> Tensor:
        out = torch.empty_like(x)
        mean_into(x, out, t)
        return x.tanh()

    assert_drops_right(op)


def places_read_twice(change: Callable[[Tensor], Any]) -> Op:
    """`places` does not depend on the drop: behind it, its rows are gathered once."""

    def op(x: Tensor, t: int) -> Tensor:
        places = torch.arange(x.shape[t], device=x.device)[None, :, None] * 0.01 + torch.zeros(1, 1, 32)
        first = x * places
        change(places)
        return (first + x * places) * 0.1

    return op


def test_a_value_of_all_tokens_that_changes_between_two_reads_is_refused() -> None:
    assert_dense(places_read_twice(Tensor.sin_), "before and after")


def test_a_change_that_can_be_made_into_a_new_value_drops() -> None:
    assert_drops_right(places_read_twice(lambda places: places.add_(1.0)))


def test_an_operator_that_only_writes_survives_the_rewrite() -> None:
    """Nobody reads what it writes in the graph: the buffer lives outside."""

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build("bnd", [[], []])
            self.calls: Tensor
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, ids: Tensor) -> Tensor:
            count(ids, self.calls)
            return self.model(ids)

    model, ids = Counting().eval(), prompt()
    fast = torch.compile(model, backend="uniprefill", dynamic=True, options=options_of(SPEC))
    report = uniprefill_fx.explain(model, ids, **options_of(SPEC))
    assert report.after is not None
    assert [operation(n) for n in report.after.graph.nodes].count("count") == 1
    model.calls.zero_()
    with torch.inference_mode():
        for calls in (1, 2):
            got = fast(ids)
            call = uniprefill_fx.last_call()
            assert call is not None and call.dropped and int(model.calls) == calls
    assert_near(got, reference(model.model, ids, SPEC).logits)
