"""Have Dynamo trace prompts with a symbolic length from the first call on, without any process-wide setting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from uniprefill_fx.passes.attention_node import AttentionNode
from uniprefill_fx.passes.node_utils import shape
from uniprefill_fx.torch_internals import RestartTrace, is_static_input, mark_maybe_dynamic, traced_inputs


class TraceAgain(RestartTrace):
    """Raised by the backend to have Dynamo trace the frame once more."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"uniprefill: {reason}")


def trace_symbolic(gm: fx.GraphModule, attention: Sequence[AttentionNode], example_inputs: Sequence[Any]) -> None:
    """Trace a prompt's graph again if its length, or the batch, was traced as a number; at most once an input.

    The prompt length and the batch are those of the queries of the first attention.

    Raises:
        TraceAgain: inputs were marked.
    """
    # of attention that was refused, too: understood or not may depend on the numbers
    fresh = [a for a in attention if not a.cached and len(shape(a.q) or ()) > a.layout.tokens]
    if not fresh:
        return
    batch, length = (None if size.free_symbols else int(size) for size in (fresh[0].batch, fresh[0].num_queries))
    placeholders = (n for n in gm.graph.nodes if n.op == "placeholder")
    _ask_for_symbols(batch, length, list(zip(placeholders, example_inputs, strict=True)))


def ask_for_symbols(context: Any) -> None:
    """The same before the first layer, called while Dynamo traces a function that has a local `embeds`.

    `embeds`: (batch, tokens, hidden). A trace that is thrown away at its end costs as much as one that is used.

    Raises:
        TraceAgain: inputs were marked.
    """
    embeds = context.get_local("embeds").as_fake()
    batch, length = (size if isinstance(size, int) else None for size in embeds.shape[:2])
    _ask_for_symbols(batch, length, traced_inputs())


def _ask_for_symbols(batch: int | None, length: int | None, inputs: Sequence[tuple[fx.Node, Any]]) -> None:
    """Mark the axes of inputs that are as long as the prompts; of a batch of prompts its axis too.

    Rows of requests can only be told from other axes by their own symbol. Which inputs hold the prompts, tracing will
    tell: the mark is a wish, and an axis that turns out to be something else of the same size is specialised as before.
    """
    wanted = [size for size in (length, batch) if size is not None and size > 1]
    if not wanted or length == 1:
        return
    marked = False
    for node, example in inputs:
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
