"""Decoders in plain PyTorch, with no transformers in sight, drop tokens exactly, or say why they don't."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from eager_reference import DropSpec
from exactness import TIE, assert_differs, assert_near, options_of
from plain_decoders import DECODERS, Encoder, Gpt, GptLayer, SequenceFirst, SequenceFirstLayer, build, ids_for
from plain_reference import Expected, reference
from torch import Tensor

import uniprefill_fx
from uniprefill_fx import LastCall

LENGTHS = (300, 211, 352)
SPEC = DropSpec((0, 1), p=(0.8, 0.7), block_size=16, last_n=16, sink_tokens=16)
SYMBOLIC = {"gpt", "packed"}  # decoders that `dynamic=True` is tried on by default
SLOW = {"grouped", "einsum", "torchattention", "complex"}


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@torch.inference_mode()
def run(model: Any, ids: Tensor, **call: Any) -> tuple[Tensor, LastCall]:
    """The compiled model's output, and its record of the call."""
    before = uniprefill_fx.last_call()
    out = model(ids, **call)
    after = uniprefill_fx.last_call()
    assert after is not None and after is not before
    return out, after


def assert_dropped_as(call: LastCall, want: Expected, drops: Sequence[int] = SPEC.drop_layers) -> None:
    """The kept sets are those that the reference chose, and rows were dropped."""
    assert all(min(s.margin, s.gap) > TIE for s in want.selections.values()), "a tie: choose another prompt"
    assert call.dropped and call.reason is None, str(call)
    assert call.kept_indices.keys() == want.kept.keys() and list(call.num_tokens) == want.rows
    assert all(torch.equal(call.kept_indices[layer], kept) for layer, kept in want.kept.items())
    assert tuple(call.kept_indices) == tuple(drops)
    assert call.tokens is not None and all(call.tokens > len(kept) for kept in call.kept_indices.values())


CASES = [
    pytest.param(
        name, dynamic, marks=[] if name in SYMBOLIC or (dynamic is None and name not in SLOW) else pytest.mark.slow
    )
    for name in DECODERS
    for dynamic in (None, True)
]


@pytest.mark.filterwarnings("ignore:uniprefill. outputs of all positions")
@pytest.mark.parametrize(("name", "dynamic"), CASES)
def test_decoder(name: str, dynamic: bool | None) -> None:
    """Kept rows equal a run without the dropped keys, dropped rows show the state they were frozen in."""
    if name == "torchlayers" and torch.__version__ < "2.12":
        pytest.skip("Dynamo of torch 2.11 breaks the graph at an encoder layer's fused op when the length is a symbol")
    model, untouched = build(name), build(name)
    model.compile(backend="uniprefill", dynamic=dynamic, options=options_of(SPEC))
    for length in LENGTHS:
        ids = ids_for(name, length)
        got, call = run(model, ids)
        with torch.inference_mode():
            dense = untouched(ids)
        assert_near(reference(untouched, ids, None).logits, dense)
        want = reference(untouched, ids, SPEC)
        assert call.tokens == length
        assert_dropped_as(call, want)
        assert_near(got, want.logits)
        assert_differs(got, dense)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("name", ["gpt", "packed"])
def test_logits_of_the_last_position_alone(name: str) -> None:
    model, untouched, ids = build(name), build(name), ids_for(name, 300)
    model.compile(backend="uniprefill", options=options_of(SPEC))
    got, call = run(model, ids, last=True)
    want = reference(untouched, ids, SPEC)
    assert_dropped_as(call, want)
    assert_near(got.flatten(), want.logits.reshape(300, -1)[-1])


def dense_because(model: Any, ids: Tensor, category: str) -> None:
    """The call runs dense, equal to the model as it is, with a reason of this category."""
    got, call = run(model, ids)
    with torch.inference_mode():
        want = model.forward(ids)
    assert not call.dropped and call.reason is not None and call.reason.category.value == category, str(call)
    assert call.reason.seen and call.reason.hint
    assert_near(got, want)


def test_attention_that_is_not_causal_is_refused() -> None:
    model = build(Encoder)
    model.compile(backend="uniprefill", options=options_of(SPEC))
    dense_because(model, ids_for("encoder", 300), "non-causal-attention")


@pytest.mark.parametrize("name", ["gpt", "sequencefirst"])
def test_several_prompts_in_one_call(name: str) -> None:
    """Side by side along a batch axis, or within the axis of heads: one by one, or dense."""
    model = build(name)
    model.compile(backend="uniprefill", options=options_of(SPEC))
    ids = torch.cat([ids_for(name, 300), ids_for(name, 300).flip(1)])
    got, call = run(model, ids)
    if call.dropped:
        wants = [reference(build(name), row[None], SPEC).logits for row in ids]
        assert_near(got, torch.cat(wants, dim=got.shape.index(2)))
        return
    assert call.reason is not None and call.reason.category.value == "batch", str(call)
    with torch.inference_mode():
        assert_near(got, model.forward(ids))


@pytest.mark.filterwarnings("ignore:uniprefill. outputs of all positions")
def test_a_mask_kept_as_a_buffer_is_looked_at_again_when_it_changes() -> None:
    """Written over, or replaced: no triangle any more, so the prompt runs dense; and as before when it is one again."""
    model, ids = build("causalbuffer"), ids_for("causalbuffer", 300)
    model.compile(backend="uniprefill", options=options_of(SPEC))
    want = reference(build("causalbuffer"), ids, SPEC)
    triangle = model.layers[1].triangle
    for _ in range(2):
        got, call = run(model, ids)
        assert_dropped_as(call, want)
        assert_near(got, want.logits)
        triangle[..., 200:, :100] = 0
        dense_because(model, ids, "mask-not-understood")
        triangle[..., 200:, :100] = 1


class Prefix(Gpt):
    """Written in place into a triangle: every token sees the first ten."""

    class layer(GptLayer):
        def attend(self, x: Tensor) -> Tensor:
            n = x.shape[1]
            q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=-1))
            mask = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
            mask[:, :10] = True
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return self.c_proj(y.transpose(1, 2).flatten(2))


def test_a_mask_that_is_written_in_place_is_not_taken_for_what_it_was() -> None:
    model = build(Prefix)
    model.compile(backend="uniprefill", options=options_of(SPEC))
    dense_because(model, ids_for("prefix", 300), "mask-not-understood")


class Pairs(Gpt):
    """Positions that are halved and rounded down: a token sees the one behind it too, if they are a pair."""

    class layer(GptLayer):
        def attend(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=-1))
            pair = (torch.arange(x.shape[1], device=x.device) / 2).long()
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=pair[None, :] <= pair[:, None])
            return self.c_proj(y.transpose(1, 2).flatten(2))


def test_rounding_in_a_mask_is_not_overlooked() -> None:
    model = build(Pairs)
    model.compile(backend="uniprefill", options=options_of(SPEC))
    got, call = run(model, ids_for("pairs", 300))
    assert not call.dropped and call.reason is not None, str(call)
    with torch.inference_mode():
        assert_near(got, model.forward(ids_for("pairs", 300)))


class Counting(SequenceFirst):
    """Each layer counts its calls in a buffer, beside attention that is brought into another form."""

    class layer(SequenceFirstLayer):
        def __init__(self) -> None:
            super().__init__()
            self.calls: Tensor
            self.register_buffer("calls", torch.zeros(1))

        def attend(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return super().attend(x)


@pytest.mark.filterwarnings("ignore:uniprefill. outputs of all positions")
def test_writes_that_nobody_reads_in_the_graph_are_kept() -> None:
    model, ids = build(Counting), ids_for("counting", 300)
    model.compile(backend="uniprefill", options=options_of(SPEC))
    for count in (1, 2):
        got, call = run(model, ids)
        want = reference(build(SequenceFirst), ids, SPEC)
        assert_dropped_as(call, want)
        assert_near(got, want.logits)
        assert [int(layer.calls) for layer in model.layers] == [count] * 3


class GatedSumLayer(GptLayer):
    """The MLP comes in through a gate of each token's own: no sum of the stream with something else."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x))
        opened = self.gate(x).sigmoid()
        return x * (1 - opened) + self.mlp(self.ln_2(x)) * opened


class GatedSum(Gpt):
    layer = GatedSumLayer


class GatedAtFirst(Gpt):
    """One layer with a gate, then layers of the usual kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = GatedSumLayer()


@pytest.mark.filterwarnings("ignore:uniprefill. outputs of all positions")
def test_a_stream_that_is_not_followed_freezes_nothing() -> None:
    """The last sum that is known lies before the gate: dropped rows would be older than the layer they left at."""
    model = build(GatedSum)
    model.compile(backend="uniprefill", options=options_of(SPEC))
    dense_because(model, ids_for("gated", 300), "residual-stream-not-found")


@pytest.mark.filterwarnings("ignore:uniprefill. outputs of all positions")
def test_only_the_layer_behind_such_a_step_stays_dense() -> None:
    model, ids = build(GatedAtFirst), ids_for("gated", 300)
    model.compile(backend="uniprefill", options=options_of(SPEC))
    got, call = run(model, ids)
    spec = DropSpec((0,), p=(0.8,), block_size=16, last_n=16, sink_tokens=16)
    want = reference(build(GatedAtFirst), ids, spec)
    assert_dropped_as(call, want, spec.drop_layers)
    assert_near(got, want.logits)


class KeyBias(Gpt):
    """Logits that grow with a number of each key, which all heads share: (batch, 1, 1, keys)."""

    class layer(GptLayer):
        def attend(self, x: Tensor) -> Tensor:
            n = x.shape[1]
            q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=-1))
            hidden = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
            scores = q @ k.mT * 8**-0.5 + x[..., 0][:, None, None]
            y = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
            return self.c_proj(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("prompts", [1, 4])
def test_a_bias_that_heads_share_is_not_taken_for_one_of_each_head(prompts: int) -> None:
    """Not even where there are as many prompts as heads."""
    model, ids = build(KeyBias), ids_for("keybias", 300)
    model.compile(backend="uniprefill", dynamic=True, options=options_of(SPEC))
    dense_because(model, torch.cat([ids.roll(i, 1) for i in range(prompts)]), "attention-not-understood")


class Scratch(Gpt):
    """One buffer for the whole model, which each layer writes."""

    def forward(self, ids: Tensor, last: bool = False) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.size(1), device=ids.device))
        scratch = torch.empty_like(x)
        layer: Any
        for layer in self.layers:
            scratch.copy_(layer.ln_1(x))
            x = x + layer.attend(scratch)
            x = x + layer.mlp(layer.ln_2(x))
        return self.head(x)


def test_a_buffer_that_is_made_before_the_drop_is_a_reason_and_no_failure() -> None:
    model = build(Scratch)
    model.compile(backend="uniprefill", dynamic=True, options=options_of(SPEC))
    dense_because(model, ids_for("scratch", 300), "mutation-across-cut")
