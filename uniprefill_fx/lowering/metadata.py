"""What torch's compiler looks for in a graph that comes from Dynamo, on graphs that our passes made.

AOTAutograd reads which inputs are parameters off the placeholders (`tensor_dict`), and takes a graph for Dynamo's when
it has a `dynamo_compile_id`, `_param_name_to_source`, and a `_dynamo_source` on each placeholder. Its cache wants an
`example_value` on everything that a method is called on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import LocalSource
from torch._dynamo.utils import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from uniprefill_fx.passes.node_utils import expression, meta

log = logging.getLogger(__name__)
_KEPT = ("nn_module_stack", "stack_trace", "tensor_dict")


def is_static(node: fx.Node) -> bool:
    """Whether Dynamo said that a placeholder is a parameter or a buffer, the same tensor at each call."""
    return node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type") is not None


def mark_as_dynamo(gm: fx.GraphModule) -> None:
    """Give a graph module of ours the marks of Dynamo's; its inputs become the locals arg0, arg1, ..."""
    gm.meta.setdefault("dynamo_compile_id", None)
    gm._param_name_to_source = {}  # type: ignore[assignment]
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        node._dynamo_source = LocalSource(f"arg{i}")


def renew_values(gm: fx.GraphModule, mode: FakeTensorMode, inputs: Sequence[Any]) -> None:
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
        node.meta = {k: v for k, v in node.meta.items() if k in _KEPT}
        if node in values.known:
            node.meta["example_value"] = values.known[node]


def complete_values(gm: fx.GraphModule) -> None:
    """Fill in the values that a graph of Dynamo lost in our passes, where the compiler looks at them."""
    known = {node: meta(node) for node in gm.graph.nodes if meta(node) is not None}
    mode = detect_fake_mode([value for value in known.values() if isinstance(value, torch.Tensor)])
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
        mode: FakeTensorMode,
        symbols: Mapping[sympy.Symbol, Any] | None,
        known: dict[fx.Node, Any],
    ) -> None:
        self.gm, self.mode, self.symbols, self.known = gm, mode, symbols, known

    def write(self) -> None:
        """Compute the values of everything that a method is called on."""
        shape_env = self.mode.shape_env
        assert shape_env is not None
        receivers = dict.fromkeys(n.args[0] for n in self.gm.graph.nodes if n.op == "call_method")
        # The compiler will trace the graph itself: guards are its business.
        with torch.no_grad(), enable_python_dispatcher(), self.mode, shape_env.suppress_guards():
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
        assert self.symbols is not None and self.mode.shape_env is not None
        found = expression(size)
        if not found.free_symbols <= self.symbols.keys():
            raise _Unknown
        new = found.xreplace({s: expression(self.symbols[s]) for s in found.free_symbols})
        return int(new) if new.is_Integer else self.mode.shape_env.create_symintnode(new, hint=None)

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
