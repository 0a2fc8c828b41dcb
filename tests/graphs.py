"""What tests ask of a traced or rewritten graph."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx


def operation(node: fx.Node) -> str:
    """The name of what a node calls, the same for functions, methods and overloads."""
    if node.op not in ("call_function", "call_method"):
        return node.op
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return name.split(".")[0]


def value(node: fx.Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def tensors(item: Any) -> list[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        return [item]
    return [t for part in item for t in tensors(part)] if isinstance(item, tuple | list) else []


def symbols(size: Any) -> set[sympy.Symbol]:
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


def assert_no_square(gm: fx.GraphModule) -> None:
    """Every node has meta, and no tensor has two sizes that depend on a number of tokens."""
    for node in gm.graph.nodes:
        if node.op == "output" or operation(node) == "_log_api_usage_once":
            continue
        assert "val" in node.meta or "example_value" in node.meta, node.format_node()
        for tensor in tensors(value(node)):
            assert sum(bool(symbols(size)) for size in tensor.shape) <= 1, f"{node.format_node()}: {tensor.shape}"
