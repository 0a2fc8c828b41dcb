"""The analyses of the plan, one by one, on a decoder of two layers: what each finds, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from graphs import operation
from torch import Tensor, fx, nn
from traced import trace

import uniprefill_fx.frontends
from uniprefill_fx.config import OptionError, PrefillConfig
from uniprefill_fx.errors import Category, RefusalError
from uniprefill_fx.passes.analyze.attention_nodes import find_attention_nodes, register_reader, token_count
from uniprefill_fx.passes.analyze.batch import request_dim
from uniprefill_fx.passes.analyze.drop_layers import choose_layers, drop_spec
from uniprefill_fx.passes.analyze.entry import keys_of_earlier_tokens, reason_from_outside
from uniprefill_fx.passes.analyze.outputs import Exposure
from uniprefill_fx.passes.analyze.plan import Plan, make_plan
from uniprefill_fx.passes.analyze.residual import entering, leaving, residual_adds
from uniprefill_fx.passes.dataflow import Ancestry

uniprefill_fx.frontends.install()
CONFIG = PrefillConfig(drop_layers=(0,), min_tokens=0, inner_backend="eager")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.up = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.up(F.gelu(x))


class Decoder(nn.Module):
    """`ending`: what becomes of the stream behind the last layer."""

    def __init__(self, ending: Callable[[Tensor], Any] = lambda y: y[:, -1:]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head, self.ending = nn.Linear(16, 32), ending

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.ending(self.head(x))


def traced(model: nn.Module, batch: int = 1) -> fx.GraphModule:
    return trace(model.eval(), torch.randn(batch, 37, 16))[0]


def planned(model: nn.Module, config: PrefillConfig = CONFIG) -> Plan:
    gm = traced(model)
    return make_plan(gm, find_attention_nodes(gm.graph), config)


def test_attention_is_found_by_the_first_reader_that_answers() -> None:
    gm = traced(Decoder())
    found = find_attention_nodes(gm.graph)
    assert [a.layer for a in found] == [0, 1] and all(a.is_prefill and a.full for a in found)
    assert [(a.num_heads, a.num_kv_heads, a.head_dim, a.batch) for a in found] == [(2, 2, 8, 1)] * 2
    assert isinstance(token_count(found), sympy.Symbol)
    from uniprefill_fx.frontends import torch_attention
    from uniprefill_fx.passes.analyze import attention_nodes

    before = list(attention_nodes._READERS)
    register_reader(torch_attention.fused_attention)
    assert before == attention_nodes._READERS


def test_the_residual_stream_is_found_by_data_flow() -> None:
    gm = traced(Decoder())
    ancestry, found = Ancestry(gm.graph), find_attention_nodes(gm.graph)
    adds = residual_adds(gm.graph, token_count(found), ancestry)
    assert len(adds) == 4
    first, second = (entering(a, adds, ancestry) for a in found)
    assert first.op == "placeholder" and second is adds[1][0]
    assert leaving(found[0], adds, ancestry) is adds[3][0]


class NoResidual(Layer):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def test_without_a_residual_stream_the_layer_is_refused() -> None:
    model = Decoder()
    model.layers = nn.ModuleList(NoResidual() for _ in range(2))
    plan = planned(model)
    assert not plan.drops and plan.refusals[-1].category is Category.RESIDUAL


def test_levels_begin_at_the_output_of_the_attention() -> None:
    plan = planned(Decoder())
    (drop,) = plan.drops
    assert plan.level[drop.attention.node] == 0
    assert all(plan.level[user] == 1 for user in drop.attention.node.users)
    assert drop.residual is not None and plan.level[drop.residual] == 0 and drop.residual in plan.gather_rules
    second = plan.attention_nodes[1]
    assert plan.level[second.node] == plan.level[second.k] == 1


@pytest.mark.parametrize("rows", [1, 3])
def test_the_last_rows_alone_need_no_restoring(rows: int) -> None:
    plan = planned(Decoder(lambda y: y[:, -rows:]))
    assert plan.drops and plan.exposure is Exposure.NONE and plan.shown == rows and not plan.head_region


@pytest.mark.parametrize("ending", [lambda y: y, lambda y: y[:, :-1]])
def test_outputs_that_show_dropped_rows_are_restored_first(ending: Callable[[Tensor], Any]) -> None:
    plan = planned(Decoder(ending))
    assert plan.drops and plan.exposure is Exposure.ALL and plan.stream_end not in plan.head_region
    assert "linear" in {operation(node) for node in plan.head_region}


@pytest.mark.parametrize(
    "ending, category",
    [(lambda y: y.mean(), Category.OUTPUT), (lambda y: y.sum(1), Category.OUTPUT)],
)
def test_an_output_computed_from_all_rows_is_refused(ending: Callable[[Tensor], Any], category: Category) -> None:
    plan = planned(Decoder(ending))
    assert not plan.drops and plan.refusals[-1].category is category


def test_a_graph_that_ends_with_the_stream_may_be_followed_by_more_layers() -> None:
    model = Decoder(lambda y: y)
    model.head = nn.Identity()  # type: ignore[assignment]
    plan = planned(model)
    assert not plan.drops and plan.refusals[-1].category is Category.GRAPH_BREAK


def test_drop_layers_are_those_that_were_asked_for() -> None:
    found = find_attention_nodes(traced(Decoder()).graph)
    every = PrefillConfig(drop_layers="all", p=(0.9, 0.8), block_size="auto")
    assert [a.layer for a in choose_layers(found, 2, every)] == [0, 1]
    assert [(s.p, s.block_size) for s in (drop_spec(every, i, 2, 0.5) for i in range(2))] == [(0.9, 64), (0.8, 64)]
    with pytest.raises(OptionError, match="Layer 5"):
        choose_layers(found, 6, PrefillConfig(drop_layers=(5,)))


def test_the_axis_of_the_requests() -> None:
    batch, tokens = sympy.symbols("b n", integer=True, positive=True)
    gm = trace(lambda x: (x + 1, x.transpose(0, 1) * 2, x[:1] - 1), torch.randn(3, 37, 16))[0]
    shaped = {operation(n): n for n in gm.graph.nodes if n.op.startswith("call")}
    sizes = [n for n in gm.graph.nodes if n.op == "placeholder" and isinstance(n.meta["example_value"], Tensor)]
    b = sizes[0].meta["example_value"].shape[0].node.expr
    assert request_dim(shaped["add"], 1, sympy.S.One) is None
    assert [request_dim(shaped[name], dim, b) for name, dim in (("add", 1), ("mul", 0), ("sub", 1))] == [0, 1, 0]
    with pytest.raises(RefusalError, match="no axis of one row"):
        request_dim(shaped["add"], 1, batch * tokens)


def test_reasons_from_outside() -> None:
    gm, given = trace(Decoder(), torch.randn(1, 37, 16))
    with torch.no_grad():
        assert reason_from_outside(gm, given) is None
    found = reason_from_outside(gm, [torch.randn(2, requires_grad=True)])
    assert found is not None and found.category is Category.GRADIENTS
    assert not keys_of_earlier_tokens(gm.graph, find_attention_nodes(gm.graph))


def second_chunk(q: Tensor, k: Tensor) -> Tensor:
    mask = torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)


def test_a_later_chunk_is_no_prompt() -> None:
    gm = trace(second_chunk, torch.randn(1, 2, 7, 8), torch.randn(1, 2, 40, 8))[0]
    found = find_attention_nodes(gm.graph)
    assert keys_of_earlier_tokens(gm.graph, found)
    plan = make_plan(gm, found, CONFIG)
    assert plan.past and not plan.prefill and not plan.drops


@pytest.mark.parametrize("causal", [True, False])
def test_numbers_of_blocks_that_are_padded(causal: bool) -> None:
    """As a step of Gemma-4 has it: no token is in a block where those before it get the same number."""

    def step(q: Tensor, k: Tensor) -> Tensor:
        before = k.shape[2] - q.shape[2]
        blocks = F.pad(torch.full((1, q.shape[2]), -1), (0, before), value=-1 if causal else 0)
        query, key = torch.arange(q.shape[2])[:, None] + before, torch.arange(k.shape[2])[None]
        of_query, of_key = blocks[torch.zeros_like(query), query], blocks[torch.zeros_like(key), key]
        mask = (key <= query) | ((of_query == of_key) & (of_query >= 0))
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)

    (found,) = find_attention_nodes(trace(step, torch.randn(1, 2, 7, 8), torch.randn(1, 2, 40, 8))[0].graph)
    assert (found.spec is not None and found.full) == causal
    assert causal or (found.refusal is not None and found.refusal.category is Category.NON_CAUSAL)


@pytest.mark.parametrize("cast, heads", [(False, 2), (True, 4)])
def test_keys_and_values_are_taken_before_they_are_repeated_or_both_after(cast: bool, heads: int) -> None:
    """Flint casts repeated keys, and does not cast values."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared = (1, 2, 2, q.shape[2], 8)
        keys, values = (x[:, :, None].expand(shared).reshape(q.shape) for x in (k, v))
        return F.scaled_dot_product_attention(q, keys.float() if cast else keys, values, is_causal=True)

    gm, _ = trace(attend, torch.randn(1, 4, 12, 8), *(torch.randn(1, 2, 12, 8) for _ in range(2)))
    (found,) = find_attention_nodes(gm.graph)
    assert found.spec is not None
    assert [x.meta["example_value"].shape[1] for x in (found.k, found.v)] == [heads, heads]
