"""Write what a graph computes with DTensors as what each rank computes, and what ranks exchange.

A column-parallel layer that gathers its channels, and an embedding whose rows are split, use DTensors. Before::

    own = linear(x, w)                                     # (1, N, C / ranks), this rank's channels
    all = DTensor.from_local(own, mesh, [Shard(-1)]).redistribute([Replicate()]).to_local()

    found = embedding(DTensor.from_local(ids, mesh, [Replicate()]), table)      # table: a DTensor, Shard(0)
    h = (found * scale).redistribute([Replicate()]).to_local()                  # (1, N, hidden)

After::

    rows = own.movedim(-1, 0).contiguous()                 # (C / ranks, 1, N)
    rows = _c10d_functional.wait_tensor(_c10d_functional.all_gather_into_tensor(rows, ranks, "0"))
    all = rows.movedim(0, -1).contiguous()                 # (1, N, C)

    found = uniprefill.vocab_rows(ids, table.to_local(), "0")                   # zeros where another rank has the row
    h = _c10d_functional.wait_tensor(_c10d_functional.all_reduce(found, "sum", "0")) * scale
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from uniprefill_fx.passes.distributed import conversion, group_of_mesh, in_order, is_dtensor, is_whole, split_dim
from uniprefill_fx.passes.node_utils import arguments, meta, name_of
from uniprefill_fx.passes.operator_internals import collective

# Functions of single elements that are written for DTensors as for any tensor.
ELEMENTWISE = frozenset("mul add sub truediv to".split())
TABLE = ("input", "weight")  # of an embedding


def plain_dtensors(gm: fx.GraphModule) -> int:
    """Replace what is understood, in place; returns how many results. What is not stays as it is."""
    found = [node for node in gm.graph.nodes if conversion(node) == "to_local" and node.args[0].op != "placeholder"]
    replaced = sum([_Rewrite(node).run() for node in found])
    if replaced:
        for node in reversed(list(gm.graph.nodes)):
            if is_dtensor(meta(node)) and node.op != "placeholder" and not node.users:
                gm.graph.erase_node(node)
        gm.recompile()
    return replaced


class _UnknownError(Exception):
    """A DTensor that comes about in a way that has no rule."""


class _Rewrite:
    """One result, a plain tensor of a DTensor that every rank holds all of."""

    def __init__(self, result: fx.Node) -> None:
        self.result, self.graph = result, result.graph

    def run(self) -> bool:
        source = self.result.args[0]
        assert isinstance(source, fx.Node)
        if not is_whole(meta(source)):
            return False
        made = len(self.graph.nodes)
        try:
            with self.graph.inserting_before(self.result):
                plain = self._whole(source)
        except _UnknownError:
            for node in reversed(list(self.graph.nodes)) if len(self.graph.nodes) > made else ():
                if node.meta.get("uniprefill_of") is self.result and not node.users:
                    self.graph.erase_node(node)
            return False
        self.result.replace_all_uses_with(plain)
        self.graph.erase_node(self.result)
        return True

    def _whole(self, node: fx.Node) -> fx.Node:
        """The value of a DTensor, all of it, as a plain tensor that is the same on every rank.

        Raises:
            _UnknownError: there is no rule for how it is made.
        """
        source = node.args[0] if node.args else None
        how = conversion(node)
        if not isinstance(source, fx.Node) or group_of_mesh(meta(node)) is None:
            raise _UnknownError
        if how == "from_local" and is_whole(meta(node)):
            return source
        if how == "redistribute" and is_whole(meta(node)):
            parts = conversion(source) == "from_local" and not is_whole(meta(source))
            return self._gathered(source) if parts else self._whole(source)
        if name_of(node) == "embedding":
            return self._embedded(node)
        if name_of(node) in ELEMENTWISE and node.op in ("call_function", "call_method"):
            return self._elementwise(node)
        raise _UnknownError

    def _gathered(self, parts: fx.Node) -> fx.Node:
        value, own = meta(parts), parts.args[0]
        assert isinstance(own, fx.Node)
        dim, ranks, group = split_dim(value), value.device_mesh.size(), group_of_mesh(value)
        if dim is None or not in_order(value):
            raise _UnknownError
        size, every = meta(own).shape[dim], value.shape[dim]
        if not isinstance(size, int) or not isinstance(every, int) or size * ranks != every:
            raise _UnknownError
        rows = self._method("movedim", own, dim, 0)
        rows = self._method("contiguous", rows)
        gathered = meta(rows).new_empty((every, *meta(rows).shape[1:]))
        rows = self._collective("all_gather_into_tensor", gathered, rows, ranks, group)
        return self._method("contiguous", self._method("movedim", rows, 0, dim))

    def _embedded(self, node: fx.Node) -> fx.Node:
        given = dict(zip(TABLE, node.args, strict=False)) | dict(node.kwargs)
        ids, table = given.get("input"), given.get("weight")
        further = list(node.args[2:]) + [v for k, v in node.kwargs.items() if k not in TABLE]
        renorm = (node.args[3] if len(node.args) > 3 else None, node.kwargs.get("max_norm"))
        if not isinstance(ids, fx.Node) or not isinstance(table, fx.Node) or table.op != "placeholder":
            raise _UnknownError
        if any(isinstance(v, fx.Node) for v in further) or any(n is not None for n in renorm):
            raise _UnknownError  # max_norm writes into the table
        weight = meta(table)
        group = group_of_mesh(weight) if is_dtensor(weight) else None
        if group is None or split_dim(weight) != 0 or not in_order(weight):
            raise _UnknownError
        own = self._method("to_local", table)
        operands = (self._whole(ids), own, group)
        found = self._new("call_function", torch.ops.uniprefill.vocab_rows.default, operands, {})
        value = meta(own).new_empty((*meta(operands[0]).shape, weight.shape[1]))
        found.meta["example_value"] = value
        return self._collective("all_reduce", value, found, "sum", group)

    def _elementwise(self, node: fx.Node) -> fx.Node:
        plain: dict[fx.Node, fx.Node] = {}
        for argument in arguments(node):
            if isinstance(argument, fx.Node) and is_dtensor(meta(argument)):
                plain[argument] = self._whole(argument)
            elif isinstance(argument, fx.Node) and isinstance(meta(argument), torch.Tensor) and meta(argument).ndim:
                raise _UnknownError  # a number is the same on every rank
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: plain.get(n, n))
        made = self._new(node.op, node.target, args, kwargs)
        made.meta["example_value"] = _called(made)
        return made

    def _method(self, name: str, source: fx.Node, *args: Any) -> fx.Node:
        node = self._new("call_method", name, (source, *args), {})
        node.meta["example_value"] = getattr(meta(source), name)(*args)
        return node

    def _collective(self, name: str, value: torch.Tensor, *args: Any) -> fx.Node:
        node = self._new("call_function", collective(name), args, {})
        wait = self._new("call_function", collective("wait_tensor"), (node,), {})
        node.meta["example_value"] = wait.meta["example_value"] = value
        return wait

    def _new(self, op: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """A new node of the module that the result is of."""
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta = dict(self.result.meta) | {"uniprefill_of": self.result}
        return node


def _called(node: fx.Node) -> Any:
    """What a call makes of the fakes of its arguments."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), meta)
    target: Any = node.target
    return getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)
