"""What a compilation leaves in PyTorch's logs: lines under `TORCH_LOGS="+uniprefill_fx"`, and artifacts for tlparse.

With `TORCH_TRACE=folder` torch writes structured logs, and `tlparse folder` shows, beside Dynamo's own, the decisions
of each compilation (`uniprefill_plan`) and, where tokens are dropped, the rewritten graph (`uniprefill_rewritten`).
"""

from __future__ import annotations

import json
import logging
from typing import Any

from torch import fx

from uniprefill_fx.passes.analyze.plan import Plan
from uniprefill_fx.torch_internals import log_artifact

log = logging.getLogger(__name__)


def decisions(plan: Plan, seconds: dict[str, float]) -> dict[str, Any]:
    """What was decided about one graph, fit for JSON."""
    return {
        "layers": plan.num_layers,
        "prefill": plan.prefill,
        "attention": {
            attention.layer: str(attention.refusal) if attention.spec is None else attention.kind
            for attention in plan.attention_nodes
        },
        "drops": {drop.attention.layer: {"p": drop.spec.p, "keep_ratio": drop.spec.keep_ratio} for drop in plan.drops},
        "refusals": [str(refusal) for refusal in plan.refusals],
        "seconds": {name: round(s, 4) for name, s in seconds.items()},
    }


def note(plan: Plan, after: fx.GraphModule | None, seconds: dict[str, float]) -> None:
    """Log one compilation. The graph is printed only where somebody reads it."""
    kind = "prefill" if plan.prefill else "no prefill"
    where = [drop.attention.layer for drop in plan.drops]
    times = ", ".join(f"{name} {s:.2f} s" for name, s in seconds.items())
    log.info("graph of %d layers, %s: drops after %s; %s", plan.num_layers, kind, where or "none", times)
    log_artifact("uniprefill_plan", "json", lambda: json.dumps(decisions(plan, seconds)))
    if after is not None:
        graph = after
        log_artifact("uniprefill_rewritten", "string", lambda: str(graph.print_readable(print_output=False)))
        if log.isEnabledFor(logging.DEBUG):
            log.debug("rewritten graph:\n%s", graph.print_readable(print_output=False))
