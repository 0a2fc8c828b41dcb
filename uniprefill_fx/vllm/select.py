"""Score and select the tokens of a step's prompts, one behind the other in the stream, with the ops of the package."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from uniprefill_fx.config import PrefillConfig, auto_block_size
from uniprefill_fx.passes.analyze.drop_layers import drop_spec
from uniprefill_fx.specs import AttentionSpec, DropSpec
from uniprefill_fx.vllm import ranks
from uniprefill_fx.vllm.steps import Step

ops = torch.ops.uniprefill


def select_packed(
    q: Tensor,
    k: Tensor,
    step: Step,
    drop: int,
    depths: Sequence[float],
    spec: AttentionSpec,
    sinks: Tensor | None,
) -> tuple[Tensor, list[tuple[int, int]]]:
    """The rows of the stream that stay after a drop.

    Args:
        q: (tokens, heads, head_dim), k: (tokens, kv_heads, head_dim). spec, sinks: of the attention that they are of.
        drop: which drop it is of those at `depths`, shares of the decoder in (0, 1].

    Returns:
        (kept,) int64, ascending; and by request of `step.order` where its rows lie then.
    """
    chosen: dict[int, Tensor] = {}
    for how, requests in _alike(step, drop, depths).items():
        bounds = torch.tensor([step.bounds[r] for r in requests])
        whole = torch.tensor([(0, step.tokens[step.order[r]]) for r in requests])
        wide = [x.transpose(0, 1).unsqueeze(0).expand(len(requests), -1, -1, -1) for x in (q, k)]
        terms = (spec.scale, spec.softcap, sinks, None, how.last_n, how.block_size, how.score_dtype)
        scores = ranks.summed(ops.score(*wide, None, bounds, *terms))
        kept, after = ops.select(
            scores, bounds, whole, how.block_size, how.last_n, how.sink_tokens, how.p, how.keep_ratio
        )
        for i, (request, (start, end)) in enumerate(zip(requests, after.tolist(), strict=True)):
            chosen[request] = kept[i, start:end]
    return _joined(chosen, step.bounds, q.device)


def _alike(step: Step, drop: int, depths: Sequence[float]) -> dict[DropSpec, list[int]]:
    """The requests that drop, by index in the stream, by how they select."""
    found: dict[DropSpec, list[int]] = {}
    for i, name in enumerate(step.order):
        config = step.dropping.get(name)
        if config is not None:
            found.setdefault(_how(config, step.tokens[name], drop, depths), []).append(i)
    return found


def _how(config: PrefillConfig, tokens: int, drop: int, depths: Sequence[float]) -> DropSpec:
    how = drop_spec(config, drop, len(depths), depths[drop])
    if config.block_size != "auto":
        return how
    sized = auto_block_size(tokens)
    return DropSpec(how.last_n, how.sink_tokens, sized, how.score_dtype, how.p, how.keep_ratio)


def _joined(
    chosen: dict[int, Tensor], bounds: Sequence[tuple[int, int]], device: torch.device
) -> tuple[Tensor, list[tuple[int, int]]]:
    """All rows in order: those that were chosen of requests that drop, every one of the others."""
    parts: list[Tensor] = []
    after: list[tuple[int, int]] = []
    begin = end = total = 0  # rows [begin, end) all stay, and are not yet in parts
    for i, (start, stop) in enumerate(bounds):
        if i in chosen:
            if end > begin:
                parts.append(torch.arange(begin, end, device=device))
            parts.append(chosen[i])
            begin = end = stop
            kept = len(chosen[i])
        else:
            begin, end, kept = (begin if end == start and end > begin else start), stop, stop - start
        after.append((total, total + kept))
        total += kept
    if end > begin:
        parts.append(torch.arange(begin, end, device=device))
    return torch.cat(parts), after
