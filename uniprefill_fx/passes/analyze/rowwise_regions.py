"""Operations that no rule knows, one by one and in chains: what they are to the rows, by running them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from uniprefill_fx.passes.analyze.rowwise_calls import any_tensor
from uniprefill_fx.passes.analyze.rowwise_constants import CONVOLUTION, CUTS, index_along, reach
from uniprefill_fx.passes.analyze.rowwise_counts import COUNTS_TOKENS, check_counts, passed_on
from uniprefill_fx.passes.analyze.rowwise_kinds import Axes, Kinds, Mixed, Rows, State
from uniprefill_fx.passes.analyze.rowwise_ops import (
    ALONG,
    CONVOLVES,
    FILLS,
    GROUPS,
    POINTWISE,
    dimensions,
    is_random,
    known_name,
)
from uniprefill_fx.passes.analyze.rowwise_probe import ProbeError, Runs
from uniprefill_fx.passes.dataflow import aliases
from uniprefill_fx.passes.node_utils import arguments, expression, meta, name_of, shape
from uniprefill_fx.passes.schemas import effects

SHORT, LONG = 23, 1031  # rows of a probe; the long one finds what mixes rows that are far apart
ELEMENTS = 1 << 22  # of one operand, at most: where a token has many, fewer rows are run
SMALL = 1 << 14  # elements for each token, up to which floats are float64
FARTHEST = 512  # a shift, or a number that whole numbers are compared with: up to it a probe is made long enough
# Along the tokens these depend on where a row lies, which a short probe of a long chain need not show.
PLACES = frozenset("cumsum cumprod flip unbind roll diff".split())
ANSWERS = frozenset("any all".split())  # about all tokens: nearly always the same ones, of random rows


class Regions:
    """Probes of one graph.

    Args:
        level: nonzero for values that will hold fewer rows. kind_of: (node, its reader) -> what it is known to be.
    """

    def __init__(
        self,
        graph: fx.Graph,
        axes: Axes,
        level: Mapping[fx.Node, int],
        kind_of: Callable[..., Kinds],
    ) -> None:
        self.graph, self.axes, self.level, self.kind_of = graph, axes, level, kind_of
        self.numbers = _hints(graph)
        self.longest = _largest_number(graph, level)
        self.chain: list[fx.Node] = []  # nodes of chains, in order
        self.run_up_to = 0
        self.runs: Runs | None = None
        self.reach: dict[fx.Node, int] = {}  # of values in which tokens are mixed: what shifts on the way to it sum to
        self.numbered: dict[Any, int] = {}
        self.known: dict[int, tuple[Kinds, dict[int, Kinds]]] = {}
        self.keys: dict[fx.Node, _Key] = {}
        self.written: dict[tuple[fx.Node, fx.Node], Kinds] = {}

    def kind(self, node: fx.Node, mixed: list[Mixed]) -> Kinds:
        """What a node makes of its arguments. `mixed`: those of them in which tokens are mixed."""
        key = self._key(node)
        if mixed:
            first, name = mixed[0], known_name(node)
            groups = all(m.groups for m in mixed) and name in GROUPS and not self._by_place(node)
            convolves = all(m.convolves for m in mixed) and name in CONVOLVES
            if not groups and not convolves:
                return Mixed(first.what)
            convolution = any(m.convolution for m in mixed) or name in CONVOLUTION
            counted = name in COUNTS_TOKENS or bool(self._counted(node))
            open_kind = Mixed(first.what, groups, convolves, convolution and convolves, counted)
        else:
            open_kind = self._opened(node)
        self.keys[node] = key
        self.reach[node] = reach(node, self.axes)
        if mixed:
            before = (self.reach[n] if n in self.reach else reach(n, self.axes) for n in node.all_input_nodes)
            self.reach[node] += max(before)
        if key.number not in self.known:
            try:
                if self.axes.count != self.axes.tokens:
                    raise ProbeError("it reads the rows of a cache")
                found = self._run_alone(node) if not mixed else self._run_in_chain(node, open_kind)
            except ProbeError as error:
                found = Mixed(f"it is not known what `{name_of(node)}` does to tokens: {error}"), {}
                if mixed:
                    found = Mixed(f"{open_kind.what}; `{name_of(node)}`: {error}"), {}
            self.known[key.number] = found
        kind, written = self.known[key.number]
        kind = _filled(kind, open_kind)
        for place, target in enumerate(effects(node).writes):
            self.written[node, target] = _filled(written.get(place), open_kind)
            for alias in aliases(target):
                self.keys[alias] = self._interned(("written", place, key.number), key.values)
                self.reach[alias] = max(self.reach.get(alias, 0), self.reach[node])
        if mixed or any(isinstance(k, Mixed) for k in (kind, *self.written.values())):
            self.chain.append(node)
        else:
            self.reach[node] = 0  # rows of single tokens again: no shift is left
        return kind

    def _opened(self, node: fx.Node) -> Mixed:
        """What a node is called if it mixes tokens by itself."""
        name = known_name(node)
        what = f"`{name_of(node)}` mixes tokens: its rows for some of them are not those it has for all"
        groups = name in GROUPS and not self._by_place(node)
        return Mixed(what, groups, name in CONVOLVES, name in CONVOLUTION, name in COUNTS_TOKENS)

    def _counted(self, node: fx.Node) -> list[fx.Node]:
        """The operands that hold numbers of tokens and pass them on."""

        def holds(kind: Kinds) -> bool:
            return any(map(holds, kind)) if isinstance(kind, tuple) else isinstance(kind, Mixed) and kind.counted

        return [n for n in passed_on(node) if holds(self.kind_of(n, node))]

    def _by_place(self, node: fx.Node) -> bool:
        """Whether an operation goes by the places of rows along an axis of tokens: slices, shifts, running sums."""
        name, source = known_name(node), node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not isinstance(meta(source), torch.Tensor):
            return False
        dims = self.axes.dims(meta(source))
        if name in PLACES | ANSWERS and name in ALONG:
            return bool({d % meta(source).ndim for d in dimensions(node, name, meta(source).ndim)} & set(dims))
        if name in CUTS:
            place, default = CUTS[name]
            given = node.args[place] if len(node.args) > place else node.kwargs.get("dim", default)
            return not isinstance(given, int) or given % meta(source).ndim in dims
        if name == "getitem" and dims:
            along = index_along(node, dims)
            return any(isinstance(i, int) or (isinstance(i, slice) and i != slice(None)) for i in along)
        return False

    # -- running -----------------------------------------------------------------------------------------------------

    def _run_alone(self, node: fx.Node) -> tuple[Kinds, dict[int, Kinds]]:
        """A node whose arguments are understood, by itself: short and long, in float64 where it takes that."""
        if is_random(node):
            raise ProbeError("it draws random numbers")
        if known_name(node) in ANSWERS and self._by_place(node):
            return None, {}
        found: list[tuple[Kinds, dict[int, Kinds]]] = []
        enough = self._enough(node)
        each = max((self._elements(n) for n in node.all_input_nodes), default=1)
        for tokens in (SHORT, max(SHORT + 2, enough, min(LONG, ELEMENTS // max(1, each)))):
            try:
                found.append(self._once(node, tokens, precise=each <= SMALL))
            except ProbeError:
                found.append(self._once(node, tokens, precise=False))
            if found[-1] != found[0]:
                return None, {}
        return found[0]

    def _once(self, node: fx.Node, tokens: int, precise: bool) -> tuple[Kinds, dict[int, Kinds]]:
        runs = Runs(self.axes, tokens, self.numbers, precise)
        for read in node.all_input_nodes:
            self._make(read, node, runs)
        runs.run(node)
        return runs.kind(node), {i: runs.kind(t) for i, t in enumerate(effects(node).writes)}

    def _run_in_chain(self, node: fx.Node, kind: Mixed) -> tuple[Kinds, dict[int, Kinds]]:
        """A node behind others that mix tokens: all of them are run."""
        if self.longest > FARTHEST:
            raise ProbeError(f"whole numbers are compared with {self.longest}")
        tokens = max(SHORT, 2 * self.longest + 3, self._enough(node))
        if self.runs is None or self.runs.tokens < tokens:
            self.runs, self.run_up_to = Runs(self.axes, tokens, self.numbers, precise=False), 0
        for earlier in (*self.chain[self.run_up_to :], node):
            self.run_up_to += 1  # also where it fails: what it wrote must not be written twice
            for read in earlier.all_input_nodes:
                self._make(read, earlier, self.runs)
            self.runs.run(earlier)
        check_counts(node, self._counted(node), self.runs.values[0])
        found = self.runs.kind(node)
        if found is None and kind.convolution:
            found = self.runs.kind(node, causal=True)
        return found, {i: self.runs.kind(t) for i, t in enumerate(effects(node).writes)}

    def _enough(self, node: fx.Node) -> int:
        """The rows of a probe in which what is shifted along the tokens, up to this node, still meets other rows."""
        if self.reach[node] > FARTHEST:
            raise ProbeError(f"rows are shifted or cut by {self.reach[node]}")
        return 2 * self.reach[node] + 3

    def _make(self, node: fx.Node, reader: fx.Node, runs: Runs) -> None:
        """Give a node a value: random rows, or what it is made of where that matters (indices, views of a buffer)."""
        value = meta(node)
        if node in runs.values[0] or not any_tensor(value):
            return
        kind = self.kind_of(node, reader)
        if isinstance(kind, State):
            raise ProbeError(f"`{node.name}` is the state of a mixer")
        whole = not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex())
        computed = node.op in ("call_function", "call_method")
        view = bool(effects(node).shares) and not effects(node).writes and bool(self.level.get(node))
        view = view and not any(isinstance(self.kind_of(n, node), Mixed) for n in node.all_input_nodes)
        written = known_name(node) in FILLS and isinstance(kind, Rows)  # a buffer that now holds rows
        if written and whole:
            raise ProbeError(f"`{node.name}` holds whole numbers that were written into it")
        if computed and not written and (whole or view or known_name(node) in FILLS | {"arange"}):
            for read in node.all_input_nodes:
                self._make(read, node, runs)
            runs.run(node)
            if isinstance(kind, Rows) and self.level.get(node, 0) < self.level[reader]:
                runs.gather(node, kind)  # positions, which keep their values
        elif isinstance(kind, Mixed):
            raise ProbeError(f"`{node.name}` has no value")
        else:
            runs.make(node, kind)

    def _elements(self, node: fx.Node) -> int:
        """The elements of an operand that one token has."""
        sizes, total = shape(node) or (), 1
        for size in sizes:
            total *= int(size) if size.is_integer and not size.free_symbols else 1
        return total if self.axes.dims(meta(node)) else total // 256  # a weight, which every token is multiplied by

    # -- what is the same call ---------------------------------------------------------------------------------------

    def _key(self, node: fx.Node) -> _Key:
        """Equal for calls that do the same to values of the same kinds: the layers of a model are run once.

        Values that come in are numbered, so that f(x, x) is not taken for f(x, y).
        """
        values: list[fx.Node] = []

        def of(argument: Any) -> Any:
            if not isinstance(argument, fx.Node):
                return str(argument) if isinstance(argument, slice) else argument
            value, key = meta(argument), self.keys.get(argument)
            if key is None and not any_tensor(value):
                return str(value)
            own = (argument,) if key is None else key.values
            values.extend(v for v in own if v not in values)
            places = tuple(values.index(v) for v in own)
            if key is not None:
                return f"#{key.number}", places
            described: Any = type(value)
            if isinstance(value, torch.Tensor):
                described = value.dtype, tuple(expression(s) for s in value.shape)
            return str(self.kind_of(argument, node)), described, known_name(argument) in FILLS | {"arange"}, places

        made = repr(fx.node.map_aggregate((node.args, dict(node.kwargs)), of))
        return self._interned((node.op, node.target, made), tuple(values))

    def _interned(self, key: Any, values: tuple[fx.Node, ...]) -> _Key:
        return _Key(self.numbered.setdefault(key, len(self.numbered)), values)


@dataclass(frozen=True)
class _Key:
    """What a value was made by, as a number, and from which values that come from outside of the chain."""

    number: int
    values: tuple[fx.Node, ...]


def _filled(kind: Kinds, mixed: Mixed) -> Kinds:
    """The kind, where it was not found that of a value in which tokens are mixed."""
    if isinstance(kind, tuple):
        return tuple(mixed if k is None else k for k in kind)
    return mixed if kind is None else kind


def _hints(graph: fx.Graph) -> dict[sympy.Symbol, int]:
    """What tracing had for the symbols of sizes."""
    found: dict[sympy.Symbol, int] = {}
    for node in graph.nodes:
        value = meta(node)
        sizes = [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]
        for size in sizes:
            if isinstance(size, torch.SymInt) and isinstance(expression(size), sympy.Symbol) and size.node.hint:
                found[expression(size)] = int(size.node.hint)
    return found


def _largest_constant(node: fx.Node) -> int:
    return max((abs(a) for a in arguments(node) if isinstance(a, int) and not isinstance(a, bool)), default=0)


def _largest_number(graph: fx.Graph, level: Mapping[fx.Node, int]) -> int:
    """The largest number that whole numbers behind a drop are compared or combined with."""
    largest = 0
    for node in graph.nodes:
        if level.get(node) and known_name(node) in POINTWISE:
            values = [meta(n) for n in node.all_input_nodes]
            if any(isinstance(v, torch.Tensor) and not v.is_floating_point() for v in values):
                largest = max(largest, _largest_constant(node))
    return largest
