"""Whether a forward ends with a graph, or more layers may follow in another one.

Dropped rows must not be rebuilt between layers: what was frozen early would enter them as if it were computed, which
destroys the output. So a graph that shows all rows may drop only if it holds the end of the decoder. Dynamo tells when
it broke a graph, but not when a model comes in several frames (a function that is disabled for the compiler, hooks, a
break inside a loop, halves or layers that are compiled one by one). The graph itself tells: what leaves it is not the
residual stream but what a final norm or a head, which lie outside the layers, made of it.
"""

from __future__ import annotations

import torch
from torch import fx

from uniprefill_fx.errors import Category, refuse
from uniprefill_fx.passes.analyze.residual import is_of_norm
from uniprefill_fx.passes.dataflow import Ancestry
from uniprefill_fx.passes.node_utils import arguments, meta, module_path, name_of, shape


def layers_root(nodes: list[fx.Node]) -> tuple[str, ...] | None:
    """The path of the list that layers are in, such as ("model", "layers"), from nodes inside of layers."""
    for node in nodes:
        parts = module_path(node).split(".")
        numbered = [i for i, part in enumerate(parts) if part.isdigit()]
        if numbered:
            return tuple(parts[: numbered[0]])
    return None


def in_layers(node: fx.Node, root: tuple[str, ...] | None) -> bool:
    """Whether a node was traced inside of one of the layers."""
    parts = module_path(node).split(".")
    depth = 0 if root is None else len(root)
    return (
        root is not None and tuple(parts[:depth]) == root and parts[depth : depth + 1] != [] and parts[depth].isdigit()
    )


def check_decoder_end(
    graph: fx.Graph, attention: list[fx.Node], end: fx.Node, head_region: frozenset[fx.Node], ancestry: Ancestry
) -> None:
    """Check that a graph whose outputs show all rows ends with the decoder.

    Args:
        attention: the attention ops. end: the last value of the residual stream. head_region: what is computed from it.

    Raises:
        RefusalError: more layers may follow, or the last one does more to the stream behind its last sum.
    """
    outputs = [n for n in arguments(graph.output_node()) if isinstance(n, fx.Node)]
    root = layers_root(attention)
    for node in graph.nodes:
        if node in head_region and in_layers(node, root) and not is_of_norm(node):
            raise refuse(
                Category.RESIDUAL,
                f"`{name_of(node)}` of the last layer computes from its last sum, and no sum `x + f(x)` follows",
                "dropped rows would be restored in the middle of a layer; let it end with such a sum",
            )
    width = (shape(end) or (None,))[-1]
    closing = [node for node in head_region if not in_layers(node, root) and _reads_weights(node, end, head_region)]

    closed = [o for o in outputs if o in head_region and any(ancestry.depends(o, node) for node in closing)]
    of_width = [o for o in closed if (shape(o) or (None,))[-1] == width]
    if root is None:
        closed = [o for o in closed if o not in of_width]
    if not closed or (end in outputs and not of_width):  # the stream beside logits: of an early exit?
        raise refuse(
            Category.GRAPH_BREAK,
            "the residual stream leaves the graph, and no final norm or head follows: more layers may do so elsewhere",
            "compile the whole model as one graph; fullgraph=True, or TORCH_LOGS=graph_breaks, shows what divides it",
        )


def _reads_weights(node: fx.Node, end: fx.Node, head_region: frozenset[fx.Node]) -> bool:
    """Whether a node combines what comes from the stream with a tensor that does not: the weight of a norm or head."""
    for read in node.all_input_nodes:
        value = meta(read)
        if read is not end and read not in head_region and isinstance(value, torch.Tensor) and value.ndim > 0:
            return True
    return False
