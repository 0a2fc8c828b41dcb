"""Decide what to do with one graph: which layers drop, what each node runs on, and what the outputs become.

`make_plan` only reads the graph. `rewrite` executes the plan and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import sympy
import torch
from torch import fx

from uniprefill_fx.config import PrefillConfig
from uniprefill_fx.errors import Category, Refusal, RefusalError, refuse
from uniprefill_fx.passes.analyze.attention_nodes import token_count
from uniprefill_fx.passes.analyze.batch import mixed_along
from uniprefill_fx.passes.analyze.decoder_end import check_decoder_end
from uniprefill_fx.passes.analyze.drop_layers import (
    choose_layers,
    depth_of,
    drop_spec,
    layers_of_this_graph,
    nowhere_to_drop,
)
from uniprefill_fx.passes.analyze.drop_levels import GatherRule, drop_levels, gather_rules
from uniprefill_fx.passes.analyze.entry import behind_break, keys_of_earlier_tokens
from uniprefill_fx.passes.analyze.outputs import Exposure, exposure_of, head_region_of, restored_outputs, rows_shown
from uniprefill_fx.passes.analyze.ranks import Ranks, check_heads, check_same
from uniprefill_fx.passes.analyze.residual import entering, leaving, residual_adds
from uniprefill_fx.passes.analyze.sparse_attention import check_named_layers, sparse_attention
from uniprefill_fx.passes.attention_node import AttentionNode
from uniprefill_fx.passes.dataflow import Ancestry
from uniprefill_fx.passes.node_utils import decoder_layer, expression, meta, name_of, peel, shape, token_dims
from uniprefill_fx.specs import DropSpec, SparseSpec


@dataclass(frozen=True)
class Drop:
    """One drop: after which attention, what dropped tokens are frozen to (None: nobody sees them), how it selects."""

    attention: AttentionNode
    residual: fx.Node | None
    spec: DropSpec


@dataclass(frozen=True)
class Plan:
    """What happens to one graph. `drops` is empty when nothing is dropped, and `refusals` says why.

    Attributes:
        attention_nodes: all attention ops. num_layers: decoder layers seen in the graph.
        tokens: the symbol of the prompt length; count: the graph's node of it.
        level: node -> number of drops behind it. gather_rules: how a value of an earlier level meets the kept rows.
        head_region: nodes behind the restored stream; empty when no output shows dropped rows.
        stream_end: the last value of the residual stream. restored: outputs that show dropped rows, see `outputs`.
        exposure: what the head_region shows of dropped rows.
        past: whether keys of earlier tokens come in: a decode step or a later chunk.
        padding: placeholder of the (batch, tokens) mask that every attention applies to its keys; None without one.
        unpadded: placeholders of other padding masks: all their elements must be nonzero for the plan to hold.
        batch: 1, or the symbol of the number of prompts. mixed: values of kept rows whose padding has to be cleared.
        sequence_ids: numbers of packed prompts, (batch, tokens): each row must hold one number for the plan to hold.
        causal_buffers: placeholders of masks: their values must stay what they were for the plan to hold.
        sparse: the attention that leaves out blocks of keys, and how each chooses them.
        ranks: those that drop tokens together; None: this one alone.
        shown: how many of the last rows outputs show, where they show no others: so many must stay.
        shown_input: the placeholder of that number, where it is no constant.
    """

    attention_nodes: tuple[AttentionNode, ...]
    num_layers: int = 0
    refusals: tuple[Refusal, ...] = ()
    drops: tuple[Drop, ...] = ()
    tokens: sympy.Symbol | None = None
    count: fx.Node | None = None
    level: dict[fx.Node, int] = field(default_factory=dict)
    gather_rules: dict[fx.Node, GatherRule] = field(default_factory=dict)
    head_region: frozenset[fx.Node] = frozenset()
    stream_end: fx.Node | None = None
    restored: frozenset[fx.Node] = frozenset()
    exposure: Exposure = Exposure.NONE
    padding: fx.Node | None = None
    unpadded: tuple[fx.Node, ...] = ()
    sequence_ids: tuple[fx.Node, ...] = ()
    causal_buffers: tuple[fx.Node, ...] = ()
    batch: sympy.Expr = sympy.S.One
    mixed: frozenset[fx.Node] = frozenset()
    shown: int = 0
    shown_input: fx.Node | None = None
    past: bool = False
    sparse: tuple[tuple[AttentionNode, SparseSpec], ...] = ()
    ranks: Ranks | None = None

    @property
    def rewrites(self) -> bool:
        """Whether the graph of the prompt becomes another one."""
        return bool(self.drops) or bool(self.sparse)

    @property
    def prefill(self) -> bool:
        """Whether the graph takes a whole new prompt (and not a decode step or a later chunk)."""
        decoder = bool(self.attention_nodes) or self.num_layers > 0
        return decoder and not self.past

    def depth(self, drop: int) -> float:
        """Where a drop lies, in (0, 1]."""
        return depth_of(self.drops[drop].attention.layer, self.num_layers)


def make_plan(
    gm: fx.GraphModule,
    attention: Sequence[AttentionNode],
    config: PrefillConfig,
    blocked: Refusal | None = None,
    ranks: Ranks | None = None,
) -> Plan:
    """Analyse a Dynamo graph. Never raises for a graph it does not understand: the reasons are in the plan.

    Args:
        attention: what `find_attention_nodes` found.
        blocked: a reason from outside the graph (gradients, a graph break) why nothing may be dropped.
        ranks: those that run the graph together; None: this one alone.

    Raises:
        OptionError: an option does not fit this model (a drop layer without full attention, a list of the wrong
            length).
    """
    graph = gm.graph
    attention_nodes = tuple(attention)
    # those of attention too: where layers run again, attentions are counted, and are more than the modules
    layers = [*map(decoder_layer, graph.nodes), *(attention.layer for attention in attention_nodes)]
    num_layers = max((layer for layer in layers if layer is not None), default=-1) + 1
    refusals = [attention.refusal for attention in attention_nodes if attention.refusal is not None]
    try:
        if blocked is not None and (attention_nodes or blocked.category is not Category.GRAPH_BREAK):
            raise RefusalError(blocked)
        return _plan(graph, attention_nodes, num_layers, config, refusals, ranks)
    except RefusalError as error:
        # the last one is what a call gives as its reason
        refusals = [*(refusal for refusal in refusals if refusal != error.refusal), error.refusal]
        reasons = tuple(map(behind_break, refusals))
        return Plan(attention_nodes, num_layers, reasons, past=keys_of_earlier_tokens(graph, attention_nodes))


def _plan(
    graph: fx.Graph,
    attention_nodes: tuple[AttentionNode, ...],
    num_layers: int,
    config: PrefillConfig,
    refusals: list[Refusal],
    ranks: Ranks | None,
) -> Plan:
    check_named_layers(attention_nodes, config)
    tokens = token_count(list(attention_nodes))
    sparse, elsewhere = sparse_attention(attention_nodes, config)
    refusals += elsewhere
    plan = replace(_prompt(graph, attention_nodes, num_layers, tokens), ranks=ranks)
    if config.drop_layers != "none":
        try:
            plan = _with_drops(graph, plan, config, refusals)
        except RefusalError as error:
            if not sparse:
                raise
            refusals.append(error.refusal)
    return replace(plan, sparse=sparse, refusals=tuple(dict.fromkeys(refusals)))


def _prompt(graph: fx.Graph, attention_nodes: tuple[AttentionNode, ...], num_layers: int, tokens: sympy.Symbol) -> Plan:
    """The plan that changes nothing: what a prompt must look like for any other to hold."""
    key_masks = [a.spec.key_mask for a in attention_nodes if a.spec]
    masks = tuple(dict.fromkeys(_padding_input(mask) for mask in key_masks if mask is not None))
    padding = masks[0] if len(masks) == 1 and None not in key_masks else None
    numbers = [a.spec.sequence_ids for a in attention_nodes if a.spec and a.spec.sequence_ids]
    return Plan(
        attention_nodes,
        num_layers,
        tokens=tokens,
        count=count_node(graph, tokens),
        level=dict.fromkeys(graph.nodes, 0),
        padding=padding,
        unpadded=() if padding is not None else masks,
        sequence_ids=tuple(dict.fromkeys(numbers)),
        causal_buffers=tuple(dict.fromkeys(t for a in attention_nodes for t in sorted(a.causal_buffers))),
        batch=_batch(attention_nodes, tokens),
    )


def _with_drops(graph: fx.Graph, plan: Plan, config: PrefillConfig, refusals: list[Refusal]) -> Plan:
    """The plan of a prompt that drops tokens.

    Raises:
        RefusalError: none can be dropped.
    """
    attention_nodes, num_layers, tokens = plan.attention_nodes, plan.num_layers, plan.tokens
    assert tokens is not None
    ancestry = Ancestry(graph)
    adds = residual_adds(graph, tokens, ancestry)
    end = leaving(next(s for s in attention_nodes if s.is_prefill), adds, ancestry)
    head_region = head_region_of(graph, end, ancestry)
    exposure = exposure_of(graph, head_region, end, tokens, config)
    shown, shown_input = rows_shown(graph, head_region, tokens, config.last_n)
    if exposure is Exposure.NONE:
        head_region = frozenset()  # nobody sees dropped rows: the head runs on the kept ones and nothing is restored
    else:
        check_decoder_end(graph, [a.node for a in attention_nodes], end, head_region, ancestry)
    config, elsewhere = layers_of_this_graph(graph, attention_nodes, config)
    refusals += elsewhere
    chosen = choose_layers(attention_nodes, num_layers, config)
    drops = []
    for i, attention in enumerate(chosen):
        try:
            residual = entering(attention, adds, ancestry, shown=exposure is not Exposure.NONE)
            if plan.ranks is not None:
                check_heads(plan.ranks, attention)
                check_same(plan.ranks, (residual, end), attention.layer)
        except RefusalError as error:
            refusals.append(error.refusal)
            continue
        _check_prompts(residual, attention, tokens)
        depth = depth_of(attention.layer, num_layers)
        drops.append(Drop(attention, residual, drop_spec(config, i, len(chosen), depth)))
    if not drops:
        raise RefusalError(refusals[-1]) if refusals else nowhere_to_drop(config)
    level = drop_levels(graph, attention_nodes, [d.attention for d in drops], tokens, head_region)
    moves = gather_rules(graph, attention_nodes, level, tokens, plan.batch)
    restored = restored_outputs(graph, attention_nodes, level, head_region, end, tokens, config)
    return replace(
        plan,
        drops=tuple(drops),
        level=level,
        gather_rules=moves,
        head_region=head_region,
        stream_end=end,
        restored=restored,
        exposure=exposure,
        mixed=mixed_along(graph, attention_nodes, level, tokens, plan.batch),
        shown=shown,
        shown_input=shown_input,
    )


def _check_prompts(stream: fx.Node, attention: AttentionNode, tokens: sympy.Symbol) -> None:
    """Refuse prompts that lie side by side in the axis of heads, where `products.unify_attention_form` sees none."""
    sizes = shape(stream) or ()
    beside = [size for d, size in enumerate(sizes) if d not in token_dims(stream, tokens)]  # prompts, then channels
    prompts = sympy.prod(beside[:-1])
    if prompts != attention.batch:
        raise refuse(
            Category.BATCH,
            f"a stream of shape {sizes}, whose prompts are part of the axis of heads",
            "run prompts one by one",
            attention.layer,
        )


def _batch(attention_nodes: tuple[AttentionNode, ...], tokens: sympy.Symbol) -> sympy.Expr:
    """1, or the symbol of the number of prompts: a number could be mistaken for another size of the model."""
    batch = next(a for a in attention_nodes if a.is_prefill).batch
    if batch != 1 and (not isinstance(batch, sympy.Symbol) or batch == tokens):
        raise refuse(
            Category.BATCH,
            f"a batch whose size was traced as {batch}",
            "a size in the model, or the prompt length, equals the number of prompts: run such prompts one by one",
        )
    return batch


def _padding_input(mask: fx.Node) -> fx.Node:
    source = peel(mask, ("to", "bool", "contiguous", "view", "reshape"))
    if source.op != "placeholder":
        raise refuse(Category.PADDING, f"a padding mask computed in the graph: {source.name}", "pass a 2-D mask")
    return source


def count_node(graph: fx.Graph, tokens: sympy.Symbol) -> fx.Node:
    for node in graph.nodes:
        value = meta(node)
        if node.op == "placeholder" and isinstance(value, torch.SymInt) and expression(value) == tokens:
            return node
        if name_of(node) == "sym_size" and expression(value) == tokens:
            return node
    raise refuse(Category.TOKEN_AXIS, "no input holds the prompt length", "pass token ids or embeddings as a tensor")
