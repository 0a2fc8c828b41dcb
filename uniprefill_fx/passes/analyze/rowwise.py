"""Which operations may run on some of a prompt's tokens without changing what they mean for those: what is proven.

Every value behind a drop is followed from the kept rows on. It has rows (one for each token, of that token alone), is
the same for any tokens, or is the state of a mixer. An operator of `rowwise_ops` says what it makes of its arguments;
any other is run on small random rows (`rowwise_probe`). Where rows are sorted, looked up and counted, as experts do,
single operations mix tokens and the whole of them does not: the chain is run until some value has rows again::

    order = argsort(experts.view(-1))            # mixed: rows of all tokens
    y = grouped_mm(x[order // k], w, offsets)    # mixed
    z = y[argsort(order)].view(N, k, d).sum(1)   # has rows: op(x[kept]) == op(x)[kept]

Convolutions along the tokens are meant to see kept rows as neighbours, like mixers; they have to be causal. Whatever
else mixes tokens is refused where it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from uniprefill_fx.errors import Category, RefusalError, refuse
from uniprefill_fx.ops.mixer import bind
from uniprefill_fx.passes.analyze.row_operators import is_row_operator, row_operator_kind
from uniprefill_fx.passes.analyze.rowwise_kinds import Axes, Kinds, Mixed, Rows, Same, State
from uniprefill_fx.passes.analyze.rowwise_ops import FILLS, known_name
from uniprefill_fx.passes.analyze.rowwise_regions import Regions
from uniprefill_fx.passes.analyze.rowwise_rules import Rules
from uniprefill_fx.passes.dataflow import aliases
from uniprefill_fx.passes.distributed import collective_name
from uniprefill_fx.passes.node_utils import arguments, expression, is_op, meta, name_of, token_dims
from uniprefill_fx.passes.schemas import acts_outside_the_graph, effects

# Operations whose integer arguments are sizes or bounds of a token axis, so that a length may be replaced by the
# kept length. Anywhere else a length is a value, and replacing it would change what the model computes.
SIZED = frozenset(
    "view reshape expand repeat repeat_interleave new_zeros new_ones new_empty new_full zeros ones empty full arange "
    "split split_with_sizes narrow getitem unflatten resize_ setitem mixer".split()
)

SIZES = frozenset("size numel dim".split())


def check_rows(
    graph: fx.Graph,
    level: Mapping[fx.Node, int],
    axes: Axes,
    given: Collection[fx.Node] = (),
    skipped: Collection[fx.Node] = (),
    numbers_rows: Callable[[fx.Node], bool] = lambda node: False,
    head_region: Collection[fx.Node] = (),
    ends: Iterable[fx.Node] = (),
) -> None:
    """Check that every node behind a drop computes each token's row from that token alone, or mixes them as a mixer is
    meant to.

    Args:
        level: nonzero for values that will hold fewer rows.
        given: nodes whose rows are known to be right: attention, rows of a cache. skipped: nodes that nobody will run.
        numbers_rows: whether an arange counts the rows anew. head_region: what is computed from the restored stream.
        ends: values that must have rows, besides outputs.

    Raises:
        RefusalError: with fewer rows one would compute something else, or it is not known what.
    """
    _Checker(graph, level, axes, given, skipped, numbers_rows, head_region).run(set(ends))


class _Checker:
    def __init__(
        self,
        graph: fx.Graph,
        level: Mapping[fx.Node, int],
        axes: Axes,
        given: Collection[fx.Node],
        skipped: Collection[fx.Node],
        numbers_rows: Callable[[fx.Node], bool],
        head_region: Collection[fx.Node],
    ) -> None:
        self.graph, self.level, self.axes = graph, level, axes
        self.given, self.skipped, self.numbers_rows = set(given), set(skipped), numbers_rows
        self.head_region = head_region
        self.kinds: dict[fx.Node, Kinds] = {}
        self.rules = Rules(axes)
        self.regions = Regions(graph, axes, level, self.kind_of)

    def run(self, ends: set[fx.Node]) -> None:
        for node in self.graph.nodes:
            if node.op == "output":
                ends |= {a for a in arguments(node) if isinstance(a, fx.Node)}
                break
            if node in self.skipped:
                continue
            if node in self.given:
                self.kinds[node] = self.axes.plain(meta(node)) or Mixed(f"`{node.name}` has no row for each token")
            elif self.level.get(node):
                self._visit(node)
            elif node in self.head_region:
                ends |= set(node.all_input_nodes)
            elif any(isinstance(self.kinds.get(n), State | Mixed) for n in node.all_input_nodes):
                self._written_before(node)
        for node in ends:
            self._proven(node)

    def _proven(self, node: fx.Node) -> None:
        for kind in k if isinstance(k := self.kinds.get(node, Same()), tuple) else (k,):
            if isinstance(kind, Mixed):
                raise _mixes(kind.what)

    def _visit(self, node: fx.Node) -> None:
        self._check_form(node)
        if is_op(node, "mixer"):
            _check_unpacked(node)
            for read in node.all_input_nodes:
                self._proven(read)
            self.kinds[node] = tuple(self.axes.plain(v) or State() for v in meta(node))
            return
        if is_op(node, "bind_positions") or is_op(node, "dropped_after_layer"):
            for read in node.all_input_nodes:
                self._proven(read)
            self.kinds[node] = self.axes.plain(meta(node)) or Same()
            return
        if is_row_operator(node):
            self.kinds[node] = kind = row_operator_kind(node, self.axes, lambda n: self.kind_of(n, node))
            self._written(node, kind)
            return
        if acts_outside_the_graph(node) and any(self.kind_of(n, node) != Same() for n in node.all_input_nodes):
            raise _mixes(f"nothing says what `{name_of(node)}` does with rows, or with what is made of them")
        self.kinds[node] = kind = self._kind(node)
        if effects(node).writes:
            self._written(node, kind)

    def _kind(self, node: fx.Node) -> Kinds:
        name, read = known_name(node), [self.kind_of(n, node) for n in node.all_input_nodes]
        if not effects(node).known:
            return Mixed(f"nothing says what `{name_of(node)}` writes")
        if name == "arange":
            return Mixed(f"`arange` counts the rows of `{node.name}`", groups=True, counted=True)
        if name in SIZES or (name in FILLS and name not in ("full", "full_like", "new_full", "fill")):
            return Same()
        if name == "getitem" and isinstance(read[0], tuple) and isinstance(node.args[1], int):
            picked = read[0][node.args[1]]
            return picked if not isinstance(picked, Mixed) else self.regions.kind(node, [picked])
        kinds = [k for kind in read for k in (kind if isinstance(kind, tuple) else (kind,))]
        mixed = [k for k in kinds if isinstance(k, Mixed)]
        if not mixed:
            found = self.rules.result(node, lambda n: self.kind_of(n, node))
            if found is not None:
                return found
            if any(isinstance(k, State) for k in kinds):
                return Mixed(f"`{name_of(node)}` reads the last rows, or a state, beside the rows of all tokens")
        if collective_name(node):
            return Mixed(mixed[0].what if mixed else f"the collective `{name_of(node)}` moves rows between ranks")
        return self.regions.kind(node, mixed)

    def kind_of(self, node: Any, reader: fx.Node | None = None) -> Kinds:
        """What a value is to a node that reads it, gathered where it is of an earlier level."""
        value, own = meta(node), self.level.get(node, 0)
        if node in self.kinds:
            kind = self.kinds[node]
            if reader is not None and 0 < own < self.level[reader] and isinstance(kind, Mixed):
                raise _mixes(kind.what)
            return kind
        if own or not isinstance(value, torch.Tensor):
            return tuple(self.axes.plain(v) or Same() for v in value) if isinstance(value, tuple | list) else Same()
        if not self.axes.dims(value) or known_name(node) in FILLS:
            return Same()
        if known_name(node) == "arange" and self.numbers_rows(node):
            return Mixed("`arange` counts the rows", groups=True, counted=True)
        return self.axes.plain(value) or Mixed(f"`{node.name}` of shape {tuple(value.shape)} has no row for each token")

    # -- writes ------------------------------------------------------------------------------------------------------

    def _written(self, node: fx.Node, kind: Kinds) -> None:
        """A node writes: whoever shares storage with its target now holds what was written."""
        for target in effects(node).writes:
            its = self.regions.written.get((node, target), kind)
            for alias in aliases(target):
                old, rows = self.kind_of(alias), self.axes.dims(meta(alias))
                if isinstance(its, Mixed | State):
                    self.kinds[alias] = its
                elif isinstance(its, Rows) and isinstance(old, Same | Mixed) and rows:
                    like = its if self.axes.sizes(meta(alias)) == self.axes.sizes(meta(target)) else None
                    self.kinds[alias] = (
                        like
                        or self.axes.plain(meta(alias))
                        or Mixed(f"`{name_of(node)}` writes rows into `{alias.name}`, which has several for each token")
                    )
                elif isinstance(its, Rows) and not rows:
                    self.kinds[alias] = Mixed(f"`{name_of(node)}` writes the rows of tokens into `{alias.name}`")

    def _written_before(self, node: fx.Node) -> None:
        """A node of all tokens reads what was written from the kept ones into a value that has no axis of them."""
        reason = f"`{name_of(node)}` reads for all tokens what was written from the kept ones"
        self.kinds[node] = Mixed(reason) if self.axes.dims(meta(node)) else State()

    # -- what no probe can tell --------------------------------------------------------------------------------------

    def _check_form(self, node: fx.Node) -> None:
        name, tokens = name_of(node), self.axes.tokens
        if len(self.axes.dims(meta(node))) > 1:
            raise refuse(
                Category.TOKEN_OP,
                f"`{name}` relates tokens to tokens, shape {tuple(meta(node).shape)}",
                "only recognised attention may; register it as a mixer, or drop tokens behind it",
            )
        base = node.args[0] if node.args else None
        buffer = isinstance(base, fx.Node) and isinstance(meta(base), torch.Tensor) and not token_dims(base, tokens)
        looked_up = any(isinstance(meta(n), torch.Tensor) for n in node.all_input_nodes if n is not base)  # table[ids]
        if name in ("getitem", "narrow") and token_dims(node, tokens) and buffer and not looked_up:
            raise refuse(
                Category.TOKEN_OP,
                f"the first rows of `{base}`, one for each token of the prompt, are taken",
                "the kept tokens are not the first ones",
            )
        for argument in arguments(node):
            value = meta(argument) if isinstance(argument, fx.Node) else None
            if isinstance(value, torch.SymInt) and tokens in expression(value).free_symbols and name not in SIZED:
                raise refuse(
                    Category.TOKEN_OP,
                    f"`{name}` computes with the prompt length as a number",
                    "on fewer rows the length would mean something else",
                )


def _mixes(what: str) -> RefusalError:
    return refuse(
        Category.TOKEN_OP,
        what,
        "with tokens dropped it would compute something else; register it as a mixer if it is meant to",
    )


def _check_unpacked(mixer: fx.Node) -> None:
    """Refuse a mixer that is told where requests lie in the stream: behind a drop they lie elsewhere."""
    for argument, value in bind(*mixer.args).items():  # type: ignore[arg-type]
        held: list[fx.Node] = []
        fx.node.map_arg(value, held.append)
        if argument.startswith("cu_seq") and held:
            raise refuse(
                Category.TOKEN_OP,
                f"a mixer over packed requests, `{argument}` of {mixer.args[0]}",
                "such a call stays dense; run prompts one by one",
            )
