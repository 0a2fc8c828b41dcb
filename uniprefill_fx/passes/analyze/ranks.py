"""Find what a graph exchanges with other processes: tensor or expert parallelism.

Every rank would score the heads that it holds, and ranks that keep different rows cannot add up their outputs. Until
scores are summed over ranks before the selection (paper Eq. 15), such a graph stays dense.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import fx

from uniprefill_fx.errors import Category, Refusal
from uniprefill_fx.passes.node_utils import meta, name_of

COLLECTIVES = "_c10d_functional"  # the namespace of the ops that Dynamo makes of `torch.distributed` calls


def find_ranks(graph: fx.Graph) -> Refusal | None:
    """The reason to stay dense when a graph holds a collective or a DTensor; None when it runs on one rank."""
    for node in graph.nodes:
        collective = COLLECTIVES in (getattr(node.target, "__module__", None) or "")
        if collective or _is_distributed(meta(node)):
            what = f"the collective `{name_of(node)}`" if collective else f"a DTensor, `{node.name}`,"
            return Refusal(
                Category.RANKS,
                f"{what} in the graph: the model is split over ranks",
                "ranks could keep different tokens; load the model without tp_plan to have tokens dropped",
            )
    return None


def _is_distributed(value: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # without it there is no DTensor
    return module is not None and isinstance(value, module.DTensor)
