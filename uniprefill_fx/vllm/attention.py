"""The frontend: vLLM's attention as the package knows attention, and its graphs in a form that the analysis reads.

Rows are packed, (tokens, heads, head_dim), one request behind the other. `vllm.unified_kv_cache_update` stores keys and
values of a layer that it is given by name; `vllm.unified_attention_with_output` writes its fourth argument::

    out = torch.empty(tokens, 128)
    out_1 = out.view(-1, 4, 32)
    dep = vllm.unified_kv_cache_update(k, v, name)
    vllm.unified_attention_with_output(q, k, v, out_1, name, kv_cache_dummy_dep=dep)
    y = out_1.view(-1, 128)

What attention computes is not in the graph: it is read off the layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from uniprefill_fx.errors import Category, Refusal, refuse
from uniprefill_fx.passes.attention_node import AttentionNode, Layout
from uniprefill_fx.passes.node_utils import meta
from uniprefill_fx.passes.operator_internals import schema_of
from uniprefill_fx.passes.schemas import overloads
from uniprefill_fx.specs import AttentionSpec

ATTENTION = "vllm::unified_attention_with_output"
KV_UPDATE = "vllm::unified_kv_cache_update"
IMPLEMENTATIONS = frozenset({"CPUAttentionBackendImpl", "FlashAttentionImpl", "TritonAttentionImpl"})
"""Implementations of attention whose attributes, cache and metadata are known."""


def operator_name(node: fx.Node) -> str:
    """ "library::operator" of a node that calls one, else ""."""
    found = overloads(node) if node.op == "call_function" else ()
    return str(schema_of(found[0]).name) if found else ""


def layer_argument(argument: Any) -> Any:
    """What an operator is given for the name of a layer: a string, or vLLM's object that holds one."""
    value = meta(argument) if isinstance(argument, fx.Node) else argument
    return getattr(value, "real_obj", value)


def layer_name_of(argument: Any) -> str | None:
    """The name of a layer that an operator is given."""
    value = layer_argument(argument)
    value = getattr(value, "value", value)
    return value if isinstance(value, str) else None


def layer_number(name: str) -> int | None:
    """ "model.layers.3.self_attn.attn" -> 3; None where no part is a number."""
    numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", name)
    return int(numbers[0]) if numbers else None


class Reader:
    """Finds attention in graphs of one engine. layers: by name, vLLM's modules (`static_forward_context`)."""

    def __init__(self, layers: Mapping[str, Any]) -> None:
        self.layers = layers

    def __call__(self, node: fx.Node) -> AttentionNode | None:
        if operator_name(node) != ATTENTION:
            return None
        q, k, v, out, named = node.args[:5]
        assert isinstance(q, fx.Node) and isinstance(out, fx.Node)
        name = layer_name_of(named)
        if name is None or not isinstance(k, fx.Node) or not isinstance(v, fx.Node):
            raise refuse(Category.ATTENTION, "attention without keys, or of a layer without a name", "stays dense")
        layer, number = self.layers.get(name), layer_number(name)
        reason = _reason(layer, name, node)
        spec = None if reason else _spec(layer)
        stores = tuple(n for n in k.users if operator_name(n) == KV_UPDATE)
        if reason is None and [layer_name_of(n.args[2]) for n in stores] != [name]:
            spec, reason = None, "it does not store the keys that it attends to"
        return AttentionNode(
            node,
            q,
            k,
            v,
            spec,
            number,
            name,
            layout=Layout(0, 1, None),
            written_output=out,
            cache_writes=stores,
            interior=frozenset({node}),
            refusal=None if reason is None else Refusal(Category.ATTENTION, reason, "stays dense", number),
        )


def _reason(layer: Any, name: str, node: fx.Node) -> str | None:
    """Why the attention of a layer is not understood."""
    if layer is None:
        return f"no layer is called {name}"
    kind = type(layer.impl).__name__
    if type(layer).__name__ != "Attention" or kind not in IMPLEMENTATIONS:
        return f"{type(layer).__name__} with {kind}, which is not known"
    if str(getattr(layer.attn_type, "value", layer.attn_type)) != "decoder":
        return f"attention of type {layer.attn_type}"
    if layer.kv_sharing_target_layer_name is not None:
        return f"it reads the keys of {layer.kv_sharing_target_layer_name}"
    if getattr(layer.impl, "alibi_slopes", None) is not None:
        return "alibi: keys lie elsewhere once tokens are dropped"
    if getattr(layer, "use_mm_prefix", False):
        return "attention that is not causal inside images"
    if any(getattr(layer.impl, n, -1) not in (-1, None, 0) for n in ("chunk_lookback",)):
        return "attention in chunks"
    if node.kwargs.get("output_scale") is not None or node.kwargs.get("output_block_scale") is not None:
        return "a quantised output"
    return None


def _spec(layer: Any) -> AttentionSpec:
    """Sinks are no value of the graph: `sinks_of` gives them to the selection."""
    softcap = getattr(layer.impl, "logits_soft_cap", None) or None
    return AttentionSpec(scale=float(layer.impl.scale), window=layer.sliding_window, softcap=softcap)


def sinks_of(layer: Any) -> torch.Tensor | None:
    """The further logit of each head of a layer, (heads,)."""
    return getattr(layer.impl, "sinks", None)
