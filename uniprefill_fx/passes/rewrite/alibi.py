"""The bias of the attention logits that alibi slopes stand for: one number for each head and key."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx


def alibi_bias(graph: fx.Graph, slopes: fx.Node, factor: float, tokens: Any, device: torch.device) -> fx.Node:
    """Nodes of `factor * slopes[head] * (key - (tokens - 1))`, (heads, 1, tokens) float32.

    It counts from the last token, so that rounding is least where the distances are short.

    Args:
        slopes: `heads` elements. tokens: how many there are, dropped ones included; a number or a node.
    """
    first = graph.call_function(operator.sub, (1, tokens)) if isinstance(tokens, fx.Node) else 1 - tokens
    places = graph.call_function(torch.arange, (first, 1), {"dtype": torch.float32, "device": device})
    by_head = graph.call_method("reshape", (graph.call_method("float", (slopes,)), (-1, 1, 1)))
    return graph.call_function(torch.mul, (graph.call_function(torch.mul, (by_head, places)), factor))
