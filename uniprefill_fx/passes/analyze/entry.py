"""What is known before anything is planned: reasons from outside the decoder, and whether it is a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from uniprefill_fx.errors import Category, Refusal
from uniprefill_fx.passes.attention_node import AttentionNode
from uniprefill_fx.passes.node_utils import decoder_layer, is_op
from uniprefill_fx.torch_internals import frame_is_resumed, graph_break

_last_break: list[str] = []  # where Dynamo last broke a graph: pieces behind it are told apart by no module


def keys_of_earlier_tokens(graph: fx.Graph, attention: Iterable[AttentionNode]) -> bool:
    """Whether attention reads keys that were there before this call: a decode step or a later chunk."""
    stored = any(is_op(node, "logical_view") for node in graph.nodes)
    return stored or any(a.spec is not None and a.offset != 0 for a in attention)


def reason_from_outside(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Refusal | None:
    """A reason from outside the decoder why its graph must stay dense."""
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in example_inputs):
        return Refusal(Category.GRADIENTS, "gradients are on", "call inside torch.inference_mode() or torch.no_grad()")
    broken = graph_break(gm)
    if broken is not None:
        why, stack = broken[0].strip().splitlines(), broken[1]
        _last_break[:] = [f"{stack[-1] if stack else 'an unknown place'}: {why[0] if why else 'no reason'}"]
        return Refusal(
            Category.GRAPH_BREAK,
            f"Dynamo broke the graph at {_last_break[0]}",
            "only the last graph of a forward may drop tokens: take the break out, or behind the layers",
        )
    if frame_is_resumed() and all(decoder_layer(node) is None for node in gm.graph.nodes):
        return Refusal(
            Category.GRAPH_BREAK,
            f"a piece behind a graph break (the last one at {_last_break[0] if _last_break else 'an unknown place'}), "
            "whose layers have no names",
            "which layers these are cannot be told: take the break out, or make the layers an nn.ModuleList",
        )
    return None


def behind_break(refusal: Refusal) -> Refusal:
    """The same reason, with the graph break in front of the graph if there is one: it took from sight how masks or
    positions came about."""
    if refusal.category is Category.GRAPH_BREAK or not _last_break or not frame_is_resumed():
        return refusal
    return replace(refusal, seen=f"{refusal.seen}, in a piece behind a graph break (the last one at {_last_break[0]})")
