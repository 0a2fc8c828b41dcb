"""The operators that a served graph holds in place of vLLM's: layers are named by strings, whatever vLLM's version.

`served_attention`, `served_kv_update` and `served_qk_norm_rope_gate` call those of vLLM. `packed_select` chooses the
tokens that stay, for all requests of a step; which requests those are is known to `steps.current()`. `scatter_rows`
gives what leaves the graph its full length again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("uniprefill", "FRAGMENT")
_library.define("served_kv_update(Tensor k, Tensor v, str layer) -> ()")
_library.define("served_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, str layer) -> ()")
_library.define("packed_select(Tensor q, Tensor k, int drop) -> Tensor")
_library.define(
    "served_qk_norm_rope_gate(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos_sin, "
    "Tensor positions, float eps, int q_heads, int kv_heads, int head_dim, int rotary_dim, float norm_beta) "
    "-> (Tensor, Tensor, Tensor)"
)
_library.define("scatter_rows(Tensor x, Tensor rows, SymInt tokens) -> Tensor")

selecting: list[Callable[[Tensor, Tensor, int], Tensor]] = []
"""The model that is served, which `packed_select` asks."""

layers: dict[str, Any] = {}
"""By name of a layer, what vLLM's operators want as its name: a string, or an object that holds one."""


@torch.library.impl(_library, "served_kv_update", "CompositeExplicitAutograd")
def served_kv_update(k: Tensor, v: Tensor, layer: str) -> None:
    """Store (tokens, kv_heads, head_dim) keys and values where the step's slot mapping of the layer says."""
    torch.ops.vllm.unified_kv_cache_update(k, v, layers[layer])


@torch.library.impl(_library, "served_attention", "CompositeExplicitAutograd")
def served_attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: str) -> None:
    """Attention of (tokens, heads, head_dim) queries to what the layer's cache holds of their requests, into `out`."""
    torch.ops.vllm.unified_attention_with_output(q, k, v, out, layers[layer])


@torch.library.impl(_library, "packed_select", "CompositeExplicitAutograd")
def packed_select(q: Tensor, k: Tensor, drop: int) -> Tensor:
    """(1, kept) int64: the rows of the stream that stay after the drop-th drop, ascending.

    q: (tokens, heads, head_dim), k: (tokens, kv_heads, head_dim), after rotary.
    """
    return selecting[-1](q, k, drop)


@torch.library.impl(_library, "served_qk_norm_rope_gate", "CompositeExplicitAutograd")
def served_qk_norm_rope_gate(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    eps: float,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    norm_beta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised and rotated queries and keys, and the gate, (tokens, heads · head_dim) each, by vLLM's Triton kernel.

    q_gate: (tokens, q_heads · 2 · head_dim), k: (tokens, kv_heads · head_dim), cos_sin: (positions, rotary_dim).
    """
    fused = importlib.import_module("vllm.model_executor.layers.fused_qk_norm_rope").fused_qk_rmsnorm_rope_gate
    q_gate, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_gate, k))
    more = {"norm_beta": norm_beta} if norm_beta else {}  # vLLM 0.24 adds it to the weights itself
    numbers = (eps, q_heads, kv_heads, head_dim, rotary_dim)
    made: tuple[Tensor, Tensor, Tensor] = fused(q_gate, k, q_weight, k_weight, cos_sin, positions, *numbers, **more)
    return made


@torch.library.impl(_library, "scatter_rows", "CompositeExplicitAutograd")
def scatter_rows(x: Tensor, rows: Tensor, tokens: int) -> Tensor:
    """(tokens, ...) with x (kept, ...) in `rows` (1, kept), and zeros elsewhere: nobody reads the others."""
    return x.new_zeros(tokens, *x.shape[1:]).index_copy_(0, rows[0], x)


for _name in ("served_kv_update", "served_attention"):
    torch.library.register_fake(f"uniprefill::{_name}", lambda *args: None, lib=_library)
    torch.fx.node.has_side_effect(getattr(torch.ops.uniprefill, _name).default)


@torch.library.register_fake("uniprefill::packed_select", lib=_library)
def _(q: Tensor, k: Tensor, drop: int) -> Tensor:
    return q.new_empty((1, torch.library.get_ctx().new_dynamic_size()), dtype=torch.int64)


@torch.library.register_fake("uniprefill::served_qk_norm_rope_gate", lib=_library)
def _(q_gate: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    q_heads, kv_heads, head_dim = rest[5:8]
    q, gate = (q_gate.new_empty(q_gate.shape[0], q_heads * head_dim) for _ in range(2))
    return q, k.new_empty(k.shape[0], kv_heads * head_dim), gate


@torch.library.register_fake("uniprefill::scatter_rows", lib=_library)
def _(x: Tensor, rows: Tensor, tokens: int) -> Tensor:
    return x.new_empty(tokens, *x.shape[1:])


QK_NORM_ROPE_GATE = torch.ops.uniprefill.served_qk_norm_rope_gate.default
