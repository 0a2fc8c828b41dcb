"""`register_mixer`: linear attention that the package has never heard of becomes one op, and drops exactly."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import pytest
import torch
from exactness import assert_differs, assert_near, options_of
from plain_decoders import HEADS, Gpt, GptLayer, build, ids_for
from plain_reference import Expected, alive, reference
from test_plain_decoders import SPEC, assert_dropped_as, dense_because, run
from torch import Tensor, nn

import uniprefill_fx
from uniprefill_fx import register_mixer
from uniprefill_fx.frontends import install

CHUNK = 32


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def decayed(q: Tensor, k: Tensor, v: Tensor, decay: float) -> Tensor:
    """Linear attention with a decay, token by token; (batch, heads, tokens, dim) each."""
    state, outputs = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
    for i in range(q.shape[2]):
        state = decay * state + k[:, :, i, :, None] * v[:, :, i, None]
        outputs.append(q[:, :, i, None] @ state)
    return torch.cat(outputs, dim=2)


def chunked(q: Tensor, k: Tensor, v: Tensor, decay: float, tokens: int, chunk: int = CHUNK) -> Tensor:
    """The same by chunks, a loop whose length tracing would fix; it is told the number of tokens."""
    state, outputs = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
    for start in range(0, tokens, chunk):
        a, b, c = (t[:, :, start : start + chunk] for t in (q, k, v))
        place = torch.arange(a.shape[2], device=q.device)
        within = (decay ** (place[:, None] - place)).tril()
        outputs.append(a * (decay ** (place[:, None] + 1)) @ state + (a @ b.mT * within) @ c)
        left = decay ** (a.shape[2] - 1 - place[:, None])
        state = state * decay ** a.shape[2] + (b * left).mT @ c
    return torch.cat(outputs, dim=2)


class Recurrent(GptLayer):
    """A layer of linear attention. `decay` is a tensor for the method, a number for the function."""

    def __init__(self) -> None:
        super().__init__()
        self.decay: Any = 0.9

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return chunked(q, k, v, self.decay, q.shape[2])

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=-1))
        return q, k.sigmoid(), v

    def attend(self, x: Tensor) -> Tensor:
        return self.c_proj(self.mix(*self.split(x)).transpose(1, 2).flatten(2))


class ByFunction(Recurrent):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return chunked(q, k, v, self.decay, q.shape[2])


class ByMethod(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.tensor(0.9))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return chunked(q, k, v, self.decay, q.shape[2], CHUNK)


class ByDisabled(Recurrent):
    """Calls a kernel as flash-linear-attention's are: disabled for the compiler, over (batch, tokens, heads, dim)."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        gate = torch.full(q.shape[:-1], self.decay).log()
        out, state = sys.modules["fla.ops.simple_gla.stand_in"].chunk_simple_gla(q, k, v, g=gate, scale=1.0)
        assert state is None
        return out.transpose(1, 2)


def stand_in() -> types.ModuleType:
    """A module in the place of one of flash-linear-attention's."""
    module = types.ModuleType("fla.ops.simple_gla.stand_in")

    def chunk_simple_gla(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        scale: float,
        output_final_state: bool = False,
        cu_seqlens: Any = None,
    ) -> tuple[Tensor, None]:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return chunked(q * scale, k, v, float(g.flatten()[0].exp()), q.shape[2]).transpose(1, 2), None

    chunk_simple_gla.__module__ = module.__name__
    chunk_simple_gla.__qualname__ = "chunk_simple_gla"
    module.chunk_simple_gla = torch.compiler.disable(chunk_simple_gla)  # type: ignore[attr-defined]
    return module


LIBRARY = stand_in()


class Hybrid(Gpt):
    """Full attention, linear attention, full attention, linear attention."""

    recurrent: type[nn.Module] = ByFunction

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GptLayer(), self.recurrent(), GptLayer(), self.recurrent()])


class HybridByMethod(Hybrid):
    recurrent = ByMethod


class HybridByDisabled(Hybrid):
    recurrent = ByDisabled


register_mixer(chunked, "v")
register_mixer(ByMethod.mix, "v", attributes=("decay",))


HYBRIDS = {"function": Hybrid, "method": HybridByMethod, "disabled": HybridByDisabled}
ATTENTION = (0, 2)
DROPS = dataclasses.replace(SPEC, drop_layers=ATTENTION, p=(0.8, 0.8))


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, LIBRARY.__name__, LIBRARY)


def expected(name: str, ids: Tensor) -> Expected:
    """Attention that cannot see what was dropped, and the recurrence token by token over the rows that remain."""
    model = build(HYBRIDS[name])

    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = alive()
        out = decayed(q[:, :, rows], k[:, :, rows], v[:, :, rows], 0.9)
        return torch.zeros_like(v).index_copy(2, rows, out)

    for layer in (model.layers[1], model.layers[3]):
        layer.mix = mix
    return reference(model, ids, DROPS, ATTENTION)


@pytest.mark.filterwarnings("ignore:uniprefill. outputs of all positions")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_registered_mixer_is_one_op_and_sees_the_kept_rows(name: str, dynamic: bool | None) -> None:
    model, untouched = build(HYBRIDS[name]), build(HYBRIDS[name])
    model.compile(backend="uniprefill", dynamic=dynamic, options=options_of(DROPS))
    for length in (300, 211, 391):
        ids = ids_for(name, length)
        got, call = run(model, ids)
        want = expected(name, ids)
        assert call.tokens == length
        assert_dropped_as(call, want, ATTENTION)
        assert_near(got, want.logits)
        with torch.inference_mode():
            assert_differs(got, untouched(ids))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.filterwarnings("ignore:uniprefill. outputs of all positions")
def test_a_batch_equals_its_prompts_one_by_one() -> None:
    """The requests keep different numbers of rows, and the recurrence of one does not see the padding of another."""
    model, ids = build(Hybrid), ids_for("batch", 300)
    ids = torch.cat([ids, ids.flip(1)])
    model.compile(backend="uniprefill", options=options_of(DROPS))
    got, call = run(model, ids)
    assert call.dropped
    for row, logits in zip(ids, got, strict=True):
        assert_near(logits[None], expected("function", row[None]).logits)


@pytest.mark.parametrize("name", HYBRIDS)
def test_other_backends_trace_what_they_always_did(name: str) -> None:
    install()
    graphs: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm.code)
        return gm.forward

    model, ids = build(HYBRIDS[name]), ids_for(name, 70)
    with torch.inference_mode():
        got = torch.compile(model, backend=backend)(ids)
        assert_near(got, model(ids))
    assert not any("uniprefill" in code for code in graphs)
    assert (len(graphs) > 1) == (name == "disabled")


def test_explain_shows_the_op() -> None:
    report = uniprefill_fx.explain(build(Hybrid), ids_for("hybrid", 300), **options_of(DROPS))
    nodes = [n for n in report.before.graph.nodes if n.target is torch.ops.uniprefill.mixer]
    assert len(nodes) == 2 and report.call is not None and report.call.dropped


def packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    return q + v.cumsum(2) * k


class ByPacked(Recurrent):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed(q, k, v, torch.tensor([0, 1], device=q.device) * q.shape[2])


class HybridByPacked(Hybrid):
    recurrent = ByPacked


register_mixer(packed, ["v"])


def test_a_mixer_that_is_told_where_requests_lie_is_not_run_on_other_rows() -> None:
    model, ids = build(HybridByPacked), ids_for("packed requests", 300)
    model.compile(backend="uniprefill", options=options_of(DROPS))
    dense_because(model, ids, "operation-mixes-tokens")


class ByProducts(Recurrent):
    """Linear attention over all tokens, in two products, registered as nothing."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q @ (k.mT @ v)


class HybridByProducts(Hybrid):
    recurrent = ByProducts


def test_a_sum_over_all_tokens_is_refused() -> None:
    model, ids = build(HybridByProducts), ids_for("products", 300)
    model.compile(backend="uniprefill", options=options_of(DROPS))
    dense_because(model, ids, "operation-mixes-tokens")


def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.sum(2)


class ByWrong(Recurrent):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return wrong(q, k, v)


class HybridByWrong(Hybrid):
    recurrent = ByWrong


register_mixer(wrong, "v")


def test_a_mixer_that_returns_something_else_than_promised_raises() -> None:
    model, ids = build(HybridByWrong), ids_for("wrong", 300)
    model.compile(backend="uniprefill", options=options_of(DROPS))
    with pytest.raises(RuntimeError, match=r"wrong: returned tensors of shapes \[\(1, 4, 8\)\], was registered with"):
        run(model, ids)


def described(v: Tensor) -> Tensor:
    return v.cumsum(1)


def misdescribed(v: Tensor) -> Tensor:
    return v.cumsum(1)


def test_shapes_that_are_no_list_raise_when_the_model_is_compiled() -> None:
    register_mixer(described, lambda call: [(call["v"].shape, call["v"].dtype)])
    register_mixer(misdescribed, lambda call: (tuple(call["v"].shape), call["v"].dtype))
    x = torch.randn(1, 5, 8)
    options = options_of(DROPS)
    assert torch.compile(lambda v: described(v) * 2, backend="uniprefill", options=options)(x).equal(x.cumsum(1) * 2)
    with pytest.raises(Exception, match=r"misdescribed returned no list of \(shape, dtype\) or None"):
        torch.compile(lambda v: misdescribed(v) * 2, backend="uniprefill", options=options)(x)


def other(v: Tensor) -> Tensor:
    return v


def test_bad_arguments_raise() -> None:
    with pytest.raises(TypeError, match="expected a Python function"):
        register_mixer(torch.cumsum, "input")
    with pytest.raises(TypeError, match="expected argument names"):
        register_mixer(other, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no argument 'x', only v"):
        register_mixer(other, "x")
    with pytest.raises(ValueError, match="are for methods"):
        register_mixer(other, "v", attributes=("decay",))

    class Local:
        def mix(self, v: Tensor) -> Tensor:
            return v

    with pytest.raises(ValueError, match="is no method that"):
        register_mixer(Local.mix, "v")
    register_mixer(chunked, "v")  # once more is as good as once
    again = types.FunctionType(chunked.__code__, globals(), "chunked")
    again.__qualname__ = "chunked"
    with pytest.raises(ValueError, match="another function is registered as"):
        register_mixer(again, "v")
