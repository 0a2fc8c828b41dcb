"""Whether a model that reads its cache eagerly could do so when the cache is compact: the rules of `eager_rules`, asked
of the graph that Dynamo traced of it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from uniprefill_fx.frontends import eager_rules
from uniprefill_fx.passes.node_utils import is_op, name_of

# whose result has no holes
_ORDINARY: set[Callable[..., Any]] = {eager_rules.metadata, eager_rules.largest, eager_rules.sdpa}
_KEEP_WEIGHTS = {eager_rules.move, eager_rules.take, eager_rules.laid_out, eager_rules.scaled}


def unreadable_eagerly(graph: fx.Graph) -> str | None:
    """What in a prefill, as Dynamo traced it, eager code could not do on a compact cache; None: it can read one."""
    stored = [node.args[1:3] for node in graph.nodes if is_op(node, "bind_positions")]
    weights = {node: False for pair in stored for node in pair}  # by node with holes: whether they are weights
    for node in graph.nodes:
        views = [n for n in node.all_input_nodes if n in weights]
        if not views or node.op == "output" or is_op(node, "bind_positions"):
            continue
        rule = eager_rules.RULES.get(_function(node))
        only_weights = all(weights[n] for n in views)
        if rule is None:
            if not only_weights:
                return name_of(node) or str(node.target)
        elif rule is eager_rules.product and weights.get(node.args[0], False):
            if len(views) != 2 or only_weights:
                return "a product of weights and values that are not of one cache layer"
        elif rule not in _ORDINARY:
            weights[node] = rule is eager_rules.softmax or (only_weights and rule in _KEEP_WEIGHTS)
    return None


def _function(node: fx.Node) -> Any:
    """What eager code would hand to `__torch_function__`."""
    if node.op == "call_method":
        return getattr(Tensor, str(node.target), None)
    target: Any = node.target
    if target is getattr:
        return getattr(getattr(Tensor, str(node.args[1]), None), "__get__", None)
    name = getattr(target, "__name__", "")
    if getattr(operator, name, None) is target:
        return getattr(Tensor, f"__{name.strip('_')}__", None)
    return target
