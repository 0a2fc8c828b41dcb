"""What torch's compiler looks for in a graph that comes from Dynamo, on graphs that our passes made.

AOTAutograd reads which inputs are parameters off the placeholders, in graphs that it takes for Dynamo's
(`compiler_internals.mark_as_dynamo`). Its cache wants an `example_value` on everything that a method is called on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from uniprefill_fx.lowering.compiler_internals import KEPT_META, Mode, mode_of, size_in, without_guards
from uniprefill_fx.passes.node_utils import expression, meta
from uniprefill_fx.torch_internals import dispatch_in_python

log = logging.getLogger(__name__)


def renew_values(gm: fx.GraphModule, mode: Mode, inputs: Sequence[Any]) -> None:
    """Replace the meta of a graph by values of another fake mode, where the compiler looks at them.

    Args:
        inputs: the new values of the placeholders. Others follow from the old ones by size.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    symbols: dict[sympy.Symbol, Any] = {}
    for node, new in zip(placeholders, inputs, strict=True):
        symbols |= _symbols(meta(node), new)
    values = _Values(gm, mode, symbols, dict(zip(placeholders, inputs, strict=True)))
    values.write()
    for node in gm.graph.nodes:
        node.meta = {k: v for k, v in node.meta.items() if k in KEPT_META}
        if node in values.known:
            node.meta["example_value"] = values.known[node]


def complete_values(gm: fx.GraphModule) -> None:
    """Fill in the values that a graph of Dynamo lost in our passes, where the compiler looks at them."""
    known = {node: meta(node) for node in gm.graph.nodes if meta(node) is not None}
    mode = mode_of([value for value in known.values() if isinstance(value, torch.Tensor)])
    if mode is None:
        return  # a graph without tensors
    values = _Values(gm, mode, None, known)
    values.write()
    for node, value in values.known.items():
        node.meta.setdefault("example_value", value)


def _symbols(old: Any, new: Any) -> dict[sympy.Symbol, Any]:
    """Which new size stands for which symbol of an old value."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        pairs = list(zip(old.shape, new.shape, strict=True))
    else:
        pairs = [(old, new)]
    return {found: b for a, b in pairs if isinstance(a, torch.SymInt) and (found := expression(a)).is_Symbol}


class _Unknown(Exception):
    """A value that the graph does not tell."""


class _Values:
    """Fake values of nodes, computed when they are asked for. `symbols`: None where old values stay good."""

    def __init__(
        self,
        gm: fx.GraphModule,
        mode: Mode,
        symbols: Mapping[sympy.Symbol, Any] | None,
        known: dict[fx.Node, Any],
    ) -> None:
        self.gm, self.mode, self.symbols, self.known = gm, mode, symbols, known

    def write(self) -> None:
        """Compute the values of everything that a method is called on."""
        receivers = dict.fromkeys(n.args[0] for n in self.gm.graph.nodes if n.op == "call_method")
        # The compiler will trace the graph itself: guards are its business.
        with torch.no_grad(), dispatch_in_python(), self.mode, without_guards(self.mode):
            for node in receivers:
                try:
                    self.value(node)
                except Exception as error:
                    log.info("no value for %s, so its graph will not be cached: %s", node, error)

    def value(self, node: fx.Node) -> Any:
        if node in self.known:
            return self.known[node]
        try:
            if self.symbols is None or (old := meta(node)) is None:
                raise _Unknown
            value = self._renewed(old)
        except _Unknown:
            value = self._run(node)
        self.known[node] = value
        return value

    def _renewed(self, old: Any) -> Any:
        if isinstance(old, torch.Tensor):
            size, stride = ([self._size(s) for s in sizes] for sizes in (old.shape, old.stride()))
            return torch.empty_strided(size, stride, dtype=old.dtype, device=old.device)
        if isinstance(old, tuple | list):
            return type(old)(self._renewed(part) for part in old)
        if isinstance(old, torch.SymInt):
            return self._size(old)
        if isinstance(old, torch.SymFloat | torch.SymBool):
            raise _Unknown
        return old

    def _size(self, size: Any) -> Any:
        assert self.symbols is not None
        found = expression(size)
        if not found.free_symbols <= self.symbols.keys():
            raise _Unknown
        return size_in(self.mode, found.xreplace({s: expression(self.symbols[s]) for s in found.free_symbols}))

    def _run(self, node: fx.Node) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.value)
        target: Any = node.target
        if node.op == "call_function":
            return target(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        if node.op == "get_attr" and isinstance(held := getattr(self.gm, str(node.target), None), torch.Tensor):
            return self.mode.from_tensor(held, static_shapes=True)
        raise _Unknown(f"{node.op} {node.target}")
