"""Ranks that drop tokens together decide together: one small exchange before each prompt.

A rank that dropped alone would wait for sums of scores that the others never send, or add rows of other tokens to
theirs. So each rank says which graph it runs and what it is about to do with it; where two say different things, all of
them run the prompt dense. A rank that is gone ends the exchange with an error of `torch.distributed`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from uniprefill_fx.passes.distributed import is_dtensor, placement_of
from uniprefill_fx.passes.node_utils import leaves_of, meta
from uniprefill_fx.torch_internals import group_named


class Agreement:
    """What the ranks of a group ask one another before a prompt.

    Args:
        group: the name of the process group. graph: of the prompt. options: whatever else decides what ranks do.
    """

    def __init__(self, group: str, graph: fx.Graph, options: Any) -> None:
        self.group = group
        self.device = next((v.device for v in map(meta, graph.nodes) if isinstance(v, torch.Tensor)), "cpu")
        self.program = hashlib.sha256("\n".join(_lines(graph)).encode())
        self.program.update(repr(options).encode())

    def reached(self, *decision: Any) -> bool:
        """Whether every rank runs this graph and calls with this decision, whose parts are told apart by their `repr`.

        Every rank of the group has to call it, at the same prompt.
        """
        digest = self.program.copy()
        digest.update(repr(decision).encode())
        number = int.from_bytes(digest.digest()[:7], "big")  # fits an int64, and its negative does
        extremes = torch.tensor([number, -number], device=self.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group_named(self.group))
        largest, smallest = extremes.tolist()
        return bool(largest == -smallest)


def _lines(graph: fx.Graph) -> Iterator[str]:
    """A graph as text that is the same in every process which traced the same, whatever device it runs on."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        arguments = [_text(leaf, number) for leaf in leaves_of((node.args, node.kwargs))]
        yield f"{node.op} {target if node.op != 'placeholder' else ''} {arguments} {sorted(node.kwargs)} {_value(node)}"


def _text(leaf: Any, number: dict[fx.Node, int]) -> str:
    if isinstance(leaf, fx.Node):
        return f"%{number[leaf]}"
    if isinstance(leaf, torch.device):
        return leaf.type  # ranks of one host have a device each
    plain = leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype | type(Ellipsis))
    return repr(leaf) if plain else type(leaf).__name__


def _value(node: fx.Node) -> str:
    value = meta(node)
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    sizes = [int(size) if isinstance(size, int) else "dynamic" for size in value.shape]
    return f"{value.dtype} {sizes} {placement_of(value)[1] if is_dtensor(value) else ''}"
