"""Ranks of tensor parallelism: each runs the same graph with its own heads, and all of them keep the same rows.

Every rank is told the same of a step (vLLM sends one `SchedulerOutput` to all), so they agree on which prompts drop.
They agree on what is kept because all select by the same numbers: the scores of all heads (UniPrefill, arXiv
2605.06221, Eq. 15), added up in one order.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, fx

from uniprefill_fx.errors import Category, refuse
from uniprefill_fx.passes.attention_node import AttentionNode
from uniprefill_fx.vllm.attention import ATTENTION, KV_UPDATE, operator_name
from uniprefill_fx.vllm.operators import EXCHANGE_NOTHING, MIXERS, OUTPUTS

KNOWN = EXCHANGE_NOTHING | OUTPUTS.keys() | MIXERS.keys() | {ATTENTION, KV_UPDATE}


def count() -> int:
    """How many ranks share a model."""
    from vllm.distributed import get_tp_group

    return int(get_tp_group().world_size)


def summed(scores: Tensor) -> Tensor:
    """The block scores of all heads, from those of each rank's own.

    The softmax of a score is over the keys of one head, so that heads add up, wherever they are. Parts are gathered and
    added up on each rank, not reduced: whether a reduction of vLLM gives all ranks the same bits need not be known.

    Args:
        scores: (requests, blocks), of this rank.

    Returns:
        The same shape, in float32 at least; the same bits on every rank. Where every rank scored the same heads, a
        multiple of theirs, which selects alike.
    """
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return scores
    own = scores.to(torch.promote_types(scores.dtype, torch.float32))
    parts: Tensor = group.all_gather(own[None], dim=0)
    return parts.sum(0)


def agree(program: str) -> bool:
    """Whether all ranks are about to run the same; every rank has to ask, with what it is about to run."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    said: list[str | None] = [None] * group.world_size
    if group.world_size > 1:
        dist.all_gather_object(said, program, group=group.cpu_group)
    return len(set(said)) == 1


def check_exchanges(graph: fx.Graph, attention: AttentionNode) -> None:
    """Check that all operators behind a drop are known to exchange nothing with other ranks, or to keep rows in place.

    The analysis runs what it does not know on random rows: an exchange would wait there for the other ranks.

    Raises:
        RefusalError: one of another library than torch is not known.
    """
    nodes = list(graph.nodes)
    for node in nodes[nodes.index(attention.node) + 1 :]:
        name = operator_name(node)
        own = name.startswith(("aten::", "prims::", "uniprefill::"))
        if name and not own and name not in KNOWN:
            raise refuse(
                Category.RANKS,
                f"`{name}`, of which it is not known what it exchanges with other ranks",
                "stays dense; run it on one GPU (tensor_parallel_size=1)",
            )
