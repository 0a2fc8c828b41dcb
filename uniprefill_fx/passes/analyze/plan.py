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
from uniprefill_fx.passes.analyze.attention_nodes import Site, find_sites, token_count
from uniprefill_fx.passes.analyze.batch import mixed_along
from uniprefill_fx.passes.analyze.decoder_end import check_ending, in_layers, layers_root
from uniprefill_fx.passes.analyze.drop_levels import Crossing, crossings, stages
from uniprefill_fx.passes.analyze.outputs import Exposure, Output, exposure_of, read_outputs, rows_shown, tail_of
from uniprefill_fx.passes.analyze.residual import entering, leaving, residual_adds
from uniprefill_fx.passes.dataflow import Ancestry
from uniprefill_fx.passes.node_utils import decoder_layer, expression, is_op, meta, name_of, peel, shape, token_dims


@dataclass(frozen=True)
class Drop:
    """One drop: after which attention, how much stays, and what dropped tokens are frozen to."""

    site: Site
    residual: fx.Node
    p: float | None
    keep_ratio: float | None


@dataclass(frozen=True)
class Plan:
    """What happens to one graph. `drops` is empty when it stays dense, and `refusals` says why.

    Attributes:
        sites: all attention ops. num_layers: decoder layers seen in the graph.
        tokens: the symbol of the prompt length; count: the graph's node of it.
        stage: node -> number of drops behind it. crossings: how a value of an earlier stage meets the kept rows.
        tail: nodes behind the restored stream; empty when no output shows dropped rows.
        stream_end: the last value of the residual stream. outputs: what each leaf of the output becomes.
        exposure: what the tail shows of dropped rows.
        past: whether keys of earlier tokens come in: a decode step or a later chunk.
        padding: placeholder of the (batch, tokens) mask that every attention applies to its keys; None without one.
        unpadded: placeholders of other padding masks: all their elements must be nonzero for the plan to hold.
        batch: 1, or the symbol of the number of prompts. mixed: values of kept rows whose padding has to be cleared.
        segments: numbers of packed prompts, (batch, tokens): each row must hold one number for the plan to hold.
        triangles: placeholders of masks: their values must stay what they were for the plan to hold.
        shown: how many of the last rows outputs show, where they show no others: so many must stay.
    """

    sites: tuple[Site, ...]
    num_layers: int = 0
    refusals: tuple[Refusal, ...] = ()
    drops: tuple[Drop, ...] = ()
    tokens: sympy.Symbol | None = None
    count: fx.Node | None = None
    stage: dict[fx.Node, int] = field(default_factory=dict)
    crossings: dict[fx.Node, Crossing] = field(default_factory=dict)
    tail: frozenset[fx.Node] = frozenset()
    stream_end: fx.Node | None = None
    outputs: tuple[Output, ...] = ()
    exposure: Exposure = Exposure.NONE
    padding: fx.Node | None = None
    unpadded: tuple[fx.Node, ...] = ()
    segments: tuple[fx.Node, ...] = ()
    triangles: tuple[fx.Node, ...] = ()
    batch: sympy.Expr = sympy.S.One
    mixed: frozenset[fx.Node] = frozenset()
    shown: int = 0
    past: bool = False

    @property
    def prefill(self) -> bool:
        """Whether the graph takes a whole new prompt (and not a decode step or a later chunk)."""
        decoder = bool(self.sites) or self.num_layers > 0
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
    sites = tuple(find_sites(graph))
    layers = [decoder_layer(n) for n in graph.nodes]
    num_layers = max((layer for layer in layers if layer is not None), default=len(sites) - 1) + 1
    refusals = [site.refusal for site in sites if site.refusal is not None]
    try:
        if blocked is not None and (sites or blocked.category is not Category.GRAPH_BREAK):
            raise RefusalError(blocked)
        return _plan(graph, sites, num_layers, config, refusals)
    except RefusalError as error:
        if error.refusal not in refusals:
            refusals.append(error.refusal)
        stored = any(is_op(node, "logical_view") for node in graph.nodes)
        later = any(site.mask is not None and site.mask.offset != 0 for site in sites)
        return Plan(sites, num_layers, tuple(refusals), past=stored or later)


def _plan(
    graph: fx.Graph, sites: tuple[Site, ...], num_layers: int, config: PrefillConfig, refusals: list[Refusal]
) -> Plan:
    tokens = token_count(list(sites))
    batch = _batch(sites, tokens)
    key_masks = [s.mask.key_mask for s in sites if s.mask]
    masks = tuple(dict.fromkeys(_padding_input(mask) for mask in key_masks if mask is not None))
    padding = masks[0] if len(masks) == 1 and None not in key_masks else None
    ancestry = Ancestry(graph)
    adds = residual_adds(graph, tokens, ancestry)
    end = leaving(next(s for s in sites if s.fresh), adds, ancestry)
    tail = tail_of(graph, end, ancestry)
    exposure = exposure_of(graph, tail, end, tokens, config)
    shown = rows_shown(tail, tokens, config.last_n)
    if exposure is Exposure.NONE:
        tail = frozenset()  # nobody sees dropped rows: the head runs on the kept ones and nothing is restored
    else:
        check_ending(graph, [s.node for s in sites], end, tail, ancestry)
    config, elsewhere = _in_this_graph(graph, sites, config)
    refusals += elsewhere
    chosen = choose_layers(sites, num_layers, config)
    drops = []
    for i, site in enumerate(chosen):
        try:
            residual = entering(site, adds, ancestry)
        except RefusalError as error:
            refusals.append(error.refusal)
            continue
        _check_prompts(residual, site, tokens)
        p, ratio = config.kept_for(i, len(chosen))
        drops.append(Drop(site, residual, p, ratio))
    if not drops:
        raise RefusalError(refusals[-1]) if refusals else _no_site(config)
    stage = stages(graph, sites, [d.site for d in drops], tokens, tail)
    moves = crossings(graph, sites, stage, tokens, batch)
    outputs = read_outputs(graph, sites, stage, tail, end, tokens, config)
    return Plan(
        sites,
        num_layers,
        tuple(refusals),
        tuple(drops),
        tokens,
        _count_node(graph, tokens),
        stage,
        moves,
        tail,
        end,
        outputs,
        exposure,
        padding,
        () if padding is not None else masks,
        tuple(dict.fromkeys(s.mask.segments for s in sites if s.mask and s.mask.segments)),
        tuple(dict.fromkeys(t for s in sites if s.mask for t in sorted(s.mask.triangles))),
        batch,
        mixed_along(graph, sites, stage, tokens, batch),
        shown,
    )


def _in_this_graph(
    graph: fx.Graph, sites: tuple[Site, ...], config: PrefillConfig
) -> tuple[PrefillConfig, list[Refusal]]:
    """The options without drop layers that lie in an earlier graph of the same forward, and why they don't drop."""
    root = layers_root([s.node for s in sites])
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


def _check_prompts(stream: fx.Node, site: Site, tokens: sympy.Symbol) -> None:
    """Refuse prompts that lie side by side in the axis of heads, where `products.write_products` sees none."""
    sizes = shape(stream) or ()
    prompts = sympy.prod(size for d, size in enumerate(sizes[:-1]) if d not in token_dims(stream, tokens))
    if prompts != expression(meta(site.q).shape[0]):
        raise refuse(
            Category.BATCH,
            f"a stream of shape {sizes}, whose prompts are part of the axis of heads",
            "run prompts one by one",
            site.layer,
        )


def _batch(sites: tuple[Site, ...], tokens: sympy.Symbol) -> sympy.Expr:
    """1, or the symbol of the number of prompts: a number could be mistaken for another size of the model."""
    batch = expression(meta(next(s for s in sites if s.fresh).q).shape[0])
    if batch != 1 and (not isinstance(batch, sympy.Symbol) or batch == tokens):
        raise refuse(
            Category.BATCH,
            f"a batch whose size was traced as {batch}",
            "a size in the model, or the prompt length, equals the number of prompts: run such prompts one by one",
        )
    return batch


def choose_layers(sites: Iterable[Site], num_layers: int, config: PrefillConfig) -> list[Site]:
    """The sites after which tokens are dropped, in graph order.

    Raises:
        OptionError: `drop_layers` names a layer that has no full attention over the prompt.
        RefusalError: it names one whose attention was not understood in this graph.
    """
    full = {s.layer: s for s in sites if s.fresh and s.mask is not None and s.mask.full}
    if config.drop_layers == "all":
        return list(full.values())
    if config.drop_layers == "auto":
        return [full[layer] for layer in auto_drop_layers(tuple(full), num_layers)]
    by_layer = {s.layer: s for s in sites}
    for layer in config.drop_layers:
        site = by_layer.get(layer)
        if site is not None and site.refusal is not None:
            raise RefusalError(site.refusal)
        if site is not None and site.mask is not None and site.mask.full and not site.fresh:
            keys = expression(meta(site.k).shape[2])
            raise refuse(Category.CACHE, f"attention over {keys} keys of a cache", "pass DynamicCache, or none", layer)
        if layer not in full:
            raise OptionError(
                "drop_layers",
                list(config.drop_layers),
                f"layers with full causal attention over the prompt, here {sorted(full)}",
                f"Layer {layer} has none that is understood; explain() shows what each layer is.",
            )
    return [full[layer] for layer in sorted(config.drop_layers)]


def _no_site(config: PrefillConfig) -> RefusalError:
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
