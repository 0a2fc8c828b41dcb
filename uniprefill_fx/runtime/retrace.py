"""Have Dynamo trace prompts with a symbolic length from the first call on, without any process-wide setting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from uniprefill_fx.passes.attention_node import AttentionNode
from uniprefill_fx.passes.node_utils import shape
from uniprefill_fx.torch_internals import RestartTrace, is_static_input, mark_maybe_dynamic


class TraceAgain(RestartTrace):
    """Raised by the backend to have Dynamo trace the frame once more."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"uniprefill: {reason}")


def trace_symbolic(gm: fx.GraphModule, attention: Sequence[AttentionNode], example_inputs: Sequence[Any]) -> None:
    """Mark the token axes of a prompt's static graph's inputs as dynamic and trace again; at most once an input.

    In a batch of prompts, mark its axis too: rows of requests can only be told from other axes by their own symbol.
    The prompt length and the batch are those of the queries of the first attention. Which inputs hold them, tracing
    will tell: the mark is a wish, and an axis that turns out to be something else of the same size is specialised as
    before.

    Raises:
        TraceAgain: inputs were marked.
    """
    # of attention that was refused, too: understood or not may depend on the numbers
    fresh = [a for a in attention if not a.cached and len(shape(a.q) or ()) > a.layout.tokens]
    if not fresh:
        return
    batch, length = fresh[0].batch, fresh[0].num_queries
    wanted = [int(size) for size in (length, batch) if not size.free_symbols and size > 1]
    if not wanted or length == 1:
        return
    marked = False
    placeholders = (n for n in gm.graph.nodes if n.op == "placeholder")
    for node, example in zip(placeholders, example_inputs, strict=True):
        if not isinstance(example, torch.Tensor) or _is_state(node, example):
            continue
        sizes = [size if isinstance(size, int) else None for size in example.shape]
        # The axis of the prompts is the first one, or the second behind that of the tokens.
        own = (0, 1) if sizes[:1] == [length] else (0,)
        axes = [d for d, size in enumerate(sizes) if size in wanted and (size == length or d in own)]
        marked |= mark_maybe_dynamic(example, axes)
    if marked:
        raise TraceAgain(f"sizes {wanted} of the prompts were traced as numbers")


def _is_state(node: fx.Node, example: torch.Tensor) -> bool:
    """Parameters and buffers: their sizes are the model's."""
    return is_static_input(node) or isinstance(example, torch.nn.Parameter)
