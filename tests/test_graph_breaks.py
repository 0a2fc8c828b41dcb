"""A model that Dynamo gives in pieces is still right: only the last graph of a forward drops; the report says why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import assert_differs, assert_near, options_of
from plain_decoders import Gpt, GptLayer, build, ids_for
from plain_reference import reference
from test_plain_decoders import SPEC, assert_dropped_as, dense_because, run
from tiny import tiny_llama, token_ids
from torch import Tensor, nn

import uniprefill_fx

BEHIND = dataclasses.replace(SPEC, drop_layers=(2,), p=0.7)  # in the second half of four layers
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:uniprefill. outputs of all positions"),
]


class Four(Gpt):
    """Four layers in two halves; subclasses put something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GptLayer() for _ in range(4))

    def enter(self, ids: Tensor) -> Tensor:
        return self.embed(ids) + self.places(torch.arange(ids.size(1), device=ids.device))

    def first(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))

    def second(self, x: Tensor) -> Tensor:
        return self.head(self.layers[3](self.layers[2](x)))

    def forward(self, ids: Tensor, last: bool = False) -> Tensor:
        return self.second(self.first(self.enter(ids)))


class Broken(Four):
    def forward(self, ids: Tensor, last: bool = False) -> Tensor:
        x = self.layers[1](self.layers[0](self.enter(ids)))
        torch._dynamo.graph_break()
        return self.second(x)


class Prints(Four):
    def forward(self, ids: Tensor, last: bool = False) -> Tensor:
        x = self.layers[1](self.layers[0](self.enter(ids)))
        print("between")
        return self.second(x)


class Looks(Four):
    def forward(self, ids: Tensor, last: bool = False) -> Tensor:
        x = self.layers[1](self.layers[0](self.enter(ids)))
        if x[0, 0, 0].item() > 1e9:
            x = x + 1
        return self.second(x)


class Halves(Four):
    """Not broken: each half is a frame of its own, as what calls them is not compiled."""

    @torch.compiler.disable(recursive=False)
    def forward(self, ids: Tensor, last: bool = False) -> Tensor:
        return self.second(self.first(self.enter(ids)))


PIECES = {"graph_break": Broken, "print": Prints, "item": Looks, "halves": Halves}


@pytest.mark.parametrize("name", PIECES)
def test_the_last_piece_drops(name: str) -> None:
    model, untouched = build(PIECES[name]), build(Four)
    model.compile(backend="uniprefill", options=options_of(BEHIND))
    for length in (300, 211, 352):
        ids = ids_for(name, length)
        got, call = run(model, ids)
        want = reference(untouched, ids, BEHIND)
        assert_dropped_as(call, want, (2,))
        assert_near(got, want.logits)
        with torch.inference_mode():
            assert_differs(got, untouched(ids))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4  # at most two a piece


@pytest.mark.parametrize("layers", [[1, 2], "all"], ids=str)
@pytest.mark.parametrize("name", ["graph_break", "halves"])
def test_layers_of_earlier_pieces_stay_dense(name: str, layers: Any) -> None:
    """A drop that is asked for there does not happen, and is no error in the options."""
    model, ids = build(PIECES[name]), ids_for(name, 300)
    kept = (2,) if layers == [1, 2] else (2, 3)
    model.compile(backend="uniprefill", options=options_of(BEHIND) | {"drop_layers": layers})
    got, call = run(model, ids)
    want = reference(build(Four), ids, dataclasses.replace(BEHIND, drop_layers=kept))
    assert_dropped_as(call, want, kept)
    assert_near(got, want.logits)


def test_explain_says_where_the_break_is_why_and_what_it_costs() -> None:
    report = uniprefill_fx.explain(build(Broken), ids_for("broken", 300), **options_of(BEHIND))
    assert report.call is not None and report.call.dropped
    (cost,) = report.breaks
    line = Broken.forward.__code__.co_firstlineno + 2
    assert cost.startswith("layers 0 to 1 cannot drop") and f"{__file__}:{line}, in forward" in cost
    assert "torch._dynamo.graph_break()" in cost and f"graph break: {cost}" in str(report)
    whole = uniprefill_fx.explain(build(Four), ids_for("whole", 300), **options_of(BEHIND))
    assert whole.breaks == () and "graph break" not in str(whole)


class MaskBefore(nn.Module):
    """A mask that is made in front of a break: nobody sees how."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama(2)

    def forward(self, ids: Tensor) -> Tensor:
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[None, None]
        torch._dynamo.graph_break()
        return self.model(ids, attention_mask=mask, use_cache=False, logits_to_keep=1).logits


@torch.inference_mode()
def test_a_mask_from_before_the_break_is_refused_with_the_break() -> None:
    ids = token_ids(300)
    want = MaskBefore()(ids)
    got = torch.compile(MaskBefore(), backend="uniprefill", options=options_of(BEHIND) | {"drop_layers": [0]})(ids)
    call = uniprefill_fx.last_call()
    assert call is not None and call.reason is not None and not call.dropped
    line = MaskBefore.forward.__code__.co_firstlineno + 2
    assert call.reason.category.value == "mask-not-understood", str(call)
    assert f"behind a graph break (the last one at {__file__}:{line}, in forward" in call.reason.seen
    assert_near(got, want)


class Loop(Four):
    """A break inside a loop: Dynamo leaves the loop to Python, and each layer becomes a graph."""

    def forward(self, ids: Tensor, last: bool = False) -> Tensor:
        x = self.enter(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 1:
                torch._dynamo.graph_break()
        return self.head(x)


def hooked() -> Any:
    model = build(Four)
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: print("hook"))
    return model


def each_compiled(options: dict[str, Any]) -> Any:
    model = build(Four)
    for layer in model.layers:
        layer.compile(backend="uniprefill", options=options)
    return model


ONE_BY_ONE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "loop": lambda _: build(Loop),
    "hooks": lambda _: hooked(),
    "each compiled": each_compiled,
}


@pytest.mark.parametrize("layers", [[2], "all"], ids=str)
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_a_graph_for_each_layer_stays_dense(name: str, layers: Any) -> None:
    options = options_of(BEHIND) | {"drop_layers": layers}
    model = ONE_BY_ONE[name](options)
    if name != "each compiled":
        model.compile(backend="uniprefill", options=options)
    dense_because(model, ids_for(name, 300), "graph-break")


class FirstHalf(Four):
    def forward(self, ids: Tensor, last: bool = False) -> Tensor:
        return self.first(self.enter(ids))


class EarlyExit(FirstHalf):
    """Logits of an early exit beside the stream that goes on."""

    def forward(self, ids: Tensor, last: bool = False) -> Any:
        x = self.first(self.enter(ids))
        return x, self.head(x)


class Base(Four):
    """No head: the stream after its final norm."""

    def forward(self, ids: Tensor, last: bool = False) -> Tensor:
        return self.norm(self.layers[3](self.layers[2](self.first(self.enter(ids)))))

    def head(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_half_a_model_that_returns_its_stream_stays_dense() -> None:
    model = build(FirstHalf)
    model.compile(backend="uniprefill", options=options_of(BEHIND) | {"drop_layers": "all"})
    dense_because(model, ids_for("half", 300), "graph-break")


def test_a_stream_beside_the_logits_of_an_early_exit_stays_dense() -> None:
    model, ids = build(EarlyExit), ids_for("exit", 300)
    model.compile(backend="uniprefill", options=options_of(BEHIND) | {"drop_layers": "all"})
    got, call = run(model, ids)
    assert not call.dropped and call.reason is not None and call.reason.category.value == "graph-break"
    with torch.inference_mode():
        for ours, theirs in zip(got, model.forward(ids), strict=True):
            assert_near(ours, theirs)


def test_a_model_without_a_head_drops() -> None:
    model, ids = build(Base), ids_for("base", 300)
    model.compile(backend="uniprefill", options=options_of(BEHIND))
    got, call = run(model, ids)
    want = reference(build(Base), ids, BEHIND)
    assert_dropped_as(call, want, (2,))
    assert_near(got, want.logits)
