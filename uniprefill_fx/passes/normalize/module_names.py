"""Modules by their names below the model, also where a decorator hides `self` from Dynamo.

    L['args'][0].model.layers.3.mlp    ->    L['self'].model.layers.3.mlp

A decorator `def wrapped(*args, **kwargs)` around the `forward` that is compiled makes Dynamo name the model as the
first of its arguments. transformers has one around every model since 5.24. Its 0 would pass for a layer's number.
"""

from __future__ import annotations

from torch import fx

HIDDEN, SELF = "L['args'][0]", "L['self']"


def name_from_self(gm: fx.GraphModule) -> int:
    """Rename the modules in the meta of nodes; returns of how many, 0 where not all are parts of one first argument."""
    nodes = [node for node in gm.graph.nodes if node.meta.get("nn_module_stack")]
    paths = {str(entry[0]) for node in nodes for entry in node.meta["nn_module_stack"].values()}
    if not paths or not all(path.startswith(HIDDEN) and path[len(HIDDEN) :][:1] in ("", ".", "[") for path in paths):
        return 0
    for node in nodes:
        stack = node.meta["nn_module_stack"].items()
        node.meta["nn_module_stack"] = {key: (SELF + str(path)[len(HIDDEN) :], *rest) for key, (path, *rest) in stack}
    return len(nodes)
