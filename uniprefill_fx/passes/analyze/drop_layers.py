"""After which attention tokens are dropped, and how each of these drops selects them: the options, for one graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from uniprefill_fx.config import OptionError, PrefillConfig
from uniprefill_fx.errors import Category, Refusal, RefusalError, refuse
from uniprefill_fx.passes.analyze.decoder_end import in_layers, layers_root
from uniprefill_fx.passes.attention_node import AttentionNode
from uniprefill_fx.passes.node_utils import decoder_layer
from uniprefill_fx.specs import DropSpec

SCORE_DTYPES = {"float32": torch.float32, "float64": torch.float64, "float8_e4m3": torch.float8_e4m3fn}

LAYERS_PER_DROP = 4
"""Distance in decoder layers between the published drop layers of Llama-3.1-8B and Qwen3-Next (`auto_drop_layers`)."""


def auto_drop_layers(full_attention_layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The drop layers that `drop_layers="auto"` stands for, in increasing order.

    Early layers attend diffusely, so a drop there costs accuracy; a drop at the very end saves nothing. Between them
    the published sets drop at about every fourth layer. Hence, with layers counted from 0:

    1. Split the depth into groups of four layers. In each, the last layer with full attention is a candidate.
    2. Keep the candidates that end at least the first sixth of the depth (layers 0 to i are a sixth or more of all)
       and leave at least a twelfth of the depth after them.
    3. When none is left, as in models of a few layers, take the full-attention layer nearest to half the depth
       (the lower one of two), except the last decoder layer.

    This gives the published sets of Llama-3.1-8B, 32 layers all full (7, 11, …, 27), and of Qwen3-Next, 48 layers
    with full attention in every fourth (7, 11, …, 43). Layers outside [0, num_layers) raise ValueError. The result
    is empty only when no layer but the last one holds full attention.
    """
    layers = sorted(set(full_attention_layers))
    if layers and (layers[0] < 0 or layers[-1] >= num_layers):
        raise ValueError(f"full-attention layers {layers}: wanted indices in [0, {num_layers})")
    last_of_group = {layer // LAYERS_PER_DROP: layer for layer in layers}  # a later one of a group replaces an earlier
    chosen = tuple(
        layer
        for layer in last_of_group.values()
        if 6 * (layer + 1) >= num_layers and 12 * (num_layers - 1 - layer) >= num_layers
    )
    worthwhile = [layer for layer in layers if layer < num_layers - 1]
    if chosen or not worthwhile:
        return chosen
    return (min(worthwhile, key=lambda layer: abs(2 * (layer + 1) - num_layers)),)


def depth_of(layer: int, num_layers: int) -> float:
    """The share of the decoder that has run when a layer is done."""
    return (layer + 1) / num_layers


def drop_spec(config: PrefillConfig, index: int, count: int, depth: float) -> DropSpec:
    """How the index-th of `count` drops, at a depth in (0, 1], selects tokens."""
    # an argument of the selection, which every call replaces with "auto": any number will do in the graph
    block_size = 64 if config.block_size == "auto" else config.block_size
    dtype = SCORE_DTYPES[config.score_dtype]
    return DropSpec(config.last_n, config.sink_tokens, block_size, dtype, *config.kept_for(index, count, depth))


def layers_of_this_graph(
    graph: fx.Graph, attention_nodes: tuple[AttentionNode, ...], config: PrefillConfig
) -> tuple[PrefillConfig, list[Refusal]]:
    """The options without drop layers that lie in an earlier graph of the same forward, and why they don't drop."""
    root = layers_root([a.node for a in attention_nodes])
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


def choose_layers(
    attention_nodes: Iterable[AttentionNode], num_layers: int, config: PrefillConfig
) -> list[AttentionNode]:
    """The attention_nodes after which tokens are dropped, in graph order: of a layer its first full attention.

    Raises:
        OptionError: `drop_layers` names a layer that has no full attention over the prompt.
        RefusalError: it names one whose attention was not understood in this graph.
    """
    full: dict[int, AttentionNode] = {}
    for attention in attention_nodes:
        if attention.is_prefill and attention.full:
            full.setdefault(attention.layer, attention)
    assert config.drop_layers != "none"
    if config.drop_layers == "all":
        return list(full.values())
    if config.drop_layers == "auto":
        return [full[layer] for layer in auto_drop_layers(tuple(full), num_layers)]
    for layer in config.drop_layers:
        for attention in (a for a in attention_nodes if a.layer == layer and layer not in full):
            if attention.refusal is not None:
                raise RefusalError(attention.refusal)
            if attention.full and not attention.is_prefill:
                raise refuse(
                    Category.CACHE,
                    f"attention over {attention.num_keys} keys of a cache",
                    "pass DynamicCache, or none",
                    layer,
                )
        if layer not in full:
            raise OptionError(
                "drop_layers",
                list(config.drop_layers),
                f"layers with full causal attention over the prompt, here {sorted(full)}",
                f"Layer {layer} has none that is understood; explain() shows what each layer is.",
            )
    return [full[layer] for layer in sorted(config.drop_layers)]


def nowhere_to_drop(config: PrefillConfig) -> RefusalError:
    return refuse(
        Category.NO_ATTENTION,
        f"no layer to drop after with drop_layers={config.drop_layers!r}",
        "dropping needs full causal attention before the last layer",
    )
