"""Steps with attention that nobody understands, over a cache that may be compact: they run as eager code would.

Compiled, such attention reads a view of all tokens seen, which is right only where a layer holds them all. Where it
does not, the graph runs op by op as the model wrote it, over views that know what they do not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from uniprefill_fx.errors import Refusal
from uniprefill_fx.frontends.eager_view import compact_view
from uniprefill_fx.ops.cache import holds_all, leave_later
from uniprefill_fx.passes.node_utils import copy_module, is_op
from uniprefill_fx.passes.rewrite.extract import extract
from uniprefill_fx.runtime.warn_once import warn_once


def reads_views(graph: fx.Graph) -> bool:
    """Whether a graph reads cache layers by a view of all tokens seen."""
    return any(is_op(node, "logical_view") for node in graph.nodes)


class OwnAttention:
    """Runs a graph compiled where each cache layer holds what its mask counts on, and eagerly elsewhere.

    Args:
        run: the compiled graph. gm: as Dynamo traced it. refusal: why its attention was not understood.
    """

    def __init__(self, run: Callable[..., Any], gm: fx.GraphModule, refusal: Refusal | None) -> None:
        self.run, self.refusal = run, refusal
        views = [node for node in gm.graph.nodes if is_op(node, "logical_view")]
        self.read = [(node.args[1], node.args[3], (*node.args, None)[4]) for node in views]
        self.wanted = list(dict.fromkeys(x for read in self.read for x in read if isinstance(x, fx.Node)))
        self.layers = extract(gm, self.wanted)
        self.eager = copy_module(gm)
        for node in self.eager.graph.nodes:
            if is_op(node, "logical_view"):
                node.target = _view
        self.eager.recompile()

    def __call__(self, *args: Any) -> Any:
        found = dict(zip(self.wanted, self.layers(*args), strict=True))
        layers = [[found.get(x, x) if isinstance(x, fx.Node) else x for x in read] for read in self.read]
        if all(_holds(*layer) for layer in layers):
            return self.run(*args)
        warn_once(
            "own attention",
            "a step over a compact KV cache has attention that was not understood, and runs eagerly: right, but slow. "
            f"{self.refusal}",
            stacklevel=3,
        )
        return self.eager(*args)


def _holds(positions: Tensor, expected: int, dropped_after: Tensor | None) -> bool:
    return holds_all(positions, expected) and not leave_later(dropped_after)


def _view(stored: Tensor, positions: Tensor, seen: int, expected: int, dropped_after: Tensor | None = None) -> Tensor:
    """`uniprefill::logical_view`, of a layer that may hold fewer tokens."""
    return compact_view(stored, positions, seen, dropped_after)
