"""Graphs as Dynamo hands them to a backend, for tests of single passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from graphs import operation
from torch import fx

from uniprefill_fx.passes.node_utils import copy_module


def trace(function: Callable[..., Any], *inputs: Any, dynamic: bool | None = True) -> tuple[fx.GraphModule, list[Any]]:
    """The graph of one call, and the inputs that Dynamo passes to it."""
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            found.append((copy_module(gm), list(args)))
            return gm(*args)

        return run

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*inputs)
    torch._dynamo.reset()
    return found[0]


def calls(gm: fx.GraphModule) -> list[str]:
    """What the nodes of a graph call, in order."""
    return [operation(node) for node in gm.graph.nodes if node.op in ("call_function", "call_method")]


def assert_same_values(before: fx.GraphModule, after: fx.GraphModule, inputs: list[Any]) -> None:
    """Two graphs give the same for copies of the same inputs, and write the same into them."""
    runs = []
    for gm in (before, after):
        own = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        with torch.no_grad():
            runs.append((gm(*own), own))
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-6, atol=1e-6)
