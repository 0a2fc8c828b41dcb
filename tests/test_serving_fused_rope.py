"""vLLM's fused kernel in front of Qwen3-Next's attention, by one of its name and arguments that is never launched."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor, fx
from traced import calls

from uniprefill_fx.passes.node_utils import copy_module
from uniprefill_fx.vllm.fused_rope import name_fused_rope

HEADS, KV_HEADS, DIM, ROTARY = 4, 1, 8, 4
EPS = 1e-6


@triton.jit
def _fused_qk_rmsnorm_rope_gate_kernel(  # type: ignore[no-untyped-def]
    q_gate_ptr, k_ptr, q_out_ptr, k_out_ptr, gate_out_ptr, q_weight_ptr, k_weight_ptr, cos_sin_cache_ptr, positions_ptr,
    q_gate_stride_t, num_q_heads: tl.constexpr, num_kv_heads: tl.constexpr, head_dim: tl.constexpr,
    rotary_dim: tl.constexpr, eps: tl.constexpr, norm_beta: tl.constexpr, HAS_MROPE: tl.constexpr,
):  # fmt: skip
    pass


def launch(q_gate: Tensor, k: Tensor, weights: tuple[Tensor, Tensor], cache: Tensor, at: Tensor, more: int) -> Any:
    q_out = torch.empty((q_gate.shape[0], HEADS * DIM))
    k_out = torch.empty((q_gate.shape[0], KV_HEADS * DIM))
    gate_out = torch.empty_like(q_out)
    _fused_qk_rmsnorm_rope_gate_kernel[(q_gate.shape[0], HEADS + KV_HEADS)](
        q_gate, k, q_out, k_out, gate_out, *weights, cache, at, q_gate.stride(0), HEADS, KV_HEADS, DIM, ROTARY, EPS,
        0.5, more,
    )  # fmt: skip
    return q_out, k_out, gate_out


def fused(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cache: Tensor, at: Tensor, eps: float, heads: int,
    kv_heads: int, dim: int, rotary: int, norm_beta: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What vLLM's function says that it does, in torch."""

    def turned(x: Tensor, weight: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + norm_beta)
        cos, sin = cache[at][:, None].chunk(2, -1)
        a, b, rest = x.split([rotary // 2, rotary // 2, dim - rotary], -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).flatten(1)

    q, gate = q_gate.unflatten(-1, (heads, 2, dim)).unbind(2)
    return turned(q, q_weight), turned(k.unflatten(-1, (kv_heads, dim)), k_weight), gate.flatten(1)


@pytest.fixture
def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    width = (2 * HEADS + 2 * KV_HEADS) * DIM
    shapes = [(13, width), (DIM,), (DIM,), (40, ROTARY)]
    found = [torch.randn(*shape, generator=generator) for shape in shapes]
    return [*found, torch.randperm(40, generator=generator)[:13]]


def traced(inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch, several_positions: int = 0) -> fx.GraphModule:
    """The graph of a function that launches the kernel, of which Dynamo looks at nothing but its arguments."""
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, given: list[Any]) -> Any:
        found.append(copy_module(gm))
        return lambda *args: [torch.zeros(1)] * len(gm.graph.output_node().args[0])  # type: ignore[arg-type]

    def function(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cache: Tensor, at: Tensor) -> Any:
        q_gate, k, _ = qkv.split([2 * HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1)
        q, k, gate = launch(q_gate, k, (q_weight, k_weight), cache, at, several_positions)
        return q * 2, k, gate.view(-1, HEADS, DIM)

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=True, fullgraph=True)(*inputs)
    return found[0]  # whose kernel Dynamo would forget with another reset


def test_it_becomes_an_operator(inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    gm = traced(inputs, monkeypatch)
    name_fused_rope(gm.graph)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    assert "triton_kernel_wrapper_mutation" not in calls(gm) and "empty" not in calls(gm)
    module: Any = types.ModuleType("fused")
    module.fused_qk_rmsnorm_rope_gate = fused
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.fused_qk_norm_rope", module)
    given = {"qkv": inputs[0], "q_weight": inputs[1], "k_weight": inputs[2], "cache": inputs[3], "at": inputs[4]}
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    by_name = {f"l_{name}_": value for name, value in given.items()}
    got = gm(*[by_name.get(name, inputs[0].shape[0]) for name in names])
    qkv, q_weight, k_weight, cache, at = inputs
    q_gate, k, _ = qkv.split([2 * HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1)
    q, k, gate = fused(q_gate, k, q_weight, k_weight, cache, at, EPS, HEADS, KV_HEADS, DIM, ROTARY, 0.5)
    for ours, want in zip(got, (q * 2, k, gate.view(-1, HEADS, DIM)), strict=True):
        torch.testing.assert_close(ours, want)


def test_a_launch_that_is_not_known_stays(inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    gm = traced(inputs, monkeypatch, several_positions=1)
    name_fused_rope(gm.graph)
    assert "triton_kernel_wrapper_mutation" in calls(gm)
