"""How a pass ends: what nobody reads goes, the graph is checked and compiled."""

from __future__ import annotations

from torch import fx

from uniprefill_fx.passes.dataflow import written_nodes
from uniprefill_fx.passes.node_utils import is_selected


def clean(gm: fx.GraphModule) -> None:
    """Remove what nobody reads (masks, after attention stopped using them), check the graph, recompile."""
    gm.graph.eliminate_dead_code(is_impure_node=_keeps)
    gm.graph.lint()
    gm.recompile()


def _keeps(node: fx.Node) -> bool:
    # Masks made by vmap enter and leave its levels by nodes that nobody reads.
    levels = getattr(node.target, "__module__", None) or ""
    kept = node.op in ("placeholder", "output") or levels.startswith("torch._functorch")
    return kept or is_selected(node) or bool(written_nodes(node)) or node.is_impure()
