"""Graphs of vLLM's own kernels, as its CUDA builds trace them, in the form that the analysis reads. Needs vllm."""

from __future__ import annotations

import contextlib
import importlib.util
import unittest.mock
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from uniprefill_fx.errors import RefusalError
from uniprefill_fx.passes.analyze.attention_nodes import token_count
from uniprefill_fx.passes.analyze.drop_levels import drop_levels
from uniprefill_fx.passes.attention_node import AttentionNode, Layout
from uniprefill_fx.passes.dataflow import written_nodes
from uniprefill_fx.passes.node_utils import name_of
from uniprefill_fx.specs import AttentionSpec
from uniprefill_fx.vllm import operators, ranks
from uniprefill_fx.vllm.normalize import normalize

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm (make test-vllm)")
WIDTH, HEADS, LAYERS = 64, 2, 3


class Kernels(nn.Module):
    """A decoder whose stream is one tensor that every layer writes. Attention: a sum over earlier rows, written."""

    def __init__(self, mixes: bool = False, exchange: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixes, self.exchange = mixes, exchange
        self.norms = nn.ParameterList(torch.rand(WIDTH) + 0.5 for _ in range(2 * LAYERS))
        self.proj = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(LAYERS))
        self.cos_sin = nn.Buffer(torch.rand(512, WIDTH // HEADS))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        residual = torch.zeros_like(x)
        for i in range(LAYERS):
            torch.ops._C.fused_add_rms_norm(x, residual, self.norms[2 * i], 1e-5)
            q, k, v = self.proj[i](x).split([WIDTH, WIDTH, WIDTH], -1)
            torch.ops._C.rotary_embedding(positions, q, k, WIDTH // HEADS, self.cos_sin, True)
            out = torch.empty_like(q)
            torch.ops.kernel_library.attend(q, k, v, out, i)
            x = out
            torch.ops._C.fused_add_rms_norm(x, residual, self.norms[2 * i + 1], 1e-5)
            up = self.up[i](x)
            x = torch.empty_like(x)
            torch.ops._C.silu_and_mul(x, up)
            x = x if self.exchange is None else self.exchange(x)
            if self.mixes and i == LAYERS - 1:
                x = x - x.mean(0)
        return x + residual


@pytest.fixture(scope="module", autouse=True)
def library() -> torch.library.Library:
    importlib.import_module("vllm._custom_ops")
    importlib.import_module("vllm.distributed.parallel_state")
    operators.register()
    made = torch.library.Library("kernel_library", "FRAGMENT")
    made.define("attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int layer) -> ()")

    def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
        out.copy_((q * k).cumsum(0) + v)

    made.impl("attend", attend, "CompositeExplicitAutograd")
    torch.library.register_fake("kernel_library::attend", lambda *args: None, lib=made)
    return made


def traced(model: nn.Module) -> tuple[fx.GraphModule, Tensor]:
    """The normal form of the model's graph, and what the model itself gives."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(gm)
        normalize(gm)
        return gm.forward

    torch._dynamo.reset()
    x, positions = torch.rand(40, WIDTH), torch.arange(40)
    with torch.no_grad():
        want = model(x.clone(), positions)  # which writes into x
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(positions, 0)
        got = torch.compile(model, backend=backend, fullgraph=True)(x, positions)
    torch.testing.assert_close(got, want)
    return found[0], want


def attention_of(gm: fx.GraphModule) -> list[AttentionNode]:
    nodes = [n for n in gm.graph.nodes if name_of(n) == "attend"]
    found = []
    for i, node in enumerate(nodes):
        q, k, v, out = node.args[:4]
        assert all(isinstance(n, fx.Node) for n in (q, k, v, out))
        common: dict[str, Any] = {"layout": Layout(0, None, None), "heads": (HEADS, HEADS), "written_output": out}
        common |= {"q": q, "k": k, "v": v, "interior": frozenset({node})}
        found.append(AttentionNode(node, spec=AttentionSpec(), layer=i, path=f"layers.{i}", **common))
    return found


def test_norms_that_write_the_stream_are_taken_apart() -> None:
    gm, _ = traced(Kernels())
    names = [name_of(n) for n in gm.graph.nodes]
    assert names.count("fused_add_rms_norm") == 0 and names.count("rms_norm") == 2 * LAYERS
    stream = [n for n in gm.graph.nodes if name_of(n) == "rms_norm"]
    assert all(len(written_nodes(n)) == 1 for n in stream)


def test_what_lies_behind_a_drop_is_proven() -> None:
    gm, _ = traced(Kernels())
    nodes = attention_of(gm)
    level = drop_levels(gm.graph, nodes, nodes[:1], token_count(nodes), frozenset())
    assert level[nodes[0].node] == 0 and level[nodes[1].node] == level[nodes[2].node] == 1


def test_what_mixes_tokens_is_refused() -> None:
    gm, _ = traced(Kernels(mixes=True))
    nodes = attention_of(gm)
    with pytest.raises(RefusalError, match="mean"):
        drop_levels(gm.graph, nodes, nodes[:1], token_count(nodes), frozenset())


def summed_in_place(x: Tensor) -> Tensor:
    torch.ops._C.shm_allreduce(0, x)
    return x


def summed_after_a_view(x: Tensor) -> Tensor:
    """As linear layers of bfloat16 on a CPU."""
    found = torch.empty(x.shape[0], WIDTH)
    torch.ops._C.silu_and_mul(found.reshape(-1, WIDTH), torch.cat([x, x], 1))
    torch.ops._C.shm_allreduce(0, found)
    return found


def gathered_into(x: Tensor) -> Tensor:
    found = torch.empty(2 * x.shape[0], WIDTH)
    torch.ops._C.shm_all_gather(0, x, found)
    return found[: x.shape[0]]


def group(name: str, x: Tensor, *arguments: int) -> Tensor:
    """A collective of a group that there is none of: whoever runs it fails."""
    found: Tensor = getattr(torch.ops.vllm, name)(x, *arguments, group_name="of nobody")
    return found


# by name: what ranks exchange, and words of the refusal
EXCHANGES: dict[str, tuple[Callable[[Tensor], Tensor], str | None]] = {
    "sums": (lambda x: group("all_reduce", x), None),
    "sums in place": (summed_in_place, None),
    "sums of a view": (summed_after_a_view, None),
    "channels": (lambda x: group("all_gather", x[:, : WIDTH // 2].contiguous(), 1, 2), None),
    "rows": (lambda x: group("all_gather", x, 0, 2)[: x.shape[0]], "something other than a row for each token"),
    "sequences": (lambda x: group("all_gather", group("reduce_scatter", x, 0, 2), 0, 2), "vllm::reduce_scatter"),
    "unknown": (gathered_into, "_C::shm_all_gather"),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_what_ranks_may_exchange(name: str) -> None:
    """Without being run: alone, a rank would wait for the others."""
    exchange, refusal = EXCHANGES[name]
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(gm)
        normalize(gm)
        return lambda *given: (torch.zeros(40, WIDTH),)

    torch._dynamo.reset()
    x, positions = torch.rand(40, WIDTH), torch.arange(40)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(positions, 0)
    with torch.no_grad():
        torch.compile(Kernels(exchange=exchange), backend=backend, fullgraph=True)(x, positions)
    nodes = attention_of(found[0])
    stated = contextlib.nullcontext() if refusal is None else pytest.raises(RefusalError, match=refusal)
    with stated, unittest.mock.patch.object(ranks, "KNOWN", ranks.KNOWN | {"kernel_library::attend"}):
        ranks.check_exchanges(found[0].graph, nodes[0])
        level = drop_levels(found[0].graph, nodes, nodes[:1], token_count(nodes), frozenset())
        assert level[nodes[-1].node] == 1
