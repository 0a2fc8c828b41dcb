"""How a pass ends: what nobody reads goes, the graph is checked and compiled."""

from __future__ import annotations

from torch import fx

from uniprefill_fx.passes.dataflow import written_nodes
from uniprefill_fx.passes.node_utils import counts_blocks, is_selected
from uniprefill_fx.passes.operator_internals import moves_between_vmap_levels


def clean(gm: fx.GraphModule) -> None:
    """Remove what nobody reads (masks, after attention stopped using them), check the graph, recompile."""
    gm.graph.eliminate_dead_code(is_impure_node=_keeps)
    gm.graph.lint()
    gm.recompile()


def _keeps(node: fx.Node) -> bool:
    kept = node.op in ("placeholder", "output") or moves_between_vmap_levels(node)
    kept |= is_selected(node) or counts_blocks(node)
    return kept or bool(written_nodes(node)) or node.is_impure()
