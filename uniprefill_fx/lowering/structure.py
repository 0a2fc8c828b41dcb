"""Which graphs are the same but for the names of their nodes and the values of their weights."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from uniprefill_fx.lowering.compiler_internals import is_wrapper
from uniprefill_fx.passes.distributed import is_dtensor, placement_of
from uniprefill_fx.passes.node_utils import meta
from uniprefill_fx.torch_internals import is_static_input


def structure(gm: fx.GraphModule) -> Hashable:
    """A key that two graph modules share only if what compiles one computes the other, from its own inputs.

    It holds every operation with its arguments, and of each input what a compilation depends on: of a parameter its
    layout too, of an activation its dtype, its device and which of its sizes are symbolic. Strides of activations, and
    which symbolic sizes are equal, are left to the guards of a compilation. Tensors that the module holds itself count
    by identity.
    """
    return _Structure(gm).key()


class _Structure:
    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.index = {node: i for i, node in enumerate(gm.graph.nodes)}

    def key(self) -> Hashable:
        return tuple(self._node(node) for node in self.gm.graph.nodes)

    def _node(self, node: fx.Node) -> Hashable:
        if node.op == "placeholder":
            return ("placeholder", is_static_input(node), self._input(meta(node), is_static_input(node)))
        if node.op == "get_attr":
            held: Any = self.gm
            for name in str(node.target).split("."):
                held = getattr(held, name)
            return ("get_attr", id(held))  # the module keeps it alive, and whoever compares keeps the module
        return (node.op, node.target, self._value(node.args), self._value(node.kwargs))

    def _input(self, value: Any, static: bool) -> Hashable:
        if isinstance(value, torch.Tensor):
            if is_dtensor(value) and static:  # how it is split says what each rank holds
                return (type(value), value.dtype, tuple(value.shape), value.stride(), placement_of(value))
            if is_wrapper(value):
                return id(value)  # a quantised weight: what it is made of differs by class
            sizes = tuple(self._size(s) for s in value.shape)
            layout = (value.stride(), value.layout) if static else None  # which guards do not look at
            return (type(value), value.dtype, value.device, value.requires_grad, sizes, layout)
        return self._size(value) if isinstance(value, torch.SymInt) else self._value(value)

    def _size(self, size: Any) -> Hashable:
        return "dynamic" if isinstance(size, torch.SymInt) else int(size)

    def _value(self, value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            return ("node", self.index[value])
        if isinstance(value, tuple | list):
            return (type(value).__name__, *map(self._value, value))
        if isinstance(value, dict):
            return ("dict", *((name, self._value(part)) for name, part in sorted(value.items())))
        if isinstance(value, slice):
            return ("slice", self._value(value.start), self._value(value.stop), self._value(value.step))
        if isinstance(value, float):
            return ("float", value.hex())  # -0.0 is not 0.0, and NaN is NaN
        return (type(value), value)  # 1, 1.0 and True are equal, and are not the same argument
