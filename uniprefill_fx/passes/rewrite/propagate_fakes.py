"""Fill in the meta of a rewritten graph: a fake value for each node, in a shape environment of its own.

Dynamo's environment is left alone: kept lengths are no inputs of the traced frame, so guards about them must not reach
Dynamo. Here the prompt length and each kept length are backed symbols.

A size that meets another by chance is not found out: what compares, or broadcasts, the two goes through for this trace
and fails in a call. So no two symbols are traced with one number, and none that was chosen here with a fixed size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch import fx

from uniprefill_fx.errors import Category, refuse
from uniprefill_fx.passes.distributed import is_dtensor, with_local
from uniprefill_fx.passes.node_utils import expression, is_op, meta
from uniprefill_fx.passes.schemas import overloads
from uniprefill_fx.torch_internals import dispatch_in_python, fake_mode, hint_of, new_size

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis))
KEPT = "uniprefill_kept"  # in the meta of a selection that returns kept indices alone: which drop it is
FIRST_HINT = 1031  # and the next ones below it: each drop keeps fewer rows than the one before


def propagate(gm: fx.GraphModule, batch: sympy.Expr) -> None:
    """Set `meta["val"]` (and `example_value`) of every node of a rewritten graph. `batch`: 1, or a symbol.

    Raises:
        RefusalError: the graph holds for one prompt length, or one kept length, only.
    """
    _Propagator(gm, batch).run_all()


class _Propagator(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, batch: sympy.Expr) -> None:
        super().__init__(gm)
        self.graph_module, self.batch = gm, batch
        self.mode = fake_mode()
        self.sizes: dict[sympy.Symbol, torch.SymInt] = {}
        self.hints: dict[sympy.Symbol, int] = {}
        self.inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self.taken = set(_sizes_of(self.inputs))
        # Layers repeat one another. A call of what was called before, with values of the same sizes, gives the value
        # that it gave then, and values of the same sizes are one value; unless a call changes sizes in place.
        self.repeats = not any(torch.Tag.inplace_view in o.tags for n in gm.graph.nodes for o in overloads(n))
        self.called: dict[Any, Any] = {}
        self.values: dict[Any, torch.Tensor] = {}
        self.alike: dict[int, torch.Tensor] = {}  # by the id of a value, which is alive as long as its node

    def run_all(self) -> None:
        inputs = [self._input(node) for node in self.inputs]
        lengths = dict(self.sizes)
        with torch.inference_mode(False), torch.no_grad(), dispatch_in_python(), self.mode:
            self.run(*inputs)
        for symbol, size in lengths.items():
            if not expression(size).free_symbols:
                raise refuse(
                    Category.TOKEN_AXIS,
                    f"the rewritten graph holds for one size {symbol} only",
                    "an operation in the model needs a fixed number of tokens, or of prompts",
                )

    def _input(self, node: fx.Node) -> Any:
        value = meta(node)
        if is_dtensor(value):
            with torch.inference_mode(False), self.mode:
                return with_local(value, torch.empty_strided)
        if isinstance(value, torch.Tensor):
            size = [self._size(s) for s in value.shape]
            stride = [self._size(s) for s in value.stride()]
            with torch.inference_mode(False), self.mode:
                return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
        if isinstance(value, torch.SymInt):
            return self._size(value)
        return value

    def _size(self, size: Any) -> Any:
        found = expression(size)
        if not found.free_symbols:
            return int(found)
        for symbol in sorted(found.free_symbols, key=str):
            if symbol not in self.sizes:
                self._new(symbol, None if symbol == self.batch else hint_of(size, symbol))
        if isinstance(found, sympy.Symbol):
            return self.sizes[found]
        return sympy.lambdify(list(self.sizes), found)(*self.sizes.values())

    def _new(self, symbol: sympy.Symbol, traced: int | None) -> torch.SymInt:
        """The size of a symbol: inputs by the number that Dynamo traced them with, all others by a number of their own.

        Two inputs that were traced with one number may meet in an operation, as they did in the trace. The number of
        prompts has one of its own too: Dynamo traced a batch of 2 or 3, as many as there are of much else.
        """
        hint = traced
        if hint is None:
            hint = next(
                n
                for n in itertools.chain(range(FIRST_HINT, 1, -1), itertools.count(FIRST_HINT + 1))
                if n not in self.taken
            )
        self.taken.add(hint)
        self.hints[symbol] = hint
        # A size that is symbolic is neither 0 nor 1: such a number is no size.
        self.sizes[symbol] = new_size(self.mode, str(symbol), hint, any_integer=traced is not None and traced < 2)
        return self.sizes[symbol]

    def run_node(self, n: fx.Node) -> Any:
        if is_op(n, "select"):
            value: Any = self._select(n)
        elif KEPT in n.meta:
            value = self._kept(n)
        else:
            value = self._called(n)
        n.meta["val"] = n.meta["example_value"] = value
        return value

    def _called(self, n: fx.Node) -> Any:
        if not self.repeats or n.op not in ("call_function", "call_method"):
            return super().run_node(n)
        try:
            key = (n.target, self._key(self.fetch_args_kwargs_from_env(n)))
        except _NoKeyError:
            return super().run_node(n)
        if key not in self.called:
            value = super().run_node(n)
            several = type(value) is tuple
            value = tuple(map(self._one_of_its_size, value)) if several else self._one_of_its_size(value)
            self.called[key] = value
        return self.called[key]

    def _key(self, argument: Any) -> Any:
        """What arguments have in common that calls cannot tell apart. Tensors are alive, in the meta of nodes."""
        if isinstance(argument, tuple | list):
            return (type(argument), *(self._key(a) for a in argument))
        if isinstance(argument, dict):
            return tuple((name, self._key(a)) for name, a in argument.items())
        if isinstance(argument, slice):
            return (slice, self._key((argument.start, argument.stop, argument.step)))
        if is_dtensor(argument):
            raise _NoKeyError  # two of one size may be split differently
        if isinstance(argument, torch.Tensor):
            if id(argument) not in self.alike:
                self.alike[id(argument)] = self._one_of_its_size(argument)
            return (torch.Tensor, id(self.alike[id(argument)]))
        if isinstance(argument, torch.SymInt):
            return (torch.SymInt, expression(argument))
        if argument is None or isinstance(argument, _PLAIN):
            return (type(argument), argument)
        raise _NoKeyError

    def _one_of_its_size(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        sizes = tuple(expression(s) for s in (*value.shape, *value.stride(), value.storage_offset()))
        known = set().union(*(expression(size).free_symbols for size in self.sizes.values()))
        if not set().union(*(s.free_symbols for s in sizes)) <= known:
            return value  # a number that only its data tells
        return self.values.setdefault((sizes, value.dtype, value.device, type(value)), value)

    def _kept(self, n: fx.Node) -> torch.Tensor:
        """The indices of a selection over packed requests, (1, kept): `kept` is backed, and equals no other length."""
        like = next(value for a in n.all_input_nodes if isinstance(value := self.env[a], torch.Tensor))
        return like.new_empty(1, self._new(sympy.Symbol(f"kept{n.meta[KEPT]}"), None), dtype=torch.int64)

    def _select(self, n: fx.Node) -> tuple[torch.Tensor, torch.Tensor]:
        """`select` with a backed kept length, which equals no other length."""
        scores, token_bounds = (self.env[a] for a in n.args[:2] if isinstance(a, fx.Node))
        kept = self._new(sympy.Symbol(f"kept{n.meta['uniprefill_drop']}"), None)
        return scores.new_empty(token_bounds.shape[0], kept, dtype=torch.int64), torch.empty_like(token_bounds)


class _NoKeyError(Exception):
    """An argument that nothing says of when it is the same as another."""


def _sizes_of(inputs: list[fx.Node]) -> Iterator[int]:
    """Every fixed size of the inputs, and every number that one of their symbolic sizes was traced with."""
    for node in inputs:
        value = meta(node)
        for size in value.shape if isinstance(value, torch.Tensor) else [value]:
            if not isinstance(size, int | torch.SymInt):
                continue
            found = expression(size)
            if found.is_Integer:
                yield int(found)
            elif isinstance(size, torch.SymInt):
                yield from (hint_of(size, symbol) for symbol in found.free_symbols)
