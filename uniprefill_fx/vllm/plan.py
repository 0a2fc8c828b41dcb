"""What happens to a graph of vLLM: the package's own analyses, for packed requests of which nobody sees dropped rows.

vLLM samples from the last token of each request, and `last_n` of them always stay; so the head runs on the kept rows,
and dropped ones need no state.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
from torch import fx

from uniprefill_fx.config import PrefillConfig
from uniprefill_fx.errors import Category, Refusal, RefusalError, refuse
from uniprefill_fx.passes.analyze.attention_nodes import token_count
from uniprefill_fx.passes.analyze.drop_layers import choose_layers, depth_of, drop_spec, nowhere_to_drop
from uniprefill_fx.passes.analyze.drop_levels import drop_levels, gather_rules
from uniprefill_fx.passes.analyze.plan import Drop, Plan, count_node
from uniprefill_fx.passes.attention_node import AttentionNode
from uniprefill_fx.passes.node_utils import arguments, shape, token_dims
from uniprefill_fx.vllm.ranks import check_exchanges


def plan_served(
    graph: fx.Graph, attention_nodes: Sequence[AttentionNode], config: PrefillConfig, several_ranks: bool
) -> Plan:
    """The plan of a step with prompts that drop; without drops, `refusals` says why.

    Args:
        several_ranks: whether the model is split over ranks, each of which has a graph.

    Raises:
        OptionError: an option does not fit this model.
    """
    nodes = tuple(attention_nodes)
    refusals = [a.refusal for a in nodes if a.refusal is not None]
    num_layers = max((a.layer for a in nodes), default=-1) + 1
    try:
        return _plan(graph, nodes, num_layers, config, refusals, several_ranks)
    except RefusalError as error:
        reasons = [*(r for r in refusals if r != error.refusal), error.refusal]
        return Plan(nodes, num_layers, tuple(reasons))


def _plan(
    graph: fx.Graph,
    nodes: tuple[AttentionNode, ...],
    num_layers: int,
    config: PrefillConfig,
    refusals: list[Refusal],
    several_ranks: bool,
) -> Plan:
    tokens = token_count(list(nodes))
    chosen = choose_layers(nodes, num_layers, config)
    if not chosen:
        raise RefusalError(refusals[-1]) if refusals else nowhere_to_drop(config)
    if several_ranks:
        check_exchanges(graph, chosen[0])
    level = drop_levels(graph, nodes, chosen, tokens, frozenset())
    moves = gather_rules(graph, nodes, level, tokens, sympy.S.One)
    for node in (a for a in arguments(graph.output_node()) if isinstance(a, fx.Node)):
        if level[node] and token_dims(node, tokens) not in ((), (0,)):
            raise refuse(Category.OUTPUT, f"an output of shape {shape(node)}", "stays dense")
    drops = tuple(
        Drop(a, None, drop_spec(config, i, len(chosen), depth_of(a.layer, num_layers))) for i, a in enumerate(chosen)
    )
    return Plan(
        nodes,
        num_layers,
        tuple(dict.fromkeys(refusals)),
        drops,
        tokens,
        count_node(graph, tokens),
        level,
        moves,
    )
