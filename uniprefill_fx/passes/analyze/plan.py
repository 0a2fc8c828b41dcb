"""Decide what to do with one graph: which layers drop, what each node runs on, and what the outputs become.

`make_plan` only reads the graph. `rewrite` executes the plan and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from uniprefill_fx.config import OptionError, PrefillConfig, auto_drop_layers
from uniprefill_fx.errors import Category, Refusal, RefusalError, refuse
from uniprefill_fx.passes.analyze.attention_nodes import AttentionNode, find_attention_nodes, token_count
from uniprefill_fx.passes.analyze.batch import mixed_along
from uniprefill_fx.passes.analyze.decoder_end import check_decoder_end, in_layers, layers_root
from uniprefill_fx.passes.analyze.drop_levels import GatherRule, gather_rules, levels
from uniprefill_fx.passes.analyze.outputs import Exposure, Output, exposure_of, head_region_of, read_outputs, rows_shown
from uniprefill_fx.passes.analyze.residual import entering, leaving, residual_adds
from uniprefill_fx.passes.dataflow import Ancestry
from uniprefill_fx.passes.node_utils import decoder_layer, expression, is_op, meta, name_of, peel, shape, token_dims


@dataclass(frozen=True)
class Drop:
    """One drop: after which attention, how much stays, and what dropped tokens are frozen to."""

    attention: AttentionNode
    residual: fx.Node
    p: float | None
    keep_ratio: float | None


@dataclass(frozen=True)
class Plan:
    """What happens to one graph. `drops` is empty when it stays dense, and `refusals` says why.

    Attributes:
        attention_nodes: all attention ops. num_layers: decoder layers seen in the graph.
        tokens: the symbol of the prompt length; count: the graph's node of it.
        level: node -> number of drops behind it. gather_rules: how a value of an earlier level meets the kept rows.
        head_region: nodes behind the restored stream; empty when no output shows dropped rows.
        stream_end: the last value of the residual stream. outputs: what each leaf of the output becomes.
        exposure: what the head_region shows of dropped rows.
        past: whether keys of earlier tokens come in: a decode step or a later chunk.
        padding: placeholder of the (batch, tokens) mask that every attention applies to its keys; None without one.
        unpadded: placeholders of other padding masks: all their elements must be nonzero for the plan to hold.
        batch: 1, or the symbol of the number of prompts. mixed: values of kept rows whose padding has to be cleared.
        sequence_ids: numbers of packed prompts, (batch, tokens): each row must hold one number for the plan to hold.
        causal_buffers: placeholders of masks: their values must stay what they were for the plan to hold.
        shown: how many of the last rows outputs show, where they show no others: so many must stay.
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
    outputs: tuple[Output, ...] = ()
    exposure: Exposure = Exposure.NONE
    padding: fx.Node | None = None
    unpadded: tuple[fx.Node, ...] = ()
    sequence_ids: tuple[fx.Node, ...] = ()
    causal_buffers: tuple[fx.Node, ...] = ()
    batch: sympy.Expr = sympy.S.One
    mixed: frozenset[fx.Node] = frozenset()
    shown: int = 0
    past: bool = False

    @property
    def prefill(self) -> bool:
        """Whether the graph takes a whole new prompt (and not a decode step or a later chunk)."""
        decoder = bool(self.attention_nodes) or self.num_layers > 0
        return decoder and not self.past


def make_plan(gm: fx.GraphModule, config: PrefillConfig, blocked: Refusal | None = None) -> Plan:
    """Analyse a Dynamo graph. Never raises for a graph it does not understand: the reasons are in the plan.

    Args:
        blocked: a reason from outside the graph (gradients, a graph break) why nothing may be dropped.

    Raises:
        OptionError: an option does not fit this model (a drop layer without full attention, a list of the wrong
            length).
    """
    graph = gm.graph
    attention_nodes = tuple(find_attention_nodes(graph))
    layers = [decoder_layer(n) for n in graph.nodes]
    num_layers = max((layer for layer in layers if layer is not None), default=len(attention_nodes) - 1) + 1
    refusals = [attention.refusal for attention in attention_nodes if attention.refusal is not None]
    try:
        if blocked is not None and (attention_nodes or blocked.category is not Category.GRAPH_BREAK):
            raise RefusalError(blocked)
        return _plan(graph, attention_nodes, num_layers, config, refusals)
    except RefusalError as error:
        if error.refusal not in refusals:
            refusals.append(error.refusal)
        stored = any(is_op(node, "logical_view") for node in graph.nodes)
        later = any(attention.mask is not None and attention.mask.offset != 0 for attention in attention_nodes)
        return Plan(attention_nodes, num_layers, tuple(refusals), past=stored or later)


def _plan(
    graph: fx.Graph,
    attention_nodes: tuple[AttentionNode, ...],
    num_layers: int,
    config: PrefillConfig,
    refusals: list[Refusal],
) -> Plan:
    tokens = token_count(list(attention_nodes))
    batch = _batch(attention_nodes, tokens)
    key_masks = [s.mask.key_mask for s in attention_nodes if s.mask]
    masks = tuple(dict.fromkeys(_padding_input(mask) for mask in key_masks if mask is not None))
    padding = masks[0] if len(masks) == 1 and None not in key_masks else None
    ancestry = Ancestry(graph)
    adds = residual_adds(graph, tokens, ancestry)
    end = leaving(next(s for s in attention_nodes if s.is_prefill), adds, ancestry)
    head_region = head_region_of(graph, end, ancestry)
    exposure = exposure_of(graph, head_region, end, tokens, config)
    shown = rows_shown(head_region, tokens, config.last_n)
    if exposure is Exposure.NONE:
        head_region = frozenset()  # nobody sees dropped rows: the head runs on the kept ones and nothing is restored
    else:
        check_decoder_end(graph, [s.node for s in attention_nodes], end, head_region, ancestry)
    config, elsewhere = _in_this_graph(graph, attention_nodes, config)
    refusals += elsewhere
    chosen = choose_layers(attention_nodes, num_layers, config)
    drops = []
    for i, attention in enumerate(chosen):
        try:
            residual = entering(attention, adds, ancestry)
        except RefusalError as error:
            refusals.append(error.refusal)
            continue
        _check_prompts(residual, attention, tokens)
        p, ratio = config.kept_for(i, len(chosen))
        drops.append(Drop(attention, residual, p, ratio))
    if not drops:
        raise RefusalError(refusals[-1]) if refusals else _nowhere_to_drop(config)
    level = levels(graph, attention_nodes, [d.attention for d in drops], tokens, head_region)
    moves = gather_rules(graph, attention_nodes, level, tokens, batch)
    outputs = read_outputs(graph, attention_nodes, level, head_region, end, tokens, config)
    return Plan(
        attention_nodes,
        num_layers,
        tuple(refusals),
        tuple(drops),
        tokens,
        _count_node(graph, tokens),
        level,
        moves,
        head_region,
        end,
        outputs,
        exposure,
        padding,
        () if padding is not None else masks,
        tuple(dict.fromkeys(s.mask.sequence_ids for s in attention_nodes if s.mask and s.mask.sequence_ids)),
        tuple(dict.fromkeys(t for s in attention_nodes if s.mask for t in sorted(s.mask.causal_buffers))),
        batch,
        mixed_along(graph, attention_nodes, level, tokens, batch),
        shown,
    )


def _in_this_graph(
    graph: fx.Graph, attention_nodes: tuple[AttentionNode, ...], config: PrefillConfig
) -> tuple[PrefillConfig, list[Refusal]]:
    """The options without drop layers that lie in an earlier graph of the same forward, and why they don't drop."""
    root = layers_root([s.node for s in attention_nodes])
    first = min((decoder_layer(n) or 0 for n in graph.nodes if in_layers(n, root)), default=0)
    if first == 0:
        return config, []
    if isinstance(config.drop_layers, str):
        if isinstance(config.p, tuple) or isinstance(config.keep_ratio, tuple):
            raise refuse(
                Category.GRAPH_BREAK,
                f"values for the drop layers of a whole model, and a graph that begins with layer {first}",
                "name the drop_layers: which of the values are for this graph cannot be told",
            )
        return config, []
    here = [i for i, layer in enumerate(config.drop_layers) if layer >= first]
    changes: dict[str, Any] = {"drop_layers": tuple(config.drop_layers[i] for i in here)}
    for name in ("p", "keep_ratio"):
        values = getattr(config, name)
        if isinstance(values, tuple) and len(values) == len(config.drop_layers):
            changes[name] = tuple(values[i] for i in here)
    earlier = [
        Refusal(
            Category.GRAPH_BREAK,
            f"this graph begins with layer {first}; Dynamo traced the layers before it apart",
            "compile the whole model as one graph: only the last graph of a forward may drop",
            layer,
        )
        for layer in config.drop_layers
        if layer < first
    ]
    if not here:
        raise RefusalError(earlier[-1])
    return replace(config, **changes), earlier


def _check_prompts(stream: fx.Node, attention: AttentionNode, tokens: sympy.Symbol) -> None:
    """Refuse prompts that lie side by side in the axis of heads, where `products.unify_attention_form` sees none."""
    sizes = shape(stream) or ()
    beside = [size for d, size in enumerate(sizes) if d not in token_dims(stream, tokens)]  # prompts, then channels
    prompts = sympy.prod(beside[:-1])
    if prompts != expression(meta(attention.q).shape[0]):
        raise refuse(
            Category.BATCH,
            f"a stream of shape {sizes}, whose prompts are part of the axis of heads",
            "run prompts one by one",
            attention.layer,
        )


def _batch(attention_nodes: tuple[AttentionNode, ...], tokens: sympy.Symbol) -> sympy.Expr:
    """1, or the symbol of the number of prompts: a number could be mistaken for another size of the model."""
    batch = expression(meta(next(s for s in attention_nodes if s.is_prefill).q).shape[0])
    if batch != 1 and (not isinstance(batch, sympy.Symbol) or batch == tokens):
        raise refuse(
            Category.BATCH,
            f"a batch whose size was traced as {batch}",
            "a size in the model, or the prompt length, equals the number of prompts: run such prompts one by one",
        )
    return batch


def choose_layers(
    attention_nodes: Iterable[AttentionNode], num_layers: int, config: PrefillConfig
) -> list[AttentionNode]:
    """The attention_nodes after which tokens are dropped, in graph order.

    Raises:
        OptionError: `drop_layers` names a layer that has no full attention over the prompt.
        RefusalError: it names one whose attention was not understood in this graph.
    """
    full = {s.layer: s for s in attention_nodes if s.is_prefill and s.mask is not None and s.mask.full}
    if config.drop_layers == "all":
        return list(full.values())
    if config.drop_layers == "auto":
        return [full[layer] for layer in auto_drop_layers(tuple(full), num_layers)]
    by_layer = {s.layer: s for s in attention_nodes}
    for layer in config.drop_layers:
        attention = by_layer.get(layer)
        if attention is not None and attention.refusal is not None:
            raise RefusalError(attention.refusal)
        if attention is not None and attention.mask is not None and attention.mask.full and not attention.is_prefill:
            keys = expression(meta(attention.k).shape[2])
            raise refuse(Category.CACHE, f"attention over {keys} keys of a cache", "pass DynamicCache, or none", layer)
        if layer not in full:
            raise OptionError(
                "drop_layers",
                list(config.drop_layers),
                f"layers with full causal attention over the prompt, here {sorted(full)}",
                f"Layer {layer} has none that is understood; explain() shows what each layer is.",
            )
    return [full[layer] for layer in sorted(config.drop_layers)]


def _nowhere_to_drop(config: PrefillConfig) -> RefusalError:
    return refuse(
        Category.NO_ATTENTION,
        f"no layer to drop after with drop_layers={config.drop_layers!r}",
        "dropping needs full causal attention before the last layer",
    )


def _padding_input(mask: fx.Node) -> fx.Node:
    source = peel(mask, ("to", "bool", "contiguous", "view", "reshape"))
    if source.op != "placeholder":
        raise refuse(Category.PADDING, f"a padding mask computed in the graph: {source.name}", "pass a 2-D mask")
    return source


def _count_node(graph: fx.Graph, tokens: sympy.Symbol) -> fx.Node:
    for node in graph.nodes:
        value = meta(node)
        if node.op == "placeholder" and isinstance(value, torch.SymInt) and expression(value) == tokens:
            return node
        if name_of(node) == "sym_size" and expression(value) == tokens:
            return node
    raise refuse(Category.TOKEN_AXIS, "no input holds the prompt length", "pass token ids or embeddings as a tensor")
