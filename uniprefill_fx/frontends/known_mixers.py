"""The mixers that are registered without being asked: those of transformers' models and of three kernel libraries.

A model of transformers calls its library's kernel, where that is installed, from a function of its own, which is what
is registered; models written elsewhere call the kernels themselves.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from uniprefill_fx.frontends.mixers import register_mixer
from uniprefill_fx.ops.mixer import MIXERS


def gated_delta_rule(call: dict[str, Any]) -> list[Any]:
    """(batch, tokens, heads, v_dim) in the query's dtype, and the fp32 state (batch, heads, k_dim, v_dim) if wanted."""
    query, value = call["query"], call["value"]
    state = (value.shape[0], value.shape[2], query.shape[-1], value.shape[-1])
    wanted = call.get("output_final_state", False)
    return [(tuple(value.shape), query.dtype), (state, torch.float32) if wanted else None]


def mamba2_scan(call: dict[str, Any]) -> list[Any]:
    """(batch, tokens, heads, head_dim) fp32, and the state (batch, heads, head_dim, state) fp32 if wanted."""
    x, b = call["hidden_states"], call["B"]
    state = (x.shape[0], x.shape[2], x.shape[3], b.shape[-1])
    out = [(tuple(x.shape), torch.float32)]
    return [*out, (state, torch.float32)] if call.get("return_final_states", False) else out


def mamba_scan(call: dict[str, Any]) -> list[Any]:
    """(batch, channels, tokens) in the input's dtype, and the state (batch, channels, state) if wanted."""
    x, a = call["hidden_states"], call["A"]
    out = [(tuple(x.shape), x.dtype)]
    state = (x.shape[0], x.shape[1], a.shape[-1])
    return [*out, (state, torch.float32)] if call.get("return_last_state", False) else out


# function name -> shapes; every modeling file has its own copy of these functions.
KNOWN: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "torch_recurrent_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "recurrent_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": mamba2_scan,
    "mamba_selective_scan": mamba_scan,
}


def linear_attention(call: dict[str, Any]) -> list[Any]:
    """fla: (batch, tokens, heads, v_dim) in the query's dtype, and the fp32 states if wanted, one for each request."""
    q, v, packed = call["q"], call["v"], call.get("cu_seqlens")
    requests = q.shape[0] if packed is None else packed.shape[0] - 1
    state = (requests, v.shape[2], q.shape[-1], v.shape[-1])
    return [(tuple(v.shape), q.dtype), (state, torch.float32) if call.get("output_final_state", False) else None]


def ssd_scan(call: dict[str, Any]) -> list[Any]:
    """mamba_ssm: (batch, tokens, heads, head_dim) in the input's dtype, and the state if wanted."""
    x, b = call["x"], call["B"]
    state = (x.shape[0], x.shape[2], x.shape[3], b.shape[-1])
    out = [(tuple(x.shape), x.dtype)]
    return [*out, (state, torch.float32)] if call.get("return_final_states", False) else out


def selective_scan(call: dict[str, Any]) -> list[Any]:
    """mamba_ssm: (batch, channels, tokens) in the input's dtype, and the state (batch, channels, state) if wanted."""
    u, a = call["u"], call["A"]
    out = [(tuple(u.shape), u.dtype)]
    return [*out, ((*u.shape[:2], a.shape[-1]), torch.float32)] if call.get("return_last_state", False) else out


def causal_conv(call: dict[str, Any]) -> list[Any]:
    """causal_conv1d: (batch, channels, tokens), and the last inputs (batch, channels, width - 1) if wanted."""
    x = call["x"]
    out = [(tuple(x.shape), x.dtype)]
    last = ((*x.shape[:2], call["weight"].shape[-1] - 1), x.dtype)
    return [*out, last] if call.get("return_final_states", False) else out


FLA = "gated_delta_rule kda gla simple_gla delta_rule linear_attn retention".split()
# package -> function name -> shapes
LIBRARIES: dict[str, dict[str, Callable[[dict[str, Any]], list[Any]]]] = {
    "fla": {f"{way}_{kind}": linear_attention for way in ("chunk", "fused_recurrent") for kind in FLA},
    "mamba_ssm": {"mamba_chunk_scan_combined": ssd_scan, "selective_scan_fn": selective_scan},
    "causal_conv1d": {"causal_conv1d_fn": causal_conv},
}


def install_known() -> int:
    """Register the known mixers of every module that is imported by now; returns how many were new."""
    before = len(MIXERS)
    for path, module in list(sys.modules.items()):
        known = LIBRARIES.get(path.split(".")[0], {})
        if path.startswith("transformers.models.") and ".modeling_" in path:
            known = KNOWN
        for name, shapes in known.items():
            function = vars(module).get(name)
            if inspect.isfunction(function) and function.__module__ == path:
                register_mixer(function, shapes)
    modeling = sys.modules.get("transformers.models.minimax.modeling_minimax")
    if modeling is not None and "uniprefill_fx.frontends.minimax" not in sys.modules:
        from uniprefill_fx.frontends import minimax

        minimax.install(modeling)
    return len(MIXERS) - before
