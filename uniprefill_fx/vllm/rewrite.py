"""Execute a plan on a graph of vLLM: attention stays vLLM's, on the rows that are left. Before, where a layer drops::

    dep = vllm.unified_kv_cache_update(k, v, name)                                     # (tokens, kv_heads, head_dim)
    vllm.unified_attention_with_output(q, k, v, out, name, kv_cache_dummy_dep=dep)
    y = linear(out.view(-1, 128), w)                                                   # (tokens, hidden)

After::

    uniprefill.served_kv_update(k, v, "model.layers.3.self_attn.attn")
    uniprefill.served_attention(q, k, v, out, "model.layers.3.self_attn.attn")
    kept = uniprefill.packed_select(q, k, 0)                                           # (1, kept)
    y = linear(uniprefill.compact(out, kept, 0).view(-1, 128), w)                      # (kept, hidden)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from uniprefill_fx.config import PrefillConfig
from uniprefill_fx.passes.analyze.plan import Plan
from uniprefill_fx.passes.attention_node import AttentionNode
from uniprefill_fx.passes.node_utils import arguments, is_op, meta, token_dims
from uniprefill_fx.passes.rewrite.drop_tokens import Rewriter
from uniprefill_fx.passes.rewrite.propagate_fakes import KEPT
from uniprefill_fx.vllm.attention import layer_name_of

ops = torch.ops.uniprefill
OUTSIDE = ("served_kv_update", "served_attention", "packed_select")


def drop_served(gm: fx.GraphModule, plan: Plan, config: PrefillConfig) -> fx.GraphModule:
    """The graph of a step with prompts that drop; `gm` is left as it is. Node meta is not filled in."""
    return _ServedRewriter(gm, plan, config).run()


def runs_outside(node: fx.Node) -> bool:
    """Whether a node of the rewritten graph is not to be compiled: it looks up a layer by name, or selects."""
    named = any(n.op == "placeholder" and hasattr(meta(n), "real_obj") for n in node.all_input_nodes)
    return named or any(is_op(node, name) for name in OUTSIDE)


def layers_in(nodes: Iterable[fx.Node]) -> set[str]:
    """The names of layers that some nodes of the rewritten graph are given."""
    return {name for node in nodes for argument in arguments(node) if (name := layer_name_of(argument)) is not None}


class _ServedRewriter(Rewriter):
    def __init__(self, gm: fx.GraphModule, plan: Plan, config: PrefillConfig) -> None:
        super().__init__(gm, plan, config)
        self.stored_by = {store: a for a in plan.attention_nodes for store in a.cache_writes}

    def _token_bounds(self) -> Any:
        return None  # the step knows where its requests lie

    def _emit(self, node: fx.Node) -> Any:
        if node in self.stored_by:
            level = self.plan.level[node]
            k, v = (self.at(n, level) for n in node.args[:2])
            return self.graph.call_function(ops.served_kv_update.default, (k, v, self.stored_by[node].path))
        return super()._emit(node)

    def _attention(self, attention: AttentionNode, level: int) -> None:
        q, k, v = (self.at(n, level) for n in (attention.q, attention.k, attention.v))
        out = self.at(attention.output, level)
        self.graph.call_function(ops.served_attention.default, (q, k, v, out, attention.path))
        ordinal = self.drop_at.get(attention.output)
        if ordinal is None:
            return
        kept = self.graph.call_function(ops.packed_select.default, (q, k, ordinal - 1))
        kept.meta[KEPT] = ordinal
        self.kept_indices.append(kept)
        self.count.append(self.graph.call_function(torch.ops.aten.sym_size.int, (kept, 1)))
        self.positions.append(self._compact(self.positions[level], ordinal, 1, None))

    def _output(self, node: fx.Node) -> Any:
        level = self.plan.level[node]
        value = self.value[node, level]
        if not level or not token_dims(node, self.tokens):
            return value
        return self.graph.call_function(ops.scatter_rows.default, (value, self.positions[level], self.count[0]))
