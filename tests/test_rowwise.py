"""What runs on some of the tokens and means the same: operations one by one, in four layouts, and chains of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mixing_decoders import LAYOUTS
from mixing_ops import MIXING, ROWWISE, Op, channels_last, experts
from torch import Tensor, fx

from uniprefill_fx.errors import RefusalError
from uniprefill_fx.passes.analyze import rowwise, rowwise_regions
from uniprefill_fx.passes.analyze.rowwise_kinds import Axes, Mixed, Rows, Same, State
from uniprefill_fx.passes.node_utils import expression, meta, name_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
SIZES = {"b": 2, "n": 211, "d": 32}
SLOW = pytest.mark.slow


def traced(op: Op, layout: str, batch: bool = False) -> tuple[fx.Graph, fx.Node, int]:
    """What Dynamo makes of x + op(x), its input, and the axis of tokens."""
    shape = [1 if axis == "b" and not batch else SIZES[axis] for axis in layout]
    x, t = torch.randn(shape), layout.index("n")
    torch._dynamo.mark_dynamic(x, t)
    if batch:
        torch._dynamo.mark_dynamic(x, layout.index("b"))
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(lambda x: x + op(x, t), backend=keep, fullgraph=True)(x)
    graph = graphs[0].graph
    source = next(n for n in graph.nodes if n.op == "placeholder" and isinstance(meta(n), Tensor) and meta(n).ndim > 1)
    return graph, source, t


def behind(graph: fx.Graph, source: fx.Node) -> dict[fx.Node, int]:
    """The levels of a graph whose input is what a drop has left."""
    level = {source: 1}
    for node in graph.nodes:
        level[node] = level.get(node, max((level[n] for n in node.all_input_nodes), default=0))
    return level


def refusal(op: Op, layout: str = "bnd", batch: bool = False) -> str | None:
    """Why an operation must not run on some of the rows, as a user reads it; None if it may."""
    graph, source, t = traced(op, layout, batch)
    tokens = expression(meta(source).shape[t])
    requests = expression(meta(source).shape[layout.index("b")]) if batch else expression(1)
    try:
        rowwise.check_rows(
            graph,
            behind(graph, source),
            Axes(tokens, tokens, requests),
            given=[source],
            numbers_rows=lambda node: True,
        )
    except RefusalError as error:
        return str(error)
    return None


def cases(ops: dict[str, Op]) -> list[Any]:
    return [pytest.param(name, layout, marks=[] if layout == "bnd" else SLOW) for layout in LAYOUTS for name in ops]


@pytest.mark.parametrize(("name", "layout"), cases(MIXING))
def test_what_mixes_tokens_is_refused_by_name(name: str, layout: str) -> None:
    why = refusal(MIXING[name], layout)
    assert why is not None and "operation-mixes-tokens" in why and "`" in why


@pytest.mark.parametrize(("name", "layout"), cases(ROWWISE))
def test_what_computes_row_by_row_is_let_through(name: str, layout: str) -> None:
    assert refusal(ROWWISE[name], layout) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXING)
def test_in_a_batch_what_mixes_tokens_is_refused(name: str) -> None:
    assert refusal(MIXING[name], batch=True) is not None


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("sorted experts", "flat linear") else SLOW) for n in ROWWISE]
)
def test_in_a_batch_what_computes_row_by_row_is_let_through(name: str) -> None:
    assert refusal(ROWWISE[name], batch=True) is None


def test_a_batch_is_not_mixed_either() -> None:
    """Behind a drop, row j of one prompt and row j of another are different tokens."""
    assert refusal(lambda x, t: x - x.mean(0, keepdim=True), batch=True) is not None
    assert refusal(lambda x, t: x.roll(1, 0), batch=True) is not None


NAMED = {
    "normalize": "normalize",
    "vector_norm": "linalg_vector_norm",
    "einsum": "einsum",
    "fft": "fft_fft",
    "group_norm": "group_norm",
    "sort": "sort",
    "avg_pool1d": "avg_pool1d",
    "pad and slice": "pad",
    "flat softmax": "softmax",
    "custom average": "average",
    "custom mean into": "mean_into",
    "custom far apart": "far_apart",
}


@pytest.mark.parametrize("name", NAMED)
def test_the_reason_names_the_operation(name: str) -> None:
    assert f"`{NAMED[name]}`" in str(refusal(MIXING[name]))


# -- chains ----------------------------------------------------------------------------------------------------------


def kinds_of(op: Op) -> dict[str, Any]:
    """By name of operation, what its value was found to be."""
    graph, source, t = traced(op, "bnd")
    tokens = expression(meta(source).shape[t])
    checker = rowwise._Checker(graph, behind(graph, source), Axes(tokens, tokens), [source], (), lambda n: True, ())
    with contextlib.suppress(RefusalError):  # of what is put out
        checker.run(set())
    return {name_of(node): checker.kinds.get(node) for node in graph.nodes if name_of(node)}


def test_sorted_experts_have_rows_again_when_they_are_put_back() -> None:
    found = kinds_of(channels_last(lambda y: experts(y, True)))
    assert isinstance(found["argsort"], Mixed) and found["argsort"].groups
    assert found["sum"] == Rows(0) and found["view"] == Rows(1)


def test_experts_that_are_not_put_back_are_refused() -> None:
    def op(y: Tensor) -> Tensor:
        order = torch.argsort(y[..., 0].reshape(-1))
        return y.reshape(-1, y.shape[-1])[order].view_as(y)

    assert "argsort" in str(refusal(channels_last(op)))


def test_a_chain_sees_the_numbers_that_it_compares_with() -> None:
    """Room for 60 rows an expert: a probe of a few rows would not fill it."""

    def op(y: Tensor) -> Tensor:
        flat = y.reshape(-1, y.shape[-1])
        order = torch.argsort(flat[:, 0] > 0, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=y.device)
        return (flat * (place < 60)[:, None]).view_as(y)

    assert refusal(channels_last(op)) is not None


def test_pieces_of_a_fixed_length_are_refused() -> None:
    """Few rows make fewer or shorter pieces than were traced: nothing is proven by them, and nothing is raised."""
    split = refusal(channels_last(lambda y: torch.cat(y.split(64, 1), 1)))
    cleared = refusal(channels_last(lambda y: torch.cat((y[:, :100] * 0, y[:, 100:]), 1)))
    assert split is not None and "`split`" in split
    assert cleared is not None and "operation-mixes-tokens" in cleared


def test_causal_convolutions_see_kept_rows_as_neighbours() -> None:
    def causal(y: Tensor) -> Tensor:
        y = y.transpose(1, 2)
        return F.conv1d(y, y.new_ones(y.shape[1], 1, 4), padding=3, groups=y.shape[1])[..., : y.shape[2]].transpose(
            1, 2
        )

    def padded(y: Tensor) -> Tensor:
        y = y.transpose(1, 2)
        return F.conv1d(F.pad(y, (3, 0)), y.new_ones(y.shape[1], 1, 4), groups=y.shape[1]).transpose(1, 2)

    def ahead(y: Tensor) -> Tensor:
        y = y.transpose(1, 2)
        return F.conv1d(y, y.new_ones(y.shape[1], 1, 4), padding=3, groups=y.shape[1])[..., 3:].transpose(1, 2)

    assert refusal(channels_last(causal)) is None and refusal(channels_last(padded)) is None
    assert "conv1d" in str(refusal(channels_last(ahead)))


def test_a_call_is_run_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of many layers costs as many probes as one of two."""
    ran: list[str] = []
    run = rowwise_regions.Runs.run

    def counted(self: rowwise_regions.Runs, node: fx.Node) -> None:
        ran.append(name_of(node))
        run(self, node)

    monkeypatch.setattr(rowwise_regions.Runs, "run", counted)

    def layers(count: int) -> int:
        def op(x: Tensor, t: int) -> Tensor:
            for _ in range(count):
                x = x + ROWWISE["sorted experts"](x, t) + ROWWISE["fft"](x, t)
            return x

        ran.clear()
        assert refusal(op) is None
        return len(ran)

    once, four = layers(1), layers(4)
    assert 0 < four <= 2 * once


def test_the_random_state_of_a_user_is_left_alone() -> None:
    graph, source, t = traced(MIXING["noise"], "bnd")
    tokens = expression(meta(source).shape[t])
    before = torch.get_rng_state()
    with pytest.raises(RefusalError):
        rowwise.check_rows(graph, behind(graph, source), Axes(tokens, tokens), given=[source])
    assert torch.equal(torch.get_rng_state(), before)


def test_products_of_constants_and_states_are_told_apart() -> None:
    found = kinds_of(lambda x, t: x * torch.ones_like(x))
    assert found["ones_like"] == Same() and found["mul"] == Rows(1)
    assert isinstance(kinds_of(lambda x, t: x + 0 * x[:, -1:].sum())["sum"], State | Mixed)
