"""The contract between those who recognise attention in a graph and everything behind them.

A reader (`frontends`) looks at one node and returns an `AttentionNode`: operands, their layout, an `AttentionSpec`,
where the result goes, and what stores the keys. Plan, rewrite, lowering and reports know nothing else about a library.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx

from uniprefill_fx.errors import Refusal
from uniprefill_fx.passes.node_utils import meta, shape
from uniprefill_fx.specs import AttentionSpec


@dataclass(frozen=True)
class Layout:
    """Where the axes of queries, keys, values and the output lie.

    Attributes:
        tokens: the token axis.
        heads: the axis of the heads; None: the last axis holds heads and head_dim together, heads first.
        batch: the axis of the requests; None: one request, or several one behind the other.
    """

    tokens: int = 2
    heads: int | None = 1
    batch: int | None = 0

    @property
    def canonical(self) -> bool:
        """Whether operands are (batch, heads, tokens, head_dim), as the ops of this package take them."""
        return self == Layout()


@dataclass(frozen=True)
class CachedKeys:
    """Where keys and values come from when they come from a cache layer.

    Attributes:
        roots: views (`uniprefill::logical_view`) of the layer's rows. region: what computes keys and values from them.
        positions: which tokens those rows are. seen: how many tokens there were, a node or a number.
        dropped_after: the layers behind which tokens were dropped, where several layers may read this one
            (`ops.cache`).
    """

    roots: tuple[fx.Node, ...]
    region: tuple[fx.Node, ...]
    positions: fx.Node
    seen: Any
    dropped_after: fx.Node | None = None


@dataclass(frozen=True)
class AttentionNode:
    """One attention of a graph, or the reason why it was not understood.

    Attributes:
        node: the op that computes it.
        q, k, v: its operands in `layout`, k and v before they are repeated for grouped queries.
        spec: what it computes; its tensors are nodes. None when it was refused.
        offset: position of the first query minus that of the first key. 0 for a prompt.
        heads: (heads, kv_heads), where `layout` has no axis of heads to read them from.
        written_output: the tensor that `node` writes its result into, made by the node before and read by those behind
            it; None: it returns the result. output_layout: of the result, where it is another than `layout`.
        cached: the cache layer that k and v are computed from; None when they are all new.
        cache_writes: operators that store k and v somewhere that is no value of the graph. They are to run on the rows
            that k and v hold by then, which the library behind them is prepared for.
        alibi: what is added to the logits grows with the key's position: node of `heads` slopes, and a factor on them.
        causal_buffers: buffers whose values were looked at; what is said here holds while they stay.
        interior: nodes between q, k, v and the output that go away with the op; the op itself among them.
        layer: decoder layer, from the module path (it may hold several attentions); without one, the ordinal among the
            attention nodes.
        path: module path, "" if unknown. refusal: why it was not understood.
    """

    node: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    spec: AttentionSpec | None
    layer: Any
    path: str
    offset: sympy.Expr = sympy.S.Zero
    layout: Layout = Layout()
    heads: tuple[int, int] | None = None
    written_output: fx.Node | None = None
    output_layout: Layout | None = None
    cached: CachedKeys | None = None
    cache_writes: tuple[fx.Node, ...] = ()
    alibi: tuple[fx.Node, float] | None = None
    causal_buffers: frozenset[fx.Node] = frozenset()
    interior: frozenset[fx.Node] = frozenset()
    refusal: Refusal | None = None

    @property
    def output(self) -> fx.Node:
        """The node whose value is the result."""
        return self.node if self.written_output is None else self.written_output

    @property
    def of_output(self) -> Layout:
        """The layout of the result."""
        return self.layout if self.output_layout is None else self.output_layout

    @property
    def full(self) -> bool:
        """Whether it was understood, and a query sees all tokens before it."""
        return self.spec is not None and self.spec.full

    @property
    def is_prefill(self) -> bool:
        """A whole new prompt: the keys are those of the queries, and nothing was stored before."""
        if self.cached is not None or self.spec is None or self.offset != 0:
            return False
        return self.num_queries == self.num_keys

    @property
    def num_queries(self) -> sympy.Expr:
        """Rows of queries, padding included."""
        return self._size(self.q, self.layout.tokens)

    @property
    def num_keys(self) -> sympy.Expr:
        """Rows of keys, padding included."""
        return self._size(self.k, self.layout.tokens)

    @property
    def batch(self) -> sympy.Expr:
        """Number of requests; 1 without an axis of them."""
        return sympy.S.One if self.layout.batch is None else self._size(self.q, self.layout.batch)

    @property
    def num_heads(self) -> int:
        """Heads of the queries."""
        return self.heads[0] if self.heads else int(meta(self.q).shape[self.layout.heads or 1])

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.heads[1] if self.heads else int(meta(self.k).shape[self.layout.heads or 1])

    @property
    def head_dim(self) -> int:
        """Width of a head of queries and keys."""
        return self._width(self.q, self.num_heads)

    @property
    def v_dim(self) -> int:
        """Width of a head of values."""
        return self._width(self.v, self.num_kv_heads)

    def _width(self, node: fx.Node, heads: int) -> int:
        last = int(meta(node).shape[-1])
        return last // heads if self.layout.heads is None else last

    @staticmethod
    def _size(node: fx.Node, dim: int) -> sympy.Expr:
        return (shape(node) or ())[dim]

    @property
    def kind(self) -> str:
        """What a query sees, in words."""
        if self.spec is None:
            return "not understood"
        spec = self.spec
        kind = "full" if spec.full else f"sliding window {spec.window}" if spec.window else f"chunk {spec.chunk}"
        kind += ", padding mask" if spec.key_mask is not None else ""
        kind += ", packed prompts" if spec.sequence_ids is not None else ""
        return kind + (", alibi" if self.alibi else "")


def interiors(attention_nodes: Iterable[AttentionNode]) -> frozenset[fx.Node]:
    """The nodes that go away with the attention ops that are understood."""
    return frozenset().union(*(a.interior for a in attention_nodes if a.spec is not None))
