"""The passes that edit a graph without changing what it computes: the graph, the counts, the numbers, and no match."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from traced import assert_same_values, calls, trace

from uniprefill_fx.passes.node_utils import copy_module, decoder_layer, module_path
from uniprefill_fx.passes.normalize.attention_form import unify_attention_form
from uniprefill_fx.passes.normalize.causal_buffers import MARK, CausalBuffer, mark_causal_buffers
from uniprefill_fx.passes.normalize.expand_layer_ops import expand_layer_ops
from uniprefill_fx.passes.normalize.fold_constants import fold_constants
from uniprefill_fx.passes.normalize.functionalize import functionalize
from uniprefill_fx.passes.normalize.module_names import name_from_self

Pass = Callable[[fx.GraphModule], int]
X = torch.arange(24.0).reshape(1, 12, 2) / 10


def applied(one: Pass, function: Callable[..., Any], *inputs: Any, **how: Any) -> tuple[fx.GraphModule, int]:
    """The graph after a pass, which computes what it did before, and what the pass counted."""
    gm, given = trace(function, *inputs, **how)
    before = copy_module(gm)
    count = one(gm)
    gm.graph.lint()
    assert_same_values(before, gm, given)
    return gm, count


# -- module names -----------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapped


class Decorated(Layers):
    forward = decorated(Layers.forward)


def places(gm: fx.GraphModule) -> list[tuple[str, int | None]]:
    """Every module that a node is in, and the layer that it is taken for."""
    return list(dict.fromkeys((module_path(node), decoder_layer(node)) for node in gm.graph.nodes if module_path(node)))


@pytest.mark.parametrize("model, renamed", [(Layers, False), (Decorated, True)])
def test_modules_are_named_from_the_model(model: type[Layers], renamed: bool) -> None:
    gm, count = applied(name_from_self, model(), X)
    assert (count > 0) == renamed and places(gm) == [("layers.0", 0), ("layers.1", 1)]


def test_layers_that_are_arguments_keep_their_numbers() -> None:
    gm, count = applied(name_from_self, lambda *args: args[1](args[0](args[2])), nn.Linear(2, 2), nn.Linear(2, 2), X)
    assert count == 0 and places(gm) == [("args.0", 0), ("args.1", 1)]


# -- fold constants ---------------------------------------------------------------------------------------------------


def scaled(x: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, scale=scale) * scale


def test_a_number_that_tracing_made_an_input_is_written_as_a_number() -> None:
    gm, count = applied(fold_constants, scaled, X[None], 0.25)
    assert count >= 1 and "item" not in calls(gm)
    (attention,) = [n for n in gm.graph.nodes if n.target is F.scaled_dot_product_attention]
    assert attention.kwargs["scale"] == 0.25
    (product,) = [n for n in gm.graph.nodes if n.target is operator.mul]
    assert product.args[1] == 0.25


def test_sizes_that_are_still_symbols_stay() -> None:
    gm, count = applied(fold_constants, lambda x: x + x.shape[1], X)
    assert count == 0
    (add,) = [n for n in gm.graph.nodes if n.target in (operator.add, torch.add)]
    assert isinstance(add.args[1], fx.Node)


# -- functionalize ----------------------------------------------------------------------------------------------------


def added(x: Tensor) -> Tensor:
    y = x * 2
    y += x
    return y.masked_fill_(y > 1, 0.0)


def test_arithmetic_in_place_that_nobody_else_sees_becomes_plain() -> None:
    gm, count = applied(functionalize, added, X)
    assert count == 2
    assert calls(gm) == ["mul", "add", "gt", "masked_fill"]


def kept_view(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    view = y[:, 1:]
    y += x
    return y, view


def into_input(x: Tensor) -> Tensor:
    x += 1
    return x


@pytest.mark.parametrize("function", [kept_view, into_input])
def test_a_write_that_is_seen_under_another_name_stays(function: Callable[..., Any]) -> None:
    gm, count = applied(functionalize, function, X)
    assert count == 0 and "iadd" in calls(gm)


def of_a_view(x: Tensor) -> Tensor:
    y = x.clone()
    row = y[0]
    row += 1
    row *= 2
    return y


def in_a_chain(x: Tensor) -> Tensor:
    y = x.clone()
    y.clamp_(0).mul_(3).add_(1)
    return y


def of_a_view_in_a_chain(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0].mul_(2).sub_(3)
    return y * 2


def of_the_input_in_a_chain(x: Tensor) -> Tensor:
    x.mul_(2).add_(1)
    return x.sum(0)


def behind_a_write_that_stays(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.clone()
    earlier = y.clamp_(0)
    y.mul_(3)
    return earlier, y


def into_zeros(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[0].copy_(x[0]).add_(1)
    return y


def fill(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:] = x.sin()
    return out * 2


def fill_up_to_its_length(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:, : x.shape[1], ...] = x.sin()
    return out * 2


def fill_with_what_is_written_later(x: Tensor) -> tuple[Tensor, Tensor]:
    out, value = torch.empty_like(x), x.sin()
    out[:] = value
    value += 1
    return out, value


def fill_with_other_strides(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[...] = x.sin().mT.contiguous().mT
    return out.view(-1)


def fill_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.zeros_like(x)
    out[:] = x.sin()
    between = out + 1
    out[:] = x.cos()
    return between, out


FILLED = {
    fill: 1, fill_up_to_its_length: 1, fill_with_what_is_written_later: 2, fill_with_other_strides: 1, fill_twice: 2,
}  # fmt: skip


@pytest.mark.parametrize("function", FILLED)
def test_a_buffer_that_is_filled_becomes_what_fills_it(function: Callable[..., Any]) -> None:
    gm, count = applied(functionalize, function, X.clone())
    assert count == FILLED[function] and "setitem" not in calls(gm)


def fill_a_part(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, : x.shape[1] - 1] = x[:, 1:]
    return out


def fill_backwards(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[0, :] = x[0].flip(0)
    return out


def fill_with_a_row(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:] = x[:, 0]
    return out


def fill_with_another_type(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:] = x.half()
    return out


def fill_where_a_view_is_read(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    row = out[:, 0]
    out[:] = x.sin()
    return row * 2


def fill_a_view(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    row = out[0]
    row[:] = x[0].sin()
    return out


def fill_the_input(x: Tensor) -> Tensor:
    x[:] = x.sin()
    return x * 2


NOT_FILLED = [
    fill_a_part, fill_backwards, fill_with_a_row, fill_with_another_type, fill_where_a_view_is_read, fill_a_view,
    fill_the_input,
]  # fmt: skip


@pytest.mark.parametrize("function", NOT_FILLED)
def test_other_stores_stay(function: Callable[..., Any]) -> None:
    gm, count = applied(functionalize, function, X.clone())
    assert count == 0 and "setitem" in calls(gm)


CHAINS = [of_a_view, in_a_chain, of_a_view_in_a_chain, of_the_input_in_a_chain, behind_a_write_that_stays, into_zeros]


@pytest.mark.parametrize("function", [*CHAINS, *FILLED, *NOT_FILLED])
def test_no_write_of_a_chain_is_lost(function: Callable[..., Any]) -> None:
    applied(functionalize, function, X.clone())
    got, want = X.clone(), X.clone()
    torch._dynamo.reset()
    compiled: Any = torch.compile(function, backend="uniprefill", options={"inner_backend": "eager"})
    torch.testing.assert_close(compiled(got), function(want))
    torch.testing.assert_close(got, want)


# -- expand layer ops -------------------------------------------------------------------------------------------------


def layer(norm_first: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=norm_first).eval()


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_layer_is_spelled_out(norm_first: bool) -> None:
    torch.manual_seed(1)
    x, mask = torch.randn(1, 12, 16), nn.Transformer.generate_square_subsequent_mask(12)
    try:
        gm, given = trace(layer(norm_first), x, mask)
    except torch._dynamo.exc.Unsupported as error:
        if "_transformer_encoder_layer_fwd" not in str(error):
            raise
        pytest.skip("this torch cannot trace the fused layer")
    before = copy_module(gm)
    count = expand_layer_ops(gm)
    if count == 0:  # traced as its parts already
        pytest.skip("this torch traces the layer by its parts")
    found = calls(gm)
    assert count == 1 and found.count("scaled_dot_product_attention") == 1 and found.count("layer_norm") == 2
    assert "_transformer_encoder_layer_fwd" not in found
    with torch.no_grad():
        torch.testing.assert_close(gm(*given), before(*given), rtol=1e-5, atol=1e-5)


def test_cross_attention_stays_as_it_is() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x, memory = torch.randn(1, 12, 16), torch.randn(1, 5, 16)
    _, count = applied(expand_layer_ops, lambda a, b: attention(a, b, b, need_weights=False)[0], x, memory)
    assert count == 0


# -- attention form ---------------------------------------------------------------------------------------------------


def with_einsum(x: Tensor) -> Tensor:
    q = x.view(1, -1, 2, 1)
    weights = torch.einsum("bihd,bjhd->bhij", q, q).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, q)


def with_bmm(x: Tensor) -> Tensor:
    return torch.bmm(torch.softmax(torch.bmm(x, x.transpose(1, 2)), -1), x)


def fused_3d(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    "function, products, four",
    [(with_einsum, ["matmul", "matmul"], 2), (with_bmm, ["matmul", "matmul"], 2), (fused_3d, [], 1)],
)
def test_products_of_attention_take_one_form(function: Callable[..., Any], products: list[str], four: int) -> None:
    gm, count = applied(unify_attention_form, function, X)
    assert count == four
    found = calls(gm)
    assert [name for name in found if name in ("matmul", "bmm", "einsum")] == products
    operators = (torch.matmul, F.scaled_dot_product_attention)
    operands = [n.args[0] for n in gm.graph.nodes if n.target in operators]
    assert operands and all(o.meta["example_value"].ndim == 4 for o in operands)


def router(x: Tensor) -> Tensor:
    return torch.einsum("bnd,bnd->bn", x, x).softmax(-1)


def test_a_softmax_that_is_no_attention_is_left_alone() -> None:
    gm, count = applied(unify_attention_form, router, X)
    assert count == 0 and "einsum" in calls(gm)


# -- causal buffers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "buffer, found",
    [
        (torch.ones(8, 8).tril(), CausalBuffer(1.0, 0.0)),
        (torch.full((1, 1, 8, 8), -1e9).triu(1), CausalBuffer(0.0, -1e9)),
        (torch.ones(8, 8).tril(-1), None),
        (torch.ones(8, 8), None),
        (torch.ones(8, 7).tril(), None),
    ],
)
def test_a_buffer_is_noted_for_what_it_holds(buffer: Tensor, found: CausalBuffer | None) -> None:
    gm, given = trace(lambda x, mask: x + mask.sum(), X, buffer)
    mark_causal_buffers(gm, given)
    marks = [n.meta[MARK] for n in gm.graph.nodes if MARK in n.meta]
    assert marks == ([] if found is None else [found])
