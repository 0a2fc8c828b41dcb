"""What the page's slider needs: what another `p` would keep, estimated from the block scores of a run without drops.

At the first drop layer the estimate is exact. At later ones the scores were taken over all tokens, and what they say of
those that would be left is their share among them: right as far as the states of kept tokens stay what they are.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from uniprefill_fx.config import PRESETS
from uniprefill_fx.passes.analyze.plan import Plan
from uniprefill_fx.runtime.last_call import LastCall
from uniprefill_fx.runtime.overrides import arguments
from uniprefill_fx.tools.report import Report
from uniprefill_fx.tools.savings import Cost, costs

SEGMENT = 16
"""Tokens of a piece of text that is shaded as one."""

AMOUNTS = ("preset", "p", "keep_ratio")

FLAT = (0.99, 0.95, 0.9, 0.7)
"""Values of p that the page offers beside the slider."""


def what_if(report: Report, tokenizer: Any = None) -> dict[str, Any] | None:
    """What the page computes with, fit for JSON; None where the call dropped nothing, or held several prompts.

    Runs the prompt twice: once keeping everything, for the scores, and once as it was, for the time.
    """
    call = report.call
    if call is None or not call.dropped or len(call.token_bounds) != 1 or report.again is None:
        return None
    same = {name: value for name, value in call.changed.items() if name not in AMOUNTS}
    if report.config.inner_backend != "eager":
        report.again(**same | {"p": 1.0})  # compiles where lengths are new
    whole, seconds_whole = report.again(**same | {"p": 1.0})
    _, seconds = report.again(**call.changed)
    if whole is None or not whole.block_scores:  # inside `disabled()`, say
        return None
    return _contents(report, call, whole, (seconds_whole, seconds), tokenizer)


def _contents(
    report: Report, call: LastCall, whole: LastCall, seconds: tuple[float, float], tokenizer: Any
) -> dict[str, Any]:
    config, ((first, past),) = report.config, call.token_bounds
    layers = list(call.kept_indices)
    changed = {name: call.changed.get(name, getattr(config, name)) for name in ("block_size", "last_n", "sink_tokens")}
    parts, stores, _ = costs(report.before, report.plan, layers, 1)
    blocks = -(-(past - first) // changed["block_size"])
    return changed | {
        "layers": layers,
        "p": _first_p(report, call),
        "first": first,
        "tokens": past - first,
        "columns": call.columns,
        "kept": [_ranges(call.kept_indices[layer].cpu() - first) for layer in layers],
        "scores": [whole.block_scores[layer][0, :blocks].double().tolist() for layer in layers],
        "costs": [asdict(part) for part in _merged(parts)],
        "density": {str(layer): share for layer, share in call.density.items()},
        "stores": [asdict(store) for store in stores],
        "seconds": seconds,
        "presets": _presets(report.plan),
        "segment": SEGMENT,
        "text": _text(report.input_ids, tokenizer, first, past),
    }


def _first_p(report: Report, call: LastCall) -> float:
    """Where the slider stands at first: p of the first drop, or 1 where it was chosen otherwise."""
    if not report.plan.drops or "keep_ratio" in call.changed:
        return 1.0
    changed = {name: value for name, value in call.changed.items() if name in AMOUNTS}
    p = arguments(changed, 0, len(report.plan.drops), report.plan.depth(0)).get("p", report.plan.drops[0].spec.p)
    return 1.0 if p is None else float(p)


def _presets(plan: Plan) -> list[dict[str, Any]]:
    """A name, and p for each drop layer."""
    drops = range(len(plan.drops))
    named = [{"name": name, "p": [preset.p(plan.depth(i)) for i in drops]} for name, preset in PRESETS.items()]
    return [*named, *({"name": f"p = {p:g}", "p": [p for _ in drops]} for p in FLAT)]


def _merged(parts: list[Cost]) -> list[Cost]:
    """What grows with the same thing, summed up over layers; the page shows no layers."""
    sums: dict[tuple[Any, ...], list[float]] = {}
    for part in parts:
        # The density of block-sparse attention is by layer.
        layer = part.layer if part.full else 0
        found = sums.setdefault((layer, part.level, part.window, part.chunk, part.full), [0.0] * 4)
        for i, name in enumerate(("each", "fixed", "pair", "scoring")):
            found[i] += getattr(part, name)
    return [
        Cost(layer, level, each, fixed, pair, window, chunk, full, scoring)
        for (layer, level, window, chunk, full), (each, fixed, pair, scoring) in sums.items()
    ]


def _ranges(kept: Tensor) -> list[tuple[int, int]]:
    """Ascending numbers as ranges, each with its end."""
    cuts = (torch.nonzero(kept.diff() != 1).flatten() + 1).tolist()
    numbers = kept.tolist()
    return [(numbers[a], numbers[b - 1] + 1) for a, b in zip([0, *cuts], [*cuts, len(numbers)], strict=True) if b > a]


def _text(ids: Tensor | None, tokenizer: Any, first: int, past: int) -> list[str] | None:
    """The prompt's text in segments."""
    if tokenizer is None or ids is None:
        return None
    own = ids.reshape(-1)[first:past].tolist()
    return [str(tokenizer.decode(own[i : i + SEGMENT])) for i in range(0, len(own), SEGMENT)]
