"""Find the residual stream: what a dropped token is frozen to, and where the kept rows are scattered back."""

from __future__ import annotations

import sympy
from torch import fx

from uniprefill_fx.errors import Category, refuse
from uniprefill_fx.passes.sites import Site
from uniprefill_fx.passes.values import Ancestry, name_of, shape, token_dims

ADDS = frozenset({"add", "iadd", "add_"})


def residual_adds(graph: fx.Graph, tokens: sympy.Symbol, ancestry: Ancestry) -> list[tuple[fx.Node, fx.Node]]:
    """[(sum, residual)] in graph order: sums `x + f(x)` of two equal shapes with a token axis, and their x.

    One operand being computed from the other is what tells a residual connection from other sums (rotary, gates,
    experts): no shape or name does.
    """
    found = []
    for node in graph.nodes:
        if name_of(node) not in ADDS or len(node.args) < 2:
            continue
        left, right = node.args[:2]
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node) or left is right:
            continue
        if shape(left) is None or shape(left) != shape(right) or not token_dims(node, tokens):
            continue
        if ancestry.depends(right, left):
            found.append((node, left))
        elif ancestry.depends(left, right):
            found.append((node, right))
    return found


def entering(site: Site, adds: list[tuple[fx.Node, fx.Node]], ancestry: Ancestry) -> fx.Node:
    """The residual stream that enters the layer of `site` (paper: H^(b,0)).

    It is the residual of the first sum that takes in the site's output: not computed from that output itself, and an
    ancestor of the site's queries.

    Raises:
        RefusalError: there is no such sum.
    """
    for node, residual in adds:
        if not ancestry.depends(node, site.node):
            continue
        if not ancestry.depends(residual, site.node) and ancestry.depends(site.q, residual):
            return residual
        break
    raise refuse(
        Category.RESIDUAL,
        "no sum of the attention output with the stream that entered the layer",
        "dropped tokens would have no state to be frozen to, so this layer stays dense",
        site.layer,
    )


def leaving(site: Site, adds: list[tuple[fx.Node, fx.Node]], ancestry: Ancestry) -> fx.Node:
    """The last value of the residual stream, behind the last layer and before the final norm."""
    later = [node for node, _ in adds if ancestry.depends(node, site.node)]
    if not later:
        raise refuse(Category.RESIDUAL, "no residual stream behind the attention", "this layer stays dense", site.layer)
    return later[-1]
