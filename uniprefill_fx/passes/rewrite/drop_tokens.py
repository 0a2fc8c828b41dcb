"""Execute a plan: the same network on ever fewer rows, as one new graph.

Before, for one layer (N tokens)::

    attn = scaled_dot_product_attention(q, k, v, attn_mask=mask)   # (1, H, N, D), mask (1, 1, N, N)
    h = add(x, linear(attn.transpose(1, 2).reshape(1, N, -1), w))  # (1, N, hidden)

After, when the layer drops (K rows stay)::

    attn = uniprefill.attention(q, k, v, ...)                      # (1, H, N, D), no mask
    scores = uniprefill.score(q, k, spans, ...)                    # (blocks,)
    rows, spans_1 = uniprefill.select(scores, spans, ...)          # (1, K)
    attn_1 = uniprefill.compact(attn, rows, 2)                     # (1, H, K, D)
    x_1 = uniprefill.compact(x, rows, 1)                           # (1, K, hidden)
    h = add(x_1, linear(attn_1.transpose(1, 2).reshape(1, K, -1), w))

`spans` is a further input of the new graph, the first one: where the tokens of each prompt of a batch lie. Behind a
drop a batch is a left-padded one, K columns for the request that keeps most; see `ops.selection`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from uniprefill_fx.config import PrefillConfig
from uniprefill_fx.ops.cache import NEVER
from uniprefill_fx.passes.analyze.attention_nodes import Site, interiors
from uniprefill_fx.passes.analyze.batch import request_dim
from uniprefill_fx.passes.analyze.drop_levels import Move
from uniprefill_fx.passes.analyze.outputs import Treatment
from uniprefill_fx.passes.analyze.plan import Plan
from uniprefill_fx.passes.dataflow import written_nodes
from uniprefill_fx.passes.node_utils import autocast, expression, is_op, meta, token_dims
from uniprefill_fx.passes.rewrite.alibi import alibi_bias
from uniprefill_fx.passes.rewrite.split import is_selected
from uniprefill_fx.timing import timed

ops = torch.ops.uniprefill
SCORE_DTYPES = {"float32": torch.float32, "float64": torch.float64, "float8_e4m3": torch.float8_e4m3fn}


@timed("rewrite")
def rewrite(gm: fx.GraphModule, plan: Plan, config: PrefillConfig) -> fx.GraphModule:
    """The graph that drops as `plan` says; `gm` is left as it is. Node meta is not filled in: see `propagate`."""
    return _Rewriter(gm, plan, config).run()


class _Rewriter:
    def __init__(self, gm: fx.GraphModule, plan: Plan, config: PrefillConfig) -> None:
        assert plan.count is not None and plan.tokens is not None and plan.stream_end is not None
        self.gm, self.plan, self.config, self.tokens = gm, plan, config, plan.tokens
        self.graph = fx.Graph()
        self.value: dict[tuple[fx.Node, int], Any] = {}
        self.drop_at = {drop.site.node: i + 1 for i, drop in enumerate(plan.drops)}
        self.site_at = {site.node: site for site in plan.sites}
        self.interior = interiors(plan.sites)
        self.windowed = {s.k for s in plan.sites if s.mask is not None and not s.mask.full}
        self.count: list[Any] = []  # by stage: number of rows, rows kept of the stage before, slots, spans
        self.rows: list[Any] = [None]
        self.slots: list[Any] = []
        self.spans: list[Any] = []
        self.several = plan.batch != 1

        self.index_slots: dict[int, Any] = {}
        self.biases: dict[tuple[fx.Node, float], fx.Node] = {}

    def run(self) -> fx.GraphModule:
        treatments = {o.node: o.treatment for o in self.plan.outputs}
        self.spans.append(self._spans())
        for node in self.gm.graph.nodes:
            if node.op == "output":
                out = fx.node.map_arg(node.args[0], lambda n: self._output(n, treatments.get(n)))
                self.graph.output(out)
            else:
                stage = self.plan.stage[node]
                self.value[node, stage] = self._emit(node)
                if node in self.plan.mixed:
                    self.value[node, stage] = self._cleared(node, stage)
                if node is self.plan.count:
                    self._begin()
        new = fx.GraphModule(self.gm, self.graph)
        clean(new)
        return new

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _emit(self, node: fx.Node) -> Any:
        stage = self.plan.stage[node]
        site = self.site_at.get(node)
        if site is not None and site.mask is not None:
            return self._attention(site, stage)
        if node in self.interior or is_op(node, "departures"):  # departures are known at the end, see `_output`
            return None
        if is_op(node, "bind_slots"):
            if not stage:
                return self.at(node.args[0], stage)
            index = node.args[1] in self.windowed and self.config.window == "index"
            return self._index_slots(stage) if index else self.slots[stage]
        return self._copy(node, stage)

    def _copy(self, node: fx.Node, stage: int) -> fx.Node:
        tail = node in self.plan.tail

        def mapped(arg: fx.Node) -> Any:
            if tail and self.plan.stage[arg]:
                return self._restored(arg)
            return self.at(arg, stage)

        return self.graph.node_copy(node, mapped)

    def at(self, node: Any, stage: int) -> Any:
        """The value of an old node for the rows of `stage`."""
        if not isinstance(node, fx.Node):
            return node
        own = self.plan.stage[node]
        if (node, stage) in self.value:
            return self.value[node, stage]
        made = self._move(node, own, stage)
        self.value[node, stage] = made
        return made

    def _move(self, node: fx.Node, own: int, stage: int) -> Any:
        value = meta(node)
        if isinstance(value, torch.SymInt):
            size = expression(value)
            if self.tokens not in size.free_symbols:
                return self.value[node, own]
            return self.count[stage] if size == self.tokens else self._copy(node, stage)
        if isinstance(value, tuple | list) and any(isinstance(v, torch.SymInt) for v in value):
            return self._copy(node, stage)  # a torch.Size, built from sizes
        begins = self.drop_at.get(node)
        if begins is not None:
            return self._compact(self.at(node, stage - 1), stage, 2, 0 if self.several else None)
        crossing = self.plan.crossings.get(node)
        if crossing is None:
            return self.value[node, own]
        if crossing.move is Move.REPEAT:
            return self._copy(node, stage)
        return self._compact(self.at(node, stage - 1), stage, crossing.dim, crossing.batch_dim)

    def _compact(self, value: fx.Node, stage: int, dim: int, batch_dim: int | None, *fill: int) -> fx.Node:
        batch = () if batch_dim is None else (batch_dim, *fill)
        return self.graph.call_function(ops.compact.default, (value, self.rows[stage], dim, *batch))

    def _cleared(self, node: fx.Node, stage: int) -> fx.Node:
        (dim,) = token_dims(node, self.tokens)
        batch_dim = request_dim(node, dim, self.plan.batch)
        return self.graph.call_function(
            ops.clear_pads.default, (self.value[node, stage], self.rows[stage], dim, batch_dim)
        )

    # -- drops ------------------------------------------------------------------------------------------------------

    def _spans(self) -> fx.Node:
        q = meta(self.plan.drops[0].site.q)
        spans = self.graph.placeholder("uniprefill_spans")
        spans.meta["val"] = q.new_empty((q.shape[0], 2), dtype=torch.int64, device="cpu")
        return spans

    def _begin(self) -> None:
        """Stage 0: all tokens of the prompts."""
        count = self.value[self.plan.count, 0]  # type: ignore[index]
        device = meta(self.plan.sites[0].q).device
        self.count.append(count)
        slots = self.graph.call_function(torch.arange, (count,), {"device": device})
        self.slots.append(self.graph.call_method("unsqueeze", (slots, 0)))

    def _attention(self, site: Site, stage: int) -> fx.Node:
        assert site.mask is not None
        operands = [self.at(n, stage) for n in (site.q, site.k, site.v)]
        q, k, v = autocast(self.graph, operands, meta(site.q).device)
        slots = None
        if stage:
            index = not site.mask.full and self.config.window == "index"
            slots = self._index_slots(stage) if index else self.slots[stage]
        # sinks and bias are by head and by slot: whole at every stage
        terms = (site.softcap, self.at(site.sinks, 0), self._bias(site))
        out = self.graph.call_function(
            ops.attention.default,
            (q, k, v, slots, slots, self.spans[stage], None, site.scale, site.mask.window, site.mask.chunk, *terms),
            {"chunk_start": self.at(site.mask.chunk_start, 0)},
        )
        out.meta = {key: site.node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in site.node.meta}
        ordinal = self.drop_at.get(site.node)
        if ordinal is not None:
            self._drop(ordinal, q, k, site.scale, terms)
        return out

    def _bias(self, site: Site) -> Any:
        if site.mask is None or site.mask.alibi is None:
            return self.at(site.bias, 0)
        if site.mask.alibi not in self.biases:
            slopes, factor = site.mask.alibi
            device = meta(site.q).device
            self.biases[site.mask.alibi] = alibi_bias(self.graph, self.at(slopes, 0), factor, self.count[0], device)
        return self.biases[site.mask.alibi]

    def _drop(self, ordinal: int, q: fx.Node, k: fx.Node, scale: Any, terms: tuple[Any, Any, Any]) -> None:
        drop, config, stage = self.plan.drops[ordinal - 1], self.config, ordinal - 1
        if scale is None:
            scale = float(meta(drop.site.q).shape[-1]) ** -0.5
        spans = self.spans[stage]
        dtype = SCORE_DTYPES[config.score_dtype]
        slots = None if terms[2] is None else self.slots[stage]  # a bias is read by slot
        scores = self.graph.call_function(
            ops.score.default, (q, k, spans, scale, config.last_n, config.block_size, dtype, *terms, slots)
        )
        chosen = self.graph.call_function(
            ops.select.default,
            (
                scores,
                spans,
                self.spans[0],
                config.block_size,
                config.last_n,
                config.sink_tokens,
                drop.p,
                drop.keep_ratio,
            ),
        )
        for node in (scores, chosen):
            node.meta["uniprefill_drop"] = ordinal
        rows = self.graph.call_function(operator.getitem, (chosen, 0))
        self.rows.append(rows)
        self.spans.append(self.graph.call_function(operator.getitem, (chosen, 1)))
        self.count.append(self.graph.call_function(torch.ops.aten.sym_size.int, (rows, 1)))
        self.slots.append(self._compact(self.slots[stage], ordinal, 1, *((0, -1) if self.several else (None,))))

    def _index_slots(self, stage: int) -> fx.Node:
        """Slots as if the kept rows had been the last tokens of the prompt, without holes (`window="index"`)."""
        if stage not in self.index_slots:
            first = self.graph.call_function(operator.sub, (self.count[0], self.count[stage]))
            device = meta(self.plan.sites[0].q).device
            slots = self.graph.call_function(torch.arange, (first, self.count[0]), {"device": device})
            slots = self.graph.call_method("unsqueeze", (slots, 0))
            if self.several:
                tokens = self.graph.call_function(operator.ge, (self.rows[stage], 0))
                slots = self.graph.call_function(torch.where, (tokens, slots, -1))
            self.index_slots[stage] = slots
        return self.index_slots[stage]

    # -- outputs ----------------------------------------------------------------------------------------------------

    def _output(self, node: fx.Node, treatment: Treatment | None) -> Any:
        if is_op(node, "departures"):
            return self._departures(node)
        if treatment is Treatment.RESTORE:
            return self._restored(node)
        return self.value[node, self.plan.stage[node]]

    def _departures(self, node: fx.Node) -> fx.Node:
        """By token, the layer behind which it is dropped. Padding among kept rows, slot -1, has a column that goes."""
        behind = [drop.site.layer for drop in self.plan.drops]
        every = self.graph.call_function(torch.full_like, (self.at(node.args[0], 0), behind[0]))
        value = self.graph.call_function(torch.nn.functional.pad, (every, (1, 0)))
        for stage, layer in enumerate([*behind[1:], NEVER], start=1):
            columns = self.graph.call_function(operator.add, (self.slots[stage], 1))
            value = self.graph.call_function(torch.scatter, (value, 1, columns, layer))
        return self.graph.call_function(operator.getitem, (value, (slice(None), slice(1, None))))

    def _restored(self, node: fx.Node) -> Any:
        stage = self.plan.stage[node]
        value = self.value[node, stage]
        (dim,) = token_dims(node, self.tokens) or (None,)
        if dim is None:
            return value
        if (node, -1) not in self.value:
            for ordinal in range(stage, 0, -1):
                frozen = self.at(self.plan.drops[ordinal - 1].residual, ordinal - 1)
                where = (self.rows[ordinal], dim, request_dim(node, dim, self.plan.batch))
                value = self.graph.call_function(ops.restore.default, (frozen, value, *where))
            self.value[node, -1] = value
        return self.value[node, -1]


def clean(gm: fx.GraphModule) -> None:
    """Remove what nobody reads (masks, after attention stopped using them), check the graph, recompile."""
    gm.graph.eliminate_dead_code(is_impure_node=_keeps)
    gm.graph.lint()
    gm.recompile()


def _keeps(node: fx.Node) -> bool:
    # Masks made by vmap enter and leave its levels by nodes that nobody reads.
    levels = getattr(node.target, "__module__", None) or ""
    kept = node.op in ("placeholder", "output") or levels.startswith("torch._functorch")
    return kept or is_selected(node) or bool(written_nodes(node)) or node.is_impure()
