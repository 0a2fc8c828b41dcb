"""Marks on what a compiled graph returns, for the graphs that take it as inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from uniprefill_fx.passes.node_utils import expression, is_op, meta, shape
from uniprefill_fx.torch_internals import mark_maybe_dynamic


class LengthMarks:
    """Marks the token axes of a graph's outputs as dynamic: a graph that takes them as inputs (the next decode step,
    which reads the cache rows that this one wrote) is then traced for any length at once.

    gm: as it was traced, with the views of its cache layers. Their rows are marked where a number of them was traced,
    as behind a prompt of one token: a step that finds marks has no use for the graph of one that found none."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.axes: list[tuple[int, list[int]]] = []
        outputs = gm.graph.output_node().args[0]
        assert isinstance(outputs, tuple | list)
        rows = _row_axes(gm.graph)
        for i, node in enumerate(outputs):
            value = meta(node) if isinstance(node, fx.Node) else None
            if isinstance(value, torch.Tensor):
                dims = {d for d, size in enumerate(value.shape) if expression(size).free_symbols} | rows.get(
                    node, set()
                )
                self.axes += [(i, sorted(dims))] if dims else []

    def __call__(self, outputs: Any) -> Any:
        outputs = list(outputs)
        seen: set[int] = set()
        for i, dims in self.axes:
            # Layers behind one drop store the same positions. As one object they would be guarded to be one, and a step
            # that has appended to each would need a graph of its own.
            if id(outputs[i]) in seen:
                outputs[i] = outputs[i].detach()
            seen.add(id(outputs[i]))
            mark_maybe_dynamic(outputs[i], dims)
        return tuple(outputs)


def _row_axes(graph: fx.Graph) -> dict[fx.Node, set[int]]:
    """The axis of the rows of what compact cache layers store, where this graph reads them; that of their timelines."""
    views = [node for node in graph.nodes if is_op(node, "logical_view")]
    axes = {node.args[0]: {2} for node in views} | {node.args[1]: {1} for node in views}
    if views:
        outputs = graph.output_node().all_input_nodes
        axes |= {node: {0} for node in outputs if (shape(node) or ())[1:] == (0,)}
    return axes
