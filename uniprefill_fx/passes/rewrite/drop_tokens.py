"""Execute a plan: the same network on ever fewer rows, as one new graph.

Before, for one layer (N tokens)::

    attn = scaled_dot_product_attention(q, k, v, attn_mask=mask)   # (1, H, N, D), mask (1, 1, N, N)
    h = add(x, linear(attn.transpose(1, 2).reshape(1, N, -1), w))  # (1, N, hidden)

After, when the layer drops (K rows stay)::

    attn = uniprefill.attention(q, k, v, ...)                            # (1, H, N, D), no mask
    scores = uniprefill.score(q, k, None, token_bounds, ...)             # (1, blocks)
    kept, token_bounds_1 = uniprefill.select(scores, token_bounds, ...)  # (1, K)
    attn_1 = uniprefill.compact(attn, kept, 2)                           # (1, H, K, D)
    x_1 = uniprefill.compact(x, kept, 1)                                 # (1, K, hidden)
    h = add(x_1, linear(attn_1.transpose(1, 2).reshape(1, K, -1), w))

`token_bounds` is a further input of the new graph, the first one: where the tokens of each prompt of a batch lie.
Behind a drop a batch is a left-padded one, K columns for the request that keeps most; see `ops.select`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import fx

from uniprefill_fx.config import PrefillConfig
from uniprefill_fx.ops.cache import NEVER
from uniprefill_fx.passes.analyze.batch import request_dim
from uniprefill_fx.passes.analyze.drop_levels import Move
from uniprefill_fx.passes.analyze.plan import Plan
from uniprefill_fx.passes.attention_node import AttentionNode, interiors
from uniprefill_fx.passes.cleanup import clean
from uniprefill_fx.passes.node_utils import expression, is_op, meta, token_dims
from uniprefill_fx.passes.operator_internals import collective
from uniprefill_fx.passes.rewrite.alibi import alibi_bias
from uniprefill_fx.passes.rewrite.attention_op import attention_op, attention_operands, sparse_attention_op
from uniprefill_fx.specs import AttentionSpec, SparseSpec

ops = torch.ops.uniprefill
SPARSE_OPTIONS = "uniprefill_sparse"  # a placeholder: (sparse layers, fields of a `SparseSpec`) float64 on the CPU


def drop_tokens(gm: fx.GraphModule, plan: Plan, config: PrefillConfig) -> fx.GraphModule:
    """The graph that drops as `plan` says; `gm` is left as it is. Node meta is not filled in: see `propagate`."""
    return Rewriter(gm, plan, config).run()


class Rewriter:
    def __init__(self, gm: fx.GraphModule, plan: Plan, config: PrefillConfig) -> None:
        assert plan.count is not None and plan.tokens is not None
        self.gm, self.plan, self.config, self.tokens = gm, plan, config, plan.tokens
        self.graph = fx.Graph()
        self.value: dict[tuple[fx.Node, int], Any] = {}
        self.drop_at = {drop.attention.output: i + 1 for i, drop in enumerate(plan.drops)}
        self.attention_at = {attention.node: attention for attention in plan.attention_nodes}
        self.interior = interiors(plan.attention_nodes)
        self.sparse_row = {attention.node: row for row, (attention, _) in enumerate(plan.sparse)}
        self.windowed = {a.k for a in plan.attention_nodes if a.spec is not None and not a.full}
        self.layout_of = {drop.attention.output: drop.attention.of_output for drop in plan.drops}
        # By level: how many rows, which those are of the level before, their positions, the bounds of requests.
        self.count: list[Any] = []
        self.kept_indices: list[Any] = [None]
        self.positions: list[Any] = []
        self.token_bounds: list[Any] = []
        self.several = plan.batch != 1
        self.index_positions: dict[int, Any] = {}
        self.biases: dict[tuple[fx.Node, float], fx.Node] = {}

    def run(self) -> fx.GraphModule:
        self.token_bounds.append(self._token_bounds())
        if self.plan.sparse:
            self.sparse_options = self.graph.placeholder(SPARSE_OPTIONS)
            self.sparse_options.meta["val"] = (
                self.token_bounds[0]
                .meta["val"]
                .new_empty((len(self.plan.sparse), len(fields(SparseSpec))), dtype=torch.float64)
            )
        for node in self.gm.graph.nodes:
            if node.op == "output":
                out = fx.node.map_arg(node.args[0], self._output)
                self.graph.output(out)
            else:
                level = self.plan.level[node]
                self.value[node, level] = self._emit(node)
                if node in self.plan.mixed:
                    self.value[node, level] = self._cleared(node, level)
                if node is self.plan.count:
                    self._begin()
        new = fx.GraphModule(self.gm, self.graph)
        clean(new)
        return new

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _emit(self, node: fx.Node) -> Any:
        level = self.plan.level[node]
        attention = self.attention_at.get(node)
        if attention is not None and attention.spec is not None:
            self._attention(attention, level)
            return self.value.get((node, level))
        if node in self.interior or is_op(node, "dropped_after_layer"):  # the latter is known at the end: `_output`
            return None
        if is_op(node, "bind_positions"):
            if not level:
                return self.at(node.args[0], level)
            index = node.args[1] in self.windowed and self.config.window == "index"
            return self._index_positions(level) if index else self.positions[level]
        return self._copy(node, level)

    def _copy(self, node: fx.Node, level: int) -> fx.Node:
        head_region = node in self.plan.head_region

        def mapped(arg: fx.Node) -> Any:
            if head_region and self.plan.level[arg]:
                return self._restored(arg)
            return self.at(arg, level)

        return self.graph.node_copy(node, mapped)

    def at(self, node: Any, level: int) -> Any:
        """The value of an old node for the rows of `level`."""
        if not isinstance(node, fx.Node):
            return node
        own = self.plan.level[node]
        if (node, level) in self.value:
            return self.value[node, level]
        made = self._move(node, own, level)
        self.value[node, level] = made
        return made

    def _move(self, node: fx.Node, own: int, level: int) -> Any:
        value = meta(node)
        if isinstance(value, torch.SymInt):
            size = expression(value)
            if self.tokens not in size.free_symbols:
                return self.value[node, own]
            return self.count[level] if size == self.tokens else self._copy(node, level)
        if isinstance(value, tuple | list) and any(isinstance(v, torch.SymInt) for v in value):
            return self._copy(node, level)  # a torch.Size, built from sizes
        begins = self.drop_at.get(node)
        if begins is not None:
            layout = self.layout_of[node]
            return self._compact(self.at(node, level - 1), level, layout.tokens, layout.batch if self.several else None)
        gather_rule = self.plan.gather_rules.get(node)
        if gather_rule is None:
            return self.value[node, own]
        if gather_rule.move is Move.REPEAT:
            return self._copy(node, level)
        return self._compact(self.at(node, level - 1), level, gather_rule.dim, gather_rule.batch_dim)

    def _compact(self, value: fx.Node, level: int, dim: int, batch_dim: int | None, *fill: int) -> fx.Node:
        batch = () if batch_dim is None else (batch_dim, *fill)
        return self.graph.call_function(ops.compact.default, (value, self.kept_indices[level], dim, *batch))

    def _cleared(self, node: fx.Node, level: int) -> fx.Node:
        (dim,) = token_dims(node, self.tokens)
        batch_dim = request_dim(node, dim, self.plan.batch)
        return self.graph.call_function(
            ops.clear_pads.default, (self.value[node, level], self.kept_indices[level], dim, batch_dim)
        )

    # -- drops ------------------------------------------------------------------------------------------------------

    def _token_bounds(self) -> fx.Node:
        first = next(a for a in self.plan.attention_nodes if a.is_prefill)
        q, batch = meta(first.q), first.layout.batch
        token_bounds = self.graph.placeholder("uniprefill_token_bounds")
        size = (1 if batch is None else q.shape[batch], 2)
        token_bounds.meta["val"] = q.new_empty(size, dtype=torch.int64, device="cpu")
        return token_bounds

    def _begin(self) -> None:
        """Level 0: all tokens of the prompts."""
        count = self.value[self.plan.count, 0]  # type: ignore[index]
        device = meta(self.plan.attention_nodes[0].q).device
        self.count.append(count)
        positions = self.graph.call_function(torch.arange, (count,), {"device": device})
        self.positions.append(self.graph.call_method("unsqueeze", (positions, 0)))

    def _attention(self, attention: AttentionNode, level: int) -> None:
        spec = attention.spec
        assert spec is not None
        positions = None
        if level:
            index = not spec.full and self.config.window == "index"
            positions = self._index_positions(level) if index else self.positions[level]
        # terms are by head and by position: whole at every level; padding is what the bounds say
        spec = replace(spec, bias=None, key_mask=None, sequence_ids=None).map(lambda term: self.at(term, 0))
        spec = replace(spec, bias=self._bias(attention))
        operands = attention_operands(self.graph, attention, [self.at(n, level) for n in _operands(attention)])
        bounds, row = self.token_bounds[level], self.sparse_row.get(attention.node)
        if row is not None:
            out = sparse_attention_op(self.graph, attention, operands, bounds, self.sparse_options, row, spec)
        else:
            out = attention_op(self.graph, attention, operands, (positions, positions, bounds), spec)
        self.value[attention.output, level] = out
        ordinal = self.drop_at.get(attention.output)
        if ordinal is not None:
            self._drop(ordinal, operands, spec)

    def _bias(self, attention: AttentionNode) -> Any:
        assert attention.spec is not None
        if attention.alibi is None:
            return self.at(attention.spec.bias, 0)
        if attention.alibi not in self.biases:
            slopes, factor = attention.alibi
            device = meta(attention.q).device
            self.biases[attention.alibi] = alibi_bias(self.graph, self.at(slopes, 0), factor, self.count[0], device)
        return self.biases[attention.alibi]

    def _drop(self, ordinal: int, operands: Sequence[fx.Node], spec: AttentionSpec) -> None:
        level, how = ordinal - 1, self.plan.drops[ordinal - 1].spec
        bounds = self.token_bounds[level]
        positions = None if spec.bias is None else self.positions[level]  # a bias is read by position
        q, k = operands[:2]
        terms = (spec.scale, spec.softcap, spec.sinks, spec.bias, how.last_n, how.block_size, how.score_dtype)
        scores = self.graph.call_function(ops.score.default, (q, k, positions, bounds, *terms))
        if self.plan.ranks is not None:  # each has scored its own heads
            arguments = (scores, "sum", self.plan.ranks.group)
            scores = self.graph.call_function(collective("all_reduce"), arguments)
            scores = self.graph.call_function(collective("wait_tensor"), (scores,))
        amounts = (how.block_size, how.last_n, how.sink_tokens, how.p, how.keep_ratio)
        chosen = self.graph.call_function(ops.select.default, (scores, bounds, self.token_bounds[0], *amounts))
        for node in (scores, chosen):
            node.meta["uniprefill_drop"] = ordinal
        kept = self.graph.call_function(operator.getitem, (chosen, 0))
        self.kept_indices.append(kept)
        self.token_bounds.append(self.graph.call_function(operator.getitem, (chosen, 1)))
        self.count.append(self.graph.call_function(torch.ops.aten.sym_size.int, (kept, 1)))
        self.positions.append(self._compact(self.positions[level], ordinal, 1, *((0, -1) if self.several else (None,))))

    def _index_positions(self, level: int) -> fx.Node:
        """Slots as if the kept rows had been the last tokens of the prompt, without holes (`window="index"`)."""
        if level not in self.index_positions:
            first = self.graph.call_function(operator.sub, (self.count[0], self.count[level]))
            device = meta(self.plan.attention_nodes[0].q).device
            positions = self.graph.call_function(torch.arange, (first, self.count[0]), {"device": device})
            positions = self.graph.call_method("unsqueeze", (positions, 0))
            if self.several:
                tokens = self.graph.call_function(operator.ge, (self.kept_indices[level], 0))
                positions = self.graph.call_function(torch.where, (tokens, positions, -1))
            self.index_positions[level] = positions
        return self.index_positions[level]

    # -- outputs ----------------------------------------------------------------------------------------------------

    def _output(self, node: fx.Node) -> Any:
        if is_op(node, "dropped_after_layer"):
            return self._dropped_after_layer(node)
        if node in self.plan.restored:
            return self._restored(node)
        return self.value[node, self.plan.level[node]]

    def _dropped_after_layer(self, node: fx.Node) -> fx.Node:
        """By token, the layer behind which it is dropped. Padding among kept rows, position -1, has a column that
        goes."""
        behind = [drop.attention.layer for drop in self.plan.drops]
        every = self.graph.call_function(torch.full_like, (self.at(node.args[0], 0), behind[0]))
        value = self.graph.call_function(torch.nn.functional.pad, (every, (1, 0)))
        for level, layer in enumerate([*behind[1:], NEVER], start=1):
            columns = self.graph.call_function(operator.add, (self.positions[level], 1))
            value = self.graph.call_function(torch.scatter, (value, 1, columns, layer))
        return self.graph.call_function(operator.getitem, (value, (slice(None), slice(1, None))))

    def _restored(self, node: fx.Node) -> Any:
        level = self.plan.level[node]
        value = self.value[node, level]
        (dim,) = token_dims(node, self.tokens) or (None,)
        if dim is None:
            return value
        if (node, -1) not in self.value:
            for ordinal in range(level, 0, -1):
                frozen = self.at(self.plan.drops[ordinal - 1].residual, ordinal - 1)
                where = (self.kept_indices[ordinal], dim, request_dim(node, dim, self.plan.batch))
                value = self.graph.call_function(ops.restore.default, (frozen, value, *where))
            self.value[node, -1] = value
        return self.value[node, -1]


def _operands(attention: AttentionNode) -> tuple[fx.Node, fx.Node, fx.Node]:
    return attention.q, attention.k, attention.v
